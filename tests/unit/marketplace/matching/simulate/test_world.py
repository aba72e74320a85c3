"""Whole runs: repeatable, nobody forgotten, owners obeyed; and the rules of the matcher at work in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.sizing.devices import DEVICES
from marketplace.matching.simulate import engine as states
from marketplace.matching.simulate.benchmark import LLAMA_8B_FP8, benchmark_fleet, capacity_requests, pooled_hit_rate
from marketplace.matching.simulate.fleet import Fleet, Hours, NodeSpec, make_node
from marketplace.matching.simulate.generator import CODE, CONVERSATION, LONG, generate
from marketplace.matching.simulate.policies import POLICIES, Matcher
from marketplace.matching.simulate.report import Report, in_time, jain, percentiles, report
from marketplace.matching.simulate.traces import Request, Trace
from marketplace.matching.simulate.world import Outcome, simulate
from marketplace.metering.pricing import Rates

RATES = Rates(50_000_000, 25_000_000, 100_000_000)
FINAL = {states.DONE, states.REFUSED, states.INTERRUPTED}


def nodes(count: int, card: str = "RTX 4090", rates: Rates = RATES, **more: object) -> tuple[NodeSpec, ...]:
    return tuple(
        make_node(LLAMA_8B_FP8, DEVICES[card], name=f"{card} {n}", rates=rates, **more)  # type: ignore[arg-type]
        for n in range(count)
    )


def fleet_of(*some: NodeSpec) -> Fleet:
    return Fleet(LLAMA_8B_FP8, some)


def spread_out(count: int, every_s: float, prompt: int = 1000, output: int = 100) -> Trace:
    return Trace("even", tuple(Request(n * every_s, prompt, output) for n in range(count)))


def scaled(pattern_seconds: float, load: float, fleet: Fleet) -> Trace:
    trace = generate(CONVERSATION, pattern_seconds, 3)
    return trace.at_rate(capacity_requests(fleet, trace) * load)


def facts(outcome: Outcome) -> list[tuple[float, float, int, int]]:
    return [(run.first_s, run.end_s, run.node, run.state) for run in outcome.runs]


class TestRuns:
    @pytest.mark.parametrize("name", POLICIES)
    def test_the_same_seed_gives_the_same_run_and_everybody_ends(self, name: str) -> None:
        fleet = benchmark_fleet()
        trace = scaled(60, 0.9, fleet)
        first, second = (simulate(fleet, trace, POLICIES[name], 7) for _ in range(2))
        assert facts(first) == facts(second)
        assert {run.state for run in first.runs} <= FINAL
        assert len(first.runs) == len(trace.requests)
        assert sum(tally.requests for tally in first.nodes) == sum(run.state == states.DONE for run in first.runs)

    def test_nothing_comes_before_its_cause(self) -> None:
        fleet = benchmark_fleet()
        outcome = simulate(fleet, scaled(60, 0.8, fleet), Matcher, 1)
        for run in outcome.runs:
            if run.state == states.DONE:
                assert run.at_s <= run.sent_s < run.first_s <= run.end_s

    def test_tokens_and_money_add_up(self) -> None:
        fleet = fleet_of(*nodes(2))
        outcome = simulate(fleet, spread_out(50, 0.4), Matcher, 1)
        assert sum(tally.input_tokens for tally in outcome.nodes) == 50 * 1000
        assert sum(tally.output_tokens for tally in outcome.nodes) == 50 * 100
        paid = sum(tally.revenue_nano for tally in outcome.nodes)
        assert paid == 50 * (1000 * RATES.input + 100 * RATES.output)

    def test_progress_is_told(self) -> None:
        heard: list[int] = []
        simulate(fleet_of(*nodes(1)), spread_out(2500, 0.5, 50, 2), Matcher, 1, heard.append)
        assert heard == [0, 1000, 2000, 2500]


class TestOwners:
    def test_a_node_is_used_only_while_it_is_offered(self) -> None:
        home = nodes(1, hours=Hours(windows=((10.0, 30.0),)))
        outcome = simulate(fleet_of(*home), spread_out(60, 1.0, 200, 5), Matcher, 1)
        served = [run for run in outcome.runs if run.state == states.DONE]
        assert served
        assert all(10.0 + 4.25 <= run.first_s <= 30.0 for run in served)
        assert outcome.nodes[0].offered_s == pytest.approx(20.0)
        assert outcome.nodes[0].cold_loads == 1

    def test_what_had_begun_is_cut_off_and_what_had_not_moves(self) -> None:
        leaving = nodes(1, hours=Hours(windows=((0.0, 5.0),)))
        staying = nodes(1, rates=Rates(500_000_000, 250_000_000, 1_000_000_000))
        # A long answer runs when the owner comes back, a long prompt is being read, and another stands behind it.
        trace = Trace("t", (Request(0.0, 500, 900), Request(4.6, 6000, 20), Request(4.7, 6000, 20), Request(20, 9, 1)))
        outcome = simulate(fleet_of(*leaving, *staying), trace, POLICIES["cheapest"], 1)
        assert [run.state for run in outcome.runs] == [states.INTERRUPTED, states.DONE, states.DONE, states.DONE]
        assert [run.node for run in outcome.runs[1:]] == [1, 1, 1]
        assert (outcome.moved, outcome.nodes[0].interrupted) == (2, 1)
        # Nobody pays for what was cut off.
        assert outcome.nodes[0].revenue_nano == 0

    def test_a_broken_node_comes_back_after_its_repair(self) -> None:
        fragile = nodes(1, failures_per_day=2000.0, repair_s=5.0)
        outcome = simulate(fleet_of(*fragile), spread_out(600, 1.0, 200, 5), Matcher, 1)
        assert outcome.nodes[0].cold_loads > 3
        assert sum(run.state == states.DONE for run in outcome.runs) > 200
        assert outcome.nodes[0].offered_s < 590

    def test_every_policy_meets_the_same_hours(self) -> None:
        fleet = fleet_of(*nodes(3, hours=Hours(on_s=20, off_s=10)))
        trace = spread_out(200, 0.5, 200, 5)
        offered = [
            [tally.offered_s for tally in simulate(fleet, trace, POLICIES[name], 4).nodes]
            for name in ("random", "fallow", "cheapest")
        ]
        assert offered[0] == pytest.approx(offered[1], rel=0.05)
        assert offered[0] == pytest.approx(offered[2], rel=0.05)


class TestMatching:
    """Small inputs that systems like this got wrong, on the real matcher."""

    def test_every_idle_node_is_used_before_any_queue_passes_one(self) -> None:
        trace = Trace("burst", tuple(Request(0.0, 400, 50) for _ in range(5)))
        outcome = simulate(fleet_of(*nodes(5)), trace, Matcher, 1)
        assert sorted(run.node for run in outcome.runs) == [0, 1, 2, 3, 4]

    def test_a_burst_of_64_sees_its_own_picks(self) -> None:
        trace = Trace("burst", tuple(Request(0.0, 300, 20) for _ in range(64)))
        outcome = simulate(fleet_of(*nodes(8)), trace, Matcher, 1)
        shares = [sum(run.node == n for run in outcome.runs) for n in range(8)]
        assert max(shares) <= 2 * 64 / 8
        assert min(shares) >= 4

    def test_long_prompts_count_from_dispatch_and_spread_evenly(self) -> None:
        trace = Trace("long", tuple(Request(0.2 * n, 32_000, 1) for n in range(48)))
        outcome = simulate(fleet_of(*nodes(4, "H100 SXM")), trace, Matcher, 1)
        work = [tally.input_tokens for tally in outcome.nodes]
        assert max(work) < 1.3 * sum(work) / len(work)

    def test_a_miss_goes_to_the_idle_node_not_to_the_busy_one(self) -> None:
        heavy = [Request(0.01 * n, 8000, 200, tuple(range(100 * n, 100 * n + 15))) for n in range(3)]
        trace = Trace("t", (*heavy, Request(0.5, 4000, 20, tuple(range(900, 907)))))
        outcome = simulate(fleet_of(*nodes(4)), trace, Matcher, 1)
        assert outcome.runs[3].node not in {run.node for run in outcome.runs[:3]}

    def test_a_conversation_stays_where_its_beginning_is_cached_until_that_node_is_busy(self) -> None:
        blocks = tuple(range(20))
        turns = [Request(3.0 * n, 512 * 20, 30, blocks) for n in range(6)]
        calm = simulate(fleet_of(*nodes(3)), Trace("t", tuple(turns)), Matcher, 1)
        assert len({run.node for run in calm.runs}) == 1
        assert all(run.cached for run in calm.runs[1:])
        rush = [Request(3.0 + 0.001 * n, 512 * 20 + 4000, 30, (*blocks, *range(100 * n + 100, 100 * n + 107)))
                for n in range(12)]  # fmt: skip
        outcome = simulate(fleet_of(*nodes(3)), Trace("t", (turns[0], *rush)), Matcher, 1)
        assert {run.node for run in outcome.runs if run.state == states.DONE} == {0, 1, 2}

    def test_what_cannot_be_useful_in_time_is_refused_rather_than_spoiling_others(self) -> None:
        trace = Trace("flood", tuple(Request(0.01 * n, 2000, 20) for n in range(300)))
        fleet = fleet_of(*nodes(2, "A100-80 SXM"))
        ours, theirs = (report(simulate(fleet, trace, POLICIES[name], 1)) for name in ("fallow", "least-outstanding"))
        assert ours.refused > 100
        assert ours.in_time > 2 * theirs.in_time

    def test_it_beats_every_simple_rule_on_each_kind_of_demand(self) -> None:
        fleet = benchmark_fleet()
        for pattern, seconds in ((CODE, 400), (CONVERSATION, 150), (LONG, 150)):
            trace = generate(pattern, seconds, 2)
            trace = trace.at_rate(capacity_requests(fleet, trace) * 0.8)
            made = {name: report(simulate(fleet, trace, make, 1)) for name, make in POLICIES.items()}
            best = max(one.in_time for name, one in made.items() if name != "fallow")
            assert made["fallow"].in_time > best, pattern.name
            if pattern is CONVERSATION:  # So short a run of the others says little about who is busiest.
                busy = [kind for kind in made["fallow"].kinds if kind.use.busy > 0.1]
                assert max(kind.busiest_over_mean for kind in busy) < 1.3


@pytest.fixture(scope="module")
def made() -> Report:
    fleet = benchmark_fleet()
    fleet = replace(fleet, nodes=tuple(replace(node, capital_usd=1000.0) for node in fleet.nodes))
    return report(simulate(fleet, scaled(60, 0.7, fleet), Matcher, 1))


class TestReport:
    def test_counts_add_up(self, made: Report) -> None:
        assert made.done + made.refused + made.interrupted == made.requests
        assert sum(size.requests for size in made.refused_by_size) == made.requests
        assert sum(kind.requests for kind in made.kinds) == made.done
        assert sum(owner.tokens for owner in made.owners) == sum(kind.tokens for kind in made.kinds)

    def test_the_three_meanings_of_use_stand_in_order(self, made: Report) -> None:
        for kind in made.kinds:
            assert 0 <= kind.use.busy <= kind.use.rented + 1e-9 <= 1 + 2e-9

    def test_an_owners_net_is_gross_less_fee_and_power(self, made: Report) -> None:
        for owner in made.owners:
            assert owner.net_usd == pytest.approx(owner.gross_usd - owner.fee_usd - owner.energy_usd)
            assert owner.yield_a_year == pytest.approx(owner.net_usd / (made.duration_s / 3600) * 8760 / 1000)

    def test_paying_for_late_tokens_makes_those_in_time_dearer(self, made: Report) -> None:
        assert made.usd_per_mtok_in_time >= made.usd_per_mtok > 0
        assert made.goodput_tokens_per_s <= made.offered_tokens_per_s

    def test_targets_are_both_to_be_met(self) -> None:
        fleet = fleet_of(*nodes(1))
        outcome = simulate(fleet, spread_out(1, 1.0), Matcher, 1)
        run = outcome.runs[0]
        assert in_time(run, fleet)
        run.first_s += 2
        run.end_s += 2
        assert not in_time(run, fleet)
        run.first_s -= 2
        run.end_s += 99 * 0.08
        assert not in_time(run, fleet)

    def test_percentiles_and_fairness(self) -> None:
        values = percentiles(float(n) for n in range(101))
        assert (values.p50, values.p95, values.p99) == (50, 95, 99)
        assert percentiles([]).p99 == 0
        assert jain([1, 1, 1, 1]) == 1
        assert jain([1, 0, 0, 0]) == 0.25
        assert jain([]) == 1


class TestCache:
    def test_a_larger_pool_hits_more_up_to_all_that_repeats(self) -> None:
        trace = generate(LONG, 900, 1)
        rates = [pooled_hit_rate(trace, tokens) for tokens in (0, 3e5, 3e6, 1e12)]
        assert rates[0] == 0
        assert rates == sorted(rates)
        assert rates[3] == pytest.approx(0.33, abs=0.06)
