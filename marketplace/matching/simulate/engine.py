"""One node's engine: continuous batching over a paged cache, timed by the roofline. Exact to the step, not stepped.

A step gives every running sequence a token, and reads a chunk of the prompts that wait, in order of arrival: so
prefill steals from decoding. The chunk is what fits into the step beside the decoding, so that those who decode keep
their pace; it is chosen anew for each burst. Between two changes (a sequence ends, a prompt is read to its end,
somebody arrives) steps differ only by the context that grows, so a whole burst of them has a closed form:

    n decode steps    sum of max(W + k (S + i B), q B + a (S + i B)) + t0,  i = 0 .. n-1
    n chunks of C     (n C lin + quad ((h + n C)^2 - h^2)) + n t0

with B sequences of S tokens together, h tokens of the prompt read before. Whoever drives the engine calls `advance` at
`until_s`, and `submit` when a request comes.

Simplifications: memory is taken for prompt and answer when a request is admitted, so nothing is ever pre-empted; a
prefix counts as cached from the moment that a request with it is sent here (prompts are read in order, so it is there
when the next one is read).
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import Final

from marketplace.matching.simulate.fleet import MAX_SLOTS, NodeSpec
from marketplace.matching.simulate.traces import BLOCK_TOKENS

NEVER: Final = math.inf
LEAST_CHUNK_TOKENS: Final = 64
"""Prompts are read on even where decoding alone takes the whole step."""
BURST_CHUNKS: Final = 8
"""After so many chunks their size is chosen anew."""


class Run:
    """One request on its way through the fleet."""

    __slots__ = (
        "at_s",
        "blocks",
        "cached",
        "end_s",
        "end_step",
        "first_s",
        "left",
        "node",
        "number",
        "output",
        "prompt",
        "sent_s",
        "state",
        "ticket",
        "tries",
    )

    def __init__(self, number: int, at_s: float, prompt: int, output: int, blocks: tuple[int, ...]) -> None:
        self.number = number
        self.at_s = at_s
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        self.cached = 0
        """Prompt tokens that the engine did not have to read."""
        self.left = 0
        """Prompt tokens that it still has to read."""
        self.sent_s = NEVER
        self.first_s = NEVER
        self.end_s = NEVER
        self.end_step = 0
        self.node = -1
        self.ticket: object = None
        self.tries = 0
        self.state = WAITING


WAITING: Final = 0
SENT: Final = 1
DONE: Final = 2
REFUSED: Final = 3
INTERRUPTED: Final = 4


class PrefixCache:
    """Blocks that one engine holds, the least recently used first; `holders` tells all engines' as bits."""

    __slots__ = ("_bit", "_holders", "blocks")

    def __init__(self, bit: int, holders: dict[int, int]) -> None:
        self.blocks: dict[int, None] = {}
        self._bit = bit
        self._holders = holders

    def hit(self, blocks: tuple[int, ...]) -> int:
        """How many of the first blocks are held."""
        held = self.blocks
        count = 0
        for block in blocks:
            if block not in held:
                break
            count += 1
        return count

    def use(self, blocks: tuple[int, ...], room: int) -> None:
        """Hold all of these, newest of all; forget the oldest beyond `room` blocks."""
        held, holders, bit = self.blocks, self._holders, self._bit
        # From the end: a beginning must outlive what hangs on it.
        for block in reversed(blocks):
            if block in held:
                del held[block]
            else:
                holders[block] = holders.get(block, 0) | bit
            held[block] = None
        excess = len(held) - room
        if excess > 0:
            oldest = iter(held)
            for block in [next(oldest) for _ in range(min(excess, len(held)))]:
                self._forget(block)

    def clear(self) -> None:
        """Everything is gone."""
        for block in list(self.blocks):
            self._forget(block)

    def _forget(self, block: int) -> None:
        del self.blocks[block]
        rest = self._holders[block] & ~self._bit
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]


