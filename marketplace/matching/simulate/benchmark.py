"""The matching benchmark: one fixed fleet, three real traces, three loads, five simple rules beside the real matcher.

Fleet, asks, targets and loads are fixed, so that figures of different days can be compared. Loads are parts of what the
fleet could serve at the target by the formulas of agent.sizing.speed, with owners' hours counted at their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Final

from agent.sizing.devices import DEVICES, DeviceSpec
from agent.sizing.shape import ModelShape
from agent.sizing.speed import Load
from marketplace.matching.rules import INTERACTIVE, SORT_FACTOR
from marketplace.matching.simulate.fleet import Fleet, Hours, NodeSpec, capacity_requests_per_s, make_node
from marketplace.matching.simulate.policies import POLICIES, SIMULATION_RULES, Make, Matcher
from marketplace.matching.simulate.report import Report, report
from marketplace.matching.simulate.traces import BLOCK_TOKENS, Trace
from marketplace.matching.simulate.world import simulate
from marketplace.matching.types import Sort
from marketplace.metering.pricing import Rates

LLAMA_8B_FP8: Final = ModelShape(
    weight_bytes=8_500_000_000,
    parameters=8_030_000_000,
    active_parameters=8_030_000_000,
    layers=32,
    hidden=4096,
    feed_forward=14_336,
    vocabulary=128_256,
    kv_elements_per_token=65_536,
    context_train=131_072,
)
CHEAP_MONEY_S: Final = INTERACTIVE.money_s * SORT_FACTOR[Sort.PRICE]
"""What money is worth to a renter who sorts by price."""
LOADS: Final = (0.5, 0.8, 1.1)
SEEDS: Final = (1, 2, 3, 4, 5)
HOME: Final = Hours(on_s=40 * 60, off_s=25 * 60)
_ASKS: Final = {
    "RTX 4090": (0.05, 0.10),
    "L40S": (0.08, 0.16),
    "A100-80 SXM": (0.12, 0.24),
    "H100 SXM": (0.20, 0.40),
}
_ENERGY_USD_PER_KWH: Final = {"RTX 4090": 0.16}
_COLOCATED_USD_PER_KWH: Final = 0.12


def benchmark_fleet() -> Fleet:
    """24 nodes of one card: 12 RTX 4090 (6 in people's homes), 6 L40S, 4 A100 (2 at 70% power), 2 H100."""
    nodes = [
        *_some("RTX 4090", 6),
        *_some("RTX 4090", 6, first=7, hours=HOME),
        *_some("L40S", 6),
        *_some("A100-80 SXM", 2),
        *_some("A100-80 SXM", 2, first=3, power_fraction=0.7),
        *_some("H100 SXM", 2),
    ]
    return Fleet(LLAMA_8B_FP8, tuple(nodes))


def _some(
    card: str, count: int, *, first: int = 1, hours: Hours | None = None, power_fraction: float = 1.0
) -> list[NodeSpec]:
    usd_input, usd_output = _ASKS[card]
    device: DeviceSpec = DEVICES[card]
    rates = Rates(round(usd_input * 1e9), round(usd_input * 1e9 / 2), round(usd_output * 1e9))
    return [
        make_node(
            LLAMA_8B_FP8,
            device,
            name=f"{card} #{number}",
            rates=rates,
            power_fraction=power_fraction,
            hours=hours or Hours(),
            energy_usd_per_kwh=_ENERGY_USD_PER_KWH.get(card, _COLOCATED_USD_PER_KWH),
        )
        for number in range(first, first + count)
    ]


def capacity_requests(fleet: Fleet, trace: Trace) -> float:
    """Requests of this trace that the fleet serves a second at the target, with the prefix hits that it can hold."""
    load = Load(
        batch=1,
        input_tokens=trace.mean_prompt_tokens,
        output_tokens=trace.mean_output_tokens,
        cached_fraction=pooled_hit_rate(trace, sum(node.kv_tokens for node in fleet.nodes)),
    )
    return sum(capacity_requests_per_s(node, load, fleet.target) * node.hours.share for node in fleet.nodes)


def pooled_hit_rate(trace: Trace, kv_tokens: float) -> float:
    """Part of the prompt tokens that one cache of this size would have, the least recently used forgotten first."""
    held: dict[int, None] = {}
    room = int(kv_tokens // BLOCK_TOKENS)
    hits = 0
    tokens = 0
    for request in trace.requests:
        tokens += request.prompt_tokens
        unbroken = True
        for block in request.blocks:
            if block in held:
                del held[block]
                hits += unbroken * BLOCK_TOKENS
            else:
                unbroken = False
        for block in reversed(request.blocks):
            held[block] = None
        while len(held) > room:
            del held[next(iter(held))]
    return min(hits / tokens, 1.0) if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the seeds."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError for none."""
        found = list(values)
        return cls(fmean(found), min(found), max(found))


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one load of one trace."""

    trace: str
    load: float
    policy: str
    seeds: int
    of_bound: Spread
    """Goodput over what hindsight could have delivered."""
    in_time: Spread
    """Part of the offered tokens."""
    goodput_tokens_per_s: Spread
    usd_per_mtok: Spread
    usd_per_mtok_in_time: Spread
    ttft_p50_s: Spread
    ttft_p95_s: Spread
    ttft_p99_s: Spread
    tpot_p50_s: Spread
    tpot_p95_s: Spread
    tpot_p99_s: Spread
    busiest_over_mean: Spread
    prefix_hit_rate: Spread
    owners_net_usd_per_h: Spread
    """Per offered hour, all owners together, after fee and energy."""
    refused: Spread
    interrupted: Spread
    cold_loads: Spread
    refused_long: Spread
    """Part of the refused whose prompts are longer than the trace's mean."""


def cheap_matcher(fleet: Fleet, rng: Random) -> Matcher:
    """The real matcher for renters who sort by price."""
    rules = SIMULATION_RULES
    matcher = Matcher(fleet, rng, replace(rules, interactive=replace(rules.interactive, money_s=CHEAP_MONEY_S)))
    matcher.name = "fallow, sort by price"
    return matcher


def unguarded_matcher(fleet: Fleet, rng: Random) -> Matcher:
    """The choice of a node alone: as the simple rules, it sends everything somewhere. What the guard is worth."""
    matcher = Matcher(fleet, rng, replace(SIMULATION_RULES, guarded=False))
    matcher.name = "fallow, no guard"
    return matcher


CONTESTANTS: Final[tuple[Make, ...]] = (
    POLICIES["fallow"],
    cheap_matcher,
    unguarded_matcher,
    *(make for name, make in POLICIES.items() if name != "fallow"),
)


def run_benchmark(
    trace: Trace,
    *,
    loads: Iterable[float] = LOADS,
    seeds: Iterable[int] = SEEDS,
    contestants: Iterable[Make] = CONTESTANTS,
    bound: Callable[[Fleet, Trace, int], float],
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Cell, list[Report]]]:
    """All cells of one trace. `bound` tells the most tokens a second that hindsight could have delivered."""
    fleet = benchmark_fleet()
    capacity = capacity_requests(fleet, trace)
    seeds, contestants = list(seeds), list(contestants)
    for load in loads:
        scaled = trace.at_rate(capacity * load)
        most = {}
        for seed in seeds:
            progress(f"{trace.name} at {load:g}: what hindsight could do, seed {seed}")
            most[seed] = bound(fleet, scaled, seed)
        for make in contestants:
            reports = []
            for seed in seeds:
                progress(f"{trace.name} at {load:g}: {_name(make)}, seed {seed}")
                reports.append(report(simulate(fleet, scaled, make, seed)))
            yield _cell(trace, load, reports, most), reports


def _name(make: Make) -> str:
    return str(getattr(make, "name", getattr(make, "__name__", "policy")))


def _cell(trace: Trace, load: float, reports: list[Report], most: dict[int, float]) -> Cell:
    def spread(figure: Callable[[Report], float]) -> Spread:
        return Spread.of(figure(one) for one in reports)

    def long_part(one: Report) -> float:
        long = sum(size.refused for size in one.refused_by_size if (size.below_tokens or 10**9) > mean)
        return long / one.refused if one.refused else 0.0

    mean = trace.mean_prompt_tokens
    return Cell(
        trace=trace.name,
        load=load,
        policy=reports[0].policy,
        seeds=len(reports),
        of_bound=spread(lambda one: one.goodput_tokens_per_s / most[one.seed] if most[one.seed] else 1.0),
        in_time=spread(lambda one: one.in_time),
        goodput_tokens_per_s=spread(lambda one: one.goodput_tokens_per_s),
        usd_per_mtok=spread(lambda one: one.usd_per_mtok),
        usd_per_mtok_in_time=spread(lambda one: one.usd_per_mtok_in_time),
        ttft_p50_s=spread(lambda one: one.ttft_s.p50),
        ttft_p95_s=spread(lambda one: one.ttft_s.p95),
        ttft_p99_s=spread(lambda one: one.ttft_s.p99),
        tpot_p50_s=spread(lambda one: one.tpot_s.p50),
        tpot_p95_s=spread(lambda one: one.tpot_s.p95),
        tpot_p99_s=spread(lambda one: one.tpot_s.p99),
        busiest_over_mean=spread(lambda one: one.busiest_over_mean),
        prefix_hit_rate=spread(lambda one: one.prefix_hit_rate),
        owners_net_usd_per_h=spread(_net_per_hour),
        refused=spread(lambda one: one.refused),
        interrupted=spread(lambda one: one.interrupted),
        cold_loads=spread(lambda one: one.cold_loads),
        refused_long=spread(long_part),
    )


def _net_per_hour(one: Report) -> float:
    hours = sum(owner.offered_h for owner in one.owners)
    return sum(owner.net_usd for owner in one.owners) / hours if hours else 0.0
