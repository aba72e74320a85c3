"""The bound of hindsight: never below what anybody reached, and right where it can be reckoned by hand."""

from __future__ import annotations

import pytest

from agent.sizing.devices import DEVICES
from marketplace.matching.simulate.benchmark import LLAMA_8B_FP8, benchmark_fleet, capacity_requests
from marketplace.matching.simulate.fleet import Fleet, Hours, make_node
from marketplace.matching.simulate.generator import CODE, CONVERSATION, LONG, generate
from marketplace.matching.simulate.policies import POLICIES
from marketplace.matching.simulate.report import report
from marketplace.matching.simulate.traces import Request, Trace
from marketplace.matching.simulate.world import simulate
from marketplace.metering.pricing import Rates

pytest.importorskip("scipy")
from marketplace.matching.simulate.bound import first_use, hindsight


def one_card(**more: object) -> Fleet:
    node = make_node(LLAMA_8B_FP8, DEVICES["RTX 4090"], name="n", rates=Rates(1, 1, 1), **more)  # type: ignore[arg-type]
    return Fleet(LLAMA_8B_FP8, (node,))


def same(count: int, prompt: int, output: int, every_s: float = 0.001) -> Trace:
    return Trace("same", tuple(Request(n * every_s, prompt, output) for n in range(count)))


class TestByHand:
    def test_what_fits_is_all_of_it(self) -> None:
        found = hindsight(one_card(), same(5, 1000, 10), 1)
        assert found.tokens == pytest.approx(5 * 1010) == found.offered_tokens

    def test_a_card_has_ten_seconds_in_a_slice(self) -> None:
        fleet = one_card()
        reading = fleet.nodes[0].model.prefill_s(4000) - fleet.nodes[0].model.step_cost(1).fixed_s
        found = hindsight(fleet, same(100, 4000, 1), 1)
        assert found.tokens == pytest.approx(10.0 / reading * 4001, rel=1e-6)

    def test_a_card_that_is_away_gives_nothing(self) -> None:
        fleet = one_card(hours=Hours(windows=((100.0, 200.0),)))
        assert hindsight(fleet, same(5, 1000, 10), 1).tokens == 0

    def test_what_no_card_can_do_in_time_counts_for_nobody(self) -> None:
        assert hindsight(one_card(), same(1, 81_500, 100), 1).tokens == 0

    def test_a_prefix_is_free_after_its_first_use(self) -> None:
        trace = Trace("t", (Request(0, 1500, 1, (1, 2)), Request(1, 1500, 1, (1, 2, 3)), Request(2, 600, 1, (2,))))
        assert first_use(trace) == [0, 1024, 512]


class TestAgainstRuns:
    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("pattern", [CODE, CONVERSATION, LONG], ids=lambda pattern: pattern.name)
    def test_nobody_delivers_more(self, pattern: object, strict: bool) -> None:
        fleet = benchmark_fleet()
        trace = generate(pattern, 60 if pattern is not CODE else 200, 4)  # type: ignore[arg-type]
        trace = trace.at_rate(capacity_requests(fleet, trace) * 1.3)
        most = hindsight(fleet, trace, 1, strict=strict)
        for name in ("fallow", "least-outstanding"):
            made = report(simulate(fleet, trace, POLICIES[name], 1))
            assert made.goodput_tokens_per_s <= most.tokens_per_s * (1 + 1e-6)
        assert most.tokens <= most.offered_tokens * (1 + 1e-9)

    def test_the_strict_one_is_no_higher(self) -> None:
        fleet = one_card()
        trace = generate(CODE, 100, 5)
        assert hindsight(fleet, trace, 1, strict=True).tokens <= hindsight(fleet, trace, 1).tokens * (1 + 1e-9)
