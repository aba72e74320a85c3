"""What a request and a streamed chunk cost the gateway, what it adds to the first token, and what many streams weigh.

The whole money path is on: key, limit, count, match, reservation, hold, lease, relay, checkpoint, receipt; a worker
settles meanwhile, and at the end everything delivered must be settled. CPU is that of the gateway process and of every
process it started, from the operating system's own account; the stores are not counted.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from marketplace.catalog.service import Catalog
from marketplace.children import Child
from marketplace.local import answers, free_port
from tests.bench import peers
from tests.bench.gateway_world import AGENTS, SLOTS, World, agents, relayed, running_world, settled_and_delivered

CONNECTIONS = 32
CHUNKS_PER_S = 10_000
PROMPT_TOKENS = 100
SECONDS = 10.0
UNLOADED_REQUESTS = 300
FIRST_S = 0.1
"""Mean time to first token of the engines at half load..."""
LOADED_CHUNKS_PER_S = 40.0
LOADED_CHUNKS = 20
"""...and how their answers go on."""
STREAMS = 2_000
STREAM_CHUNKS_PER_S = 2.0
STREAM_SECONDS = 15.0
RSS_LIMIT_MB = 300.0
TOKENISE_WORDS = (60, 600)
"""Of the prompts that are counted for the cost of counting."""
PEER_CHUNKS = 300
"""Of each answer of a peer: enough to drown what the request itself costs, and bearable for the slowest."""


def measure() -> list[dict[str, Any]]:
    """All figures of the gateway, in one run on one machine."""
    folder = Path(tempfile.mkdtemp(prefix="fallow-bench-"))
    folder.chmod(0o755)
    try:
        with running_world(folder) as world:
            relay_port = free_port()
            return [
                *_requests(world, relay_port),
                *_chunks(world, relay_port),
                *_first_token(world, relay_port),
                *_half_load(world),
                *_many_streams(world),
                *_tokenising(world),
                *_settled(world),
            ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _requests(world: World, relay_port: int) -> list[dict[str, Any]]:
    """One-token answers: what a request costs apart from its chunks."""
    with agents(world, rate=0.0):
        ours = _load(world, world.port, world.gateway.process, seconds=SECONDS, max_tokens=1)
    with relayed(world, relay_port, rate=0.0) as relay:
        bare = _load(world, relay_port, relay, seconds=SECONDS / 2, max_tokens=1)
    others = {
        name: run.cpu_us / run.requests for name, run in _peers(world, rate=0.0, seconds=SECONDS / 2, max_tokens=1)
    }
    cost = ours.cpu_us / ours.requests
    return [_figure("gateway.cpu_us_per_request", cost, "µs", bare.cpu_us / bare.requests, others)]


def _chunks(world: World, relay_port: int) -> list[dict[str, Any]]:
    """Long answers at a paced rate: nearly all of the cost is chunks."""
    rate, length = CHUNKS_PER_S / CONNECTIONS, int(CHUNKS_PER_S / CONNECTIONS * SECONDS)
    with agents(world, rate=rate):
        ours = _load(world, world.port, world.gateway.process, seconds=SECONDS + 30, max_tokens=length, count=1)
    with relayed(world, relay_port, rate=rate) as relay:
        bare = _load(world, relay_port, relay, seconds=SECONDS + 30, max_tokens=length, count=1)
    asked = {"seconds": SECONDS + 30, "max_tokens": PEER_CHUNKS, "count": 1}
    others = {name: run.cpu_us / run.chunks for name, run in _peers(world, rate=rate, **asked)}
    return [
        _figure("gateway.cpu_us_per_chunk", ours.cpu_us / ours.chunks, "µs", bare.cpu_us / bare.chunks, others),
        {
            "figure": "gateway.chunks_per_s",
            "value": round(ours.chunks / ours.seconds),
            "unit": "chunks/s",
            "ratios": {},
        },
    ]


def _first_token(world: World, relay_port: int) -> list[dict[str, Any]]:
    """One request at a time; the stand-in answers at once, so what is left is what the gateway adds."""
    with agents(world, rate=0.0):
        ours = _load(
            world, world.port, world.gateway.process, 120, max_tokens=1, count=UNLOADED_REQUESTS, connections=1
        )
    with relayed(world, relay_port, rate=0.0) as relay:
        bare = _load(world, relay_port, relay, 120, max_tokens=1, count=UNLOADED_REQUESTS, connections=1)
    figures = []
    for name, share in (("p50", 0.50), ("p99", 0.99)):
        value, floor = (_percentile(run.first_ms[20:], share) for run in (ours, bare))
        figures.append(_figure(f"gateway.added_ttft_ms_{name}", value, "ms", floor, digits=2))
    return figures


def _half_load(world: World) -> list[dict[str, Any]]:
    """Half of the slots busy, before engines that take their time: what the renter waits, beside what the engine alone
    makes its client wait under the same load."""
    load: dict[str, Any] = {
        "seconds": SECONDS,
        "max_tokens": LOADED_CHUNKS,
        "connections": AGENTS * SLOTS // 2,
        # Clients that begin together would come together again and again: their answers are equally long.
        "spread_s": FIRST_S + LOADED_CHUNKS / LOADED_CHUNKS_PER_S,
    }
    with agents(world, rate=LOADED_CHUNKS_PER_S, first_s=FIRST_S):
        ours = _load(world, world.port, world.gateway.process, **load)
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.engine", str(port), str(LOADED_CHUNKS_PER_S), str(FIRST_S)]
    engine = Child("engine", command, world.folder / "engine.log")
    engine.start()
    try:
        engine.wait_until(lambda: answers(f"http://127.0.0.1:{port}/v1/models"), timeout_s=30)
        alone = _load(world, port, engine.process, **load)
    finally:
        engine.stop()
    figures = []
    for name, share in (("p50", 0.50), ("p99", 0.99)):
        value, floor = (_percentile(run.first_ms, share) for run in (ours, alone))
        figures.append(_told(f"gateway.half_load_ttft_ms_{name}", round(value, 1), "ms", engine=value / floor))
    return figures


def _many_streams(world: World) -> list[dict[str, Any]]:
    """The most memory that the gateway and its children had while so many slow streams ran at once."""
    length = int(STREAM_CHUNKS_PER_S * STREAM_SECONDS)
    most = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            most[0] = max(most[0], _rss_mb(world.gateway.process))

    watcher = threading.Thread(target=watch)
    with agents(world, rate=STREAM_CHUNKS_PER_S, slots=STREAMS // AGENTS):
        watcher.start()
        try:
            run = _load(world, world.port, world.gateway.process, 120, max_tokens=length, count=1, connections=STREAMS)
        finally:
            over.set()
            watcher.join()
    if run.requests != STREAMS:
        raise RuntimeError(f"{run.requests} of {STREAMS} streams came to their end")
    return [_told(f"gateway.rss_mb.{STREAMS}_streams", round(most[0], 1), "MB", target=most[0] / RSS_LIMIT_MB)]


def _rss_mb(process: subprocess.Popen[bytes] | None) -> float:
    assert process is not None
    root = psutil.Process(process.pid)
    return sum(one.memory_info().rss for one in (root, *root.children(recursive=True))) / 1e6


def _tokenising(world: World) -> list[dict[str, Any]]:
    """Counting prompts that differ, template included: a part of what a request costs, told apart."""
    catalog = Catalog(world.factory)
    catalog.load()
    variant = catalog.resolve(world.model)
    words = Path(__file__).read_text().split()
    tokens, took_s = 0, 0.0
    for length in TOKENISE_WORDS:
        for start in range(0, len(words) - length, 7):
            chat = [{"role": "user", "content": " ".join(words[start : start + length])}]
            began = time.thread_time()
            tokens += variant.count_prompt(chat).tokens
            took_s += time.thread_time() - began
    return [_told("gateway.tokenise_us_per_1000_tokens", round(took_s / tokens * 1e9), "µs")]


def _told(name: str, value: float, unit: str, **ratios: float) -> dict[str, Any]:
    told = {reference: round(ratio, 3) for reference, ratio in ratios.items()}
    return {"figure": name, "value": value, "unit": unit, "ratios": told}


def _percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[int(share * 100) - 1]


def _figure(
    name: str, value: float, unit: str, bare: float, others: Mapping[str, float] | None = None, *, digits: int = 1
) -> dict[str, Any]:
    references = {"bare_relay": bare, **(others or {})}
    return {
        "figure": name,
        "value": round(value, digits),
        "unit": unit,
        "ratios": {reference: round(value / its, 3) for reference, its in references.items()},
    }


def _peers(world: World, *, rate: float, seconds: float, max_tokens: int, count: int = -1) -> Iterator[tuple[str, Run]]:
    """The same load on each peer that can be had here, before an engine of the same rate."""
    for peer in peers.PEERS:
        with peers.running(peer, world.folder, rate=rate) as found:
            if found is not None:
                port, process = found
                try:
                    run = _load(world, port, process, seconds, max_tokens=max_tokens, count=count)
                except (RuntimeError, subprocess.SubprocessError) as error:
                    # A peer that cannot bear the load has no ratio; ours is measured all the same.
                    print(f"  {peer.name} did not bear the load: {str(error)[:200]!r}", file=sys.stderr)
                    continue
                yield peer.name, run


@dataclass
class Run:
    """What one load did and what it cost."""

    requests: int
    chunks: int
    first_ms: list[float]
    cpu_us: float
    seconds: float


def _cpu_us(process: subprocess.Popen[bytes]) -> float:
    root = psutil.Process(process.pid)
    total = 0.0
    for one in (root, *root.children(recursive=True)):
        times = one.cpu_times()
        total += times.user + times.system
    return total * 1e6


def _load(
    world: World,
    port: int,
    process: subprocess.Popen[bytes] | None,
    seconds: float,
    *,
    max_tokens: int,
    count: int = -1,
    connections: int = CONNECTIONS,
    spread_s: float = 0.0,
) -> Run:
    assert process is not None
    told = {
        "port": port,
        "key": world.key,
        "seconds": seconds,
        "count": count,
        "connections": connections,
        "spread_s": spread_s,
        "body": {
            "model": world.model,
            # The template's own tokens make up the rest of the hundred.
            "messages": [{"role": "user", "content": "word " * (PROMPT_TOKENS - 33)}],
            "max_tokens": max_tokens,
            "stream": True,
        },
    }
    file = world.folder / "load.json"
    file.write_text(json.dumps(told))
    warm = world.folder / "warm.json"
    warm.write_text(json.dumps({**told, "seconds": 1.0, "count": 20 if count == -1 else 1, "connections": 4,
                                "body": {**told["body"], "max_tokens": 1}}))  # fmt: skip
    _run_load(warm)
    before, began = _cpu_us(process), time.monotonic()
    found = _run_load(file)
    cpu_us, took = _cpu_us(process) - before, time.monotonic() - began
    if found["errors"] or not found["requests"]:
        raise RuntimeError(f"{found['errors']} of {found['requests']} requests failed: {found['sample']}")
    return Run(found["requests"], found["chunks"], found["first_ms"], cpu_us, took)


def _run_load(file: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.load", str(file)], check=True, capture_output=True, timeout=300
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _settled(world: World) -> list[dict[str, Any]]:
    settled, delivered = settled_and_delivered(world)
    print(f"  settled {settled} of {delivered} delivered jobs; the books are in order", file=sys.stderr)
    return [_told("gateway.settled_jobs", settled, "jobs", delivered=settled / max(delivered, 1))]


FIGURES = {"gateway.": measure}
