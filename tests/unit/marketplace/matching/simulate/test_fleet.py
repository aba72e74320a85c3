"""Fleet files mean what they say, and say what is wrong with them."""

from __future__ import annotations

import itertools
from importlib.resources import files
from random import Random

import pytest

from agent.sizing.devices import DEVICES
from agent.sizing.speed import Load
from marketplace.matching.simulate.benchmark import LLAMA_8B_FP8, benchmark_fleet
from marketplace.matching.simulate.fleet import (
    DAY_S,
    FleetError,
    Hours,
    Target,
    capacity_requests_per_s,
    make_node,
    parse_fleet,
)
from marketplace.metering.pricing import Rates

EXAMPLE = files("marketplace.matching.simulate").joinpath("example.toml").read_text(encoding="utf-8")


class TestFile:
    def test_the_example_is_a_fleet(self) -> None:
        fleet = parse_fleet(EXAMPLE)
        assert [node.kind for node in fleet.nodes] == ["RTX 4090"] * 6 + ["RTX 3090 at 70%"] + ["L40S"] * 4
        rig, owl, rack = fleet.nodes[0], fleet.nodes[6], fleet.nodes[7]
        assert rig.rates == Rates(50_000_000, 25_000_000, 100_000_000)
        assert (rig.owner, rack.owner) == ("gaming rig #1", "Colo Ltd")
        assert owl.hours.windows == ((22 * 3600, 8 * 3600),)
        assert owl.load_w == pytest.approx(245)
        assert rack.model.efficiency.step_overhead_s == pytest.approx(0.0014)
        assert fleet.cold_load_s == pytest.approx(4.25)
        assert fleet.target == Target()

    @pytest.mark.parametrize(
        ("old", "new", "complaint"),
        [
            ('device = "L40S"', 'device = "L41S"', "node 3: unknown device"),
            ('ask_input = "0.08"', "ask_input = 0.08", "decimal in quotes"),
            ('ask_input = "0.08"', 'ask_input = "-1"', "decimal in quotes"),
            ('ask_input = "0.08"', 'ask_input = "0.0000000001"', "nine digits"),
            ('ask_input = "0.08"', 'ask_input = "NaN"', "decimal in quotes"),
            ('offered = ["22:00-08:00"]', 'offered = ["25:00-08:00"]', "windows like"),
            ('offered = ["22:00-08:00"]', 'offered = ["22:00-08:00"]\nsession_on_min = 3', "exclude each other"),
            ("session_on_min = 40", "", "session_on_min is missing"),
            ("power_cap = 0.7", "power_cap = 1.7", "at most 1"),
            ("weights_gb = 8.5", "weights_gb = 85", "does not fit"),
            ("layers = 32", "layers = 32.5", "whole number"),
            ("layers = 32", "", "model.layers is missing"),
            ('kv_type = "f16"', 'kv_type = "f99"', "kv_type"),
            ("count = 4", "count = 4\ncolour = 'red'", "colour is unknown"),
            ("network_ms = 20", "network_ms = true", "must be a number"),
            ("per_token_ms = 80", "per_token_ms = 0", "above 0"),
            ("count = 4", "count = 100000", "count"),
        ],
    )
    def test_a_mistake_is_told_with_its_place(self, old: str, new: str, complaint: str) -> None:
        assert old in EXAMPLE
        with pytest.raises(FleetError, match=complaint):
            parse_fleet(EXAMPLE.replace(old, new))

    def test_a_fleet_without_nodes_is_none(self) -> None:
        with pytest.raises(FleetError, match="at least one"):
            parse_fleet(EXAMPLE[: EXAMPLE.index("[[node]]")])


class TestHours:
    def test_always_means_the_whole_run(self) -> None:
        assert Hours().intervals(100.0, Random(1)) == [(0.0, 100.0)]

    def test_sessions_take_their_share_of_the_time(self) -> None:
        hours = Hours(on_s=2400, off_s=1500)
        intervals = hours.intervals(5e6, Random(1))
        assert sum(end - start for start, end in intervals) / 5e6 == pytest.approx(hours.share, abs=0.03)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(intervals))

    def test_windows_repeat_each_day_and_may_pass_midnight(self) -> None:
        hours = Hours(windows=((22 * 3600, 8 * 3600),))
        assert hours.intervals(2 * DAY_S, Random(1)) == [
            (0.0, 8 * 3600),
            (22 * 3600, DAY_S + 8 * 3600),
            (DAY_S + 22 * 3600, 2 * DAY_S),
        ]
        assert hours.share == pytest.approx(10 / 24)


class TestCapacity:
    def test_a_faster_card_serves_more_and_keeps_the_pace(self) -> None:
        nodes = {node.kind: node for node in benchmark_fleet().nodes}
        load = Load(1, 1155, 211)
        target = Target()
        served = {kind: capacity_requests_per_s(node, load, target) for kind, node in nodes.items()}
        assert served["RTX 4090"] < served["L40S"] < served["H100 SXM"]
        assert served["A100-80 SXM at 70%"] < served["A100-80 SXM"]

    def test_the_benchmarks_fleet_is_the_one_that_was_fixed(self) -> None:
        fleet = benchmark_fleet()
        kinds = [node.kind for node in fleet.nodes]
        assert {kind: kinds.count(kind) for kind in kinds} == {
            "RTX 4090": 12, "L40S": 6, "A100-80 SXM": 2, "A100-80 SXM at 70%": 2, "H100 SXM": 2,
        }  # fmt: skip
        assert sum(node.hours.off_s > 0 for node in fleet.nodes) == 6
        assert fleet.nodes[0].kv_tokens == pytest.approx(81_000, rel=0.05)
        assert {node.rates.cached_input * 2 - node.rates.input for node in fleet.nodes} == {0}

    def test_a_model_that_does_not_fit_is_no_node(self) -> None:
        with pytest.raises(FleetError, match="does not fit"):
            make_node(LLAMA_8B_FP8, DEVICES["RTX 3070"], name="small", rates=Rates(1, 1, 1))
