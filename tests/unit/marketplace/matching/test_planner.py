"""The planner: what goes where, and how close to the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from marketplace.matching.planner import PlanDevice, VariantDemand, plan
from marketplace.matching.solver import available
from tests.bench.planner import market

GB = 1_000_000_000
SMALL = VariantDemand("small", 6 * GB, 1_000.0, 100.0)
LARGE = VariantDemand("large", 40 * GB, 200.0, 1_000.0)


def card(name: str, **changes: object) -> PlanDevice:
    facts: dict[str, object] = {
        "device": name,
        "memory_bytes": 24 * GB,
        "tokens_per_s": {"small": 500.0},
        "idle_w": 20.0,
        "load_w": 350.0,
        "tariff_nano_per_kwh": 0.2e9,
    }
    return PlanDevice(**{**facts, **changes})  # type: ignore[arg-type]


def where(made: object, variant: str) -> set[str]:
    return {item.device for item in made.assignments if item.variant == variant}  # type: ignore[attr-defined]


class TestAPlan:
    def test_loads_what_is_asked_for_where_it_fits(self) -> None:
        made = plan([card("a"), card("b", memory_bytes=4 * GB)], [SMALL], solver=False)
        assert where(made, "small") == {"a"}
        assert made.loads[0].cold
        assert made.unserved_tokens_per_s["small"] == pytest.approx(500.0)

    @pytest.mark.parametrize(
        "solver", [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="no scipy"))]
    )
    def test_gives_large_cards_to_large_models_and_small_ones_to_small(self, solver: bool) -> None:
        large = card("large", memory_bytes=80 * GB, tokens_per_s={"small": 3_000.0, "large": 200.0})
        demands = [replace(SMALL, tokens_per_s=900.0, nano_per_token=300.0), LARGE]
        made = plan([large, card("a"), card("b")], demands, solver=solver)
        assert where(made, "large") == {"large"}
        assert where(made, "small") == {"a", "b"}

    def test_leaves_what_is_loaded_where_it_is(self) -> None:
        devices = [card("a"), card("b", loaded=frozenset({"small"})), card("c")]
        made = plan(devices, [replace(SMALL, tokens_per_s=500.0)], solver=False)
        assert where(made, "small") == {"b"}
        assert made.loads == ()

    def test_loads_nothing_for_longer_than_its_owner_leaves_it(self) -> None:
        made = plan([card("a", offered_s=6.0), card("b", offered_s=600.0)], [SMALL], solver=False)
        assert where(made, "small") == {"b"}

    def test_does_not_serve_at_a_loss(self) -> None:
        dear = card("a", tariff_nano_per_kwh=2e12)
        assert plan([dear], [SMALL], solver=False).assignments == ()

    def test_prefers_cheap_power_at_equal_speed(self) -> None:
        devices = [card("dear", tariff_nano_per_kwh=0.5e9), card("cheap", tariff_nano_per_kwh=0.05e9)]
        assert where(plan(devices, [replace(SMALL, tokens_per_s=400.0)], solver=False), "small") == {"cheap"}

    def test_keeps_within_the_fuse(self) -> None:
        devices = [card(name, circuit="garage") for name in "abcd"]
        made = plan(devices, [replace(SMALL, tokens_per_s=9_000.0)], circuits_w={"garage": 800.0})
        assert len({item.device for item in made.assignments}) == 2

    def test_evicts_only_where_memory_is_needed(self) -> None:
        loaded = card("a", loaded=frozenset({"idle"}), tokens_per_s={"small": 500.0, "idle": 500.0})
        idle = VariantDemand("idle", 6 * GB, 0.0, 100.0)
        assert plan([loaded], [SMALL, idle], solver=False).evictions == ()
        crowded = replace(loaded, memory_bytes=8 * GB)
        assert plan([crowded], [SMALL, idle], solver=False).evictions == (("a", "idle"),)

    def test_obeys_its_owners_choice(self) -> None:
        made = plan([card("a", owner_choice=frozenset({"other"}))], [SMALL], solver=False)
        assert made.assignments == ()

    def test_of_no_time_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no time"):
            plan([card("a")], [SMALL], horizon_s=0.0)


class TestABigMarket:
    @pytest.mark.parametrize("load", [0.5, 1.5])
    def test_is_planned_within_every_bound(self, load: float) -> None:
        devices, demands, circuits = market(120, 20, load=load, seed=3)
        made = plan(devices, demands, circuits_w=circuits)
        by_device = {device.device: device for device in devices}
        served: dict[str, float] = {}
        for device in devices:
            mine = [item for item in made.assignments if item.device == device.device]
            assert sum(item.share for item in mine) <= 1.0 + 1e-9
            needed = {demand.variant: demand.needed_bytes for demand in demands}
            assert sum(needed[item.variant] for item in mine) <= device.memory_bytes
        for item in made.assignments:
            served[item.variant] = served.get(item.variant, 0.0) + item.tokens_per_s
        assert all(served.get(demand.variant, 0.0) <= demand.tokens_per_s * (1 + 1e-9) for demand in demands)
        drawn: dict[str, float] = {}
        for name in {item.device for item in made.assignments}:
            device = by_device[name]
            drawn[device.circuit] = drawn.get(device.circuit, 0.0) + device.load_w
        assert all(watts <= circuits[name] for name, watts in drawn.items())

    @pytest.mark.skipif(not available(), reason="needs scipy")
    @pytest.mark.parametrize("seed", [1, 2])
    def test_gains_nearly_the_bound_with_the_solver_and_more_than_without(self, seed: int) -> None:
        devices, demands, circuits = market(200, 30, load=0.8, seed=seed)
        led = plan(devices, demands, circuits_w=circuits, solver=True)
        greedy = plan(devices, demands, circuits_w=circuits, solver=False)
        assert led.bound_nano is not None
        assert 0.93 * led.bound_nano <= led.gain_nano <= led.bound_nano * (1 + 1e-6)
        assert greedy.gain_nano >= 0.8 * led.bound_nano
        assert led.gain_nano >= greedy.gain_nano
