"""The simulation: requests arrive, a policy places them, engines work, owners come and go. Discrete events, seeded.

The same seed, fleet and trace give the same result to the last digit. A request that nobody can serve now is refused at
once (a 503 to its renter), as a gateway does. A node that goes takes what runs there along: what had no first token yet
moves to another node at no one's cost, however late it is by then; the rest is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from random import Random
from typing import Final

from marketplace.matching.simulate import engine as states
from marketplace.matching.simulate.engine import NEVER, Engine, Run
from marketplace.matching.simulate.fleet import DAY_S, Fleet
from marketplace.matching.simulate.policies import REPORT_EVERY_S, Make, Order, Policy
from marketplace.matching.simulate.traces import BLOCK_TOKENS, Trace
from marketplace.matching.types import Refusal

MAX_TRIES: Final = 10
"""Nodes that may go under one request before its first token."""
MAX_CACHED_NODES: Final = 6
"""Nodes with the longest cached beginnings that a policy hears of."""
BOUND_PART: Final = 0.99
"""Renters bound their answers so that this part of them is not cut."""
PROGRESS_EVERY: Final = 1000


class _Kind(IntEnum):
    WORK = 0
    JOIN = 1
    LOADED = 2
    LEAVE = 3
    FAIL = 4
    REPAIRED = 5
    REPORT = 6


@dataclass(slots=True)
class NodeTally:
    """What one node did."""

    offered_s: float = 0.0
    busy_s: float = 0.0
    read_s: float = 0.0
    rented_s: float = 0.0
    """With at least one request."""
    input_tokens: int = 0
    """Of which `cached_tokens`."""
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    revenue_nano: int = 0
    """What renters paid for it, in units of 1e-6 nano-USD: the fee is not taken off yet."""
    cold_loads: int = 0
    interrupted: int = 0


@dataclass(slots=True)
class Outcome:
    """Everything that a report is made of."""

    fleet: Fleet
    trace: Trace
    policy: str
    seed: int
    runs: list[Run]
    nodes: list[NodeTally]
    duration_s: float
    """Of the arrivals."""
    moved: int = 0
    """Requests that found another node before their first token."""
    refusals: dict[str, int] = field(default_factory=dict)


def simulate(
    fleet: Fleet,
    trace: Trace,
    make: Make,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay a trace. `progress` hears now and then how many requests have arrived."""
    return _World(fleet, trace, make, seed).run(progress)


def usual_bound(trace: Trace) -> int:
    """The bound that a trace's renters set: one number for all, for nobody knows an answer's length before."""
    lengths = sorted(request.output_tokens for request in trace.requests)
    return lengths[int(BOUND_PART * (len(lengths) - 1))] if lengths else 1


def hours_of(fleet: Fleet, trace: Trace, rng: Random) -> list[list[tuple[float, float]]]:
    """When each node is offered."""
    horizon_s = max(trace.duration_s, 1.0)
    return [node.hours.intervals(horizon_s, rng) for node in fleet.nodes]


