"""The long run: clients of every kind on a marketplace whose parts die at random, judged after each round.

FALLOW_SOAK_MINUTES says how long (30 unless told), FALLOW_SOAK_SEED repeats a run's choices.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import openai
import psutil
import pytest

from tests.faults.conftest import forgive
from tests.stack import Renter, Stack, running_stack, until
from tests.witness import Seen, ask, assert_invariants, body_of, raw_request, stream, submit

MINUTES: Final = float(os.environ.get("FALLOW_SOAK_MINUTES", "30"))
ROUND_S: Final = 75.0
CLIENTS: Final = 10
RENTERS: Final = 4
PROMPTS: Final = tuple(f"Tell me story number {number}." for number in range(40))
LENGTHS: Final = (5, 40, 150)
LONG_READ: Final = "Read all of this before you answer. " * 60
QUICK: Final = {"decode_tokens_per_s": 200.0, "prefill_tokens_per_s": 4000.0}
SURVIVORS: Final = ("gw-0", "worker-0", "beat", "alpha")
"""Never killed, so that their memory can be followed."""
MORE_MEMORY: Final = 1.05
SPARE_BYTES: Final = 4 << 20
"""Growth between the second and the last quarter that is no leak: allocators give back late."""


class Clients:
    """Threads that ask, each in its own way, until told to stop. What they saw is kept for the round's judgement."""

    def __init__(self, stack: Stack, renters: list[Renter], rng: random.Random) -> None:
        self._stack = stack
        self._renters = renters
        self._seeds = [rng.random() for _ in range(CLIENTS)]
        self._ending = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._futures = [self._pool.submit(self._live, random.Random(seed)) for seed in self._seeds]

    def stop(self) -> list[Seen]:
        """No new requests; what all of them saw, once the open ones are through."""
        self._ending.set()
        seen = [each for future in self._futures for each in future.result(120)]
        self._pool.shutdown()
        return seen

    def _live(self, rng: random.Random) -> list[Seen]:
        seen: list[Seen] = []
        kinds: list[Callable[[random.Random], Seen | None]] = [
            self._stream,
            self._stream,
            self._leave,
            self._ask,
            self._read_slowly,
            self._queue,
            self._err,
        ]
        while not self._ending.is_set():
            if (what := rng.choice(kinds)(rng)) is not None:
                seen.append(what)
            time.sleep(rng.uniform(0, 0.2))
        return seen

    def _client(self, rng: random.Random) -> openai.OpenAI:
        return self._stack.client(rng.choice(("gw-0", "gw-1")), rng.choice(self._renters))

    def _stream(self, rng: random.Random) -> Seen:
        return stream(self._client(rng), rng.choice(PROMPTS), max_tokens=rng.choice(LENGTHS))

    def _leave(self, rng: random.Random) -> Seen:
        pieces = rng.randint(1, 60)
        prompt, most = rng.choice(PROMPTS), rng.choice(LENGTHS)
        return stream(self._client(rng), prompt, max_tokens=most, on_piece=lambda seen: len(seen.pieces) >= pieces)

    def _ask(self, rng: random.Random) -> Seen:
        return ask(self._client(rng), rng.choice(PROMPTS), max_tokens=rng.choice(LENGTHS))

    def _read_slowly(self, rng: random.Random) -> None:
        """Takes next to nothing, or leaves while its prompt is read; its outcome is judged by the database's rules."""
        prompt = rng.choice((LONG_READ, rng.choice(PROMPTS)))
        body = body_of(Seen(prompt, 400), stream=rng.random() < 0.8)
        with contextlib.suppress(OSError):
            connection = raw_request(self._stack, rng.choice(("gw-0", "gw-1")), rng.choice(self._renters), body)
            with contextlib.closing(connection):
                self._ending.wait(rng.uniform(0, 4))

    def _queue(self, rng: random.Random) -> None:
        client = self._client(rng)
        with contextlib.suppress(openai.APIError):
            job_id = submit(client, rng.choice(PROMPTS), max_tokens=rng.choice(LENGTHS))
            if rng.random() < 0.3:
                self._ending.wait(rng.uniform(0, 2))
                client.post(f"/jobs/{job_id}/cancel", cast_to=object)

    def _err(self, rng: random.Random) -> Seen:
        """More than any slot holds, or a model that nobody knows."""
        if rng.random() < 0.5:
            return ask(self._client(rng), LONG_READ * 40, max_tokens=5)
        return ask(self._client(rng), "Who?", model="nobody")


