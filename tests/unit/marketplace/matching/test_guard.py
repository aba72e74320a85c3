"""What would come too late everywhere is refused at once; what slow machines do slowly is not."""

from __future__ import annotations

import math
from random import Random
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.matching.cost import want
from marketplace.matching.explain import explain
from marketplace.matching.guard import allowed_s, idle_read_s
from marketplace.matching.index import Chosen, FleetIndex
from marketplace.matching.rank import rank
from marketplace.matching.rules import Rules
from marketplace.matching.types import Demand, Filter, OfferView, Rates, Refusal, Service
from tests.fleet_world import demand, offer_view

NOW = 1_000.0
FAST = {"prefill_tokens_per_s": 10_000.0, "decode_tokens_per_s": 60.0, "slots": 128, "context_per_slot": 65_536}
SLOW = {**FAST, "prefill_tokens_per_s": 150.0, "decode_tokens_per_s": 30.0, "slots": 16}
LONG = demand(prompt_tokens=4_000)


def index_of(*offers: OfferView, rules: Rules | None = None) -> FleetIndex:
    index = FleetIndex(rules or Rules())
    for offer in offers:
        index.put(offer, NOW)
    return index


def flood(index: FleetIndex, wanted: Demand, most: int = 200) -> tuple[int, Refusal | None]:
    """How many are taken until one is refused."""
    rng = Random(1)
    for taken in range(most):
        decision = index.choose(wanted, NOW, rng)
        if isinstance(decision, Refusal):
            return taken, decision
    return most, None


class TestQueues:
    def test_takes_what_is_useful_in_time_and_refuses_the_rest_with_both_times(self) -> None:
        index = index_of(offer_view(**FAST), offer_view(**FAST))
        taken, refusal = flood(index, LONG)
        assert 4 <= taken <= 10
        assert refusal is not None
        assert refusal.late is not None
        assert refusal.late.soonest_s > refusal.late.useful_s
        assert not refusal.hopeless
        assert refusal.sentence().startswith("about 2 nodes: first token would come too late, after ")

    def test_says_when_there_will_be_room_and_keeps_its_word(self) -> None:
        index = index_of(offer_view(**FAST))
        _, refusal = flood(index, LONG)
        assert refusal is not None
        assert refusal.late is not None
        later = NOW + refusal.late.retry_after_s
        assert isinstance(index.choose(LONG, later, Random(1)), Chosen)

    def test_nothing_that_is_refused_weighs_anywhere(self) -> None:
        index = index_of(offer_view(**FAST))
        taken, _ = flood(index, LONG)
        before = index.live(next(index.lives(LONG.variant_id)).offer.offer_id).free_at_s
        assert isinstance(index.choose(LONG, NOW, Random(2)), Refusal)
        live = next(index.lives(LONG.variant_id))
        assert (live.busy, live.free_at_s) == (taken, before)

    def test_a_shorter_prompt_is_refused_where_a_longer_one_may_still_wait(self) -> None:
        index = index_of(offer_view(**FAST))
        flood(index, demand(prompt_tokens=400))
        assert isinstance(index.choose(demand(prompt_tokens=400), NOW, Random(1)), Refusal)
        assert isinstance(index.choose(LONG, NOW, Random(1)), Chosen)

    def test_an_explanation_says_so_too(self) -> None:
        index = index_of(offer_view(**FAST), offer_view(**FAST))
        assert explain(index, LONG, NOW).late is None
        flood(index, LONG)
        told = explain(index, LONG, NOW)
        assert told.late is not None
        assert told.fitting == 2
        assert told.sentence().startswith("Refused: the first token would come too late, after ")

    def test_takes_the_dearer_one_that_is_in_time(self) -> None:
        cheap, dear = offer_view(**FAST, rates=Rates(1, 0, 1)), offer_view(**FAST, rates=Rates(1_000, 0, 1_000))
        index = index_of(cheap, dear)
        for _ in range(10):
            index.dispatched(cheap.offer_id, LONG, NOW)
        ranked = index.rank(LONG, NOW, Random(1))
        assert ranked.offers == (dear,)

    def test_ranking_refuses_as_picking_does(self) -> None:
        index = index_of(offer_view(**FAST))
        flood(index, LONG)
        ranked = index.rank(LONG, NOW, Random(1))
        assert ranked.offers == ()
        assert ranked.refusal.late is not None
        assert Filter.LATE in ranked.refusal.refused

    def test_looks_further_where_the_first_it_sees_are_all_late(self) -> None:
        cheap = [offer_view(**FAST, rates=Rates(1 + n, 0, 1 + n)) for n in range(60)]
        spare = offer_view(**FAST, rates=Rates(400, 0, 400))
        index = index_of(*cheap, spare)
        for offer in cheap:
            for _ in range(10):
                index.dispatched(offer.offer_id, LONG, NOW)
        decision = index.choose(LONG, NOW, Random(1))
        assert isinstance(decision, Chosen)
        assert decision.offer is spare


