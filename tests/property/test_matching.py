"""Matching over random fleets: what holds for every snapshot and every demand."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from marketplace.matching.breakers import Breakers
from marketplace.matching.cost import OVERHEAD_S
from marketplace.matching.live import UNKNOWN_PREFILL_TOKENS_PER_S
from marketplace.matching.rank import Rules, rank, refusal_of, with_pick
from marketplace.matching.retries import FLOOR_PER_S, RATIO, WINDOW_S, RetryBudget
from marketplace.matching.types import Demand, OfferView, Rates, Service, Sort
from tests.fleet_world import VARIANT_ID, demand, offer_view

rates = st.builds(Rates, *[st.integers(0, 10**12)] * 3)
nodes = st.integers(1, 6).map(lambda number: UUID(int=number))


@st.composite
def offers(draw: st.DrawFn) -> list[OfferView]:
    count = draw(st.integers(0, 12))
    return [
        offer_view(
            offer_id=UUID(int=1_000 + index),
            node_id=draw(nodes),
            variant_id=draw(st.sampled_from([VARIANT_ID, VARIANT_ID, VARIANT_ID, UUID(int=8)])),
            rates=draw(rates),
            slots=draw(st.integers(1, 8)),
            slots_busy=draw(st.integers(0, 8)),
            context_per_slot=draw(st.sampled_from([64, 200, 4_096])),
            available=draw(st.booleans()),
            warm=draw(st.booleans()),
            simulated=draw(st.booleans()),
            sampled_age_s=draw(st.floats(0, 60)),
            prefill_tokens_per_s=draw(st.none() | st.floats(0.001, 1e7)),
            decode_tokens_per_s=draw(st.none() | st.floats(0.001, 1e7)),
        )
        for index in range(count)
    ]


demands = st.builds(
    demand,
    prompt_tokens=st.integers(0, 300),
    max_output_tokens=st.integers(1, 300),
    ceiling=st.none() | rates,
    excluded_nodes=st.frozensets(nodes, max_size=2),
    cached_tokens=st.dictionaries(nodes, st.integers(0, 300), max_size=2),
    service=st.sampled_from(Service),
    sort=st.sampled_from(Sort),
)


@given(offers(), demands, st.integers(), st.booleans(), st.frozensets(nodes, max_size=3))
def test_what_is_ranked_passes_every_filter_and_what_is_not_has_a_reason(
    snapshot: list[OfferView], wanted: Demand, seed: int, simulated: bool, resting: frozenset[UUID]
) -> None:
    rules = Rules(allow_simulated=simulated)
    ranked = rank(snapshot, wanted, Random(seed), rules=rules, resting=resting)
    reasons = {offer.offer_id: refusal_of(offer, wanted, rules, resting) for offer in snapshot}
    assert {offer.offer_id for offer in ranked.offers} == {key for key, reason in reasons.items() if reason is None}
    assert len(ranked.offers) == len(ranked.ttft_s) == len(ranked.end_s)
    served = {offer.node_id for offer in ranked.offers}
    refused = {offer.node_id for offer in snapshot} - served
    assert sum(ranked.refusal.refused.values()) == len(refused)
    assert 0 <= ranked.tied <= len(ranked.offers)
    assert bool(ranked.tied) == bool(ranked.offers)


@given(offers(), demands, st.integers())
def test_predictions_are_the_ones_of_the_offer_in_the_same_place(
    snapshot: list[OfferView], wanted: Demand, seed: int
) -> None:
    ranked = rank(snapshot, wanted, Random(seed))
    for offer, first, last in zip(ranked.offers, ranked.ttft_s, ranked.end_s, strict=True):
        cached = wanted.cached_tokens.get(offer.node_id, 0) if offer.warm else 0
        rate = offer.prefill_tokens_per_s or UNKNOWN_PREFILL_TOKENS_PER_S
        assert first >= OVERHEAD_S + max(0, wanted.prompt_tokens - cached) / rate
        assert last >= first


@given(offers(), demands, st.integers())
def test_the_best_interactive_offer_is_never_dominated(snapshot: list[OfferView], wanted: Demand, seed: int) -> None:
    ranked = rank(snapshot, replace(wanted, service=Service.INTERACTIVE), Random(seed))
    if not ranked.offers:
        return
    best, best_ttft = ranked.offers[0], ranked.ttft_s[0]
    cost = _cost(best, wanted)
    for offer, ttft in zip(ranked.offers[1:], ranked.ttft_s[1:], strict=True):
        both_clearly_better = ttft < best_ttft / 1.3 - 0.2 and _cost(offer, wanted) * 1.2 < cost
        assert not both_clearly_better


@given(offers(), demands, st.integers())
def test_a_job_that_waits_never_costs_over_a_band_more_than_the_cheapest(
    snapshot: list[OfferView], wanted: Demand, seed: int
) -> None:
    ranked = rank(snapshot, replace(wanted, service=Service.FLEX), Random(seed))
    costs = [_cost(offer, wanted) for offer in ranked.offers]
    if costs:
        assert costs[0] <= min(costs) * 1.1 + 1e-6


@given(offers(), demands, st.integers())
def test_picks_until_refusal_fill_no_slot_twice(snapshot: list[OfferView], wanted: Demand, seed: int) -> None:
    rng = Random(seed)
    room = sum(offer.slots - offer.slots_busy for offer in rank(snapshot, wanted, rng).offers)
    picks = 0
    while (ranked := rank(snapshot, wanted, rng)).offers:
        snapshot = with_pick(snapshot, ranked.offers[0].offer_id)
        picks += 1
    assert picks == room


events = st.lists(st.tuples(st.sampled_from(["fail", "deliver", "look"]), nodes, st.floats(0, 30)), max_size=60)


@given(events)
def test_breakers_always_let_somebody_through_once_a_second_has_passed(
    history: list[tuple[str, UUID, float]],
) -> None:
    breakers, now = Breakers(), 0.0
    fleet = [UUID(int=number) for number in range(1, 7)]
    last_failure = -100.0
    for what, node, pause in history:
        now += pause
        if what == "fail":
            breakers.failed(node, VARIANT_ID, now)
            last_failure = now
        elif what == "deliver":
            breakers.succeeded(node, VARIANT_ID)
        resting = breakers.resting(fleet, VARIANT_ID, now)
        assert resting <= set(fleet)
        if now - last_failure >= 1.0:
            assert resting < set(fleet)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 2)), max_size=300))
def test_retries_stay_within_their_share_of_every_window(history: list[tuple[bool, float]]) -> None:
    budget, now = RetryBudget(), 0.0
    requests: list[int] = []
    retries: list[int] = []
    for is_request, pause in history:
        now += pause
        if is_request:
            budget.request(VARIANT_ID, now)
            requests.append(int(now))
        elif budget.try_retry(VARIANT_ID, now):
            retries.append(int(now))
            window = range(int(now) - WINDOW_S + 1, int(now) + 1)
            earned = int(sum(at in window for at in requests) * RATIO)
            assert sum(at in window for at in retries) <= earned + FLOOR_PER_S * WINDOW_S


def _cost(offer: OfferView, wanted: Demand) -> int:
    return wanted.prompt_tokens * offer.rates.input + wanted.max_output_tokens * offer.rates.output
