"""A whole marketplace as real processes on embedded stores and free ports: to talk to, to kill, to restart, to cut.

Everything is started from the test's own thread and dies with it. Engines that are simulated give answers that can be
foretold, so that a test knows of each stream whether it is a piece of one single answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
import openai
import psutil
import psycopg
import pytest
import redis
from sqlalchemy import select, text

from agent import enrol, home
from agent.config import Initial
from agent.engines.port import Piece
from agent.engines.simulation import Simulation, SimulationConfig
from marketplace.accounts import service as accounts
from marketplace.billing import service as billing
from marketplace.catalog import importer
from marketplace.catalog.models import Model, Variant
from marketplace.children import Child, tail
from marketplace.core import migrate
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.settings import Settings
from marketplace.embedded import EmbeddedStores, StoreUrls, socket_folder
from marketplace.fleet import enrolment
from marketplace.local import free_port
from tests.vocabularies import MODEL_ID, smollm2_path
from tests.wires import Wire

START_S: Final = 60.0
LEASE_S: Final = 6.0
"""More than half of the ten seconds for which a dead gateway is still believed: a queued job that is sent there twice
has its third attempt elsewhere."""
SWEEP_S: Final = 2.0
ASK: Final = {"ask_input": "0.05", "ask_cached_input": "0.01", "ask_output": "0.20"}
CREDIT_NANO: Final = 1_000_000_000
PACE: Final = {"decode_tokens_per_s": 50.0, "prefill_tokens_per_s": 400.0}
"""Slow enough to break something while an answer runs, or while a prompt of some hundred words is read."""
FAST: Final = {
    "FALLOW_LEASE_S": str(LEASE_S),
    "FALLOW_CHECKPOINT_S": "0.3",
    "FALLOW_SLOW_READER_S": "2",
    "FALLOW_KEEPALIVE_S": "1",
    "FALLOW_HEADER_WAIT_S": "3",
    "FALLOW_HOLD_MARGIN_S": "60",
}
"""What is waited for passes soon."""


def until(condition: Callable[[], Any], what: str, *, within_s: float = 20.0, every_s: float = 0.05) -> Any:
    """Wait until something holds, and return it; fail saying what did not come."""
    limit = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < limit, f"{what}: not within {within_s:.0f} s"
        time.sleep(every_s)
    return found


def answers(url: str) -> bool:
    """True if a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def public_folder(prefix: str) -> Iterator[Path]:
    """A fresh folder that other users may enter: root's PostgreSQL runs as one of them."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for made in (*folder.iterdir(), folder):
            shutil.rmtree(socket_folder(made), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


# --- answers that can be foretold -----------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def foretold(seed: int, prompt: str, max_tokens: int) -> tuple[str, ...]:
    """The pieces with which a simulated engine of that seed answers a single user message."""
    simulation = _simulation(seed)
    pieces: list[str] = []

    def hear(event: object) -> None:
        if isinstance(event, Piece):
            pieces.append(event.text)

    simulation.submit({"messages": [{"role": "user", "content": prompt}]}, max_tokens, "", hear)
    while (step := simulation.begin()) is not None:
        simulation.finish(step)
    return tuple(pieces)


@lru_cache(maxsize=16)
def _simulation(seed: int) -> Simulation:
    return Simulation(SimulationConfig(model_path=str(smollm2_path()), seed=seed, context_per_slot=8192))


# --- parts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renter:
    """An organisation with a key."""

    organisation_id: UUID
    secret: str


@dataclass(frozen=True)
class Node:
    """An agent of the stack. `seed` is its simulated engine's."""

    name: str
    folder: Path
    node_id: UUID
    gateway: str
    model: str
    seed: int
    wire: Wire | None


@dataclass
class Part:
    """One process with the way to start it again."""

    child: Child
    ready: Callable[[], bool]
    processes: list[psutil.Process] = field(default_factory=list)

    def start(self) -> None:
        self.child.start()

    def wait(self) -> None:
        self.child.wait_until(self.ready, timeout_s=START_S)

    @property
    def pid(self) -> int:
        assert self.child.process is not None
        return self.child.process.pid

    def family(self) -> list[psutil.Process]:
        """The process and all that it started."""
        if not self.child.running:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        return []


def _configure(path: Path, keys: Mapping[str, Any], simulation: Mapping[str, Any]) -> None:
    """Change a fresh config.toml of one model. JSON's scalars are TOML's."""
    lines = [line for line in path.read_text().splitlines() if line.partition(" =")[0] not in keys]
    added = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in keys.items() if value is not None]
    place = lines.index("[[models]]") + 1
    lines[place:place] = added
    if simulation:
        lines += [
            "[models.simulation]",
            *(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in simulation.items()),
        ]
    path.write_text("\n".join(lines) + "\n")


