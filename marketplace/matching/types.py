"""What the matcher sees and says: frozen records over a snapshot, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final
from uuid import UUID

from marketplace.metering.pricing import Rates

__all__ = ["Demand", "Filter", "Late", "OfferView", "Ranked", "Rates", "Refusal", "Service", "Sort"]


MAX_RETRY_AFTER_S: Final = 60


class Service(StrEnum):
    """What a demand wants of the market."""

    INTERACTIVE = "interactive"
    """Somebody waits: the first token, soon."""
    THROUGHPUT = "throughput"
    """Much work, cheaply, within its deadline."""
    FLEX = "flex"
    """Whenever it costs least; gives way to the others."""


class Sort(StrEnum):
    """What a renter would rather have, where one must be given up for the other."""

    BALANCED = "balanced"
    PRICE = "price"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class DataTerms:
    """What a node's owner declares of it, and of texts that pass through it. None and empty: not declared."""

    country: str = ""
    retention_days: int | None = None
    trains: bool | None = None
    operator: str = ""
    """`person` or `datacentre`."""
    attested: bool = False
    """The operator of the marketplace has seen proof."""

    @property
    def private(self) -> bool:
        """True if its owner declares that nothing is kept and nothing trained with."""
        return self.retention_days == 0 and self.trains is False


UNDECLARED = DataTerms()


@dataclass(frozen=True, slots=True)
class OfferView:
    """One offer as the fleet view knows it now."""

    offer_id: UUID
    node_id: UUID
    owner_organisation_id: UUID
    device_id: str
    variant_id: UUID
    gateway_id: str
    """The gateway that has the node's socket."""
    price_id: int
    rates: Rates
    slots: int
    slots_busy: int
    context_per_slot: int
    available: bool
    """False while the owner has the machine, or the node drains."""
    warm: bool
    simulated: bool
    prefix_cache_s: float
    sampled_age_s: float
    """Age of the last telemetry. Stale telemetry ages; it does not vanish."""
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    memory_free_bytes: int | None
    """What the device reports as free now; None: it does not say."""
    unavailable_reason: str = ""
    region: str = ""
    """Where the node stands; empty: its owner does not say."""
    probation: bool = False
    """A new node, or one that has to earn its standing again."""
    memory_needed_bytes: int | None = None
    """What loading it would still take of the device, margin included; None: nothing, or not known."""
    kv_step_s_per_token: float = 0.0
    """By how much each token of running context lengthens a decode step."""
    kv_tokens: int | None = None
    """Tokens of context that all slots share, in an engine with a paged cache; None: each slot has its own."""
    attention_s_per_token2: float = 0.0
    """Reading m tokens behind h takes this times (h + m)^2 - h^2 more: attention, which long prompts feel."""
    power_fraction: float = 1.0
    """Power limit over the device's own: a capped card prefills slower and decodes as before."""
    headroom: float = 1.0
    """Memory of the device over what this variant needs of it: a large card wasted on a small model."""
    data: DataTerms = UNDECLARED
    gives_choices: bool = False
    """Its agent gives several answers to one request."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job needs."""

    variant_id: UUID
    prompt_tokens: int
    max_output_tokens: int
    ceiling: Rates | None
    """No offer above it, class by class. None: any posted price."""
    organisation_id: UUID
    excluded_nodes: frozenset[UUID] = frozenset()
    """Nodes that failed this job already."""
    service: Service = Service.INTERACTIVE
    cached_tokens: Mapping[UUID, int] = field(default_factory=dict)
    """By node: leading tokens of this prompt that it holds in its cache."""
    sort: Sort = Sort.BALANCED
    regions: frozenset[str] = frozenset()
    """Only nodes in one of these regions or countries. Empty: anywhere."""
    private_only: bool = False
    """Only nodes whose owners declare that they keep nothing, and train nothing with it."""
    proven_only: bool = False
    """No node on probation."""
    most_nano: int | None = None
    """No offer whose worst case exceeds this: what the renter's balance holds."""
    ttft_target_s: float | None = None
    """Until when the first token is useful; None: as the rules say for its length. Infinite: whenever it comes."""
    tpot_target_s: float | None = None
    """Mean seconds between tokens that are useful; None: 0.08."""
    choices: int = 1
    """Answers to the one prompt, made one after the other; `max_output_tokens` bounds each."""
    longest_input_tokens: int | None = None
    """Of several inputs that are read one after another: the longest. None: one prompt, with its answer behind it."""

    @property
    def all_output_tokens(self) -> int:
        """The bound of all its answers together."""
        return self.max_output_tokens * self.choices

    @property
    def slot_tokens(self) -> int:
        """What a slot must hold at once."""
        return self.longest_input_tokens or self.prompt_tokens + self.max_output_tokens

    @property
    def interactive(self) -> bool:
        """True if somebody waits for it."""
        return self.service is Service.INTERACTIVE


