"""An owner's statement of yield: what was delivered, what it earned, and how much of the offered time it took. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from operator import add
from uuid import UUID

from marketplace.finance.economics import NodeEconomics
from marketplace.finance.period import Period

MICROS_PER_HOUR = 3_600_000_000
MJ_PER_KWH = 3_600_000_000
"""Millijoules."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Delivered tokens by class; the classes are disjoint."""

    input_uncached: int = 0
    input_cached: int = 0
    output_visible: int = 0
    output_reasoning: int = 0

    @property
    def input(self) -> int:
        return self.input_uncached + self.input_cached

    @property
    def output(self) -> int:
        return self.output_visible + self.output_reasoning

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.input_uncached + other.input_uncached,
            self.input_cached + other.input_cached,
            self.output_visible + other.output_visible,
            self.output_reasoning + other.output_reasoning,
        )


@dataclass(frozen=True, slots=True)
class Amounts:
    """What each class of tokens cost, in nano-USD. Reasoning tokens cost what visible output costs."""

    input_uncached_nano: int = 0
    input_cached_nano: int = 0
    output_visible_nano: int = 0
    output_reasoning_nano: int = 0

    @property
    def total_nano(self) -> int:
        return self.input_uncached_nano + self.input_cached_nano + self.output_visible_nano + self.output_reasoning_nano

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.input_uncached_nano + other.input_uncached_nano,
            self.input_cached_nano + other.input_cached_nano,
            self.output_visible_nano + other.output_visible_nano,
            self.output_reasoning_nano + other.output_reasoning_nano,
        )