class TestWhatIsNotGuarded:
    def test_work_that_waits(self) -> None:
        index = index_of(offer_view(**FAST))
        assert flood(index, demand(prompt_tokens=4_000, service=Service.FLEX), most=100) == (100, None)

    def test_what_was_admitted_already_and_moves(self) -> None:
        index = index_of(offer_view(**FAST))
        assert flood(index, demand(prompt_tokens=4_000, ttft_target_s=math.inf), most=100) == (100, None)

    def test_nothing_at_all_where_the_operator_says_so(self) -> None:
        index = index_of(offer_view(**FAST), rules=Rules(guarded=False))
        assert flood(index, LONG, most=100) == (100, None)

    @pytest.mark.parametrize("prompt", [50, 500, 2_000])
    def test_an_idle_slow_node_serves_as_many_as_it_has_slots(self, prompt: int) -> None:
        taken, refusal = flood(
            index_of(offer_view(**{**SLOW, "decode_tokens_per_s": 10.0})), demand(prompt_tokens=prompt)
        )
        assert taken == 16
        assert refusal == Refusal({Filter.FULL: 1})

    def test_a_slow_card_that_can_write_fast_keeps_a_few_waiting(self) -> None:
        assert flood(index_of(offer_view(**SLOW)), demand(prompt_tokens=100))[0] >= 4
        assert flood(index_of(offer_view(**SLOW)), demand(prompt_tokens=1_000))[0] == 16

    def test_an_engine_of_few_slots(self) -> None:
        assert flood(index_of(offer_view(**{**FAST, "slots": 8})), demand(prompt_tokens=12_000))[0] == 8

    def test_an_offer_that_does_not_say_how_fast_it_reads(self) -> None:
        index = index_of(offer_view(**{**FAST, "prefill_tokens_per_s": None, "slots": 16}))
        assert flood(index, LONG)[0] == 16

    def test_a_fast_node_that_a_renter_cannot_use_sets_no_pace(self) -> None:
        dear = offer_view(**FAST, rates=Rates(10**9, 0, 10**9))
        slow = offer_view(**SLOW, rates=Rates(1, 0, 1))
        wanted = demand(prompt_tokens=2_000, ceiling=Rates(10, 10, 10))
        assert flood(index_of(dear, slow), wanted)[0] == 16
        assert rank([dear, slow], wanted, Random(1)).offers == (slow,)

    def test_nor_does_one_whose_owner_has_it(self) -> None:
        away = offer_view(**FAST, available=False)
        assert flood(index_of(away, offer_view(**SLOW)), demand(prompt_tokens=2_000))[0] == 16

    def test_a_cold_node_alone_is_waited_for(self) -> None:
        index = index_of(offer_view(**FAST, warm=False))
        assert flood(index, LONG)[0] == 128


class TestAllowed:
    @given(target_s=st.floats(0.1, 100.0), idle_s=st.floats(0.0, 200.0))
    def test_is_never_less_than_the_target_nor_than_a_few_idle_times(self, target_s: float, idle_s: float) -> None:
        wanted = want(demand(ttft_target_s=target_s), Rules(), Rates(0, 0, 0))
        within_s = allowed_s(wanted, idle_s)
        assert within_s >= target_s * 0.999
        assert within_s >= 4 * idle_s
        assert idle_s <= target_s * 1.001 or within_s == math.inf

    @given(target_s=st.floats(0.1, 100.0), part=st.floats(0.0, 0.2))
    def test_a_fleet_that_is_fast_enough_is_held_to_the_target_itself(self, target_s: float, part: float) -> None:
        wanted = want(demand(ttft_target_s=target_s), Rules(), Rates(0, 0, 0))
        assert allowed_s(wanted, part * target_s) == pytest.approx(target_s)

    def test_an_engine_too_slow_to_keep_pace_is_no_fast_one(self) -> None:
        assert idle_read_s(100, [(0.0, 0.001, 0.1)]) == math.inf
        assert idle_read_s(100, [(0.0, 0.001, 0.1), (1.0, 0.001, 0.02)]) == pytest.approx(1.12)
        assert idle_read_s(100, []) == math.inf

    def test_follows_the_operators_target(self) -> None:
        strict, lenient = Rules(first_token_s=0.5), Rules(first_token_s=4.0)
        offers = [offer_view(**FAST, offer_id=uuid4()) for _ in range(2)]
        assert flood(index_of(*offers, rules=strict), LONG)[0] < flood(index_of(*offers, rules=lenient), LONG)[0]
