"""The simulator: its speed, and how near the matcher comes to hindsight. `make bench FIGURES=simulate`.

On public traces (see `fallow simulate benchmark --help` on where they are looked for), at the benchmark's fixed fleet
and targets. Speed is requests a second of this process's CPU time, the real matcher included, the best of three.
Goodput is a part of the bound of hindsight, the mean over five seeds, at the worse of the loads 0.5 and 0.8; beside it
what it is to the best simple rule's there, and what a million tokens in time cost to the cheapest rule's. It takes some
two minutes; progress goes to the error stream.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from marketplace.matching.simulate.benchmark import Cell, benchmark_fleet, capacity_requests, run_benchmark
from marketplace.matching.simulate.bound import hindsight
from marketplace.matching.simulate.policies import BASELINES, Matcher
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
    return [_goodput_of(name, read_trace(folder / file)) for name, file in TRACES.items()]


def _goodput_of(name: str, trace: Trace) -> dict[str, Any]:
    ours: dict[float, Cell] = {}
    rules: dict[float, list[Cell]] = defaultdict(list)
    for cell, _ in run_benchmark(
        trace,
        loads=LOADS,
        contestants=[Matcher, *BASELINES],
        bound=lambda fleet, scaled, seed: hindsight(fleet, scaled, seed).tokens_per_s,
        progress=_say,
    ):
        if cell.policy == Matcher.name:
            ours[cell.load] = cell
        else:
            rules[cell.load].append(cell)
    worse = min(LOADS, key=lambda load: ours[load].of_bound.mean)
    own, others = ours[worse], rules[worse]
    said = ", ".join(f"{ours[load].of_bound.mean:.3f} at {load:g}" for load in LOADS if load != worse)
    return _figure(
        f"simulate.goodput_of_bound.{name}",
        round(own.of_bound.mean, 4),
        f"of the bound, load {worse:g} ({said})",
        {
            "best simple rule": round(own.of_bound.mean / max(cell.of_bound.mean for cell in others), 2),
            "cheapest in time": round(
                own.usd_per_mtok_in_time.mean / min(cell.usd_per_mtok_in_time.mean for cell in others), 2
            ),
        },
    )


def _say(what: str) -> None:
    print(f"  {what}", end="\n" if not sys.stderr.isatty() else "          \r", file=sys.stderr, flush=True)


def _figure(name: str, value: float, unit: str, ratios: dict[str, float] | None = None) -> dict[str, Any]:
    return {"figure": name, "value": value, "unit": unit, "ratios": ratios or {}}


FIGURES = {"simulate.requests_per_s": speed, "simulate.goodput_of_bound": goodput}
