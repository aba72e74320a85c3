from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from fractions import Fraction
from uuid import UUID

from marketplace.finance.economics import Activity, Capital, Declared, NodeEconomics, economics

HOUR_US = 3_600_000_000
START, END = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
CAPITAL = Capital(1_600 * 10**9, 300 * 10**9, 48, "straight_line", date(2026, 1, 1))
DECLARED = Declared(CAPITAL, 164_400_000, 1_000, 10_000_000, idle_mw=30_000, load_mw=400_000)
ACTIVITY = Activity(
    start=START,
    end=END,
    offered_us=8_760 * HOUR_US,
    rented_us=4_380 * HOUR_US,
    busy_us=3_504 * HOUR_US,
    energy_mj=1_559_280 * 3_600_000,
    output_tokens=10**9,
    gross_nano=1_489_200_000_000,
    fee_nano=372_300_000_000,
    net_nano=1_116_900_000_000,
)
"""A year of the home card, half rented."""


def of(activity: Activity = ACTIVITY, declared: Declared = DECLARED) -> NodeEconomics:
    return economics(UUID(int=1), "attic", activity, declared)


class TestWorkedExample:
    def test_a_year_of_the_home_card_comes_out_of_recorded_facts(self) -> None:
        found = of()
        nano = (found.electricity_nano, found.other_nano, found.depreciation_nano, found.profit_nano)
        assert [round(value / 1e9) for value in nano if value is not None] == [256, 88, 325, 448]
        assert found.yearly_yield is not None
        assert round(float(found.yearly_yield) * 100, 1) == 28.0
        assert found.payback_years is not None
        assert round(float(found.payback_years), 2) == 2.07
        assert found.missing == ()

    def test_money_is_whole_nanos(self) -> None:
        found = of()
        assert found.profit_nano == found.revenue_nano - (found.electricity_nano or 0) - (found.other_nano or 0) - (
            found.depreciation_nano or 0
        )
        assert found.idle_loss_nano == 4_380 * (4_932_000 + 10_000_000) + 162_500_000_000

    def test_the_break_even_share_pays_exactly(self) -> None:
        share = of().break_even_share
        assert share is not None
        hours, rented = 8_760, 8_760 * share
        income = Fraction(ACTIVITY.net_nano, 4_380 * 10**9) * rented
        idle = Fraction("0.030") * Fraction("0.1644") * hours
        extra = Fraction("0.8") * Fraction("0.370") * Fraction("0.1644") * rented
        assert income == idle + extra + Fraction("0.01") * hours + 325

    def test_the_break_even_price_is_the_cost_of_a_token_with_the_fee_on_top(self) -> None:
        found = of()
        assert found.cost_per_mtok_nano is not None
        assert found.break_even_mtok_nano is not None
        assert abs(found.break_even_mtok_nano - found.cost_per_mtok_nano * 4 // 3) <= 2


class TestWhatIsNotDeclared:
    def test_nothing_is_assumed(self) -> None:
        found = of(declared=Declared())
        figures = (
            *(found.grid_kwh, found.electricity_nano, found.other_nano, found.depreciation_nano, found.profit_nano),
            *(found.idle_loss_nano, found.cost_per_mtok_nano, found.break_even_mtok_nano, found.break_even_share),
            *(found.yearly_yield, found.yearly_cash_yield, found.payback_years),
        )
        assert set(figures) == {None}
        assert not found.never_pays_back
        assert len(found.missing) == 5

    def test_each_missing_fact_takes_only_what_rests_on_it(self) -> None:
        found = of(declared=replace(DECLARED, idle_mw=None))
        assert found.profit_nano is not None
        assert (found.idle_loss_nano, found.break_even_share) == (None, None)

    def test_unknown_energy_is_not_free(self) -> None:
        found = of(replace(ACTIVITY, energy_mj=None))
        assert (found.electricity_nano, found.profit_nano) == (None, None)
        assert "energy not known" in found.missing


class TestDepreciation:
    def test_nothing_is_lost_before_service_nor_after_life(self) -> None:
        late = replace(CAPITAL, in_service_on=date(2026, 7, 1))
        assert late.depreciation_usd(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 7, 1, tzinfo=UTC)) == 0
        old = replace(CAPITAL, in_service_on=date(2015, 1, 1))
        assert old.depreciation_usd(START, END) == 0

    def test_a_declining_balance_loses_most_at_first(self) -> None:
        declining = replace(CAPITAL, method="declining")
        assert declining.depreciation_usd(START, END) == 800

    def test_cash_that_never_comes_never_pays_back(self) -> None:
        found = of(replace(ACTIVITY, net_nano=0))
        assert found.payback_years is None
        assert found.never_pays_back
