"""Gateways with nothing but a fleet, and agents that say whatever a test tells them, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from agent import protocol
from agent.protocol import DeviceReport, EnrolRequest, OfferReport, Telemetry
from marketplace.accounts.service import create_organisation
from marketplace.catalog.models import Model, Variant
from marketplace.catalog.service import Catalog
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.core.valkey import ValkeyPipe, connect_async
from marketplace.fleet import enrolment
from marketplace.fleet.links import AttemptFrame, GoneReason
from marketplace.fleet.service import Fleet
from marketplace.fleet.wire import LINK_PATH
from marketplace.matching.types import Demand, OfferView, Rates

SHA256 = "c" * 64
PATIENCE_S = 8.0


def offer_view(**changes: Any) -> OfferView:
    """An offer with room, warm and fresh."""
    facts: dict[str, Any] = {
        "offer_id": uuid4(),
        "node_id": uuid4(),
        "owner_organisation_id": uuid4(),
        "device_id": "cpu",
        "variant_id": VARIANT_ID,
        "gateway_id": "gw-a",
        "price_id": 1,
        "rates": Rates(100, 50, 400),
        "slots": 4,
        "slots_busy": 0,
        "context_per_slot": 4096,
        "available": True,
        "warm": True,
        "simulated": False,
        "prefix_cache_s": 0.0,
        "sampled_age_s": 0.0,
        "prefill_tokens_per_s": 1_000.0,
        "decode_tokens_per_s": 50.0,
        "memory_free_bytes": None,
    }
    return OfferView(**{**facts, **changes})


VARIANT_ID = UUID(int=7)


def demand(**changes: Any) -> Demand:
    """A hundred tokens in, a hundred out, now."""
    facts: dict[str, Any] = {
        "variant_id": VARIANT_ID,
        "prompt_tokens": 100,
        "max_output_tokens": 100,
        "ceiling": None,
        "organisation_id": UUID(int=1),
    }
    return Demand(**{**facts, **changes})


class Recorder:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.frames: list[AttemptFrame] = []
        self.gone: list[GoneReason] = []
        self.news = asyncio.Event()

    def on_frame(self, frame: AttemptFrame) -> None:
        self.frames.append(frame)
        self.news.set()

    def on_gone(self, reason: GoneReason) -> None:
        self.gone.append(reason)
        self.news.set()


async def until(condition: Callable[[], Any], *, within_s: float = PATIENCE_S) -> None:
    """Wait until something holds; fail if it does not."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.01)


# --- the database's side --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enrolled:
    node_id: UUID
    organisation_id: UUID
    key: Ed25519PrivateKey


def add_variant(factory: SessionFactory, sha256: str = SHA256) -> UUID:
    """A variant that can be offered, though nobody could count its tokens."""
    with transaction(factory) as session:
        if session.get(Model, "tiny") is None:
            session.add(Model(id="tiny", display_name="Tiny"))
            session.flush()
        variant = Variant(
            model_id="tiny",
            sha256=sha256,
            size_bytes=1,
            quantisation="q4_1",
            training_context=4096,
            default_max_output=512,
            shape={},
            tokenizer_kind="fast",
            tokenizer=b"",
            chat_template="",
            special_tokens={},
        )
        session.add(variant)
        session.flush()
        return variant.id


def enrol_node(factory: SessionFactory, *, owner: str = "owner", name: str = "box") -> Enrolled:
    """A node with its key, enrolled the ordinary way."""
    key = Ed25519PrivateKey.generate()
    with transaction(factory) as session:
        organisation = create_organisation(session, owner)
        token = enrolment.create_token(session, organisation.id)
        answer = enrolment.enrol(session, EnrolRequest(token, public_key_of(key), name, "test"))
        return Enrolled(UUID(answer.node_id), organisation.id, key)


