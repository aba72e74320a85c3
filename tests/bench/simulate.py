"""The simulator: its speed, and how near the matcher comes to hindsight. `make bench FIGURES=simulate`.

On public traces (see `fallow simulate benchmark --help` on where they are looked for), at the benchmark's fixed fleet
and targets. Speed is requests a second of this process's CPU time, the real matcher included, the best of three.
Goodput is a part of the bound of hindsight, the mean over five seeds, at the worse of the loads 0.5 and 0.8.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from marketplace.matching.simulate.benchmark import benchmark_fleet, capacity_requests, run_benchmark
from marketplace.matching.simulate.bound import hindsight
from marketplace.matching.simulate.policies import Matcher
from marketplace.matching.simulate.traces import AZURE_CODE, AZURE_CONV, MOONCAKE, Trace, read_trace, traces_folder
from marketplace.matching.simulate.world import simulate

TRACES = {"azure_code": AZURE_CODE, "azure_conv": AZURE_CONV, "mooncake": MOONCAKE}
LOADS = (0.5, 0.8)
TIMES = 3


def _folder(what: str) -> Path | None:
    folder = traces_folder()
    if folder is None or not all((folder / name).exists() for name in TRACES.values()):
        print(f"{what}: skipped, the public traces are not on this machine (FALLOW_TRACES)", file=sys.stderr)
        return None
    return folder


def speed() -> list[dict[str, Any]]:
    """Requests a CPU second, at the benchmark's two lower loads together."""
    folder = _folder("simulate.requests_per_s")
    if folder is None:
        return []
    every = {name: requests_per_s(read_trace(folder / file)) for name, file in TRACES.items()}
    azure = 2 / (1 / every["azure_code"] + 1 / every["azure_conv"])
    return [
        _figure("simulate.requests_per_s.azure", round(azure), "requests/CPU s"),
        *(_figure(f"simulate.requests_per_s.{name}", round(every[name]), "requests/CPU s") for name in TRACES),
    ]


def requests_per_s(trace: Trace) -> float:
    """Of one trace, over both loads."""
    fleet = benchmark_fleet()
    capacity = capacity_requests(fleet, trace)
    best = 0.0
    for _ in range(TIMES):
        began = time.process_time()
        for load in LOADS:
            simulate(fleet, trace.at_rate(capacity * load), Matcher, 1)
        best = max(best, len(LOADS) * len(trace.requests) / (time.process_time() - began))
    return best


def goodput() -> list[dict[str, Any]]:
    """Part of the bound, at the worse load."""
    folder = _folder("simulate.goodput_of_bound")
    if folder is None:
        return []
    figures = []
    for name, file in TRACES.items():
        reached: dict[float, float] = defaultdict(float)
        trace = read_trace(folder / file)
        for cell, _ in run_benchmark(
            trace,
            loads=LOADS,
            contestants=[Matcher],
            bound=lambda fleet, scaled, seed: hindsight(fleet, scaled, seed).tokens_per_s,
        ):
            reached[cell.load] = cell.of_bound.mean
        worse = min(LOADS, key=lambda load: reached[load])
        unit = (
            f"of the bound, load {worse:g} (others: {', '.join(f'{v:.3f}' for k, v in reached.items() if k != worse)})"
        )
        figures.append(_figure(f"simulate.goodput_of_bound.{name}", round(reached[worse], 4), unit))
    return figures


def _figure(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"figure": name, "value": value, "unit": unit, "ratios": {}}


FIGURES = {"simulate.requests_per_s": speed, "simulate.goodput_of_bound": goodput}
