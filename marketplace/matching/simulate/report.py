"""What a run says: service, cost, use in its three meanings, owners' yield, fairness. Pure; plain records for JSON.

Utilisation has three meanings here, each over the hours that a node was offered:
- rented share: with at least one request;
- busy share: with its engine at work (close to what a driver calls utilisation);
- token share: tokens served over tokens that it could have served at the target, by the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from agent.sizing.speed import Load
from marketplace.matching.simulate import engine as states
from marketplace.matching.simulate.engine import Run
from marketplace.matching.simulate.fleet import Fleet, NodeSpec, capacity_requests_per_s
from marketplace.matching.simulate.world import NodeTally, Outcome

SCALE_PER_USD: Final = 1e15
"""Units of a tally's revenue (1e-6 nano-USD) in a dollar."""
FEE_PART: Final = 0.2
"""Of what renters pay, the platform's; a run may say otherwise."""
HOURS_A_YEAR: Final = 8760
SHORTEST_PART: Final = 0.1
"""Nodes offered for less than this part of the run say nothing about a herd."""
SIZES: Final = (1_000, 4_000, 16_000, 64_000)
"""Bounds of prompt lengths by which refusals are told."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; NaN-free: 0 where nothing was measured."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Use:
    """The three meanings of utilisation, 0 to 1 (token share may exceed 1: the formulas' target is no hard limit)."""

    rented: float
    busy: float
    token: float


@dataclass(frozen=True, slots=True)
class KindReport:
    """Nodes of one card and cap."""

    kind: str
    nodes: int
    offered_h: float
    use: Use
    busiest_over_mean: float
    """By busy share: 1 is even, 2 is a herd."""
    requests: int
    tokens: int
    prefix_hit_rate: float


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """What one owner earned. Amounts in USD of this run, estimates for people; the books are kept elsewhere."""

    owner: str
    offered_h: float
    use: Use
    tokens: int
    gross_usd: float
    fee_usd: float
    energy_kwh: float
    energy_usd: float
    net_usd: float
    net_usd_per_offered_h: float
    yield_a_year: float | None
    """Net over capital, were the whole year like this run; None without a capital."""
    cold_loads: int
    interrupted: int


@dataclass(frozen=True, slots=True)
class SizeReport:
    """Refused by length of prompt."""

    below_tokens: int | None
    requests: int
    refused: int


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    trace: str
    policy: str
    seed: int
    duration_s: float
    requests: int
    done: int
    refused: int
    interrupted: int
    moved: int
    offered_tokens_per_s: float
    goodput_tokens_per_s: float
    """Prompt and answer of requests within both targets, over the time of the arrivals."""
    in_time: float
    """Part of the offered tokens."""
    ttft_s: Percentiles
    tpot_s: Percentiles
    usd_per_mtok: float
    """Paid per million tokens delivered."""
    usd_per_mtok_in_time: float
    """Paid per million tokens delivered within target."""
    prefix_hit_rate: float
    cold_loads: int
    use: Use
    busiest_over_mean: float
    """The worst kind's."""
    fairness: float
    """Jain's index of income an offered hour among owners of one kind, the mean over kinds: 1 is even."""
    kinds: tuple[KindReport, ...]
    owners: tuple[OwnerReport, ...]
    refused_by_size: tuple[SizeReport, ...]


def report(outcome: Outcome, fee_part: float = FEE_PART) -> Report:
    """Everything about one run."""
    runs, fleet = outcome.runs, outcome.fleet
    done = [run for run in runs if run.state == states.DONE]
    good = sum(run.prompt + run.output for run in done if in_time(run, fleet))
    offered = sum(run.prompt + run.output for run in runs)
    duration_s = outcome.duration_s or 1.0
    tallies = outcome.nodes
    tokens = sum(tally.input_tokens + tally.output_tokens for tally in tallies)
    paid_usd = sum(tally.revenue_nano for tally in tallies) / SCALE_PER_USD
    capacity = _capacity_tokens(outcome)
    kinds = _kinds(outcome, capacity)
    owners = _owners(outcome, capacity, fee_part)
    return Report(
        trace=outcome.trace.name,
        policy=outcome.policy,
        seed=outcome.seed,
        duration_s=outcome.duration_s,
        requests=len(runs),
        done=len(done),
        refused=sum(run.state == states.REFUSED for run in runs),
        interrupted=sum(run.state == states.INTERRUPTED for run in runs),
        moved=outcome.moved,
        offered_tokens_per_s=offered / duration_s,
        goodput_tokens_per_s=good / duration_s,
        in_time=good / offered if offered else 1.0,
        ttft_s=percentiles(run.first_s + fleet.network_s - run.at_s for run in done),
        tpot_s=percentiles(per_token_s(run) for run in done if run.output > 1),
        usd_per_mtok=paid_usd / tokens * 1e6 if tokens else 0.0,
        usd_per_mtok_in_time=paid_usd / good * 1e6 if good else 0.0,
        prefix_hit_rate=_ratio(tallies, lambda t: t.cached_tokens, lambda t: t.input_tokens),
        cold_loads=sum(tally.cold_loads for tally in tallies),
        use=_use(tallies, capacity),
        busiest_over_mean=max((kind.busiest_over_mean for kind in kinds), default=1.0),
        fairness=_fairness(outcome),
        kinds=kinds,
        owners=owners,
        refused_by_size=_by_size(runs),
    )


def in_time(run: Run, fleet: Fleet) -> bool:
    """True if a finished request met both targets."""
    target = fleet.target
    first_s = run.first_s + fleet.network_s - run.at_s
    return first_s <= target.ttft_s(run.prompt) and (run.output < 2 or per_token_s(run) <= target.tpot_s)


def per_token_s(run: Run) -> float:
    """Mean time of its tokens after the first."""
    return (run.end_s - run.first_s) / max(1, run.output - 1)


def percentiles(values: Iterable[float]) -> Percentiles:
    """By nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return Percentiles(0.0, 0.0, 0.0)
    last = len(ordered) - 1
    return Percentiles(*(ordered[round(part * last)] for part in (0.5, 0.95, 0.99)))


def jain(shares: Sequence[float]) -> float:
    """1 where all are equal, 1/n where one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def energy_kwh(node: NodeSpec, tally: NodeTally) -> float:
    """Of the card: its load while busy, its idle draw for the rest of the offered time."""
    idle_s = max(0.0, tally.offered_s - tally.busy_s)
    return (tally.busy_s * node.load_w + idle_s * node.idle_w) / 3.6e6


def _capacity_tokens(outcome: Outcome) -> list[float]:
    """Tokens that each node could have served in its offered time."""
    trace, fleet = outcome.trace, outcome.fleet
    load = Load(1, max(1.0, trace.mean_prompt_tokens), max(1.0, trace.mean_output_tokens))
    size = load.input_tokens + load.output_tokens
    known: dict[tuple[object, int], float] = {}
    found = []
    for node, tally in zip(fleet.nodes, outcome.nodes, strict=True):
        key = (node.model, node.kv_tokens)
        if key not in known:
            known[key] = capacity_requests_per_s(node, load, fleet.target) * size
        found.append(known[key] * tally.offered_s)
    return found


def _use(tallies: Sequence[NodeTally], capacity: Sequence[float]) -> Use:
    offered_s = sum(tally.offered_s for tally in tallies)
    possible = sum(capacity)
    if not offered_s:
        return Use(0.0, 0.0, 0.0)
    return Use(
        sum(tally.rented_s for tally in tallies) / offered_s,
        sum(tally.busy_s for tally in tallies) / offered_s,
        sum(tally.input_tokens + tally.output_tokens for tally in tallies) / possible if possible else 0.0,
    )


def _ratio(tallies: Iterable[NodeTally], part: Callable[[NodeTally], int], whole: Callable[[NodeTally], int]) -> float:
    tallies = list(tallies)
    total = sum(whole(tally) for tally in tallies)
    return sum(part(tally) for tally in tallies) / total if total else 0.0


def _grouped(keys: Iterable[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return groups


def _kinds(outcome: Outcome, capacity: Sequence[float]) -> tuple[KindReport, ...]:
    found = []
    for kind, numbers in _grouped(node.kind for node in outcome.fleet.nodes).items():
        tallies = [outcome.nodes[number] for number in numbers]
        found.append(
            KindReport(
                kind=kind,
                nodes=len(numbers),
                offered_h=sum(tally.offered_s for tally in tallies) / 3600,
                use=_use(tallies, [capacity[number] for number in numbers]),
                busiest_over_mean=_busiest(tallies, outcome.duration_s),
                requests=sum(tally.requests for tally in tallies),
                tokens=sum(tally.input_tokens + tally.output_tokens for tally in tallies),
                prefix_hit_rate=_ratio(tallies, lambda t: t.cached_tokens, lambda t: t.input_tokens),
            )
        )
    return tuple(found)


def _busiest(tallies: Sequence[NodeTally], duration_s: float) -> float:
    shares = [
        tally.busy_s / tally.offered_s for tally in tallies if tally.offered_s > SHORTEST_PART * max(duration_s, 1.0)
    ]
    mean = sum(shares) / len(shares) if shares else 0.0
    return max(shares) / mean if mean else 1.0


def _fairness(outcome: Outcome) -> float:
    indices = []
    for numbers in _grouped(node.kind for node in outcome.fleet.nodes).values():
        incomes = [
            outcome.nodes[number].revenue_nano / outcome.nodes[number].offered_s
            for number in numbers
            if outcome.nodes[number].offered_s > SHORTEST_PART * max(outcome.duration_s, 1.0)
        ]
        if len(incomes) > 1:
            indices.append(jain(incomes))
    return sum(indices) / len(indices) if indices else 1.0


def _owners(outcome: Outcome, capacity: Sequence[float], fee_part: float) -> tuple[OwnerReport, ...]:
    found = []
    for owner, numbers in _grouped(node.owner for node in outcome.fleet.nodes).items():
        nodes = [outcome.fleet.nodes[number] for number in numbers]
        tallies = [outcome.nodes[number] for number in numbers]
        offered_h = sum(tally.offered_s for tally in tallies) / 3600
        gross = sum(tally.revenue_nano for tally in tallies) / SCALE_PER_USD
        kwh = [energy_kwh(node, tally) for node, tally in zip(nodes, tallies, strict=True)]
        energy_usd = sum(used * node.energy_usd_per_kwh for used, node in zip(kwh, nodes, strict=True))
        net = gross * (1 - fee_part) - energy_usd
        capital = sum(node.capital_usd for node in nodes)
        hours = outcome.duration_s / 3600
        found.append(
            OwnerReport(
                owner=owner,
                offered_h=offered_h,
                use=_use(tallies, [capacity[number] for number in numbers]),
                tokens=sum(tally.input_tokens + tally.output_tokens for tally in tallies),
                gross_usd=gross,
                fee_usd=gross * fee_part,
                energy_kwh=sum(kwh),
                energy_usd=energy_usd,
                net_usd=net,
                net_usd_per_offered_h=net / offered_h if offered_h else 0.0,
                yield_a_year=net / hours * HOURS_A_YEAR / capital if capital and hours else None,
                cold_loads=sum(tally.cold_loads for tally in tallies),
                interrupted=sum(tally.interrupted for tally in tallies),
            )
        )
    return tuple(found)


def _by_size(runs: Iterable[Run]) -> tuple[SizeReport, ...]:
    bounds = [*SIZES, None]
    counts = [[0, 0] for _ in bounds]
    for run in runs:
        place = next((n for n, bound in enumerate(SIZES) if run.prompt < bound), len(SIZES))
        counts[place][0] += 1
        counts[place][1] += run.state == states.REFUSED
    return tuple(
        SizeReport(bound, requests, refused)
        for bound, (requests, refused) in zip(bounds, counts, strict=True)
        if requests
    )