class Trouble:
    """Breaks a part every few seconds and mends it again, until told to stop."""

    def __init__(self, stack: Stack, rng: random.Random) -> None:
        self._stack = stack
        self._rng = rng
        self.done: list[str] = []

    def make_until(self, moment: float) -> None:
        blows = {
            "a killed agent": lambda: self._stack.restart("beta"),
            "a killed gateway": lambda: self._stack.restart("gw-1"),
            "a killed worker": lambda: self._stack.restart("worker-1"),
            "a restarted Valkey": self._restart_valkey,
            "a cut wire": self._cut_wire,
        }
        while (left_s := moment - time.monotonic()) > 0:
            name = self._rng.choice(sorted(blows))
            blows[name]()
            self.done.append(name)
            time.sleep(min(self._rng.uniform(3, 9), left_s))

    def _restart_valkey(self) -> None:
        self._stack.kill_valkey()
        time.sleep(self._rng.uniform(0, 2))
        self._stack.start_valkey()

    def _cut_wire(self) -> None:
        wire = self._rng.choice(self._stack.wires)
        wire.cut()
        time.sleep(self._rng.uniform(0, 4))
        wire.mend()


@pytest.fixture
def market() -> Iterator[Stack]:
    """Two of everything, quick engines, and a third node."""
    with running_stack("fallow-soak-") as stack:
        forgive(stack)
        stack.sell()
        stack.add_workers("worker-0", "worker-1")
        stack.add_beat()
        stack.add_gateways("gw-0", "gw-1", through_wire=True)
        stack.add_node("alpha", "gw-0", seed=11, slots=6, simulation=QUICK)
        stack.add_node("beta", "gw-1", seed=22, slots=6, simulation=QUICK, through_wire=True)
        stack.wait_offered()
        yield stack


def memory_bytes(stack: Stack) -> dict[str, int]:
    """Resident memory of the survivors' own processes; an agent's engine is a process of its own."""
    return {name: psutil.Process(stack.parts[name].pid).memory_info().rss for name in SURVIVORS}


def growth(samples: list[int]) -> float:
    """Bytes by which the last quarter's median lies over the second quarter's, beyond what allocators may hold."""
    quarter = max(1, len(samples) // 4)
    before = statistics.median(samples[quarter : 2 * quarter])
    return statistics.median(samples[-quarter:]) - (before * MORE_MEMORY + SPARE_BYTES)


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 900)
def test_half_an_hour_of_trouble_breaks_no_rule_and_leaks_no_memory(
    market: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("FALLOW_SOAK_SEED", random.SystemRandom().randrange(10**6)))
    rng = random.Random(seed)
    renters = [market.renter(credit_nano=10_000 * 10**9) for _ in range(RENTERS)]
    trouble = Trouble(market, rng)
    samples: dict[str, list[int]] = {name: [] for name in SURVIVORS}
    total = complete = 0
    began = time.monotonic()
    while time.monotonic() - began < MINUTES * 60:
        clients = Clients(market, renters, rng)
        trouble.make_until(time.monotonic() + ROUND_S)
        seen = clients.stop()
        market.heal()
        assert_invariants(market, seen)
        until(lambda: market.at_rest("alpha"), "rest at alpha")
        for name, size in memory_bytes(market).items():
            samples[name].append(size)
        total += len(seen)
        complete += sum(each.complete for each in seen)
        with capsys.disabled():
            sizes = ", ".join(f"{name} {sizes[-1] / 1e6:.0f} MB" for name, sizes in samples.items())
            print(f"\nseed {seed}: {(time.monotonic() - began) / 60:.1f} of {MINUTES:.0f} min, {total} requests")
            print(f"  {complete} complete, {len(trouble.done)} blows, every rule holds; {sizes}", flush=True)
    assert complete > total / 4
    leaks = {name: round(more / 1e6, 1) for name, sizes in samples.items() if (more := growth(sizes)) > 0}
    assert not leaks, f"memory grew by so many MB too much: {leaks}; by round: {samples}"