class Engine:
    """See the module's text. Times in seconds of the simulation's clock, sizes in tokens."""

    __slots__ = (
        "_a",
        "_active",
        "_blocked",
        "_burst",
        "_chunked",
        "_context",
        "_ends",
        "_finishing",
        "_k",
        "_kv_room",
        "_lin",
        "_mixed",
        "_pace_s",
        "_q",
        "_quad",
        "_reading",
        "_slots",
        "_start_s",
        "_steps",
        "_t0",
        "_tail",
        "_waiting",
        "_weights",
        "busy_s",
        "cache",
        "ended",
        "number",
        "read_s",
        "started",
        "until_s",
    )

    def __init__(self, number: int, spec: NodeSpec, holders: dict[int, int]) -> None:
        model = spec.model
        cost = model.step_cost(1)
        self.number = number
        self._k = cost.kv_s
        self._a = cost.attention_s
        self._q = cost.sequence_s
        self._t0 = cost.fixed_s
        self._weights = [model.step_cost(batch).weights_s for batch in range(MAX_SLOTS + 1)]
        self._lin = cost.sequence_s
        # 2 L H m (m + 2 h) is L H 2 ((h + m)^2 - h^2), half of what a decode step pays a token of context.
        self._quad = cost.attention_s / 2
        self._pace_s = spec.pace_s - cost.fixed_s
        self._slots = min(spec.slots, MAX_SLOTS)
        self._kv_room = spec.kv_tokens
        self.cache = PrefixCache(1 << number, holders)
        self.started: list[Run] = []
        """Whose first token came with the last `advance`; the caller reads and empties it."""
        self.ended: list[Run] = []
        """Whose last token came."""
        self.busy_s = 0.0
        self.read_s = 0.0
        """Part of it that went into prompts."""
        self._reset(0.0)

    def _reset(self, now_s: float) -> None:
        self._waiting: deque[Run] = deque()
        self._reading: Run | None = None
        self._ends: list[tuple[int, int, Run]] = []
        self._steps = 0
        self._context = 0
        self._active = 0
        self._tail = 0
        """Tokens in memory that no prefix block covers."""
        self._start_s = now_s
        self._burst = 0
        self._chunked = False
        self._mixed = 0.0
        self._finishing: list[Run] = []
        self._blocked = False
        self.until_s = NEVER

    @property
    def running(self) -> int:
        """Sequences that decode."""
        return len(self._ends)

    def submit(self, run: Run, now_s: float) -> bool:
        """Take a request. True if `until_s` changed."""
        cache = self.cache
        if run.blocks:
            hit = min(cache.hit(run.blocks) * BLOCK_TOKENS, run.prompt - 1)
            cache.use(run.blocks, (self._capacity - self._tail) // BLOCK_TOKENS)
            run.cached = hit
            run.left = run.prompt - hit
        else:
            run.cached = 0
            run.left = run.prompt
        waiting = self._waiting
        waiting.append(run)
        if self.until_s == NEVER:
            self._begin(now_s)
            return True
        if self._chunked or self._blocked or len(waiting) > 1:
            return False
        return self._cut(now_s)

    @property
    def _capacity(self) -> int:
        return self._kv_room + self._active

    def advance(self) -> None:
        """The burst is over: `started` and `ended` tell what it brought, and the next one begins."""
        now_s = self.until_s
        if self._burst:
            self.busy_s += now_s - self._start_s
        ends = self._ends
        count = self._burst
        if count and ends:
            self._steps += count
            self._context += count * len(ends)
            steps = self._steps
            while ends and ends[0][0] <= steps:
                self._end(heappop(ends)[2])
        if self._chunked:
            self.read_s += self._mixed
            for run in self._finishing:
                self._start(run)
        self._begin(now_s)

    def clear(self, now_s: float) -> list[Run]:
        """The node goes: everything stops, and whoever was here is handed back."""
        if self._burst and self.until_s != NEVER:
            self.busy_s += max(0.0, min(now_s, self.until_s) - self._start_s)
        lost = [entry[2] for entry in self._ends] + list(self._waiting) + self._finishing
        if self._reading is not None and self._reading not in lost:
            lost.append(self._reading)
        self._kv_room += self._active
        self.cache.clear()
        self._reset(now_s)
        return lost

    def hold(self, now_s: float, seconds: float) -> None:
        """Nothing runs for a while: weights are loading. Only for an engine that is idle."""
        self._start_s = now_s
        self._burst = 0
        self._chunked = False
        self._blocked = True
        self.until_s = now_s + seconds

    # --- inside ---------------------------------------------------------------------------------------------------

    def _start(self, run: Run) -> None:
        """Its prompt is read: the step gave its first token."""
        self.started.append(run)
        if run.output <= 1:
            self._context += run.prompt + 1
            self._end(run)
            return
        run.end_step = self._steps + run.output - 1
        self._context += run.prompt + 1
        heappush(self._ends, (run.end_step, run.number, run))

    def _end(self, run: Run) -> None:
        size = run.prompt + run.output
        self._context -= size
        self._kv_room += size
        self._active -= size
        self._tail -= self._uncovered(run)
        self.ended.append(run)

    def _uncovered(self, run: Run) -> int:
        return run.output + run.prompt - len(run.blocks) * BLOCK_TOKENS if run.blocks else run.prompt + run.output

    def _admit(self) -> Run | None:
        """The first that waits, if there is room for it."""
        waiting = self._waiting
        if not waiting:
            return None
        run = waiting[0]
        size = run.prompt + run.output
        if size > self._kv_room or len(self._ends) + len(self._finishing) >= self._slots:
            return None
        waiting.popleft()
        self._kv_room -= size
        self._active += size
        self._tail += self._uncovered(run)
        return run

    def _begin(self, now_s: float) -> None:
        """Choose the next burst, from this step boundary on."""
        self._start_s = now_s
        self._finishing = []
        self._blocked = False
        head = self._reading
        if head is None:
            head = self._admit()
        ends = self._ends
        if head is None:
            self._chunked = False
            self._blocked = bool(self._waiting)
            if not ends:
                self._burst = 0
                self.until_s = NEVER
                return
            count = ends[0][0] - self._steps
            self._burst = count
            self.until_s = now_s + self._decode_s(count)
            return
        self._chunked = True
        chunk = self._chunk(head)
        if head.left >= chunk:
            count = min(BURST_CHUNKS, head.left // chunk)
            if ends:
                count = min(count, ends[0][0] - self._steps)
            self._mixed = self._read_s(head, count * chunk) + count * self._t0
            head.left -= count * chunk
            self._burst = count
            if head.left:
                self._reading = head
            else:
                self._reading = None
                self._finishing.append(head)
        else:
            self._mixed = self._pack(head, chunk) + self._t0
            count = self._burst = 1
        self.until_s = now_s + self._mixed + (self._decode_s(count) if ends else 0.0)

    def _pack(self, head: Run, chunk: int) -> float:
        """One step that ends the head and begins as many others as the chunk has room for."""
        seconds = 0.0
        self._reading = None
        run: Run | None = head
        while run is not None:
            part = run.left if run.left < chunk else chunk
            seconds += self._read_s(run, part)
            run.left -= part
            chunk -= part
            if run.left:
                self._reading = run
                break
            self._finishing.append(run)
            run = self._admit() if chunk > 0 else None
        return seconds

    def _chunk(self, head: Run) -> int:
        """Tokens of prompts for one step: what the pace leaves beside the decoding."""
        left_s = self._pace_s
        if self._ends:
            left_s -= self._decode_s(1)
        # Attention makes a token dearer, the more stand before it: the burst as a whole keeps the pace.
        chunk = 0
        if left_s > 0.0:
            quad = self._quad
            first_s = self._lin + 2 * quad * (head.prompt - head.left)
            steps = min(BURST_CHUNKS, max(1.0, head.left * (first_s + quad * head.left) / left_s))
            tokens = (math.sqrt(first_s * first_s + 4 * quad * steps * left_s) - first_s) / (2 * quad)
            chunk = int(tokens / steps)
        return chunk if chunk > LEAST_CHUNK_TOKENS else LEAST_CHUNK_TOKENS

    def _read_s(self, run: Run, tokens: int) -> float:
        before = run.prompt - run.left
        after = before + tokens
        return self._lin * tokens + self._quad * (after * after - before * before)

    def _decode_s(self, count: int) -> float:
        """So many steps of those who run now."""
        batch = len(self._ends)
        context = self._context
        memory = self._weights[batch] + self._k * context
        compute = self._q * batch + self._a * context
        if memory >= compute and self._k >= self._a:
            return count * (memory + self._t0) + self._k * batch * (count * (count - 1) // 2)
        return self._bent_s(count, batch, memory, compute)

    def _bent_s(self, count: int, batch: int, memory: float, compute: float) -> float:
        """The same where arithmetic binds at first, and perhaps memory later."""
        gain = (self._k - self._a) * batch
        bound = count if gain <= 0 else min(count, max(0, math.ceil((compute - memory) / gain)))
        first = bound * compute + self._a * batch * (bound * (bound - 1) // 2)
        rest = count - bound
        after = rest * (memory + self._k * batch * bound) + self._k * batch * (rest * (rest - 1) // 2)
        return first + after + count * self._t0

    def _cut(self, now_s: float) -> bool:
        """Somebody came while others decode: the burst ends with the step that is under way."""
        elapsed = now_s - self._start_s
        most = self._burst
        mean_s = (self.until_s - self._start_s) / most
        steps = min(most, max(1, math.ceil(elapsed / mean_s)))
        # Steps grow longer, so by the mean one too few are counted, seldom more than one or two.
        while steps < most and self._decode_s(steps) < elapsed:
            steps += 1
        while steps > 1 and self._decode_s(steps - 1) >= elapsed:
            steps -= 1
        if steps == most:
            return False
        self._burst = steps
        self.until_s = self._start_s + self._decode_s(steps)
        return True
