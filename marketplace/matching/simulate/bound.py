"""The most that any policy could have delivered in time, with hindsight: a linear programme. Solved with HiGHS.

Time is cut into slices of ten seconds. Each request may be split over any cards and over all slices between its arrival
and its latest end within the target; a card gives each slice the seconds that it was offered in it, and a request takes
at least so many of them:

    reading    its prompt, less the prefix that any request anywhere had before
    writing    o tokens at mean context c: o ((W + t0) c / KV + k c), its part of steps whose memory is full

Nothing is paid for batching badly, for waiting, for not knowing the future, or for moving. A card on which the request
alone would miss its target cannot take any of it. So no schedule can deliver more, and a good one delivers less.

A slice is longer than most targets, so that bound forgives bursts. The strict one does not: half-second slices, and the
prompt has to be read by the latest useful first token (writing, which may come later, is then not counted at all).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from agent.sizing.speed import SpeedModel
from marketplace.matching.simulate.fleet import Fleet, NodeSpec
from marketplace.matching.simulate.traces import BLOCK_TOKENS, Request, Trace
from marketplace.matching.simulate.world import hours_of

SLICE_S: Final = 10.0
STRICT_SLICE_S: Final = 0.5
MAX_COLUMNS: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class Bound:
    """What hindsight could have delivered."""

    tokens: float
    """Prompt and answer, of requests within target."""
    offered_tokens: int
    tokens_per_s: float
    """Over the time of the arrivals."""


@dataclass(frozen=True, slots=True)
class _Kind:
    node: NodeSpec
    seconds: list[float]
    """Offered in each slice, by all nodes of the kind."""


def hindsight(fleet: Fleet, trace: Trace, seed: int, *, strict: bool = False) -> Bound:
    """The bound for a trace, with the owners' hours of this seed. Raises ValueError for a problem too large."""
    requests = trace.requests
    slice_s = STRICT_SLICE_S if strict else SLICE_S
    latest = [_latest_s(fleet, request, strict) for request in requests]
    horizon_s = max(latest, default=0.0)
    slices = max(1, math.ceil(horizon_s / slice_s))
    kinds = _kinds(fleet, trace, seed, slices, slice_s)
    cached = first_use(trace)
    columns = _Columns()
    for number, request in enumerate(requests):
        first, last = int(request.at_s // slice_s), min(slices - 1, int(latest[number] // slice_s))
        for place, kind in enumerate(kinds):
            seconds = _seconds(kind.node, request, cached[number], fleet, strict)
            if seconds is not None:
                columns.add(number, place * slices + first, last - first + 1, seconds, request)
        if len(columns.gain) > MAX_COLUMNS:
            raise ValueError("too many requests and slices for one linear programme")
    offered = sum(request.prompt_tokens + request.output_tokens for request in requests)
    room = np.array([seconds for kind in kinds for seconds in kind.seconds])
    # Where all of it fits, that is the most, and no programme need be solved to know it.
    tokens = columns.all_of_it(room)
    if tokens is None:
        tokens = columns.solve(len(requests), room)
    return Bound(tokens, offered, tokens / trace.duration_s if trace.duration_s else 0.0)


def first_use(trace: Trace) -> list[int]:
    """Per request, the tokens at its beginning that some earlier request had too."""
    seen: set[int] = set()
    found: list[int] = []
    for request in trace.requests:
        held = 0
        for block in request.blocks:
            if block not in seen:
                break
            held += 1
        seen.update(request.blocks)
        found.append(min(held * BLOCK_TOKENS, request.prompt_tokens - 1))
    return found


def _latest_s(fleet: Fleet, request: Request, strict: bool) -> float:
    target = fleet.target
    if strict:
        return request.at_s + target.ttft_s(request.prompt_tokens) - fleet.network_s
    return request.at_s + target.ttft_s(request.prompt_tokens) + (request.output_tokens - 1) * target.tpot_s


def _seconds(node: NodeSpec, request: Request, cached: int, fleet: Fleet, strict: bool) -> float | None:
    """What a request takes of a card at least; None if it alone would miss its target there."""
    prompt, output = request.prompt_tokens, request.output_tokens
    if prompt + output > node.context_per_slot:
        return None
    model: SpeedModel = node.model
    cost = model.step_cost(1)
    reading = model.prefill_s(prompt - cached, cached) - cost.fixed_s
    context = prompt + output / 2
    if fleet.network_s + reading > fleet.target.ttft_s(prompt):
        return None
    if output > 1 and cost.step_s(1, context) > fleet.target.tpot_s:
        return None
    steps = 0 if strict else output - 1
    return reading + steps * context * ((cost.weights_s + cost.fixed_s) / node.kv_tokens + cost.kv_s)


def _kinds(fleet: Fleet, trace: Trace, seed: int, slices: int, slice_s: float) -> list[_Kind]:
    """Nodes that differ only in their hours, together."""
    found: dict[tuple[Any, ...], _Kind] = {}
    duration_s = max(trace.duration_s, 1.0)
    for node, intervals in zip(fleet.nodes, hours_of(fleet, trace, Random(seed)), strict=True):  # noqa: S311
        key = (node.model, node.context_per_slot, node.kv_tokens)
        kind = found.setdefault(key, _Kind(node, [0.0] * slices))
        for start, end in intervals:
            # Whoever is there at the last arrival stays for what it left to do.
            until = end if end < duration_s else slices * slice_s
            for place in range(int(start // slice_s), min(slices, math.ceil(until / slice_s))):
                overlap = min(until, (place + 1) * slice_s) - max(start, place * slice_s)
                kind.seconds[place] += max(0.0, overlap)
    return list(found.values())


class _Columns:
    """Variables: the part of a request that one kind of card does in one slice."""

    def __init__(self) -> None:
        self.request: list[int] = []
        self.slot: list[int] = []
        self.use: list[float] = []
        self.gain: list[float] = []

    def add(self, number: int, slot: int, count: int, seconds: float, request: Request) -> None:
        self.request += [number] * count
        self.slot += range(slot, slot + count)
        self.use += [seconds] * count
        self.gain += [float(request.prompt_tokens + request.output_tokens)] * count

    def all_of_it(self, room: np.ndarray[Any, Any]) -> float | None:
        """The gain of everything, if filling up in order of arrival finds room for all; None if it does not."""
        left = room.tolist()
        total = 0.0
        place, count = 0, len(self.gain)
        while place < count:
            number, part = self.request[place], 1.0
            total += self.gain[place]
            while place < count and self.request[place] == number:
                slot, use = self.slot[place], self.use[place]
                taken = min(part, left[slot] / use) if use > 0 else part
                left[slot] -= taken * use
                part -= taken
                place += 1
            if part > 1e-12:
                return None
        return total

    def solve(self, requests: int, room: np.ndarray[Any, Any]) -> float:
        """The most tokens."""
        count = len(self.gain)
        if not count:
            return 0.0
        columns = np.arange(count)
        rows = np.concatenate([np.array(self.request), requests + np.array(self.slot)])
        values = np.concatenate([np.ones(count), np.array(self.use)])
        matrix = csr_matrix((values, (rows, np.concatenate([columns, columns]))), shape=(requests + len(room), count))
        limits = np.concatenate([np.ones(requests), room])
        gain = np.array(self.gain)
        scale = gain.max()
        solved = linprog(-gain / scale, A_ub=matrix, b_ub=limits, bounds=(0, None), method="highs-ipm")
        if solved.status != 0:
            raise ValueError(f"the linear programme was not solved: {solved.message}")
        return float(-solved.fun * scale)