class _World:
    def __init__(self, fleet: Fleet, trace: Trace, make: Make, seed: int) -> None:
        self.fleet = fleet
        self.trace = trace
        self.rng = Random(seed)  # noqa: S311 - a simulation wants repeatable chance
        self.policy: Policy = make(fleet, self.rng)
        self.holders: dict[int, int] = {}
        self.engines = [Engine(number, node, self.holders) for number, node in enumerate(fleet.nodes)]
        self.tallies = [NodeTally() for _ in fleet.nodes]
        self.open = [0] * len(fleet.nodes)
        self.opened_s = [0.0] * len(fleet.nodes)
        self.joined_s = [NEVER] * len(fleet.nodes)
        self.epochs = [0] * len(fleet.nodes)
        self.wanted = [False] * len(fleet.nodes)
        """Whose owners offer them now, broken or not."""
        self.sent: list[dict[int, Run]] = [{} for _ in fleet.nodes]
        self.events: list[tuple[float, int, int, int]] = []
        self.outcome = Outcome(fleet, trace, self.policy.name, seed, [], self.tallies, trace.duration_s)
        self.bound = usual_bound(trace)
        self.unfinished = 0
        self.end_s = trace.duration_s
        # Chance of their own: the same hours and failures whatever the policy.
        self._plan(hours_of(fleet, trace, Random(seed)), Random(seed + 1))  # noqa: S311

    def _plan(self, hours: list[list[tuple[float, float]]], rng: Random) -> None:
        """When nodes come, go and fail."""
        horizon = max(self.trace.duration_s, 1.0)
        for number, (node, intervals) in enumerate(zip(self.fleet.nodes, hours, strict=True)):
            for start, end in intervals:
                heappush(self.events, (start, _Kind.JOIN, number, 0))
                # What runs when the arrivals end may end too.
                if end < horizon:
                    heappush(self.events, (end, _Kind.LEAVE, number, 0))
            if node.failures_per_day > 0:
                at = rng.expovariate(node.failures_per_day / DAY_S)
                while at < horizon:
                    heappush(self.events, (at, _Kind.FAIL, number, 0))
                    at += node.repair_s + rng.expovariate(node.failures_per_day / DAY_S)
        heappush(self.events, (REPORT_EVERY_S, _Kind.REPORT, 0, 0))

    def run(self, progress: Callable[[int], None] | None) -> Outcome:
        runs = self.outcome.runs
        events = self.events
        while events and events[0][0] <= 0.0:
            self._event(heappop(events))
        for number, request in enumerate(self.trace.requests):
            now_s = request.at_s
            while events and events[0][0] <= now_s:
                self._event(heappop(events))
            run = Run(number, now_s, request.prompt_tokens, request.output_tokens, request.blocks)
            runs.append(run)
            self.unfinished += 1
            if not self._place(run, now_s):
                self._refuse(run)
            if progress is not None and number % PROGRESS_EVERY == 0:
                progress(number)
        while self.unfinished and events:
            self._event(heappop(events))
        self._close()
        if progress is not None:
            progress(len(runs))
        return self.outcome

    # --- requests -------------------------------------------------------------------------------------------------

    def _place(self, run: Run, now_s: float) -> bool:
        """Send it to a node, if the policy finds one."""
        prompt = run.prompt
        policy = self.policy
        cached = self._cached(run.blocks) if run.blocks and policy.wants_prefixes else _NOTHING
        target = self.fleet.target
        useful_s = target.ttft_base_s + prompt / target.ttft_tokens_per_s - self.fleet.network_s
        if run.tries:
            useful_s = NEVER
        output = run.output
        bound = self.bound if self.bound > output else output
        choice = policy.choose(Order(prompt, bound, cached, useful_s), now_s)
        if isinstance(choice, Refusal):
            return False
        node, run.ticket = choice
        run.node = node
        run.state = states.SENT
        run.sent_s = now_s
        if not self.open[node]:
            self.opened_s[node] = now_s
        self.open[node] += 1
        self.sent[node][run.number] = run
        engine = self.engines[node]
        if engine.submit(run, now_s):
            heappush(self.events, (engine.until_s, _Kind.WORK, node, 0))
        return True

    def _cached(self, blocks: tuple[int, ...]) -> dict[int, int]:
        """Leading tokens of a prompt, by node that holds any; the longest first."""
        holders = self.holders
        mask = holders.get(blocks[0], 0)
        if not mask:
            return _NOTHING
        found: list[tuple[int, int]] = []
        length = 0
        for block in blocks:
            still = mask & holders.get(block, 0)
            if still != mask:
                gone = mask ^ still
                while gone:
                    low = gone & -gone
                    found.append((low.bit_length() - 1, length))
                    gone ^= low
                mask = still
                if not mask:
                    break
            length += BLOCK_TOKENS
        while mask:
            low = mask & -mask
            found.append((low.bit_length() - 1, length))
            mask ^= low
        found.reverse()
        return dict(found[:MAX_CACHED_NODES])

    def _refuse(self, run: Run) -> None:
        run.state = states.REFUSED
        self.unfinished -= 1

    # --- events ---------------------------------------------------------------------------------------------------

    def _event(self, event: tuple[float, int, int, int]) -> None:
        now_s, kind, node, epoch = event
        if kind == _Kind.WORK:
            engine = self.engines[node]
            if engine.until_s == now_s:
                self._work(engine, now_s)
        elif kind == _Kind.REPORT:
            self.policy.report(now_s)
            heappush(self.events, (now_s + REPORT_EVERY_S, _Kind.REPORT, 0, 0))
        elif kind == _Kind.JOIN:
            self.wanted[node] = True
            self._join(node, now_s)
        elif kind == _Kind.REPAIRED:
            if self.wanted[node]:
                self._join(node, now_s)
        elif kind == _Kind.LOADED:
            if epoch == self.epochs[node] and self.joined_s[node] != NEVER:
                self.policy.join(node, now_s, warm=True)
        elif kind == _Kind.LEAVE:
            self.wanted[node] = False
            self._leave(node, now_s)
        else:
            self._fail(node, now_s)

    def _work(self, engine: Engine, now_s: float) -> None:
        engine.advance()
        if engine.until_s != NEVER:
            heappush(self.events, (engine.until_s, _Kind.WORK, engine.number, 0))
        started = engine.started
        if started:
            policy = self.policy
            for run in started:
                run.first_s = now_s
                policy.started(run.ticket, now_s)
            started.clear()
        ended = engine.ended
        if ended:
            for run in ended:
                self._done(run, now_s)
            ended.clear()

    def _done(self, run: Run, now_s: float) -> None:
        node = run.node
        run.end_s = now_s
        run.state = states.DONE
        self.policy.ended(run.ticket, now_s, run.output)
        self.unfinished -= 1
        del self.sent[node][run.number]
        self.open[node] -= 1
        tally = self.tallies[node]
        if not self.open[node]:
            tally.rented_s += now_s - self.opened_s[node]
        rates = self.fleet.nodes[node].rates
        cached = run.cached
        tally.requests += 1
        tally.input_tokens += run.prompt
        tally.cached_tokens += cached
        tally.output_tokens += run.output
        tally.revenue_nano += (
            (run.prompt - cached) * rates.input + cached * rates.cached_input + run.output * rates.output
        )

    def _join(self, node: int, now_s: float) -> None:
        if self.joined_s[node] != NEVER:
            return
        self.joined_s[node] = now_s
        self.epochs[node] += 1
        warm = now_s <= 0.0
        self.policy.join(node, now_s, warm=warm)
        if not warm:
            self.tallies[node].cold_loads += 1
            engine = self.engines[node]
            engine.hold(now_s, self.fleet.cold_load_s)
            heappush(self.events, (engine.until_s, _Kind.WORK, node, 0))
            heappush(self.events, (engine.until_s, _Kind.LOADED, node, self.epochs[node]))

    def _leave(self, node: int, now_s: float) -> None:
        if self.joined_s[node] == NEVER:
            return
        tally = self.tallies[node]
        tally.offered_s += now_s - self.joined_s[node]
        self.joined_s[node] = NEVER
        self.policy.leave(node, now_s)
        self.engines[node].clear(now_s)
        if self.open[node]:
            tally.rented_s += now_s - self.opened_s[node]
        self.open[node] = 0
        gone, self.sent[node] = list(self.sent[node].values()), {}
        for run in gone:
            self.policy.ended(run.ticket, now_s, None)
            if run.first_s != NEVER or run.tries >= MAX_TRIES:
                run.state = states.INTERRUPTED
                run.end_s = now_s
                tally.interrupted += 1
                self.unfinished -= 1
                continue
            run.tries += 1
            self.outcome.moved += 1
            if not self._place(run, now_s):
                self._refuse(run)

    def _fail(self, node: int, now_s: float) -> None:
        """The engine dies, and is repaired: to those who use it the same as an owner who leaves."""
        if self.joined_s[node] == NEVER:
            return
        self._leave(node, now_s)
        heappush(self.events, (now_s + self.fleet.nodes[node].repair_s, _Kind.REPAIRED, node, 0))

    def _close(self) -> None:
        """Offered time ends with the arrivals, and with what they left to do."""
        end_s = max([self.end_s] + [run.end_s for run in self.outcome.runs if run.end_s != NEVER])
        for node, tally in enumerate(self.tallies):
            if self.joined_s[node] != NEVER:
                tally.offered_s += end_s - self.joined_s[node]
            tally.busy_s = self.engines[node].busy_s
            tally.read_s = self.engines[node].read_s


_NOTHING: Final[dict[int, int]] = {}