class Stack:
    """Stores, gateways, workers, a clock and agents. `close` ends them all; use `running_stack`."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.stores = EmbeddedStores(folder)
        self.parts: dict[str, Part] = {}
        self.ports: dict[str, int] = {}
        """Of gateways."""
        self.ports_of_engines: dict[str, int] = {}
        self.nodes: dict[str, Node] = {}
        self.wires: list[Wire] = []
        self.final: dict[UUID, tuple[Any, ...]] = {}
        """Jobs seen in a final state, as they were: nothing may change them any more."""
        self._cluster_secret = secrets.token_hex(16)
        self._extra = dict(environment or {})
        self.urls = self.stores.start()
        migrate.upgrade(self.urls.database_url)
        self.settings = Settings(
            _env_file=None,  # type: ignore[call-arg]
            database_url=self.urls.database_url,
            valkey_url=self.urls.valkey_url,
            allow_simulated=True,
        )
        self._engine = make_engine(self.settings, application_name="tests")
        self.factory: SessionFactory = make_session_factory(self._engine)

    def close(self) -> None:
        for part in self.parts.values():
            part.child.kill()
        for wire in self.wires:
            wire.close()
        self._engine.dispose()
        self.stores.stop()

    # --- building ---------------------------------------------------------------------------------------------------

    def sell(self, model: str = MODEL_ID, sha256: str | None = None) -> UUID:
        """The bundled model in the catalogue; with `sha256`, under another name and a made-up hash. Before gateways
        start: they look for new variants every few seconds only."""
        with transaction(self.factory) as session:
            variant = importer.import_gguf(session, smollm2_path(), MODEL_ID, "SmolLM2 135M Instruct")
            if sha256 is None:
                return variant.id
            columns = {
                column.key: getattr(variant, column.key)
                for column in Variant.__table__.columns
                if column.key not in ("id", "model_id", "sha256", "created_at")
            }
            session.add(Model(id=model, display_name=model))
            session.flush()
            other = Variant(model_id=model, sha256=sha256, **columns)
            session.add(other)
            session.flush()
            return other.id

    def add_gateways(self, *names: str, through_wire: bool = False, **environment: str) -> None:
        """Gateways on free ports. `through_wire`: other gateways reach them by a wire that can be cut."""
        for name in names:
            port = self.ports[name] = free_port()
            extra = {"FALLOW_HOST": "127.0.0.1", "FALLOW_PORT": str(port), **environment}
            if through_wire:
                extra["FALLOW_GATEWAY_URL"] = self.wire_to(name).url
            self._spawn(name, "gateway", environment=extra, ready=self._answers_at(port))
        self.wait(*names)

    def remove_gateway(self, name: str) -> None:
        """Stop it in order, and forget it."""
        self.stop(name)
        del self.parts[name], self.ports[name]

    def add_workers(self, *names: str) -> None:
        for name in names:
            self._spawn(name, "worker")

    def add_beat(self) -> None:
        self._spawn("beat", "beat")

    def wire_to(self, gateway: str) -> Wire:
        """A wire to that gateway's port, which a test can cut."""
        wire = Wire(self.ports[gateway])
        self.wires.append(wire)
        return wire

    def add_node(
        self,
        name: str,
        gateway: str,
        *,
        engine: str = "simulated",
        engine_url: str | None = None,
        model: str = MODEL_ID,
        seed: int = 0,
        slots: int = 4,
        context_per_slot: int = 2048,
        through_wire: bool = False,
        ask: Mapping[str, str] = ASK,
        keys: Mapping[str, Any] | None = None,
        simulation: Mapping[str, Any] | None = None,
        edit: Callable[[str], str] = str,
    ) -> Node:
        """An enrolled agent that runs, of an organisation of its own. It may take a moment until it offers.

        `keys` replace keys of its model's table (None: leaves one out); `simulation` says how its engine behaves;
        `edit` changes the whole text of its config.toml at last.
        """
        folder = self.folder / name
        wire = self.wire_to(gateway) if through_wire else None
        with transaction(self.factory) as session:
            owner = accounts.create_organisation(session, f"owner-{name}")
            token = enrolment.create_token(session, owner.id)
        initial = Initial(engine=engine, engine_url=engine_url, slots=slots, context_per_slot=context_per_slot, **ask)
        url = wire.url if wire is not None else self.url(gateway)
        enrolled = asyncio.run(
            enrol.enrol(folder, url=url, token=token, name=name, initial=initial, agent_version="test")
        )
        if engine == "simulated":
            simulation = {**PACE, "seed": seed, **(simulation or {})}
        config = folder / "config.toml"
        _configure(config, keys or {}, simulation or {})
        config.write_text(edit(config.read_text()))
        node = Node(name, folder, UUID(enrolled.node_id), gateway, model, seed, wire)
        self.nodes[name] = node
        self._spawn(name, "agent", "run", "--dir", str(folder), ready=lambda: self.offers_of(node) > 0)
        return node

    def _spawn(
        self,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> Part:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("FALLOW_")}
        child = Child(
            name,
            [sys.executable, "-m", "marketplace.cli", *arguments],
            self.logs / f"{name}.log",
            environment={
                **clean,
                "PYTHONUNBUFFERED": "1",
                "DATABASE_URL": self.urls.database_url,
                "VALKEY_URL": self.urls.valkey_url,
                "FALLOW_CLUSTER_SECRET": self._cluster_secret,
                "FALLOW_ALLOW_SIMULATED": "true",
                **FAST,
                **self._extra,
                **(environment or {}),
            },
            cwd=self.folder,
            stop_signal=signal.SIGTERM,
        )
        part = self.parts[name] = Part(child, ready or (lambda: True))
        part.start()
        return part

    @staticmethod
    def _answers_at(port: int) -> Callable[[], bool]:
        return lambda: answers(f"http://127.0.0.1:{port}/readyz")

    def wait(self, *names: str) -> None:
        """Until these parts serve."""
        for name in names:
            self.parts[name].wait()

    def wait_offered(self, *, nodes: Sequence[str] | None = None) -> None:
        """Until every gateway sees the offers of exactly these nodes (all of them, unless named)."""
        counts = dict.fromkeys((node.model for node in self.nodes.values()), 0)
        for name in self.nodes if nodes is None else nodes:
            counts[self.nodes[name].model] += 1
        limit = time.monotonic() + START_S
        for gateway in self.ports:
            for model, count in counts.items():
                while (seen := self.seen_nodes(gateway, model)) != count:
                    assert time.monotonic() < limit, f"{gateway} sees {seen} nodes that offer {model}, not {count}"
                    time.sleep(0.05)

    def only(self, *names: str) -> None:
        """Take every other node out of the market, by its owner's word."""
        for node in self.nodes.values():
            home.set_paused(node.folder, node.name not in names)
        self.wait_offered(nodes=names)

    def add_engine(self, name: str, *, slots: int) -> int:
        """A simulated engine that its owner runs by himself; its port. Faults are armed there: see `arm`."""
        port = self.ports_of_engines[name] = free_port()
        module = ["agent.engines.simulated", "--port", str(port), "--slots", str(slots)]
        vocabulary = ["--model-path", str(smollm2_path()), "--decode-tokens-per-s", "200"]
        child = Child(name, [sys.executable, "-m", *module, *vocabulary], self.logs / f"{name}.log", cwd=self.folder)
        self.parts[name] = Part(child, lambda: answers(f"http://127.0.0.1:{port}/health"))
        self.parts[name].start()
        self.wait(name)
        return port

    def arm(self, engine: str, kind: str, count: int, *, after_tokens: int = 0) -> None:
        """The next `count` requests at that engine meet this fault."""
        order = msgspec.json.encode({"kind": kind, "after_tokens": after_tokens, "count": count})
        url = f"http://127.0.0.1:{self.ports_of_engines[engine]}/faults"
        with urllib.request.urlopen(url, data=order, timeout=5) as answer:
            assert answer.status == 200

    # --- asking -----------------------------------------------------------------------------------------------------

    def url(self, gateway: str) -> str:
        return f"http://127.0.0.1:{self.ports[gateway]}"

    def seen_nodes(self, gateway: str, model: str = MODEL_ID) -> int:
        """Nodes that offer the model, as that gateway's list of models says."""
        try:
            for item in self.client(gateway, self.observer).models.list():
                if item.id == model:
                    return int((item.model_extra or {}).get("nodes") or 0)
        except openai.OpenAIError:
            return 0
        return 0

    @property
    def observer(self) -> Renter:
        """A key for looking only."""
        if not hasattr(self, "_observer"):
            self._observer = self.renter(credit_nano=0)
        return self._observer

    def offers_of(self, node: Node) -> int:
        """Intervals of this node that are open: it is on offer."""
        with self.factory() as session:
            query = text("select count(*) from offered_intervals where node_id = :node and ended_at is null")
            return int(session.execute(query, {"node": node.node_id}).scalar_one())

    def renter(self, *, credit_nano: int = CREDIT_NANO, name: str = "", **limits: Any) -> Renter:
        """A fresh organisation with a key and that much credit."""
        with transaction(self.factory) as session:
            organisation = accounts.create_organisation(session, name or f"renter-{secrets.token_hex(4)}")
            billing.ensure_credit_account(session, organisation)
            if credit_nano:
                billing.top_up(session, organisation.id, credit_nano, f"start-{organisation.id.hex}")
            many = {"requests_per_minute": 10_000, "parallel_requests": 200, **limits}
            _, secret = accounts.create_key(session, organisation.id, **many)
            return Renter(organisation.id, secret)

    def client(self, gateway: str, renter: Renter, **changes: Any) -> openai.OpenAI:
        """The official client, without retries of its own."""
        options: dict[str, Any] = {"max_retries": 0, "timeout": 30.0, **changes}
        return openai.OpenAI(api_key=renter.secret, base_url=f"{self.url(gateway)}/v1", **options)

    def valkey(self) -> redis.Redis:
        return redis.Redis.from_url(self.urls.valkey_url)

    def rows(self, query: str, **parameters: Any) -> list[Any]:
        """What the database says."""
        with self.factory() as session:
            return list(session.execute(text(query), parameters).all())

    def variant_sha256(self, model: str = MODEL_ID) -> str:
        with self.factory() as session:
            return session.scalars(select(Variant.sha256).where(Variant.model_id == model)).one()

    def status(self, name: str) -> home.Status | None:
        """What the agent says about itself."""
        return home.read_status(self.nodes[name].folder)

    def busy(self, name: str) -> int:
        """Slots that are taken, as the agent says (it says so within a second)."""
        status = self.status(name)
        return sum(offer.busy for offer in status.offers) if status is not None else 0

    def at_rest(self, name: str) -> bool:
        """True if the agent says that its engine has nothing to do."""
        return self.status(name) is not None and self.busy(name) == 0

    def engine_pid(self, name: str) -> int:
        """The engine's process under an agent."""
        part = self.parts[name]
        engines = [process for process in part.family()[1:] if "agent.engines" in " ".join(process.cmdline())]
        assert len(engines) == 1, f"{name} has {len(engines)} engines"
        return engines[0].pid

    # --- breaking ---------------------------------------------------------------------------------------------------

    def kill(self, *names: str) -> None:
        """kill -9 of each part's own process; whatever it started must end by itself."""
        families = [process for name in names for process in self.parts[name].family()]
        for name in names:
            child = self.parts[name].child
            assert child.process is not None
            os.kill(child.process.pid, signal.SIGKILL)
            child.process.wait()
        _, left = psutil.wait_procs(families, timeout=15)
        assert not left, f"after kill -9 of {names} these still run: {left}"

    def start(self, *names: str) -> None:
        """Start parts again, and wait until they serve."""
        for name in names:
            self.parts[name].start()
        self.wait(*names)

    def restart(self, *names: str) -> None:
        """kill -9, then start."""
        self.kill(*names)
        self.start(*names)

    def stop(self, name: str) -> None:
        """SIGTERM, and wait."""
        self.parts[name].child.stop()

    def kill_valkey(self) -> None:
        self.stores.valkey.child.kill()

    def start_valkey(self) -> None:
        self.stores.valkey.start()

    def kill_postgres(self) -> None:
        self.stores.postgres.child.kill()

    def start_postgres(self) -> None:
        self.stores.postgres.start()
        self._engine.dispose()

    def heal(self) -> None:
        """Whatever a test broke works again: stores, parts, wires, pauses."""
        for child, start in (
            (self.stores.postgres.child, self.start_postgres),
            (self.stores.valkey.child, self.start_valkey),
        ):
            if not child.running:
                start()
        for wire in self.wires:
            wire.mend()
        for node in self.nodes.values():
            home.set_paused(node.folder, False)
        dead = [name for name, part in self.parts.items() if not part.child.running]
        for name in dead:
            self.parts[name].start()
        self.wait(*(name for name in dead if name in self.ports))
        # An agent may be in the middle of a long pause between two tries.
        waiting = [node.name for node in self.nodes.values() if node.gateway in dead and node.name not in dead]
        self.kill(*waiting)
        for name in waiting:
            self.parts[name].start()
        self.wait_offered()


@contextlib.contextmanager
def running_stack(prefix: str, **environment: str) -> Iterator[Stack]:
    """An empty stack with running stores."""
    with public_folder(prefix) as folder:
        stack = Stack(folder, environment)
        try:
            yield stack
        except BaseException:
            stack.close()
            raise
        stack.close()


def wait_for_database(urls: StoreUrls) -> None:
    """Until PostgreSQL takes connections."""

    def connects() -> bool:
        try:
            psycopg.connect(urls.database_url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    until(connects, "the database answers")


def attach_logs(stack: Stack, report: pytest.TestReport, *, lines: int = 25) -> None:
    """Show the end of every part's log with a failed test."""
    for path in sorted(stack.logs.glob("*.log")):
        report.sections.append((f"log of {path.stem}", tail(path, lines)))
