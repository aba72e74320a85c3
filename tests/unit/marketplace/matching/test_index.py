"""The index: what it keeps up, what it picks, and that a pick is seen by the next."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import sqrt
from random import Random
from uuid import UUID, uuid4

import pytest

from marketplace.matching.index import Chosen, FleetIndex
from marketplace.matching.rank import rank
from marketplace.matching.rules import Rules
from marketplace.matching.types import DataTerms, Demand, Filter, OfferView, Rates, Refusal, Service, Sort
from tests.fleet_world import VARIANT_ID, demand, offer_view

SEED = 20_260_202
UNGUARDED = Rules(guarded=False)
NOW = 1_000.0


def index_of(*offers: OfferView, rules: Rules | None = None) -> FleetIndex:
    index = FleetIndex(rules or Rules())
    for offer in offers:
        index.put(offer, NOW)
    return index


def pick(index: FleetIndex, wanted: Demand, rng: Random, now: float = NOW) -> Chosen:
    decision = index.choose(wanted, now, rng)
    assert isinstance(decision, Chosen)
    return decision


class TestKeepingUp:
    def test_a_new_offer_can_be_picked_at_once(self) -> None:
        offer = offer_view()
        index = index_of(offer)
        assert len(index) == 1
        assert pick(index, demand(), Random(1)).offer is offer

    def test_a_removed_one_cannot(self) -> None:
        offer = offer_view()
        index = index_of(offer)
        index.remove(offer.offer_id)
        index.remove(offer.offer_id)
        assert len(index) == 0
        assert index.choose(demand(), NOW, Random(1)) == Refusal()

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"available": False}, Filter.UNAVAILABLE),
            ({"slots_busy": 4}, Filter.FULL),
            ({"context_per_slot": 100}, Filter.CONTEXT),
            ({"simulated": True}, Filter.SIMULATED),
            ({"warm": False, "memory_needed_bytes": 2, "memory_free_bytes": 1}, Filter.MEMORY),
            ({"sampled_age_s": 31.0}, Filter.STALE),
        ],
    )
    def test_a_fresh_report_changes_what_is_picked_and_back(self, change: dict[str, object], reason: Filter) -> None:
        offer = offer_view()
        index = index_of(offer)
        index.put(replace(offer, **change), NOW)
        decision = index.choose(demand(), NOW, Random(1))
        assert isinstance(decision, Refusal)
        assert decision.refused == {reason: 1}
        index.put(offer, NOW)
        assert pick(index, demand(), Random(1)).offer is offer

    def test_an_offer_that_moves_to_another_node_is_another_offer(self) -> None:
        offer = offer_view()
        index = index_of(offer)
        moved = replace(offer, node_id=uuid4())
        index.put(moved, NOW)
        assert list(index.nodes(VARIANT_ID)) == [moved.node_id]
        assert len(index) == 1

    def test_silence_ages_an_offer_before_it_refuses_it(self) -> None:
        old, fresh = offer_view(), offer_view(prefill_tokens_per_s=900.0)
        index = index_of(old, fresh)
        index.heard(fresh.offer_id, NOW + 25.0)
        wanted = demand()
        # Ten milliseconds are worth less than figures that are a quarter of a minute late.
        assert pick(index, wanted, Random(1), NOW + 25.0).offer is fresh
        index.remove(fresh.offer_id)
        assert pick(index, wanted, Random(1), NOW + 25.0).offer is old
        decision = index.choose(wanted, NOW + 31.0, Random(1))
        assert isinstance(decision, Refusal)
        assert decision.refused == {Filter.STALE: 1}

    def test_the_largest_context_follows_the_offers(self) -> None:
        large, small = offer_view(context_per_slot=8_192), offer_view(context_per_slot=2_048)
        index = index_of(large, small, offer_view(context_per_slot=99_999, simulated=True))
        assert index.largest_context(VARIANT_ID) == 8_192
        index.put(replace(large, context_per_slot=1_024), NOW)
        assert index.largest_context(VARIANT_ID) == 2_048
        assert index.largest_context(UUID(int=99)) == 0

    def test_thousands_of_changes_leave_no_trace(self) -> None:
        rng = Random(SEED)
        index = FleetIndex()
        live: dict[UUID, OfferView] = {}
        for _ in range(5_000):
            if live and rng.random() < 0.5:
                offer = live.pop(rng.choice(list(live)))
                index.remove(offer.offer_id)
            else:
                offer = offer_view(
                    rates=Rates(rng.randrange(10**9), 0, rng.randrange(10**9)),
                    slots_busy=rng.randrange(6),
                    available=rng.random() < 0.8,
                )
                live[offer.offer_id] = offer
                index.put(offer, NOW)
        assert len(index) == len(live)
        assert {offer.offer_id for offer in index.offers(VARIANT_ID, NOW)} == set(live)


class TestAPick:
    def test_takes_a_slot_until_it_is_released(self) -> None:
        offer = offer_view(slots=1)
        index = index_of(offer)
        chosen = pick(index, demand(), Random(1))
        assert chosen.reservation.offer_id == offer.offer_id
        assert index.choose(demand(), NOW, Random(1)) == Refusal({Filter.FULL: 1})
        index.release(chosen.reservation, NOW)
        index.release(chosen.reservation, NOW)
        assert chosen.reservation.offer_id is None
        assert pick(index, demand(), Random(1)).offer is offer

    def test_weighs_its_prompt_at_once_and_until_its_first_token(self) -> None:
        index = index_of(offer_view(slots=8))
        wanted = demand(prompt_tokens=2_000)
        first = pick(index, wanted, Random(1))
        second = pick(index, wanted, Random(1))
        assert second.cost.ttft_s > first.cost.ttft_s + 1.9
        index.started(first.reservation, NOW + 0.5)
        third = pick(index, wanted, Random(1), NOW + 0.5)
        # The second one's prompt is all that is left before the third's.
        assert third.cost.ttft_s == pytest.approx(second.cost.ttft_s, rel=0.2)

    def test_is_the_one_of_least_cost_in_a_small_fleet(self) -> None:
        rng = Random(SEED)
        for _ in range(100):
            offers = [
                offer_view(
                    prefill_tokens_per_s=rng.uniform(100, 10_000),
                    rates=Rates(rng.randrange(10**7, 10**9), 0, rng.randrange(10**7, 10**9)),
                    slots_busy=rng.randrange(4),
                )
                for _ in range(24)
            ]
            wanted = demand(prompt_tokens=rng.randrange(50, 3_000), service=rng.choice(list(Service)))
            found = index_of(*offers).rank(wanted, NOW, rng, limit=24)
            everything = rank(offers, wanted, rng)
            assert {offer.offer_id for offer in found.offers[: found.tied]} <= {
                offer.offer_id for offer in everything.offers[: max(everything.tied, found.tied)]
            } or wanted.service is not Service.INTERACTIVE

    def test_keeps_within_the_regions_that_were_asked_for(self) -> None:
        index = index_of(offer_view(region="eu"), offer_view(region="us", rates=Rates(1, 1, 1)))
        assert pick(index, demand(regions=frozenset({"eu"})), Random(1)).offer.region == "eu"
        decision = index.choose(demand(regions=frozenset({"ap"})), NOW, Random(1))
        assert isinstance(decision, Refusal)
        assert decision.refused == {Filter.REGION: 2}
        assert decision.hopeless

    def test_keeps_to_owners_who_declare_that_they_keep_nothing(self) -> None:
        silent, kept = offer_view(), offer_view(data=DataTerms(retention_days=30, trains=False))
        trained = offer_view(data=DataTerms(retention_days=0, trains=True))
        private = offer_view(data=DataTerms(retention_days=0, trains=False), slots=1)
        index = index_of(silent, kept, trained, private)
        assert pick(index, demand(private_only=True), Random(1)).offer is private
        decision = index.choose(demand(private_only=True), NOW, Random(1))
        assert isinstance(decision, Refusal)
        assert decision.refused == {Filter.DATA: 3, Filter.FULL: 1}

    def test_takes_a_country_for_a_region(self) -> None:
        index = index_of(offer_view(region="eu-central", data=DataTerms(country="DE")), offer_view(region="us"))
        assert pick(index, demand(regions=frozenset({"DE"})), Random(1)).offer.data.country == "DE"
        assert pick(index, demand(regions=frozenset({"eu-central"})), Random(1)).offer.data.country == "DE"

    def test_stays_within_a_balance(self) -> None:
        dear, cheap = offer_view(rates=Rates(10**9, 0, 10**9)), offer_view(prefill_tokens_per_s=10.0)
        index = index_of(dear, cheap)
        assert pick(index, demand(most_nano=1_000, sort=Sort.LATENCY), Random(1)).offer is cheap
        index.remove(cheap.offer_id)
        assert index.choose(demand(most_nano=1_000), NOW, Random(1)) == Refusal({Filter.BALANCE: 1})

    def test_gives_a_node_on_probation_few_requests_at_a_time(self) -> None:
        index = index_of(offer_view(slots=8, probation=True), rules=Rules(probation_slots=2))
        assert index.choose(demand(proven_only=True), NOW, Random(1)) == Refusal({Filter.UNPROVEN: 1})
        for _ in range(2):
            pick(index, demand(), Random(1))
        assert index.choose(demand(), NOW, Random(1)) == Refusal({Filter.PROBATION: 1})

    def test_prefers_a_proven_node_of_the_same_kind(self) -> None:
        new, proven = offer_view(probation=True), offer_view()
        assert pick(index_of(new, proven), demand(), Random(1)).offer is proven

    def test_follows_what_a_renter_would_rather_have(self) -> None:
        fast = offer_view(prefill_tokens_per_s=4_000.0, rates=Rates(400, 0, 1_600))
        cheap = offer_view()
        index = index_of(fast, cheap)
        wanted = demand(prompt_tokens=900)
        assert index.rank(replace(wanted, sort=Sort.LATENCY), NOW, Random(1)).offers[0] is fast
        assert index.rank(replace(wanted, sort=Sort.PRICE), NOW, Random(1)).offers[0] is cheap

    def test_sends_small_models_to_small_cards(self) -> None:
        large, small = offer_view(headroom=64.0), offer_view(headroom=1.2)
        assert pick(index_of(large, small), demand(), Random(1)).offer is small

    def test_sends_decoding_to_power_capped_cards_and_reading_to_the_others(self) -> None:
        capped = offer_view(power_fraction=0.6, prefill_tokens_per_s=7_000.0)
        free = offer_view(prefill_tokens_per_s=7_000.0)
        index = index_of(capped, free)
        writing = demand(prompt_tokens=10, max_output_tokens=2_000)
        reading = demand(prompt_tokens=900, max_output_tokens=1)
        assert index.rank(writing, NOW, Random(1)).offers[0] is capped
        assert index.rank(reading, NOW, Random(1)).offers[0] is free

    def test_is_sticky_to_a_prefix_until_its_node_is_saturated(self) -> None:
        warm, other = offer_view(slots=64), offer_view(slots=64)
        index = index_of(warm, other)
        wanted = demand(prompt_tokens=3_000, cached_tokens={warm.node_id: 2_800})
        miss = demand(prompt_tokens=3_000)
        assert pick(index, wanted, Random(1)).offer is warm
        while index.rank(wanted, NOW, Random(1)).offers[0] is warm:
            index.dispatched(warm.offer_id, miss, NOW)
        assert pick(index, wanted, Random(1)).offer is other

    def test_of_a_large_saturated_market_is_refused_by_groups(self) -> None:
        index = index_of(*(offer_view(slots_busy=4) for _ in range(150)), offer_view(available=False))
        decision = index.choose(demand(), NOW, Random(1))
        assert isinstance(decision, Refusal)
        assert decision.refused == {Filter.FULL: 150, Filter.UNAVAILABLE: 1}
        assert decision.sentence().startswith("about 150 nodes: no free slot")
        assert index.refusal(demand(), NOW) == Refusal(decision.refused)


class TestCases:
    """Small inputs that systems like this got wrong."""

    def test_sixteen_gateways_with_one_snapshot_give_no_node_twice_its_share(self) -> None:
        offers = [offer_view(slots=64, prefill_tokens_per_s=1_000.0 - index) for index in range(8)]
        offers.append(offer_view(slots=64, prefill_tokens_per_s=1_500.0, rates=Rates(90, 45, 360)))
        shares: Counter[UUID] = Counter()
        for gateway in range(16):
            index, rng = index_of(*offers, rules=Rules(gateways=16)), Random(gateway)
            for _ in range(16):
                shares[pick(index, demand(), rng).offer.node_id] += 1
        assert max(shares.values()) <= 2 * 16 * 16 / len(offers)

    def test_a_burst_sees_its_own_picks(self) -> None:
        index, rng = index_of(*(offer_view(slots=16) for _ in range(8))), Random(SEED)
        ready = demand(ttft_target_s=10.0)
        shares = Counter(pick(index, ready, rng).offer.node_id for _ in range(64))
        assert set(shares.values()) == {8}

    def test_equal_offers_get_shares_within_a_binomial_99_percent(self) -> None:
        nodes, picks = 200, 20_000
        index, rng = index_of(*(offer_view() for _ in range(nodes))), Random(SEED)
        shares: Counter[UUID] = Counter()
        for _ in range(picks):
            chosen = pick(index, demand(), rng)
            shares[chosen.offer.node_id] += 1
            index.release(chosen.reservation, NOW)
        mean = picks / nodes
        # 99% for all two hundred at once: 4.1 standard deviations each.
        spread = 4.1 * sqrt(picks / nodes * (1 - 1 / nodes))
        assert all(abs(shares[node] - mean) <= spread for node in index.nodes(VARIANT_ID))

    def test_a_miss_goes_to_the_idle_node_though_its_cache_is_full_of_others(self) -> None:
        busy, idle = offer_view(slots=16), offer_view(slots=16)
        index = index_of(busy, idle)
        for _ in range(4):
            index.dispatched(busy.offer_id, demand(prompt_tokens=3_000), NOW)
        assert pick(index, demand(prompt_tokens=500), Random(1)).offer is idle

    def test_of_long_prompts_with_one_token_out_load_counts_at_dispatch(self) -> None:
        index = index_of(*(offer_view(slots=64, context_per_slot=65_536) for _ in range(6)))
        rng, long = Random(SEED), demand(prompt_tokens=32_000, max_output_tokens=1)
        shares = Counter(pick(index, long, rng).offer.node_id for _ in range(120))
        assert max(shares.values()) / (120 / 6) < 1.3

    def test_telemetry_slower_than_its_limit_costs_less_than_twice_the_latency(self) -> None:
        rules = Rules(stale_after_s=0.2, telemetry_every_s=15.0)
        assert rules.contradiction() is not None

        def mean_ttft_s(report_every_s: float) -> float:
            index, rng = FleetIndex(rules), Random(SEED)
            offers = [offer_view(slots=8, prefill_tokens_per_s=2_000.0) for _ in range(10)]
            for offer in offers:
                index.put(offer, 0.0)
            told, total = 0.0, 0.0
            running: list[tuple[float, Chosen]] = []
            for step in range(1_000):
                now = step * 0.05
                if now - told >= report_every_s:
                    told = now
                    for offer in offers:
                        index.heard(offer.offer_id, now)
                for until, chosen in [item for item in running if item[0] <= now]:
                    index.release(chosen.reservation, now)
                    running.remove((until, chosen))
                chosen = pick(index, demand(prompt_tokens=400), rng, now)
                total += chosen.cost.ttft_s
                running.append((now + 1.0, chosen))
            return total / 1_000

        assert mean_ttft_s(15.0) < 2 * mean_ttft_s(0.1)

    def test_telemetry_ages_before_it_is_refused(self) -> None:
        fresh, silent = offer_view(), offer_view()
        index = index_of(fresh, silent)
        costs = []
        for now in (NOW, NOW + 12.0, NOW + 25.0):
            index.heard(fresh.offer_id, now)
            (cost,) = [
                cost.total_s
                for live, cost, _ in index._look(demand(), now, Random(1), frozenset())[0]
                if live.offer.offer_id == silent.offer_id
            ]
            costs.append(cost)
        assert costs == sorted(set(costs)), "the longer the silence, the worse"
        later = NOW + 31.0
        index.heard(fresh.offer_id, later)
        assert [offer.offer_id for offer in index.rank(demand(), later, Random(1)).offers] == [fresh.offer_id]

    def test_a_silent_crowd_is_waded_through_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        crowd, few = [offer_view() for _ in range(2_000)], [offer_view() for _ in range(3)]
        index, later = index_of(*crowd, *few), NOW + 60.0
        for offer in few:
            index.heard(offer.offer_id, later)
        looked = Counter[str]()
        passes = FleetIndex._passes
        monkeypatch.setattr(
            FleetIndex, "_passes", lambda own, live, sieve: looked.update(["at"]) or passes(own, live, sieve)
        )
        names = {offer.offer_id for offer in few}
        assert pick(index, demand(), Random(1), later).offer.offer_id in names
        looked.clear()
        for number in range(10):
            assert pick(index, demand(), Random(number), later).offer.offer_id in names
        assert looked["at"] < 500
        refused = index.choose(demand(regions=frozenset({"eu"})), later, Random(1))
        assert isinstance(refused, Refusal)
        back = crowd[0]
        index.heard(back.offer_id, later)
        seen = {pick(index, demand(excluded_nodes=frozenset(o.node_id for o in few)), Random(1), later).offer.offer_id}
        assert seen == {back.offer_id}, "who is heard again is back"

    def test_of_a_wholly_silent_market_says_so(self) -> None:
        index = index_of(*(offer_view() for _ in range(200)))
        for _ in range(2):
            refused = index.choose(demand(), NOW + 60.0, Random(1))
            assert isinstance(refused, Refusal)
            assert refused.refused == {Filter.STALE: 200}

    def test_five_decoders_are_all_used_before_any_queues(self) -> None:
        for requests in (256, 512):
            index, rng = index_of(*(offer_view(slots=128) for _ in range(5)), rules=UNGUARDED), Random(requests)
            busy: Counter[UUID] = Counter()
            for number in range(requests):
                busy[pick(index, demand(), rng).offer.node_id] += 1
                levels = [busy[node] for node in index.nodes(VARIANT_ID)]
                assert max(levels) - min(levels) <= 1, f"after request {number}"

    def test_a_short_prompt_does_not_wait_behind_one_of_600_000_tokens(self) -> None:
        offers = [offer_view(slots=8, context_per_slot=700_000, prefill_tokens_per_s=7_000.0) for _ in range(2)]
        index, rng = index_of(*offers), Random(1)
        long = pick(index, demand(prompt_tokens=600_000, max_output_tokens=100), rng)
        short = pick(index, demand(prompt_tokens=101), rng, NOW + 2.0)
        assert short.offer is not long.offer
        assert short.cost.ttft_s < 2.0


class TestLikelyAnswers:
    def test_are_as_long_as_the_latest_were_and_never_over_the_bound(self) -> None:
        index, asked = index_of(offer_view(slots=64, context_per_slot=8_192)), demand(max_output_tokens=4_000)
        assert index.likely_output(asked) == 512
        for _ in range(20):
            chosen = pick(index, asked, Random(1))
            index.wrote(chosen.reservation, 100)
            index.release(chosen.reservation, NOW)
        assert index.likely_output(asked) == 150
        assert index.likely_output(demand(max_output_tokens=80)) == 80

    def test_make_room_that_bounds_alone_would_deny(self) -> None:
        offer = offer_view(slots=64, kv_tokens=20_000, kv_step_s_per_token=1e-7, context_per_slot=20_000)
        wide = demand(max_output_tokens=4_000)
        index = index_of(offer)
        first = pick(index, wide, Random(1))
        index.wrote(first.reservation, 100)
        taken = 0
        while taken < 64 and isinstance(index.choose(wide, NOW + 0.2 * taken, Random(1)), Chosen):
            taken += 1
        assert taken > 20

    def test_of_a_variant_that_is_gone_are_forgotten(self) -> None:
        offer = offer_view()
        index = index_of(offer)
        chosen = pick(index, demand(), Random(1))
        index.remove(offer.offer_id)
        index.wrote(chosen.reservation, 10)
        assert index.likely_output(demand(max_output_tokens=900)) == 900