def public_key_of(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def fake_catalog(variants: dict[str, UUID]) -> Catalog:
    """A catalogue that knows hashes only. The dictionary stays the caller's, and may grow."""
    return cast(
        "Catalog",
        SimpleNamespace(
            by_sha256=lambda sha256: SimpleNamespace(id=variants[sha256]) if sha256 in variants else None,
            by_id=lambda _: None,
        ),
    )


# --- a gateway ------------------------------------------------------------------------------------------------------


class Gateway:
    """A fleet behind a real server on a free port."""

    def __init__(self, settings: Settings, factory: SessionFactory, variants: dict[str, UUID]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        port = self.listener.getsockname()[1]
        self.settings = settings.model_copy(update={"gateway_url": f"http://127.0.0.1:{port}"})
        self.pipe = ValkeyPipe(connect_async(settings.valkey_url))
        self.fleet = Fleet(self.settings, factory, fake_catalog(variants), self.pipe)
        self.agent_url = f"ws://127.0.0.1:{port}{protocol.SOCKET_PATH}"
        config = uvicorn.Config(
            self._app, interface="asgi3", lifespan="off", log_level="error", ws_per_message_deflate=False
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.fleet.start()
        self._server.config.load()
        self._task = asyncio.create_task(self._server._serve(sockets=[self.listener]))
        await until(lambda: self._server.started)

    async def kill(self) -> None:
        """Close every socket without a word, as a death would."""
        for task in self.fleet._tasks:
            task.cancel()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for server in self._server.servers:
            server.close()
        await self.fleet._peers.stop()

    async def stop(self) -> None:
        await self.fleet.stop()
        self._server.should_exit = True
        self._server.force_exit = True
        if self._task is not None:
            await self._task
        await self.pipe.close()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        application = {protocol.SOCKET_PATH: self.fleet.agent_socket, LINK_PATH: self.fleet.peer_socket}[scope["path"]]
        await application(scope, receive, send)


@contextlib.asynccontextmanager
async def gateway(
    settings: Settings, factory: SessionFactory, variants: dict[str, UUID], gateway_id: str = "gw-a"
) -> AsyncIterator[Gateway]:
    """A running gateway."""
    running = Gateway(settings.model_copy(update={"gateway_id": gateway_id}), factory, variants)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


# --- an agent -------------------------------------------------------------------------------------------------------


class Agent:
    """The node's side of the socket. Nothing is sent that the test does not send."""

    def __init__(self, node: Enrolled, connection: ClientConnection) -> None:
        self.node = node
        self.connection = connection
        self.frames: list[Any] = []
        self.closed = False
        self._reader = asyncio.create_task(self._read())

    async def say(self, *frames: Any) -> None:
        await self.connection.send(protocol.encode(list(frames)))

    async def hear(self, kind: type) -> Any:
        """The first frame of this kind, which is then forgotten."""
        await until(lambda: any(isinstance(frame, kind) for frame in self.frames))
        found = next(frame for frame in self.frames if isinstance(frame, kind))
        self.frames.remove(found)
        return found

    async def close(self) -> None:
        await self.connection.close()
        await self._reader

    def abort(self) -> None:
        """Vanish without a word."""
        self.connection.transport.abort()

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for message in self.connection:
                assert isinstance(message, bytes)
                self.frames += protocol.decode_from_gateway(message)
        self.closed = True


async def greet(
    connection: ClientConnection,
    node: Enrolled,
    *,
    key: Ed25519PrivateKey | None = None,
    attempts: list[protocol.RunningAttempt] | None = None,
    version: int = protocol.VERSION,
    resumes: bool = False,
    choices: bool = False,
    plans: bool = False,
) -> None:
    """Answer the challenge."""
    message = await connection.recv()
    assert isinstance(message, bytes)
    (challenge,) = protocol.decode_from_gateway(message)
    assert isinstance(challenge, protocol.Challenge)
    payload = protocol.hello_payload(challenge.nonce, str(node.node_id), challenge.gateway_id)
    signature = (key or node.key).sign(payload)
    hello = protocol.Hello(version, str(node.node_id), signature, "test", attempts or [], resumes, choices, plans)
    await connection.send(protocol.encode([hello]))


@contextlib.asynccontextmanager
async def agent(gateway_: Gateway, node: Enrolled, **greeting: Any) -> AsyncIterator[Agent]:
    """A connected agent."""
    async with connect(gateway_.agent_url, compression=None, proxy=None, close_timeout=1.0) as connection:
        await greet(connection, node, **greeting)
        running = Agent(node, connection)
        yield running
        await running.close()


def offer_report(**changes: Any) -> OfferReport:
    facts: dict[str, Any] = {
        "variant_sha256": SHA256,
        "device_id": "cpu",
        "slots": 2,
        "context_per_slot": 2048,
        "input_nano_usd_per_mtok": 100_000_000,
        "cached_input_nano_usd_per_mtok": 50_000_000,
        "output_nano_usd_per_mtok": 400_000_000,
        "engine": "llama.cpp",
        "engine_version": "1",
        "simulated": False,
        "warm": True,
        "prefix_cache_s": 30.0,
        "prefill_tokens_per_s": 120.0,
        "decode_tokens_per_s": 40.0,
    }
    return OfferReport(**{**facts, **changes})


def device(**changes: Any) -> DeviceReport:
    facts: dict[str, Any] = {
        "device_id": "cpu",
        "name": "A processor",
        "kind": "cpu",
        "memory_total_bytes": 8 << 30,
        "memory_used_bytes": 2 << 30,
        "power_mw": 30_000,
        "power_source": "declared",
    }
    return DeviceReport(**{**facts, **changes})


def telemetry(*devices: DeviceReport, available: bool = True, reason: str = "") -> Telemetry:
    return Telemetry(0, list(devices) or [device()], 0, available, reason)
