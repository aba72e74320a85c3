"""What a machine earns on its capital. Pure and exact: amounts are fractions of USD, rounded only where they are shown.

Symbols: T period (h); p income while rented ($/h); f fee; u rented share of the offered hours; a active share of the
rented ones; P_l, P_i power under load and idle (W); e price of energy ($/kWh); K capital, R residual ($); N life
(years); o other cost ($/h); q tokens/s; p_t income a token ($); u_t token share.

    revenue         Rv   = p (1 - f) u T
    energy          E    = PUE / 1000 * T * [u (a P_l + (1 - a) P_i) + (1 - u) P_i]                              kWh
    depreciation    D    = (K - R) / (N 8760)                                                                    $/h
    net profit      NP   = Rv - e E - o T - D T
    yield           y    = NP (8760 / T) / K ;  cash yield without D T ;  payback = K over the cash of a year
    idle cost       c_i  = PUE P_i e / 1000 + o + D                                                        $ an hour
    marginal floor       = [PUE e (P_l - P_i) / 1000 + wear + own use forgone] / (1 - f)
    full-cost ask        = [e E / T + o + D] / ((1 - f) u)
    per token            = (D + o) / (3600 q u_t) + PUE e P_l / (3.6e6 q)
    break-even use  u_t* = (D + o) / (3600 q [p_t (1 - f) - PUE e P_l / (3.6e6 q)])
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

HOURS_PER_YEAR: Final = 8_760
SECONDS_PER_HOUR: Final = 3_600
WATTS_PER_KILOWATT: Final = 1_000
ZERO: Final = Fraction(0)


@dataclass(frozen=True, slots=True)
class Machine:
    """What an owner knows of one machine. Nothing here has a default: what is not declared is not assumed."""

    load_w: Fraction
    idle_w: Fraction
    pue: Fraction
    """Energy drawn from the grid over energy drawn by the machine."""
    energy_usd_per_kwh: Fraction
    capital_usd: Fraction
    residual_usd: Fraction
    life_years: Fraction
    other_usd_per_h: Fraction

    @property
    def depreciation_usd_per_h(self) -> Fraction:
        """Straight line."""
        return straight_line_per_h(self.capital_usd, self.residual_usd, self.life_years)

    @property
    def fixed_usd_per_h(self) -> Fraction:
        """D + o: what an hour costs whether it is used or not."""
        return self.depreciation_usd_per_h + self.other_usd_per_h

    def idle_usd_per_h(self) -> Fraction:
        """What an idle hour costs."""
        return idle_usd_per_h(self.idle_w, self.pue, self.energy_usd_per_kwh, self.fixed_usd_per_h)

    def energy_kwh(self, hours: Fraction, rented_share: Fraction, active_share: Fraction) -> Fraction:
        """Drawn from the grid in these hours."""
        rented_w = active_share * self.load_w + (1 - active_share) * self.idle_w
        mean_w = rented_share * rented_w + (1 - rented_share) * self.idle_w
        return self.pue * hours * mean_w / WATTS_PER_KILOWATT

    def marginal_ask_usd_per_h(
        self, fee: Fraction, *, wear_usd_per_h: Fraction = ZERO, forgone_usd_per_h: Fraction = ZERO
    ) -> Fraction:
        """Below this, renting an hour out costs more than leaving the machine idle."""
        extra_w = self.load_w - self.idle_w
        extra = self.pue * self.energy_usd_per_kwh * extra_w / WATTS_PER_KILOWATT
        return (extra + wear_usd_per_h + forgone_usd_per_h) / (1 - fee)

    def energy_usd_per_token(self, tokens_per_s: Fraction) -> Fraction:
        """What the power of one token costs, under load."""
        joules_per_kwh = WATTS_PER_KILOWATT * SECONDS_PER_HOUR
        return self.pue * self.energy_usd_per_kwh * self.load_w / (joules_per_kwh * tokens_per_s)

    def usd_per_token(self, tokens_per_s: Fraction, token_share: Fraction) -> Fraction:
        """What one token costs when this share of those that it could serve is served."""
        fixed = self.fixed_usd_per_h / (SECONDS_PER_HOUR * tokens_per_s * token_share)
        return fixed + self.energy_usd_per_token(tokens_per_s)

    def break_even_token_share(
        self, tokens_per_s: Fraction, income_usd_per_token: Fraction, fee: Fraction
    ) -> Fraction | None:
        """The share of the tokens it could serve that pays for the machine; None if no share does."""
        margin = income_usd_per_token * (1 - fee) - self.energy_usd_per_token(tokens_per_s)
        return self.fixed_usd_per_h / (SECONDS_PER_HOUR * tokens_per_s * margin) if margin > 0 else None


@dataclass(frozen=True, slots=True)
class Result:
    """What a period came to, in USD."""

    hours: Fraction
    revenue_usd: Fraction
    """After the fee."""
    energy_usd: Fraction
    other_usd: Fraction
    depreciation_usd: Fraction
    capital_usd: Fraction

    @property
    def cash_usd(self) -> Fraction:
        """Before depreciation."""
        return self.revenue_usd - self.energy_usd - self.other_usd

    @property
    def net_usd(self) -> Fraction:
        return self.cash_usd - self.depreciation_usd

    @property
    def cost_usd(self) -> Fraction:
        """Everything that the period cost."""
        return self.energy_usd + self.other_usd + self.depreciation_usd

    @property
    def yearly_yield(self) -> Fraction | None:
        """Net profit on the capital a year; None without capital or hours."""
        return self._on_capital(self.net_usd)

    @property
    def yearly_cash_yield(self) -> Fraction | None:
        return self._on_capital(self.cash_usd)

    @property
    def payback_years(self) -> Fraction | None:
        """Until the cash has paid the capital back; None when it never does."""
        cash = self.yearly_cash_yield
        return 1 / cash if cash is not None and cash > 0 else None

    def ask_usd_per_h(self, fee: Fraction, rented_hours: Fraction) -> Fraction | None:
        """What a rented hour must cost for the period to pay for itself; None when nothing was rented."""
        return self.cost_usd / ((1 - fee) * rented_hours) if rented_hours > 0 and fee < 1 else None

    def _on_capital(self, amount_usd: Fraction) -> Fraction | None:
        if not self.capital_usd or not self.hours:
            return None
        return amount_usd * HOURS_PER_YEAR / self.hours / self.capital_usd


def of_rental(
    machine: Machine,
    *,
    hours: Fraction,
    income_usd_per_h: Fraction,
    fee: Fraction,
    rented_share: Fraction,
    active_share: Fraction,
) -> Result:
    """A period in which the machine is rented out by the hour."""
    energy_kwh = machine.energy_kwh(hours, rented_share, active_share)
    return Result(
        hours=hours,
        revenue_usd=income_usd_per_h * (1 - fee) * rented_share * hours,
        energy_usd=energy_kwh * machine.energy_usd_per_kwh,
        other_usd=machine.other_usd_per_h * hours,
        depreciation_usd=machine.depreciation_usd_per_h * hours,
        capital_usd=machine.capital_usd,
    )


def straight_line_per_h(capital_usd: Fraction, residual_usd: Fraction, life_years: Fraction) -> Fraction:
    """D: the same amount each hour of the life."""
    return (capital_usd - residual_usd) / (life_years * HOURS_PER_YEAR)


def declining_usd(
    capital_usd: Fraction, residual_usd: Fraction, life_years: Fraction, from_h: Fraction, to_h: Fraction
) -> Fraction:
    """Lost between two ages (hours) by double declining balance: each year 2/N of what the machine is still worth,
    evenly over that year, and never below the residual."""
    if to_h < from_h:
        raise ValueError(f"an age of {to_h} h comes before {from_h} h")
    worth, lost, year = capital_usd, ZERO, 0
    rate = min(Fraction(1), 2 / life_years)
    while year * HOURS_PER_YEAR < to_h and worth > residual_usd:
        fall = min(worth * rate, worth - residual_usd)
        begin, end = Fraction(year * HOURS_PER_YEAR), Fraction((year + 1) * HOURS_PER_YEAR)
        inside = min(end, to_h) - max(begin, from_h)
        lost += fall * max(inside, ZERO) / HOURS_PER_YEAR
        worth -= fall
        year += 1
    return lost


def idle_usd_per_h(
    idle_w: Fraction, pue: Fraction, energy_usd_per_kwh: Fraction, fixed_usd_per_h: Fraction
) -> Fraction:
    """c_i: energy, other cost and depreciation of an hour in which nothing runs."""
    return pue * idle_w * energy_usd_per_kwh / WATTS_PER_KILOWATT + fixed_usd_per_h
