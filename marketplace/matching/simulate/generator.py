"""Traces made up, with the statistics of real ones, so that a simulation needs no data set.

Three patterns, fitted to public traces of an hour each (Azure LLM inference 2023, code and conversation; Mooncake
conversation). Arrivals are a Poisson process whose rate is drawn anew after each stretch, from nothing or a lognormal,
so that bursts have the right height and length. Lengths follow the quantiles of the real ones. Follow-ups go on with a
conversation that is a little shorter, and share its blocks. What is lost: times of day, the very highest peaks, and
ties between the length of a prompt and its moment.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from marketplace.matching.simulate.traces import BLOCK_TOKENS, MAX_REQUESTS, Request, Trace

QUANTILES: Final = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
OPEN_CONVERSATIONS: Final = 400
CANDIDATES: Final = 24


@dataclass(frozen=True, slots=True)
class Pattern:
    """The statistics of one kind of demand."""

    name: str
    requests_per_s: float
    prompt_quantiles: tuple[int, ...]
    """Tokens at QUANTILES."""
    output_quantiles: tuple[int, ...]
    stretch_s: float
    """Mean time after which the rate changes."""
    quiet_part: float = 0.0
    """Of the stretches that have no arrivals at all."""
    sigma: float = 0.0
    """Of the logarithm of the others' rate."""
    grid_s: float = 0.0
    """Arrivals are told in steps of so much; 0: exactly."""
    follow_up: float = 0.0
    """Part of the requests that go on with an earlier conversation."""
    shared_blocks: int = 0
    """Prefix blocks that every prompt begins with."""


CODE: Final = Pattern(
    name="code",
    requests_per_s=2.567,
    prompt_quantiles=(3, 147, 578, 1469, 2744, 5186, 7302, 7436, 7437),
    output_quantiles=(6, 7, 9, 13, 24, 55, 90, 249, 1899),
    stretch_s=6.0,
    quiet_part=0.68,
    sigma=0.85,
)
CONVERSATION: Final = Pattern(
    name="conversation",
    requests_per_s=5.530,
    prompt_quantiles=(2, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
    output_quantiles=(7, 54, 85, 129, 395, 424, 451, 601, 1000),
    stretch_s=120.0,
    sigma=0.26,
)
LONG: Final = Pattern(
    name="long",
    requests_per_s=3.401,
    prompt_quantiles=(891, 964, 2306, 6909, 15366, 27367, 39549, 85399, 126195),
    output_quantiles=(1, 24, 156, 350, 472, 597, 698, 1115, 2000),
    stretch_s=30.0,
    sigma=0.12,
    grid_s=3.0,
    follow_up=0.39,
    shared_blocks=1,
)
PATTERNS: Final = {pattern.name: pattern for pattern in (CODE, CONVERSATION, LONG)}


def generate(pattern: Pattern, duration_s: float, seed: int) -> Trace:
    """A trace of about this length. The same arguments give the same trace. Raises ValueError for one too long."""
    if duration_s <= 0 or duration_s * pattern.requests_per_s > MAX_REQUESTS:
        raise ValueError(f"a trace must be longer than nothing and have at most {MAX_REQUESTS} requests")
    rng = Random(seed)  # noqa: S311 - repeatable on purpose
    talk = _Talk(pattern, rng)
    times = [at if not pattern.grid_s else at - at % pattern.grid_s for at in _arrivals(pattern, duration_s, rng)]
    start_s = times[0] if times else 0.0
    return Trace(pattern.name, tuple(talk.next(at_s - start_s) for at_s in times))


def _arrivals(pattern: Pattern, duration_s: float, rng: Random) -> Iterator[float]:
    at_s = 0.0
    # The lognormal's mean is one, and the busy stretches make up for the quiet ones.
    mean = pattern.requests_per_s / (1.0 - pattern.quiet_part)
    while at_s < duration_s:
        until_s = min(duration_s, at_s + rng.expovariate(1.0 / pattern.stretch_s))
        if rng.random() >= pattern.quiet_part:
            rate = mean * math.exp(rng.gauss(-(pattern.sigma**2) / 2, pattern.sigma))
            while (at_s := at_s + rng.expovariate(rate)) < until_s:
                yield at_s
        at_s = until_s


def draw(quantiles: tuple[int, ...], rng: Random) -> int:
    """A length: linear in its logarithm between two quantiles."""
    place = rng.random()
    above = min(bisect_right(QUANTILES, place), len(QUANTILES) - 1)
    low, high = max(1, quantiles[above - 1]), max(1, quantiles[above])
    part = (place - QUANTILES[above - 1]) / (QUANTILES[above] - QUANTILES[above - 1])
    return max(1, round(low * math.pow(high / low, part)))


class _Talk:
    """Who says what: lengths, and the blocks that prompts share."""

    def __init__(self, pattern: Pattern, rng: Random) -> None:
        self._pattern = pattern
        self._rng = rng
        self._ids = itertools.count(pattern.shared_blocks)
        self._shared = tuple(range(pattern.shared_blocks))
        self._open: deque[tuple[int, ...]] = deque(maxlen=OPEN_CONVERSATIONS)

    def next(self, at_s: float) -> Request:
        pattern, rng = self._pattern, self._rng
        prompt = draw(pattern.prompt_quantiles, rng)
        output = draw(pattern.output_quantiles, rng)
        if not pattern.follow_up:
            return Request(at_s, prompt, output)
        count = -(-prompt // BLOCK_TOKENS)
        before = self._earlier(count) if rng.random() < pattern.follow_up else self._shared
        blocks = before[:count] + tuple(next(self._ids) for _ in range(count - len(before)))
        self._open.append(blocks)
        return Request(at_s, prompt, output, blocks)

    def _earlier(self, count: int) -> tuple[int, ...]:
        """The longest of some open conversations that a prompt of so many blocks can go on with."""
        if not self._open:
            return self._shared
        some = (self._rng.choice(self._open) for _ in range(CANDIDATES))
        # The last block of a prompt is seldom full, so a follow-up shares all but that one.
        return max((blocks[:-1] for blocks in some if len(blocks) <= count), key=len, default=self._shared)
