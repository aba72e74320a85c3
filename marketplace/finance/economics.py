"""What a node earned on its capital in a period, from what was recorded and what its owner declared. Pure.

Money is whole nano-USD, rounded half even where a figure is made. A figure that rests on something undeclared or
unmeasured is None, and `missing` says on what: nothing is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from fractions import Fraction
from typing import Final
from uuid import UUID

import ledger
from marketplace.finance import yields
from marketplace.finance.yields import HOURS_PER_YEAR, Result

NANO: Final = 10**9
MILLI: Final = 1_000
MONTHS_PER_YEAR: Final = 12
MICROS_PER_HOUR: Final = 3_600_000_000
MJ_PER_KWH: Final = 3_600_000_000
"""Millijoules."""
TOKENS_PER_RATE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Capital:
    """What a machine cost, and over which years that is spread."""

    capital_nano: int
    residual_nano: int
    life_months: int
    method: str
    """`straight_line` or `declining`."""
    in_service_on: date

    def depreciation_usd(self, start: datetime, end: datetime) -> Fraction:
        """What the machine lost in [start, end). Nothing before it was in service, nor after its life."""
        born = datetime.combine(self.in_service_on, time(), tzinfo=UTC)
        life_h = self.life_years * HOURS_PER_YEAR
        begin, stop = (min(max(_hours_between(born, at), Fraction(0)), life_h) for at in (start, end))
        capital, residual = _usd(self.capital_nano), _usd(self.residual_nano)
        if self.method == "declining":
            return yields.declining_usd(capital, residual, self.life_years, begin, stop)
        return yields.straight_line_per_h(capital, residual, self.life_years) * (stop - begin)

    @property
    def life_years(self) -> Fraction:
        return Fraction(self.life_months, MONTHS_PER_YEAR)


@dataclass(frozen=True, slots=True)
class Declared:
    """What the owner of a node declared. None: not declared."""

    capital: Capital | None = None
    energy_nano_usd_per_kwh: int | None = None
    pue_milli: int | None = None
    other_nano_usd_per_hour: int | None = None
    idle_mw: int | None = None
    load_mw: int | None = None
    """Milliwatts."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What was recorded of a node in a period."""

    start: datetime
    end: datetime
    """The part of the period in which the node belonged to the owner; up to now at most."""
    offered_us: int
    rented_us: int
    busy_us: int
    energy_mj: int | None
    """Measured or declared; None: nothing is known."""
    output_tokens: int
    gross_nano: int
    fee_nano: int
    net_nano: int


@dataclass(frozen=True, slots=True)
class NodeEconomics:
    """One node over the hours of a period in which it was its owner's: offered or not, they cost."""

    node_id: UUID
    node_name: str
    hours_us: int
    revenue_nano: int
    """Net of the fee."""
    grid_kwh: Fraction | None
    """Drawn from the grid: the machine's energy times its PUE."""
    electricity_nano: int | None
    other_nano: int | None
    depreciation_nano: int | None
    profit_nano: int | None
    """Revenue less electricity, other cost and depreciation."""
    idle_loss_nano: int | None
    """What the offered hours without a job cost."""
    cost_per_mtok_nano: int | None
    """Of everything, a million output tokens."""
    break_even_mtok_nano: int | None
    """What a million output tokens would have to bring, fee included, to pay for the period at this use."""
    break_even_share: Fraction | None
    """The rented share of the offered hours that would have paid for the period, at this income a rented hour."""
    yearly_yield: Fraction | None
    yearly_cash_yield: Fraction | None
    payback_years: Fraction | None
    """None also when the cash never pays the capital back; then `never_pays_back`."""
    never_pays_back: bool
    missing: tuple[str, ...]
    """What is not declared or not measured, and so kept figures above from being told."""


def economics(node_id: UUID, node_name: str, activity: Activity, declared: Declared) -> NodeEconomics:
    """The economics of one node. See the module on what is None."""
    hours = _hours_between(activity.start, activity.end)
    grid_kwh = _grid_kwh(activity, declared)
    electricity = _times(grid_kwh, declared.energy_nano_usd_per_kwh)
    other = _times(hours, declared.other_nano_usd_per_hour)
    capital = declared.capital
    depreciation = capital.depreciation_usd(activity.start, activity.end) if capital is not None else None
    result = _result(
        activity, hours=hours, electricity=electricity, other=other, depreciation=depreciation, capital=capital
    )
    per_mtok = _per_mtok(result, activity.output_tokens)
    return NodeEconomics(
        node_id=node_id,
        node_name=node_name,
        hours_us=int(hours * MICROS_PER_HOUR),
        revenue_nano=activity.net_nano,
        grid_kwh=grid_kwh,
        electricity_nano=_nano(electricity),
        other_nano=_nano(other),
        depreciation_nano=_nano(depreciation),
        profit_nano=_nano(result.net_usd) if result is not None else None,
        idle_loss_nano=_nano(_idle_loss(activity, declared, hours, depreciation)),
        cost_per_mtok_nano=_nano(per_mtok),
        break_even_mtok_nano=_nano(_with_fee(per_mtok, activity)),
        break_even_share=_break_even_share(activity, declared, hours, other, depreciation),
        yearly_yield=result.yearly_yield if result is not None else None,
        yearly_cash_yield=result.yearly_cash_yield if result is not None else None,
        payback_years=result.payback_years if result is not None else None,
        never_pays_back=result is not None and result.payback_years is None and bool(hours),
        missing=_missing(activity, declared),
    )


