"""Explanations: of picks, and of idle hours."""

from __future__ import annotations

from random import Random

import pytest

from marketplace.matching.explain import Cause, Lost, explain, idle_hour
from marketplace.matching.index import Chosen, FleetIndex
from marketplace.matching.types import Filter, OfferView, Rates
from tests.fleet_world import demand, offer_view

NOW = 500.0


def index_of(*offers: OfferView) -> FleetIndex:
    index = FleetIndex()
    for offer in offers:
        index.put(offer, NOW)
    return index


class TestAPick:
    def test_is_told_with_who_was_refused_and_what_the_best_cost(self) -> None:
        fast = offer_view(prefill_tokens_per_s=5_000.0)
        index = index_of(fast, offer_view(prefill_tokens_per_s=50.0), offer_view(slots_busy=4), offer_view(warm=False))
        told = explain(index, demand(), NOW)
        assert (told.nodes, told.fitting) == (4, 3)
        assert told.refusal.refused == {Filter.FULL: 1}
        assert told.best[0].offer.offer_id == fast.offer_id
        assert told.best[-1].split.time_s > 15.0
        assert "3 of 4 nodes fit (1 node: no free slot)" in told.sentence()
        assert "the next best costs" in told.sentence()

    def test_that_found_nothing_says_why(self) -> None:
        assert explain(index_of(offer_view(slots_busy=4)), demand(), NOW).sentence() == (
            "Nothing fits: 1 node: no free slot."
        )
        assert explain(FleetIndex(), demand(), NOW).sentence() == "Nothing fits: no node is connected."

    def test_between_equals_is_chance(self) -> None:
        told = explain(index_of(offer_view(), offer_view()), demand(), NOW)
        assert told.tied == 2
        assert "2 offers are equally good" in told.sentence()


class TestAnIdleHour:
    @pytest.mark.parametrize(
        ("mine", "wanted", "cause"),
        [
            ({"rates": Rates(1_000, 500, 4_000)}, {}, Cause.PRICE),
            ({"prefill_tokens_per_s": 20.0}, {}, Cause.SPEED),
            ({"probation": True}, {}, Cause.STANDING),
            ({"context_per_slot": 128}, {}, Filter.CONTEXT),
            ({"rates": Rates(1_000, 500, 4_000)}, {"ceiling": Rates(100, 50, 400)}, Filter.PRICE),
            ({}, {}, Cause.CHANCE),
        ],
    )
    def test_has_a_bottleneck(self, mine: dict[str, object], wanted: dict[str, object], cause: object) -> None:
        idle, other = offer_view(slots=64, **mine), offer_view(slots=64)
        index = index_of(idle, other)
        asked = demand(**wanted)
        winner = next(item.split for item in explain(index, asked, NOW).best if item.offer.offer_id == other.offer_id)
        hour = idle_hour(index, idle.offer_id, [Lost(asked, winner)] * 3, NOW)
        assert hour.bottleneck is cause
        assert hour.demands == sum(hour.causes.values()) == 3

    def test_without_demand_says_so(self) -> None:
        offer = offer_view()
        hour = idle_hour(index_of(offer), offer.offer_id, [], NOW)
        assert hour.bottleneck is None
        assert hour.sentence() == "Nobody asked for this model."

    def test_counts_a_refused_demand_as_open_to_it(self) -> None:
        offer = offer_view()
        index = index_of(offer)
        assert isinstance(index.choose(demand(), NOW, Random(1)), Chosen)
        assert idle_hour(index, offer.offer_id, [Lost(demand(), None)], NOW).causes == {Cause.CHANCE: 1}
