"""The planner's figure: 1,000 devices by 50 variants, CPU seconds of a plan with the solver and without."""

from __future__ import annotations

import time
from random import Random
from typing import Any

from marketplace.matching.planner import Plan, PlanDevice, VariantDemand, plan
from marketplace.matching.solver import available

CARDS = ((24e9, 1_008e9), (12e9, 360e9), (48e9, 864e9), (80e9, 2_039e9), (80e9, 3_350e9), (16e9, 717e9))
"""Memory in bytes, bandwidth in bytes a second."""


def market(
    devices: int, variants: int, *, load: float, seed: int
) -> tuple[list[PlanDevice], list[VariantDemand], dict[str, float]]:
    """Cards of several kinds, four behind a fuse that bears three of the largest, and variants of very unequal demand
    that add up to `load` of what the cards could serve."""
    rng = Random(seed)
    sizes = {f"variant-{number}": rng.choice((1, 2, 4, 8, 14, 30, 40, 70)) * 1e9 for number in range(variants)}
    made: list[PlanDevice] = []
    for number in range(devices):
        memory, bandwidth = rng.choice(CARDS)
        speeds = {
            name: 8 * bandwidth * rng.uniform(0.9, 1.1) / size for name, size in sizes.items() if size * 1.3 <= memory
        }
        made.append(
            PlanDevice(
                device=f"device-{number}",
                memory_bytes=int(memory),
                tokens_per_s=speeds,
                loaded=frozenset((rng.choice(list(speeds)),)) if rng.random() < 0.6 else frozenset(),
                offered_s=rng.choice((300.0, 1_000.0, 1e9)),
                idle_w=30.0,
                load_w=rng.choice((200.0, 350.0, 450.0)),
                tariff_nano_per_kwh=rng.choice((0.1e9, 0.3e9)),
                circuit=f"fuse-{number // 4}",
            )
        )
    able = sum(sum(device.tokens_per_s.values()) / len(device.tokens_per_s) for device in made)
    share = {name: rng.paretovariate(1.1) for name in sizes}
    demands = [
        VariantDemand(
            variant=name,
            needed_bytes=int(size * 1.3),
            tokens_per_s=load * able * share[name] / sum(share.values()),
            nano_per_token=size / 8e9 * 100 * rng.uniform(0.3, 1.0),
        )
        for name, size in sizes.items()
    ]
    return made, demands, {f"fuse-{number}": 1_200.0 for number in range(devices // 4 + 1)}


def _timed(solver: bool) -> tuple[float, Plan]:
    devices, demands, circuits = market(1_000, 50, load=0.9, seed=1)
    began = time.process_time()
    made = plan(devices, demands, circuits_w=circuits, solver=solver)
    return time.process_time() - began, made


def measure() -> list[dict[str, Any]]:
    """planner.1000x50_s, with its gain over the bound."""
    greedy_s, greedy = _timed(solver=False)
    if not available():
        return [{"figure": "planner.1000x50_s", "value": round(greedy_s, 3), "unit": "s", "ratios": {}}]
    solved_s, solved = _timed(solver=True)
    bound = solved.bound_nano or 1.0
    return [
        {
            "figure": "planner.1000x50_s",
            "value": round(solved_s, 3),
            "unit": "s",
            "ratios": {"greedy alone": round(solved_s / greedy_s, 2)},
        },
        {
            "figure": "planner.gain_of_bound",
            "value": round(solved.gain_nano / bound, 4),
            "unit": "share",
            "ratios": {"greedy alone": round(solved.gain_nano / greedy.gain_nano, 3)},
        },
    ]


FIGURES = {"planner": measure}
