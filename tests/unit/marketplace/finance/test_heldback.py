from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from uuid import UUID

import pytest

from marketplace.finance.heldback import (
    UNKNOWN,
    Ask,
    Elsewhere,
    Held,
    Limit,
    NodeTime,
    RefusedDemand,
    Unserved,
    best_ask,
    held_back,
)

NODE, VARIANT = UUID(int=1), UUID(int=2)
HOUR_US = 3_600_000_000
TIME = NodeTime(
    NODE,
    "attic",
    connected_us=10 * HOUR_US,
    offered_us=8 * HOUR_US,
    rented_us=2 * HOUR_US,
    no_demand_us=3 * HOUR_US,
    memory_bytes=8_000,
)
ASK = Ask(NODE, VARIANT, "tiny", 100_000_000, 400_000_000, more_slots_fit=False)


def elsewhere(output_rate: int, requests: int = 1) -> Elsewhere:
    return Elsewhere(NODE, VARIANT, 100_000_000, output_rate, requests, 1_000, 1_000, 500)


def refused(filter_name: str) -> RefusedDemand:
    return RefusedDemand(NODE, VARIANT, filter_name, 3, 1_000_000, 500_000)


def of(limit: Limit, found: tuple[Held, ...]) -> Held:
    (row,) = [row for row in found if row.limit is limit]
    return row


class TestTime:
    def test_the_owners_own_hours_are_told_apart_and_are_no_loss(self) -> None:
        row = of(Limit.OWNER, held_back([TIME], [ASK], [], [], []))
        assert (row.hours_us, row.at_most_nano) == (2 * HOUR_US, None)

    def test_hours_without_demand_are_a_share_of_the_idle_ones(self) -> None:
        row = of(Limit.DEMAND, held_back([TIME], [ASK], [], [], []))
        assert row.hours_us == 3 * HOUR_US
        assert row.sentence.startswith("50% of the idle hours")


class TestMarket:
    def test_what_others_served_for_less_is_lost_to_price_and_the_lever_is_named(self) -> None:
        rows = [elsewhere(200_000_000, 6), elsewhere(300_000_000, 4), elsewhere(400_000_000, 5)]
        found = held_back([TIME], [ASK], rows, [], [])
        price = of(Limit.PRICE, found)
        assert (price.requests, price.at_most_nano) == (10, 1_000)
        assert "at 0.20 USD a million output tokens this node would have been as cheap for 100%" in price.sentence
        assert of(Limit.CHOICE, found).requests == 5

    def test_the_best_ask_weighs_price_against_requests(self) -> None:
        assert best_ask([elsewhere(100, 1), elsewhere(90, 9)]) == (90, Fraction(1))
        assert best_ask([elsewhere(100, 9), elsewhere(10, 1)]) == (100, Fraction(9, 10))
        assert best_ask([]) is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("filter_name", "limit"),
        [
            ("PRICE", Limit.PRICE),
            ("CONTEXT", Limit.CONTEXT),
            ("FULL", Limit.SLOTS),
            ("MEMORY", Limit.MEMORY),
            ("STALE", Limit.STALE),
            ("BREAKER", Limit.FAILURES),
            ("A FILTER OF TOMORROW", Limit.OTHER),
        ],
    )
    def test_each_filter_is_one_limit_with_what_it_cost_at_most(self, filter_name: str, limit: Limit) -> None:
        row = of(limit, held_back([TIME], [ASK], [], [refused(filter_name)], []))
        assert (row.requests, row.at_most_nano) == (3, 100_000_000 + 200_000_000)

    def test_full_slots_are_a_setting_where_memory_holds_more(self) -> None:
        roomy = replace(ASK, more_slots_fit=True)
        assert of(Limit.SLOTS_SET, held_back([TIME], [roomy], [], [refused("FULL")], [])).requests == 3

    def test_models_nobody_offered_are_told_by_whether_they_fit(self) -> None:
        wanted = [Unserved("small", 5_000, 2), Unserved("huge", 9_000, 7)]
        found = held_back([TIME], [ASK], [], [], wanted)
        assert of(Limit.NOT_LOADED, found).requests == 2
        assert of(Limit.WEIGHTS, found).requests == 7

    def test_without_the_devices_memory_nothing_is_said_about_weights(self) -> None:
        found = held_back([replace(TIME, memory_bytes=None)], [ASK], [], [], [Unserved("small", 5_000, 2)])
        assert {row.limit for row in found}.isdisjoint({Limit.WEIGHTS, Limit.NOT_LOADED})

    def test_what_nobody_records_is_unknown(self) -> None:
        found = held_back([TIME], [ASK], [], [], [])
        for limit in UNKNOWN:
            row = of(limit, found)
            assert (row.hours_us, row.requests, row.at_most_nano) == (None, None, None)


class TestPower:
    def test_is_told_in_hours_where_a_card_said_it_and_is_unknown_elsewhere(self) -> None:
        row = of(Limit.POWER, held_back([replace(TIME, capped_us=HOUR_US)], [ASK], [], [], []))
        assert row.hours_us == HOUR_US
        unknown = of(Limit.POWER, held_back([TIME], [ASK], [], [], []))
        assert (unknown.hours_us, unknown.sentence) == (None, UNKNOWN[Limit.POWER])