def _result(
    activity: Activity,
    *,
    hours: Fraction,
    electricity: Fraction | None,
    other: Fraction | None,
    depreciation: Fraction | None,
    capital: Capital | None,
) -> Result | None:
    if electricity is None or other is None or depreciation is None or capital is None:
        return None
    return Result(
        hours=hours,
        revenue_usd=_usd(activity.net_nano),
        energy_usd=electricity,
        other_usd=other,
        depreciation_usd=depreciation,
        capital_usd=_usd(capital.capital_nano),
    )


def _grid_kwh(activity: Activity, declared: Declared) -> Fraction | None:
    if activity.energy_mj is None or declared.pue_milli is None:
        return None
    return Fraction(activity.energy_mj, MJ_PER_KWH) * Fraction(declared.pue_milli, MILLI)


def _fixed_per_h(hours: Fraction, other: Fraction | None, depreciation: Fraction | None) -> Fraction | None:
    """D + o, in USD an hour."""
    if other is None or depreciation is None or not hours:
        return None
    return (other + depreciation) / hours


def _idle_per_h(declared: Declared, fixed: Fraction | None) -> Fraction | None:
    energy, pue, idle_mw = declared.energy_nano_usd_per_kwh, declared.pue_milli, declared.idle_mw
    if fixed is None or energy is None or pue is None or idle_mw is None:
        return None
    return yields.idle_usd_per_h(Fraction(idle_mw, MILLI), Fraction(pue, MILLI), _usd(energy), fixed)


def _idle_loss(
    activity: Activity, declared: Declared, hours: Fraction, depreciation: Fraction | None
) -> Fraction | None:
    fixed = _fixed_per_h(hours, _times(hours, declared.other_nano_usd_per_hour), depreciation)
    per_h = _idle_per_h(declared, fixed)
    if per_h is None:
        return None
    return per_h * Fraction(activity.offered_us - activity.rented_us, MICROS_PER_HOUR)


def _break_even_share(
    activity: Activity,
    declared: Declared,
    hours: Fraction,
    other: Fraction | None,
    depreciation: Fraction | None,
) -> Fraction | None:
    """Fixed cost and idle power of all hours, over what a rented hour brings beyond its own extra power."""
    idle_per_h = _idle_per_h(declared, _fixed_per_h(hours, other, depreciation))
    if idle_per_h is None or declared.load_mw is None or not activity.rented_us:
        return None
    assert declared.pue_milli is not None
    assert declared.energy_nano_usd_per_kwh is not None
    assert declared.idle_mw is not None
    rented_h = Fraction(activity.rented_us, MICROS_PER_HOUR)
    active_share = Fraction(activity.busy_us, activity.rented_us)
    extra_kw = Fraction(declared.load_mw - declared.idle_mw, MILLI * yields.WATTS_PER_KILOWATT)
    extra = Fraction(declared.pue_milli, MILLI) * _usd(declared.energy_nano_usd_per_kwh) * active_share * extra_kw
    margin = _usd(activity.net_nano) / rented_h - extra
    offered_h = Fraction(activity.offered_us, MICROS_PER_HOUR)
    return idle_per_h * hours / (offered_h * margin) if margin > 0 and offered_h else None


def _per_mtok(result: Result | None, output_tokens: int) -> Fraction | None:
    if result is None or not output_tokens:
        return None
    return result.cost_usd * TOKENS_PER_RATE / output_tokens


def _with_fee(per_mtok: Fraction | None, activity: Activity) -> Fraction | None:
    if per_mtok is None or activity.gross_nano <= activity.fee_nano:
        return None
    return per_mtok * Fraction(activity.gross_nano, activity.gross_nano - activity.fee_nano)


def _missing(activity: Activity, declared: Declared) -> tuple[str, ...]:
    facts = (
        (declared.capital is None, "capital, residual and life not declared"),
        (declared.energy_nano_usd_per_kwh is None, "price of energy not declared"),
        (declared.pue_milli is None, "PUE not declared"),
        (declared.other_nano_usd_per_hour is None, "other cost not declared"),
        (declared.idle_mw is None or declared.load_mw is None, "idle and load power not declared"),
        (activity.energy_mj is None, "energy not known"),
    )
    return tuple(name for absent, name in facts if absent)


def _times(quantity: Fraction | None, nano_each: int | None) -> Fraction | None:
    return None if quantity is None or nano_each is None else quantity * _usd(nano_each)


def _usd(nano: int) -> Fraction:
    return Fraction(nano, NANO)


def _nano(usd: Fraction | None) -> int | None:
    if usd is None:
        return None
    return ledger.divide_half_even(usd.numerator * NANO, usd.denominator)


def _hours_between(start: datetime, end: datetime) -> Fraction:
    delta = end - start
    micros = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
    return Fraction(micros, MICROS_PER_HOUR)