@dataclass(frozen=True, slots=True)
class Earnings:
    """Of receipts, in nano-USD. net = gross - fee + adjustments, to the nano."""

    jobs: int = 0
    gross_nano: int = 0
    """What renters pay for what was delivered."""
    fee_nano: int = 0
    """The platform's share of it."""
    adjustments_nano: int = 0
    """Paid by the platform for work that its own failures kept from the renter."""
    net_nano: int = 0
    """What the owner earned."""

    def __add__(self, other: Earnings) -> Earnings:
        return Earnings(
            self.jobs + other.jobs,
            self.gross_nano + other.gross_nano,
            self.fee_nano + other.fee_nano,
            self.adjustments_nano + other.adjustments_nano,
            self.net_nano + other.net_nano,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Time, in microseconds; overlapping stretches count once. rented and busy lie within offered."""

    offered_us: int = 0
    rented_us: int = 0
    """A job held a lease on the device."""
    busy_us: int = 0
    """The engine worked, as the node reports; a report's work is placed at the end of its lease."""
    capacity_tokens: float | None = None
    """Output tokens that the device could have decoded in the offered time, at its measured speed in all of its slots.
    None: not measured, or several models shared the device."""

    @property
    def rented_share(self) -> float | None:
        """Rented over offered time; None when nothing was offered."""
        return _share(self.rented_us, self.offered_us)

    @property
    def busy_share(self) -> float | None:
        """Busy over offered time; None when nothing was offered."""
        return _share(self.busy_us, self.offered_us)

    def __add__(self, other: Usage) -> Usage:
        both = self.capacity_tokens is not None and other.capacity_tokens is not None
        return Usage(
            self.offered_us + other.offered_us,
            self.rented_us + other.rented_us,
            self.busy_us + other.busy_us,
            (self.capacity_tokens or 0.0) + (other.capacity_tokens or 0.0) if both else None,
        )


@dataclass(frozen=True, slots=True)
class Energy:
    """What was drawn, by how we know it. Unknown is not zero: a stretch without a figure is told as such."""

    measured_mj: int = 0
    declared_mj: int = 0
    """From watts that the owner stated; never from a measurement."""
    measured_us: int = 0
    declared_us: int = 0
    unknown_us: int = 0

    @property
    def kwh(self) -> float | None:
        """The known part; None if nothing is known."""
        if not self.measured_us and not self.declared_us:
            return None
        return (self.measured_mj + self.declared_mj) / MJ_PER_KWH

    @property
    def source(self) -> str:
        """`measured`, `declared` or both, with `, partly unknown` where that applies; or `unknown`."""
        known = [name for name, us in (("measured", self.measured_us), ("declared", self.declared_us)) if us]
        if not known:
            return "unknown"
        return " and ".join(known) + (", partly unknown" if self.unknown_us else "")

    def __add__(self, other: Energy) -> Energy:
        return Energy(
            self.measured_mj + other.measured_mj,
            self.declared_mj + other.declared_mj,
            self.measured_us + other.measured_us,
            self.declared_us + other.declared_us,
            self.unknown_us + other.unknown_us,
        )


@dataclass(frozen=True, slots=True)
class VariantYield:
    """What one variant earned on one device."""

    variant_id: UUID
    model_id: str
    quantisation: str
    simulated: bool
    tokens: Tokens
    amounts: Amounts
    """By class of token, before the fee; together gross + adjustments."""
    earnings: Earnings

    @property
    def name(self) -> str:
        """`model (quantisation)`."""
        return f"{self.model_id} ({self.quantisation})"


@dataclass(frozen=True, slots=True)
class DeviceYield:
    """One device, or the sum of several."""

    node_id: UUID | None
    """None on the sum."""
    node_name: str
    device_id: str
    device_name: str
    simulated: bool = False
    """True: a simulated engine served some of it, in an environment that allows that; no such thing is ever sold."""
    tokens: Tokens = field(default_factory=Tokens)
    earnings: Earnings = field(default_factory=Earnings)
    usage: Usage = field(default_factory=Usage)
    energy: Energy = field(default_factory=Energy)
    variants: tuple[VariantYield, ...] = ()
    """What the earnings are the sum of, by name."""

    @property
    def token_share(self) -> float | None:
        """Output tokens over what could have been decoded; None where that is not measured."""
        capacity = self.usage.capacity_tokens
        return self.tokens.output / capacity if capacity else None


class State(StrEnum):
    """Where an owner's money is. Each nano is in one of them."""

    PENDING = "pending"
    """Earned; may not be paid out yet."""
    AVAILABLE = "available"
    """May be paid out."""
    RESERVED = "reserved"
    """Kept back against disputes."""
    IN_TRANSIT = "in transit"
    """On its way to the owner's bank."""
    PAID = "paid"
    """Arrived; since the beginning."""
    OWED = "owed to us"
    """What the owner owes the platform: it counts against the rest."""


@dataclass(frozen=True, slots=True)
class StateBalance:
    """What was in one state at the period's two bounds, in nano-USD."""

    state: State
    opening_nano: int
    closing_nano: int


@dataclass(frozen=True, slots=True)
class AccountLine:
    """What journals of one kind did to everything that the owner is owed, in nano-USD."""

    name: str
    kind: str
    """The kind of the journals; see `ledger`."""
    nano: int
    journals: int


@dataclass(frozen=True, slots=True)
class AccountMovement:
    """The owner's accounts over the period, in nano-USD: opening + settled + other = closing, to the nano.

    Receipts settle some seconds after delivery, so what was delivered in a period is not quite what settled in it:
    net + carried_in - carried_out = settled.
    """

    opening_nano: int
    carried_in_nano: int
    """Delivered before the period, settled in it or later."""
    carried_out_nano: int
    """Delivered before the period's end, not settled by then."""
    settled_nano: int
    """The sum of the receipts whose settlement counts in this period."""
    posted_nano: int
    """What the ledger posted to the account for the same receipts."""
    closing_nano: int
    """All that the owner is owed: pending, available, reserved and in transit, less what the owner owes."""
    states: tuple[StateBalance, ...] = ()
    lines: tuple[AccountLine, ...] = ()
    """All that moved, by kind: opening + lines = closing."""

    @property
    def other_nano(self) -> int:
        """Payouts, refunds, disputes and corrections."""
        return self.closing_nano - self.opening_nano - self.posted_nano


@dataclass(frozen=True, slots=True)
class YieldStatement:
    """Everything that one owner earned in one period."""

    owner_id: UUID
    owner_name: str
    period: Period
    devices: tuple[DeviceYield, ...]
    account: AccountMovement
    economics: tuple[NodeEconomics, ...] = ()
    """What each node earned on its capital, as far as its owner declared its cost."""

    @property
    def total(self) -> DeviceYield:
        """All devices together."""
        return DeviceYield(
            node_id=None,
            node_name="all nodes",
            device_id="",
            device_name="",
            simulated=any(device.simulated for device in self.devices),
            tokens=reduce(add, (device.tokens for device in self.devices), Tokens()),
            earnings=reduce(add, (device.earnings for device in self.devices), Earnings()),
            usage=reduce(add, (device.usage for device in self.devices)) if self.devices else Usage(),
            energy=reduce(add, (device.energy for device in self.devices), Energy()),
            variants=merged(variant for device in self.devices for variant in device.variants),
        )

    @property
    def problems(self) -> list[str]:
        """What does not add up, a sentence each; none in an orderly ledger."""
        account, net_nano = self.account, self.total.earnings.net_nano
        found = []
        if account.settled_nano != account.posted_nano:
            found.append(f"Receipts say {account.settled_nano} nano were settled, the ledger {account.posted_nano}.")
        if net_nano + account.carried_in_nano - account.carried_out_nano != account.settled_nano:
            found.append(
                f"Delivered {net_nano} + carried in {account.carried_in_nano} - carried out {account.carried_out_nano}"
                f" is not the settled {account.settled_nano} nano."
            )
        moved_nano = sum(line.nano for line in account.lines)
        if account.lines and account.opening_nano + moved_nano != account.closing_nano:
            found.append(
                f"Opening {account.opening_nano} + movements {moved_nano} is not the closing"
                f" {account.closing_nano} nano."
            )
        return found


def merged(variants: Iterable[VariantYield]) -> tuple[VariantYield, ...]:
    """One line a variant, by name."""
    found: dict[UUID, VariantYield] = {}
    for variant in variants:
        known = found.get(variant.variant_id)
        if known is None:
            found[variant.variant_id] = variant
            continue
        found[variant.variant_id] = replace(
            known,
            simulated=known.simulated or variant.simulated,
            tokens=known.tokens + variant.tokens,
            amounts=known.amounts + variant.amounts,
            earnings=known.earnings + variant.earnings,
        )
    return tuple(sorted(found.values(), key=lambda variant: (variant.name, variant.variant_id)))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
