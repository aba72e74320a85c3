"""A whole gateway on real stores and a real port, with agents that follow a script over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import aiohttp
from openai import AsyncOpenAI
from sqlalchemy import select
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from agent import protocol
from agent.protocol import Accepted, Cancel, Failed, Finished, Inventory, Refused, ReportAck, Run, Tokens, UsageReport
from marketplace.accounts.service import create_key, create_organisation
from marketplace.app import Gateway, create_app
from marketplace.billing.checks import invariants
from marketplace.billing.service import Credit, balance, ensure_credit_account, top_up
from marketplace.catalog.importer import import_gguf
from marketplace.catalog.models import Model, Variant
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.fleet.models import Node
from marketplace.gateway.server import DrainingServer, make_server
from marketplace.jobs.models import Attempt, Job, Outcome
from marketplace.metering.models import Receipt
from tests.fleet_world import Enrolled, enrol_node, greet, offer_report, telemetry, until
from tests.vocabularies import MODEL_ID, smollm2_path

WORDS = ("The", " quick", " brown", " fox", " jumps", " over", " the", " lazy", " dog", ".")
"""One token each, in any vocabulary of English."""
CREDIT_NANO = 1_000_000_000
CHAT: list[Any] = [{"role": "user", "content": "Say something about a fox."}]

Behaviour = Callable[["ScriptedAgent", Run], Awaitable[None]]


# --- rows -----------------------------------------------------------------------------------------------------------


_columns: dict[str, Any] = {}


def sell_smollm2(factory: SessionFactory) -> UUID:
    """The bundled model in the catalogue, with its real tokenizer and template.

    The first test of a run imports the file; the others copy the row, since hashing and comparing take seconds.
    """
    with transaction(factory) as session:
        if not _columns:
            variant = import_gguf(session, smollm2_path(), MODEL_ID, "SmolLM2")
            _columns.update(
                {c.key: getattr(variant, c.key) for c in Variant.__table__.columns if c.key != "created_at"}
            )
            return variant.id
        session.add(Model(id=MODEL_ID, display_name="SmolLM2"))
        session.flush()
        session.add(Variant(**_columns))
        return UUID(str(_columns["id"]))


@dataclass(frozen=True)
class Renter:
    organisation_id: UUID
    key_id: UUID
    secret: str


def sold_columns() -> dict[str, Any]:
    """The columns of what `sell_smollm2` sold."""
    return dict(_columns)


def add_renter(factory: SessionFactory, *, credit_nano: int = CREDIT_NANO, name: str = "", **limits: Any) -> Renter:
    """An organisation with a key and that much credit."""
    with transaction(factory) as session:
        organisation = create_organisation(session, name or f"renter-{secrets.token_hex(4)}")
        ensure_credit_account(session, organisation)
        if credit_nano:
            top_up(session, organisation.id, credit_nano, key=f"start-{organisation.id.hex}")
        key, secret = create_key(session, organisation.id, **limits)
        return Renter(organisation.id, key.id, secret)


@dataclass
class Books:
    """What the database says once a test's story is told."""

    factory: SessionFactory

    def outcomes(self) -> list[str]:
        with self.factory() as session:
            return [row.outcome for row in session.scalars(select(Outcome).order_by(Outcome.at))]

    def codes(self) -> list[str | None]:
        with self.factory() as session:
            return [row.code for row in session.scalars(select(Outcome).order_by(Outcome.at))]

    def endpoints(self) -> list[str]:
        with self.factory() as session:
            return [row.endpoint for row in session.scalars(select(Outcome).order_by(Outcome.at))]

    def jobs(self) -> list[Job]:
        with self.factory() as session:
            return list(session.scalars(select(Job).order_by(Job.created_at)))

    def attempts(self) -> list[Attempt]:
        with self.factory() as session:
            return list(session.scalars(select(Attempt).order_by(Attempt.leased_at)))

    def receipts(self) -> list[Receipt]:
        with self.factory() as session:
            return list(session.scalars(select(Receipt).order_by(Receipt.at)))

    def faults(self) -> list[int]:
        """Of each node."""
        with self.factory() as session:
            return list(session.scalars(select(Node.faults)))

    def credit(self, renter: Renter) -> Credit:
        with self.factory() as session:
            return balance(session, renter.organisation_id)

    def broken_rules(self) -> list[str]:
        with self.factory() as session:
            return invariants(session)


