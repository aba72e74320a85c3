"""The index over random fleets and histories, and the line under random load: what holds after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from marketplace.matching.cost import cost_of, want
from marketplace.matching.explain import explain, split
from marketplace.matching.index import Chosen, FleetIndex, Reservation
from marketplace.matching.line import PATIENCE_S, Line, Waiting
from marketplace.matching.rank import refusal_of
from marketplace.matching.rules import Rules
from marketplace.matching.types import UNDECLARED, DataTerms, Demand, OfferView, Rates, Refusal, Service, Sort
from tests.fleet_world import VARIANT_ID, demand, offer_view

NOW = 100.0
nodes = st.integers(1, 8).map(lambda number: UUID(int=number))
rates = st.builds(Rates, *[st.sampled_from([0, 10, 100, 10**6, 10**9])] * 3)
RULES = Rules(probation_slots=2)


@st.composite
def offers(draw: st.DrawFn, number: int | None = None) -> OfferView:
    key = number if number is not None else draw(st.integers(0, 15))
    return offer_view(
        offer_id=UUID(int=1_000 + key),
        node_id=UUID(int=1 + key % 8),
        rates=draw(rates),
        slots=draw(st.integers(1, 4)),
        slots_busy=draw(st.integers(0, 4)),
        context_per_slot=draw(st.sampled_from([64, 200, 4_096])),
        available=draw(st.booleans()),
        warm=draw(st.booleans()),
        simulated=draw(st.booleans()),
        region=draw(st.sampled_from(["", "eu"])),
        probation=draw(st.booleans()),
        sampled_age_s=draw(st.sampled_from([0.0, 20.0, 60.0])),
        prefill_tokens_per_s=draw(st.none() | st.floats(1.0, 1e5)),
        decode_tokens_per_s=draw(st.none() | st.floats(1.0, 1e4)),
        power_fraction=draw(st.sampled_from([0.5, 1.0])),
        headroom=draw(st.floats(1.0, 50.0)),
        data=draw(st.sampled_from([UNDECLARED, DataTerms("DE", 0, False), DataTerms("eu", 30, False)])),
        memory_needed_bytes=draw(st.none() | st.just(10)),
        memory_free_bytes=draw(st.none() | st.sampled_from([5, 20])),
    )


demands = st.builds(
    demand,
    prompt_tokens=st.integers(0, 300),
    max_output_tokens=st.integers(1, 300),
    ceiling=st.none() | rates,
    excluded_nodes=st.frozensets(nodes, max_size=2),
    cached_tokens=st.dictionaries(nodes, st.integers(0, 400), max_size=3),
    service=st.sampled_from(Service),
    sort=st.sampled_from(Sort),
    regions=st.sampled_from([frozenset(), frozenset({"eu"})]),
    proven_only=st.booleans(),
    private_only=st.booleans(),
    most_nano=st.none() | st.integers(0, 10**6),
)
resting_nodes = st.frozensets(nodes, max_size=2)


def fitting(index: FleetIndex, wanted: Demand, resting: frozenset[UUID]) -> set[UUID]:
    return {
        offer.offer_id for offer in index.offers(VARIANT_ID, NOW) if refusal_of(offer, wanted, RULES, resting) is None
    }


@settings(max_examples=300)
@given(st.lists(offers(), max_size=20), demands, resting_nodes, st.integers())
def test_a_pick_passes_every_filter_and_a_refusal_means_that_nothing_does(
    reports: list[OfferView], wanted: Demand, resting: frozenset[UUID], seed: int
) -> None:
    index = FleetIndex(RULES)
    for offer in reports:
        index.put(offer, NOW)
    able = fitting(index, wanted, resting)
    decision = index.choose(wanted, NOW, Random(seed), resting=resting)
    if isinstance(decision, Chosen):
        assert decision.offer.offer_id in able
        assert decision.offer.node_id not in wanted.excluded_nodes | resting
    else:
        assert not able
        known = {offer.node_id for offer in index.offers(VARIANT_ID, NOW)}
        assert sum(decision.refused.values()) == len(known)


@given(st.lists(offers(), max_size=20), demands, st.integers())
def test_a_ranking_is_complete_where_the_fleet_is_small(reports: list[OfferView], wanted: Demand, seed: int) -> None:
    index = FleetIndex(RULES)
    for offer in reports:
        index.put(offer, NOW)
    ranked = index.rank(wanted, NOW, Random(seed))
    able = fitting(index, wanted, frozenset())
    found = {offer.offer_id for offer in ranked.offers}
    assert found <= able
    assert bool(found) == bool(able)
    if able:
        usual = want(wanted, RULES, index.usual(VARIANT_ID))
        costs = {
            live.offer.offer_id: cost_of(live, usual, NOW, _cached(live.offer, wanted)).total_s
            for live in index.lives(VARIANT_ID)
        }
        best = min(costs[offer_id] for offer_id in able)
        assert min(costs[offer_id] for offer_id in found) <= best + 1e-9


def _cached(offer: OfferView, wanted: Demand) -> int:
    return min(wanted.cached_tokens.get(offer.node_id, 0), wanted.prompt_tokens) if offer.warm else 0


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from("pprrduh"), st.integers(0, 10**6)), max_size=60), st.data())
def test_no_slot_is_ever_leased_twice_whatever_happens(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    index = FleetIndex(RULES)
    held: list[Reservation] = []
    now = NOW
    for number in range(6):
        index.put(replace(data.draw(offers(number)), slots_busy=0, sampled_age_s=0.0), now)
    for action, seed in steps:
        rng = Random(seed)
        now += 0.01
        known = list(index.lives(VARIANT_ID))
        if action == "p":
            wanted = demand(service=rng.choice(list(Service)), prompt_tokens=rng.randrange(60), max_output_tokens=4)
            decision = index.choose(wanted, now, rng)
            if isinstance(decision, Chosen):
                held.append(decision.reservation)
        elif action == "r" and held:
            index.release(held.pop(rng.randrange(len(held))), now)
        elif action == "d" and known:
            gone = rng.choice(known).offer.offer_id
            index.remove(gone)
            held = [item for item in held if item.offer_id != gone]
        elif action == "u" and known:
            live = rng.choice(known)
            index.put(replace(live.offer, available=rng.random() < 0.7, slots_busy=live.busy), now)
        elif action == "h" and held:
            index.started(rng.choice(held), now)
        mine = Counter(item.offer_id for item in held)
        for live in index.lives(VARIANT_ID):
            assert live.busy == mine[live.offer.offer_id] <= live.offer.slots
            assert live.cell is not None
            assert live.cell.levels[live.level][live.place] is live


@given(st.lists(offers(), max_size=16), demands, resting_nodes)
def test_explanations_add_up(reports: list[OfferView], wanted: Demand, resting: frozenset[UUID]) -> None:
    index = FleetIndex(RULES)
    for offer in reports:
        index.put(offer, NOW)
    told = explain(index, wanted, NOW, resting=resting)
    assert told.nodes == told.fitting + sum(told.refusal.refused.values())
    assert len(told.best) == min(5, len(fitting(index, wanted, resting)))
    totals = [candidate.split.total_s for candidate in told.best]
    assert totals == sorted(totals)
    for candidate in told.best:
        parts = candidate.split
        known = parts.time_s + parts.late_s + parts.money_s + parts.work_s + parts.crowd_s + parts.age_s
        assert abs(known + parts.bias_s - parts.total_s) <= 1e-6 * max(1.0, abs(parts.total_s))
    assert told.sentence()


@given(st.lists(offers(), min_size=1, max_size=8), demands)
def test_only_a_capped_cards_bias_depends_on_the_work(reports: list[OfferView], wanted: Demand) -> None:
    index = FleetIndex(RULES)
    for offer in reports:
        index.put(offer, NOW)
    usual = want(wanted, RULES, index.usual(VARIANT_ID))
    for live in index.lives(VARIANT_ID):
        parts = split(live, cost_of(live, usual, NOW), usual, NOW)
        assert abs(parts.bias_s - live.bias_s) <= (0.2 if live.capped else 0.0) + 1e-6 * abs(parts.total_s)


# --- the line ---------------------------------------------------------------------------------------------------------

arrivals = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 4_000), st.integers(1, 800), st.floats(1.0, 3_000.0)), max_size=40
)


@given(arrivals, st.integers(1, 4), st.integers())
def test_everybody_is_served_in_time_or_expires_and_nobody_twice(
    jobs: Sequence[tuple[int, int, int, float]], room: int, seed: int
) -> None:
    rng, line, served = Random(seed), Line(), []
    now = 0.0
    for number, (renter, prompt, output, left) in enumerate(jobs):
        now += rng.random()
        job = Waiting(UUID(int=number), UUID(int=renter), VARIANT_ID, prompt, output, now, now + left, 1.0)
        assert line.join(job)
        assert not line.join(job)
    expired: list[UUID] = []
    for _ in range(len(jobs) + 1):
        expired += [job.job_id for job in line.expired(now)]
        served += [turn.job.job_id for turn in line.serve(lambda job, kept: True, now, most=room)]
        now += 1.0
    assert len(line) == 0
    assert len(set(served)) == len(served)
    assert set(served).isdisjoint(expired)
    assert len(served) + len(expired) == len(jobs)


@given(st.integers(2, 30), st.integers(0, 10**6))
def test_nobody_starves_behind_a_stream_of_others(others: int, seed: int) -> None:
    rng, line = Random(seed), Line(weights={UUID(int=2): 1e9})
    line.join(Waiting(UUID(int=0), UUID(int=1), VARIANT_ID, 4_000, 800, 0.0, 1e9, 10.0))
    now, number = 0.0, 1
    while now < PATIENCE_S + 2 * others:
        for _ in range(others):
            job = Waiting(UUID(int=number), UUID(int=2), VARIANT_ID, rng.randrange(1, 50), 1, now, now + 1e6, 0.1)
            line.join(job)
            number += 1
        if any(turn.job.job_id == UUID(int=0) for turn in line.serve(lambda job, kept: True, now, most=1)):
            break
        now += 20.0
    assert now <= PATIENCE_S + 20.0


@given(st.integers(2, 5), st.integers(20, 60), st.integers())
def test_busy_renters_get_shares_by_tokens(renters: int, rounds: int, seed: int) -> None:
    rng, line, served = Random(seed), Line(), Counter[UUID]()
    number = 0
    for renter in range(renters):
        for _ in range(400):
            number += 1
            prompt, output = rng.randrange(10, 1_000), rng.randrange(1, 200)
            line.join(Waiting(UUID(int=number), UUID(int=renter), VARIANT_ID, prompt, output, 0.0, 1e9, 1.0))
    for turn in line.serve(lambda job, kept: True, 0.0, most=rounds * renters):
        served[turn.job.renter_id] += round(turn.job.tokens)
    largest = 1_000 + 4 * 200
    assert max(served.values()) - min(served.values()) <= 2 * largest


def test_refusals_of_nothing_are_empty() -> None:
    assert FleetIndex().choose(demand(), NOW, Random(1)) == Refusal()
