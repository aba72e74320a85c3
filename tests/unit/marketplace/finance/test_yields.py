"""The three worked examples, computed exactly and compared at the precision at which they are printed."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.finance.yields import Machine, Result, declining_usd, of_rental

YEAR_H = Fraction(8_760)


def printed(value: Fraction | None, places: int = 0) -> str:
    assert value is not None
    exact = Decimal(value.numerator) / Decimal(value.denominator)
    return str(exact.quantize(Decimal(1).scaleb(-places), ROUND_HALF_EVEN))


def home_4090() -> Machine:
    return Machine(
        load_w=Fraction(400),
        idle_w=Fraction(30),
        pue=Fraction(1),
        energy_usd_per_kwh=Fraction("0.1644"),
        capital_usd=Fraction(1_600),
        residual_usd=Fraction(300),
        life_years=Fraction(4),
        other_usd_per_h=Fraction("0.01"),
    )


def colocated_h100(life_years: int = 5, load_w: int = 693) -> Machine:
    return Machine(
        load_w=Fraction(load_w),
        idle_w=Fraction(118),
        pue=Fraction("1.3"),
        energy_usd_per_kwh=Fraction("0.1222"),
        capital_usd=Fraction(30_000),
        residual_usd=Fraction(3_000),
        life_years=Fraction(life_years),
        other_usd_per_h=Fraction("0.25"),
    )


def year_of(machine: Machine, income: str, rented: str) -> Result:
    return of_rental(
        machine,
        hours=YEAR_H,
        income_usd_per_h=Fraction(income),
        fee=Fraction("0.25"),
        rented_share=Fraction(rented),
        active_share=Fraction("0.8"),
    )


class TestHomeCard:
    def test_half_rented_it_earns_28_percent_a_year(self) -> None:
        machine = home_4090()
        result = year_of(machine, "0.34", "0.5")
        assert printed(result.revenue_usd) == "1117"
        assert printed(machine.energy_kwh(YEAR_H, Fraction("0.5"), Fraction("0.8"))) == "1559"
        assert printed(result.energy_usd) == "256"
        assert printed(result.other_usd) == "88"
        assert printed(result.depreciation_usd) == "325"
        assert printed(result.net_usd) == "448"
        assert result.yearly_yield is not None
        assert printed(result.yearly_yield * 100, 1) == "28.0"
        assert result.yearly_cash_yield is not None
        assert printed(result.yearly_cash_yield * 100, 1) == "48.3"
        assert printed(result.payback_years, 2) == "2.07"
        assert printed(result.ask_usd_per_h(Fraction("0.25"), YEAR_H / 2), 3) == "0.204"
        assert printed(machine.idle_usd_per_h(), 3) == "0.052"

    def test_a_fifth_rented_it_loses(self) -> None:
        result = year_of(home_4090(), "0.34", "0.2")
        assert printed(result.net_usd) == "-94"
        assert result.yearly_yield is not None
        assert printed(result.yearly_yield * 100, 1) == "-5.9"
        assert printed(result.payback_years, 1) == "6.9"
        assert printed(result.ask_usd_per_h(Fraction("0.25"), YEAR_H / 5), 3) == "0.412"

    def test_below_the_marginal_ask_an_idle_hour_is_better(self) -> None:
        floor = home_4090().marginal_ask_usd_per_h(Fraction("0.25"))
        assert floor == Fraction("0.1644") * 370 / 1_000 / Fraction("0.75")


class TestDataCentreCard:
    def test_over_five_years_it_earns_9_5_percent(self) -> None:
        machine = colocated_h100()
        result = year_of(machine, "2.40", "0.7")
        assert printed(result.revenue_usd) == "11038"
        assert printed(result.energy_usd) == "612"
        assert printed(result.other_usd) == "2190"
        assert printed(result.depreciation_usd) == "5400"
        assert printed(result.net_usd) == "2835"
        assert result.yearly_yield is not None
        assert printed(result.yearly_yield * 100, 1) == "9.5"
        assert printed(result.payback_years, 2) == "3.64"
        assert printed(result.ask_usd_per_h(Fraction("0.25"), YEAR_H * 7 / 10), 2) == "1.78"
        idle = machine.idle_usd_per_h()
        assert printed(idle, 3) == "0.885"
        energy = machine.pue * machine.idle_w * machine.energy_usd_per_kwh / 1_000
        assert printed(energy / idle * 100) == "2"

    def test_over_three_years_it_loses(self) -> None:
        result = year_of(colocated_h100(life_years=3), "2.40", "0.7")
        assert result.yearly_yield is not None
        assert printed(result.yearly_yield * 100, 1) == "-2.5"
        assert printed(result.ask_usd_per_h(Fraction("0.25"), YEAR_H * 7 / 10), 2) == "2.57"


class TestTokens:
    @pytest.mark.parametrize(
        ("share", "home", "data_centre"),
        [("1", "0.019", "0.095"), ("0.5", "0.027", "0.184"), ("0.1", "0.091", "0.90"), ("0.036", "0.232", "2.49")],
    )
    def test_a_million_costs_more_the_less_is_served(self, share: str, home: str, data_centre: str) -> None:
        places = [len(text.partition(".")[2]) for text in (home, data_centre)]
        of_home = home_4090().usd_per_token(Fraction(1_646), Fraction(share)) * 1_000_000
        of_centre = colocated_h100(load_w=350).usd_per_token(Fraction(2_693), Fraction(share)) * 1_000_000
        assert (printed(of_home, places[0]), printed(of_centre, places[1])) == (home, data_centre)

    def test_the_fixed_cost_of_an_hour(self) -> None:
        assert printed(home_4090().fixed_usd_per_h, 3) == "0.047"
        assert printed(colocated_h100(load_w=350).fixed_usd_per_h, 3) == "0.866"

    def test_small_models_break_even_on_idle_consumer_cards_first(self) -> None:
        price, fee = Fraction("0.20") / 1_000_000, Fraction("0.25")
        home = home_4090().break_even_token_share(Fraction(1_646), price, fee)
        centre = colocated_h100(load_w=350).break_even_token_share(Fraction(2_693), price, fee)
        assert home is not None
        assert centre is not None
        assert (printed(home * 100, 1), printed(centre * 100)) == ("5.7", "62")

    def test_income_below_the_power_of_a_token_never_breaks_even(self) -> None:
        assert home_4090().break_even_token_share(Fraction(1), Fraction("0.20") / 1_000_000, Fraction(0)) is None


class TestEdges:
    def test_without_cash_there_is_no_payback(self) -> None:
        assert year_of(home_4090(), "0", "0.5").payback_years is None

    def test_without_capital_or_hours_there_is_no_yield(self) -> None:
        nothing = Result(Fraction(0), Fraction(1), Fraction(0), Fraction(0), Fraction(0), Fraction(10))
        assert (nothing.yearly_yield, nothing.yearly_cash_yield) == (None, None)
        assert nothing.ask_usd_per_h(Fraction(0), Fraction(0)) is None


class TestDecliningBalance:
    def test_each_year_takes_its_part_of_what_is_left_and_stops_at_the_residual(self) -> None:
        years = [
            declining_usd(Fraction(1_000), Fraction(100), Fraction(4), YEAR_H * year, YEAR_H * (year + 1))
            for year in range(6)
        ]
        assert years == [500, 250, 125, 25, 0, 0]

    @given(
        cuts=st.lists(st.integers(0, 60_000), min_size=2, max_size=6),
        residual=st.integers(0, 1_000),
        life=st.integers(1, 8),
    )
    def test_stretches_that_meet_lose_what_the_whole_loses(self, cuts: list[int], residual: int, life: int) -> None:
        cuts.sort()

        def lost(begin: int, end: int) -> Fraction:
            return declining_usd(Fraction(1_000), Fraction(residual), Fraction(life), Fraction(begin), Fraction(end))

        assert sum(map(lost, cuts, cuts[1:]), Fraction(0)) == lost(cuts[0], cuts[-1])
        assert 0 <= lost(0, cuts[-1]) <= 1_000 - residual