# --- agents ---------------------------------------------------------------------------------------------------------


class ScriptedAgent:
    """A node that answers each Run with a behaviour."""

    def __init__(self, node: Enrolled, connection: ClientConnection, behaviour: Behaviour) -> None:
        self.node = node
        self.connection = connection
        self.behaviour = behaviour
        self.runs: list[Run] = []
        self.cancels: list[Cancel] = []
        self.acks: list[ReportAck] = []
        self.frames: list[Any] = []
        self._texts: dict[bytes, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())

    async def say(self, *frames: Any) -> None:
        with contextlib.suppress(ConnectionClosed):
            await self.connection.send(protocol.encode(list(frames)))

    async def tokens(self, run: Run, words: tuple[str, ...] = WORDS, *, start: int = 0, choice: int = 0) -> None:
        """Pieces of an answer, one message."""
        self._texts[run.attempt] = self._texts.get(run.attempt, "") + "".join(words)
        frames = [Tokens(run.attempt, run.epoch, start + at, word, choice=choice) for at, word in enumerate(words)]
        await self.say(*frames)

    async def finish(
        self, run: Run, sequence: int, reason: str = "stop", *, cached: int = 0, reasons: tuple[str, ...] = ()
    ) -> None:
        """The report, signed over what `tokens` said; `reasons` where there were several answers."""
        usage = UsageReport(run.prompt_tokens, cached, sequence, 0)
        digest = hashlib.sha256(self._texts.get(run.attempt, "").encode()).digest()
        signed = protocol.signed_reason(reason, reasons)
        signature = self.node.key.sign(
            protocol.receipt_payload(run.attempt, run.epoch, sequence, signed, usage, digest)
        )
        facts = (run.attempt, run.epoch, sequence, reason, usage, 0.0, 1.0, 5.0, signature, list(reasons))
        await self.say(Finished(*facts))

    async def fail(self, run: Run, sequence: int, code: str) -> None:
        await self.say(Failed(run.attempt, run.epoch, sequence, code, "as the script says", UsageReport(), 1.0))

    async def cancelled(self, run: Run) -> None:
        """Wait for a Cancel of this attempt."""
        await until(lambda: any(cancel.attempt == run.attempt for cancel in self.cancels))

    def abort(self) -> None:
        """Vanish without a word."""
        self.connection.transport.abort()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.connection.close()
        await self._reader

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for message in self.connection:
                assert isinstance(message, bytes)
                for frame in protocol.decode_from_gateway(message):
                    self._take(frame)

    def _take(self, frame: Any) -> None:
        self.frames.append(frame)
        if isinstance(frame, Cancel):
            self.cancels.append(frame)
        elif isinstance(frame, ReportAck):
            self.acks.append(frame)
        elif isinstance(frame, Run):
            self.runs.append(frame)
            task = asyncio.create_task(self._behave(frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _behave(self, run: Run) -> None:
        await self.behaviour(self, run)


async def answers(agent: ScriptedAgent, run: Run) -> None:
    """The whole answer, in order, as often as it is wanted."""
    await agent.say(Accepted(run.attempt, run.epoch))
    words = WORDS[: run.max_output_tokens]
    reason = "length" if len(words) < len(WORDS) else "stop"
    for choice in range(run.choices):
        await agent.tokens(run, words, start=choice * len(words), choice=choice)
    reasons = (reason,) * run.choices if run.choices > 1 else ()
    await agent.finish(run, len(words) * run.choices, reason, reasons=reasons)


async def stalls(agent: ScriptedAgent, run: Run) -> None:
    """Three words, then nothing until it is cancelled."""
    await agent.say(Accepted(run.attempt, run.epoch))
    await agent.tokens(run, WORDS[:3])
    await agent.cancelled(run)
    await agent.finish(run, 3, "cancelled")


async def thinks(agent: ScriptedAgent, run: Run) -> None:
    """Never a first token; stops when it is told to."""
    await agent.say(Accepted(run.attempt, run.epoch))
    await agent.cancelled(run)
    await agent.finish(run, 0, "cancelled")


def fails(code: str, *, after: int = 0) -> Behaviour:
    """A failure after so many words."""

    async def behave(agent: ScriptedAgent, run: Run) -> None:
        await agent.tokens(run, WORDS[:after])
        if after:
            await asyncio.sleep(0.05)
        await agent.fail(run, after, code)

    return behave


def refuses(code: str) -> Behaviour:
    """Does not run it."""

    async def behave(agent: ScriptedAgent, run: Run) -> None:
        await agent.say(Refused(run.attempt, run.epoch, code, "as the script says"))

    return behave


@dataclass(frozen=True)
class Reply:
    """What an HTTP call was answered."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def param(self) -> Any:
        return self.json["error"]["param"]

    @property
    def code(self) -> Any:
        return self.json["error"]["code"]


# --- the gateway ----------------------------------------------------------------------------------------------------


@dataclass
class World:
    """One running gateway and its agents."""

    settings: Settings
    factory: SessionFactory
    variant_id: UUID
    gateway: Gateway
    server: DrainingServer
    url: str
    agents: list[ScriptedAgent] = field(default_factory=list)

    @property
    def books(self) -> Books:
        return Books(self.factory)

    def client(self, renter: Renter, **changes: Any) -> AsyncOpenAI:
        """The official client, without its own retries."""
        return AsyncOpenAI(
            api_key=renter.secret, base_url=f"{self.url}/v1", **{"max_retries": 0, "timeout": 15.0, **changes}
        )

    async def connect(
        self,
        behaviour: Behaviour = answers,
        *,
        node: Enrolled | None = None,
        choices: bool = True,
        resumes: bool = False,
        attempts: list[protocol.RunningAttempt] | None = None,
        data: protocol.DataPolicy | None = None,
        **offer: Any,
    ) -> ScriptedAgent:
        """A node goes live with one offer. What its agent can do, and still runs, is in its greeting: `choices` of more
        than one answer, `resumes` after a break."""
        enrolled = node or await asyncio.to_thread(
            enrol_node, self.factory, owner=f"owner-{secrets.token_hex(4)}", name="box"
        )
        connection = await connect(
            self.url.replace("http", "ws") + protocol.SOCKET_PATH, compression=None, proxy=None, close_timeout=1.0
        )
        await greet(connection, enrolled, choices=choices, resumes=resumes, attempts=attempts)
        agent = ScriptedAgent(enrolled, connection, behaviour)
        self.agents.append(agent)
        report = offer_report(**{"variant_sha256": _columns["sha256"], "prefix_cache_s": 0.0, **offer})
        await agent.say(telemetry(), Inventory([report], None, None, data))
        variant = self.gateway.services.catalog.by_sha256(report.variant_sha256)
        variant_id = variant.id if variant is not None else self.variant_id
        offers = self.gateway.services.fleet.view.offers
        await until(lambda: any(seen.node_id == enrolled.node_id for seen in offers(variant_id)))
        return agent

    async def call(self, method: str, path: str, renter: Renter | None, **sent: Any) -> Reply:
        """A plain HTTP call; `sent` is what aiohttp takes."""
        headers = {"authorization": f"Bearer {renter.secret}"} if renter is not None else {}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, self.url + path, **sent) as response,
        ):
            return Reply(response.status, response.headers, await response.read())

    def offers(self) -> list[Any]:
        return self.gateway.services.fleet.view.offers(self.variant_id)

    async def settled(self) -> None:
        """Wait until nothing runs any more and every slot is free."""
        await until(lambda: self.gateway.services.pulse.active == 0)
        await self.gateway.services.settle_background(5.0)


@contextlib.asynccontextmanager
async def world(
    settings: Settings,
    factory: SessionFactory,
    *,
    variant_id: UUID | None = None,
    send_buffer_bytes: int = 0,
    **changes: Any,
) -> AsyncIterator[World]:
    """A gateway that serves SmolLM2, without a node yet. `changes` are settings; `send_buffer_bytes` is what the kernel
    may keep of an answer that nobody reads."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    facts = {"gateway_id": f"gw-{secrets.token_hex(3)}", "gateway_url": url, "port": port, **changes}
    own = settings.model_copy(update=facts)
    sold = variant_id or await asyncio.to_thread(sell_smollm2, factory)
    gateway = create_app(own)
    server = make_server(gateway, own, drain_s=5.0, log_level="error", lifespan="off")
    server.config.load()
    await gateway.start()
    serving = asyncio.create_task(server._serve(sockets=[listener]))
    await until(lambda: server.started)
    running = World(own, factory, sold, gateway, server, url)
    try:
        yield running
    finally:
        for agent in running.agents:
            await agent.close()
        await gateway.stop()
        server.should_exit = server.force_exit = True
        await serving
