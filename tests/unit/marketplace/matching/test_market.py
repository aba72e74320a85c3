"""The market as an owner sees it."""

from __future__ import annotations

from uuid import uuid4

import pytest

from marketplace.matching.market import Paid, Spread, market, place
from marketplace.matching.types import Rates
from tests.fleet_world import offer_view


def ask(price: int, **changes: object) -> object:
    return offer_view(rates=Rates(price, price, price), **changes)


class TestAMarket:
    def test_has_a_spread_and_its_numbers(self) -> None:
        owner = uuid4()
        offers = [ask(price, owner_organisation_id=owner, slots_busy=2) for price in (10, 20, 30, 40, 50)]
        found = market(offers, paid=Paid(25, 35, 4, 24.0))  # type: ignore[arg-type]
        assert (found.offers, found.nodes, found.owners) == (5, 5, 1)
        assert found.input == found.output == Spread(10, 20, 30, 40, 50)
        assert found.busy_part == 0.5

    def test_counts_no_simulated_engine_and_no_other_region(self) -> None:
        offers = [ask(10, simulated=True), ask(20, region="eu"), ask(30, region="us")]
        assert market(offers, region="eu").input == Spread(20, 20, 20, 20, 20)  # type: ignore[arg-type]

    def test_without_offers_has_no_price(self) -> None:
        found = market([])
        assert found.input is None
        assert found.busy_part == 0.0


class TestAnAsk:
    def test_stands_behind_cheaper_offers_and_shares_with_equal_ones(self) -> None:
        offers = [ask(100), ask(1_000), ask(1_010), ask(5_000)]
        found = place(offers, Rates(1_000, 1_000, 1_000))  # type: ignore[arg-type]
        assert (found.cheaper, found.level, found.dearer) == (1, 2, 1)
        assert found.share == pytest.approx(1 / 3, rel=0.02)
        assert "1 offers ask less" in found.sentence()

    def test_under_its_owners_floor_is_refused(self) -> None:
        with pytest.raises(ValueError, match="floor"):
            place([], Rates(5, 5, 5), floor=Rates(6, 0, 0))
