"""Ranking: filters, scores, bands and chance."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import sqrt
from random import Random
from uuid import UUID, uuid4

import pytest

from marketplace.matching.rank import PRICE_BAND_RATIO, Rules, rank, refusal_of, with_pick, worst_nano
from marketplace.matching.types import Filter, OfferView, Rates, Service
from tests.fleet_world import demand, offer_view

SEED = 20_260_101


def winners(offers: list[OfferView], picks: int, service: Service = Service.INTERACTIVE) -> Counter[UUID]:
    """First choices over one unchanged snapshot."""
    rng = Random(SEED)
    wanted = demand(service=service)
    return Counter(rank(offers, wanted, rng).offers[0].node_id for _ in range(picks))


class TestFilters:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"variant_id": UUID(int=99)}, Filter.VARIANT),
            ({"simulated": True}, Filter.SIMULATED),
            ({"context_per_slot": 199}, Filter.CONTEXT),
            ({"rates": Rates(100, 50, 401)}, Filter.PRICE),
            ({"rates": Rates(100, 51, 400)}, Filter.PRICE),
            ({"node_id": UUID(int=13)}, Filter.EXCLUDED),
            ({"available": False}, Filter.UNAVAILABLE),
            ({"sampled_age_s": 31.0}, Filter.STALE),
            ({"node_id": UUID(int=14)}, Filter.BREAKER),
            ({"slots_busy": 4}, Filter.FULL),
        ],
    )
    def test_each_refuses_what_it_names(self, change: dict[str, object], reason: Filter) -> None:
        wanted = demand(ceiling=Rates(100, 50, 400), excluded_nodes=frozenset({UUID(int=13)}))
        resting = frozenset({UUID(int=14)})
        assert refusal_of(offer_view(), wanted, resting=resting) is None
        assert refusal_of(offer_view(**change), wanted, resting=resting) is reason

    def test_several_answers_need_an_agent_that_gives_them(self) -> None:
        offer = offer_view()
        assert refusal_of(offer, demand(choices=2)) is Filter.ONE_ANSWER
        assert refusal_of(replace(offer, gives_choices=True), demand(choices=2)) is None

    def test_several_answers_need_room_for_one_at_a_time_and_money_for_all(self) -> None:
        offer = offer_view(gives_choices=True, context_per_slot=200, rates=Rates(10**8, 10**8, 10**9))
        wanted = demand(choices=3)
        most = worst_nano(offer.rates, wanted)
        assert most > worst_nano(offer.rates, demand())
        assert refusal_of(offer, replace(wanted, most_nano=most)) is None
        assert refusal_of(offer, replace(wanted, most_nano=most - 1)) is Filter.BALANCE

    def test_a_context_that_fits_exactly_is_enough(self) -> None:
        assert refusal_of(offer_view(context_per_slot=200), demand()) is None

    def test_a_simulated_engine_serves_where_it_is_allowed(self) -> None:
        offer = offer_view(simulated=True)
        assert rank([offer], demand(), Random(SEED), rules=Rules(allow_simulated=True)).offers == (offer,)

    def test_a_refusal_counts_nodes_and_says_why(self) -> None:
        full = [offer_view(slots_busy=4) for _ in range(3)]
        dear = offer_view(rates=Rates(1, 1, 10**9))
        ranked = rank([*full, dear], demand(ceiling=Rates(100, 50, 400)), Random(SEED))
        assert ranked.offers == ()
        assert ranked.refusal.sentence() == "3 nodes: no free slot; 1 node: price above the maximum"
        assert not ranked.refusal.hopeless

    def test_a_node_with_two_offers_counts_once_by_the_one_nearest_to_running(self) -> None:
        node_id = uuid4()
        offers = [offer_view(node_id=node_id, context_per_slot=10), offer_view(node_id=node_id, slots_busy=4)]
        for order in (offers, offers[::-1]):
            assert rank(order, demand(), Random(SEED)).refusal.refused == {Filter.FULL: 1}

    def test_a_node_that_can_serve_by_another_offer_is_not_refused(self) -> None:
        node_id = uuid4()
        offers = [offer_view(node_id=node_id, device_id="gpu0", slots_busy=4), offer_view(node_id=node_id)]
        ranked = rank(offers, demand(), Random(SEED))
        assert ranked.offers == (offers[1],)
        assert ranked.refusal.refused == {}

    def test_a_slot_that_never_fits_makes_the_case_hopeless(self) -> None:
        assert rank([offer_view(context_per_slot=8)], demand(), Random(SEED)).refusal.hopeless


class TestInteractive:
    def test_takes_the_faster_first_token(self) -> None:
        slow, fast = offer_view(prefill_tokens_per_s=200.0), offer_view(prefill_tokens_per_s=2_000.0)
        ranked = rank([slow, fast], demand(), Random(SEED))
        assert ranked.offers == (fast, slow)
        assert ranked.ttft_s[0] < ranked.ttft_s[1]

    def test_a_cold_engine_comes_after_a_warm_one_at_twice_the_price(self) -> None:
        cold, warm = offer_view(warm=False), offer_view(rates=Rates(200, 100, 800))
        assert rank([cold, warm], demand(), Random(SEED)).offers[0] is warm

    def test_of_equally_fast_ones_takes_the_clearly_cheaper(self) -> None:
        dear, cheap = offer_view(rates=Rates(100, 50, 400)), offer_view(rates=Rates(50, 25, 200))
        assert winners([dear, cheap], 100) == {cheap.node_id: 100}

    def test_a_free_offer_comes_before_any_paid_one(self) -> None:
        paid, free = offer_view(rates=Rates(1, 1, 1)), offer_view(rates=Rates(0, 0, 0))
        assert winners([paid, free], 50) == {free.node_id: 50}

    def test_a_miss_goes_to_the_idle_node_and_a_long_hit_to_the_one_with_the_prefix(self) -> None:
        busy, idle = offer_view(slots_busy=3), offer_view()
        assert rank([busy, idle], demand(), Random(SEED)).offers[0] is idle
        long_hit = demand(prompt_tokens=3_000, cached_tokens={busy.node_id: 2_700})
        assert rank([busy, idle], long_hit, Random(SEED)).offers[0] is busy

    def test_an_unknown_speed_never_beats_a_told_one_that_is_good(self) -> None:
        silent, told = offer_view(prefill_tokens_per_s=None), offer_view(prefill_tokens_per_s=4_000.0)
        assert rank([silent, told], demand(prompt_tokens=2_000), Random(SEED)).offers[0] is told


class TestWaitingJobs:
    def test_go_to_the_cheapest_though_it_is_slow(self) -> None:
        slow_cheap = offer_view(prefill_tokens_per_s=20.0, rates=Rates(50, 25, 200))
        fast_dear = offer_view()
        ranked = rank([fast_dear, slow_cheap], demand(service=Service.FLEX), Random(SEED))
        assert ranked.offers[0] is slow_cheap
        assert ranked.tied == 1

    def test_fill_a_warm_engine_before_they_open_another(self) -> None:
        half_full, empty = offer_view(slots_busy=2), offer_view()
        assert winners([half_full, empty], 50, Service.FLEX) == {half_full.node_id: 50}


class TestChance:
    def test_gives_equal_offers_shares_within_a_binomial_99_percent(self) -> None:
        nodes, picks = 8, 4_000
        shares = winners([offer_view() for _ in range(nodes)], picks)
        mean = picks / nodes
        # 99% for all eight at once: 3.23 standard deviations each.
        spread = 3.23 * sqrt(picks * (1 / nodes) * (1 - 1 / nodes))
        assert all(abs(share - mean) <= spread for share in shares.values())
        assert len(shares) == nodes

    def test_gives_one_cent_of_undercut_no_more_than_its_proportion(self) -> None:
        base = Rates(100_000, 50_000, 400_000)
        offers = [offer_view(rates=base) for _ in range(3)]
        undercut = offer_view(rates=Rates(99_000, 49_500, 396_000))
        share = winners([*offers, undercut], 4_000)[undercut.node_id]
        assert 0.22 < share / 4_000 < 0.30

    def test_gives_a_node_traffic_in_proportion_to_its_room(self) -> None:
        small, large = offer_view(slots=1), offer_view(slots=7)
        share = winners([small, large], 4_000)[small.node_id] / 4_000
        assert 0.10 < share < 0.15

    def test_many_gateways_with_one_snapshot_and_one_best_node_do_not_herd(self) -> None:
        # One node is best by every figure, each within its band.
        offers = [offer_view(slots=64, prefill_tokens_per_s=1_000.0 - index) for index in range(8)]
        best = offer_view(slots=64, prefill_tokens_per_s=1_100.0, rates=Rates(98, 49, 392))
        snapshot = [*offers, best]
        shares: Counter[UUID] = Counter()
        for gateway in range(16):
            rng, own = Random(gateway), snapshot
            for _ in range(16):
                chosen = rank(own, demand(), rng).offers[0]
                shares[chosen.node_id] += 1
                own = with_pick(own, chosen.offer_id)
        fair = 16 * 16 / len(snapshot)
        assert max(shares.values()) <= 2 * fair

    def test_the_same_seed_gives_the_same_order(self) -> None:
        offers = [offer_view() for _ in range(20)]
        assert rank(offers, demand(), Random(5)) == rank(offers, demand(), Random(5))


class TestABurst:
    def test_sees_its_own_picks_and_spreads_evenly(self) -> None:
        offers = [offer_view(slots=16) for _ in range(8)]
        own, rng = offers, Random(SEED)
        for _ in range(64):
            own = with_pick(own, rank(own, demand(), rng).offers[0].offer_id)
        assert [offer.slots_busy for offer in own] == [8] * 8

    def test_uses_every_idle_node_before_any_gets_a_second(self) -> None:
        own, rng = [offer_view(slots=128) for _ in range(5)], Random(SEED)
        for pick in range(1, 257):
            own = with_pick(own, rank(own, demand(), rng).offers[0].offer_id)
            busy = [offer.slots_busy for offer in own]
            assert max(busy) - min(busy) <= 1, f"after pick {pick}"

    def test_of_long_prompts_counts_load_at_dispatch(self) -> None:
        own, rng = [offer_view(slots=64, context_per_slot=65_536) for _ in range(6)], Random(SEED)
        long = demand(prompt_tokens=32_000, max_output_tokens=1)
        for _ in range(120):
            own = with_pick(own, rank(own, long, rng).offers[0].offer_id)
        busy = [offer.slots_busy for offer in own]
        assert max(busy) / (sum(busy) / len(busy)) < 1.3

    def test_that_exceeds_all_slots_is_refused_as_full(self) -> None:
        own, rng = [offer_view(slots=2) for _ in range(3)], Random(SEED)
        for _ in range(6):
            own = with_pick(own, rank(own, demand(), rng).offers[0].offer_id)
        assert rank(own, demand(), rng).refusal.refused == {Filter.FULL: 3}


class TestStaleness:
    def test_a_limit_under_the_telemetrys_period_is_reported_and_not_obeyed(self) -> None:
        rules = Rules(stale_after_s=0.2, telemetry_every_s=15.0)
        assert "0.2 s" in (rules.contradiction() or "")
        assert refusal_of(offer_view(sampled_age_s=14.0), demand(), rules) is None
        assert refusal_of(offer_view(sampled_age_s=23.0), demand(), rules) is Filter.STALE

    def test_sensible_settings_contradict_nothing(self) -> None:
        assert Rules().contradiction() is None

    def test_old_figures_do_not_change_the_order_of_what_is_still_fresh_enough(self) -> None:
        old, fresh = offer_view(sampled_age_s=9.0, prefill_tokens_per_s=9_000.0), offer_view(prefill_tokens_per_s=50.0)
        assert rank([fresh, old], demand(), Random(SEED)).offers[0] is old


def test_the_tied_ones_are_as_good_as_the_first_but_for_load() -> None:
    # Quick at decoding, so that neighbours take little from a prefill.
    alike = [offer_view(slots_busy=busy, decode_tokens_per_s=400.0) for busy in (0, 1, 2)]
    dear = replace(offer_view(), rates=Rates(1_000, 500, 4_000))
    ranked = rank([dear, *alike], demand(), Random(SEED))
    assert ranked.tied == 3
    assert ranked.offers == (*alike, dear)
    assert PRICE_BAND_RATIO < 9