class Filter(StrEnum):
    """Why an offer was refused. The value is what a renter reads."""

    VARIANT = "does not serve this variant"
    SIMULATED = "simulated engine"
    UNAVAILABLE = "owner is using the machine"
    STALE = "silent for too long"
    CONTEXT = "context per slot too small"
    PRICE = "price above the maximum"
    EXCLUDED = "already failed this job"
    FULL = "no free slot"
    RESERVED = "slot taken by a simultaneous request"
    BREAKER = "resting after failures"
    REGION = "outside the regions asked for"
    DATA = "does not declare that it keeps no data"
    PROBATION = "on probation, and its few slots are taken"
    UNPROVEN = "on probation"
    BALANCE = "worst case above the balance"
    MEMORY = "too little free memory to load it"
    CHOICE = "not among the providers asked for"
    ONE_ANSWER = "gives one answer a request"
    LATE = "first token would come too late"


@dataclass(frozen=True, slots=True)
class Late:
    """Of a demand that would come too late everywhere: when its first token would come, and by when it must."""

    soonest_s: float
    useful_s: float

    def sentence(self) -> str:
        """`after 2.3 s at the soonest, useful within 1.5 s`."""
        return f"after {self.soonest_s:.1f} s at the soonest, useful within {self.useful_s:.1f} s"

    @property
    def retry_after_s(self) -> int:
        """In so long there is room, if nobody else comes: what is ahead is read by then."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self.soonest_s - self.useful_s)))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing fits: how many nodes each filter refused, first filter that hit counted."""

    refused: dict[Filter, int] = field(default_factory=dict)
    exact: bool = True
    """False where a large market was counted by groups of like offers, or not all of it was looked at."""
    late: Late | None = None
    """Set where there would be room, but too late."""

    @property
    def hopeless(self) -> bool:
        """True if waiting cannot help: no refused offer was merely full, taken, unavailable or resting."""
        return not any(count for name, count in self.refused.items() if name in CURABLE)

    def sentence(self) -> str:
        """`3 nodes: no free slot; 1 node: price above the maximum`."""
        parts = [
            f"{count} {'node' if count == 1 else 'nodes'}: {name.value}"
            for name, count in sorted(self.refused.items(), key=lambda item: -item[1])
            if count
        ]
        if not parts:
            return "no node is connected"
        counted = ("" if self.exact else "about ") + "; ".join(parts)
        if self.late is None:
            return counted
        return f"{counted}, {self.late.sentence()}"


CURABLE = frozenset(
    {
        Filter.FULL,
        Filter.RESERVED,
        Filter.UNAVAILABLE,
        Filter.STALE,
        Filter.BREAKER,
        Filter.MEMORY,
        Filter.PROBATION,
        Filter.LATE,
    }
)
"""Refusals that may be gone a moment later."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Offers that can run the demand, best first, with the predicted seconds to the first token."""

    offers: tuple[OfferView, ...]
    ttft_s: tuple[float, ...]
    refusal: Refusal
    """Of the offers that were filtered out."""
    tied: int = 1
    """So many of the first are equally good but for their load."""
    end_s: tuple[float, ...] = ()
    """Predicted seconds to the last token, should the answer use all of its bound."""
