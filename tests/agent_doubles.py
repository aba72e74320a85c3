"""Doubles for the agent's two sides: a gateway that does as it is told, and an engine that plays a script."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import WSMsgType, web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from agent import identity as identities
from agent import protocol
from agent.config import AgentConfig, OwnerTable
from agent.daemon import Daemon
from agent.engines.port import Done, EngineError, EngineEvent, EngineFacts, EngineRequest, Piece, Usage
from agent.identity import Identity, IdentityFile
from agent.protocol import DeviceReport, Run
from agent.records import Served
from agent.telemetry.port import Processes

FrameT = TypeVar("FrameT")
VARIANT = "a" * 64
NODE_ID = "0190b6a4-0000-7000-8000-000000000001"


class ScriptedGateway:
    """The server side of the agent's socket, over real HTTP on a free port of 127.0.0.1."""

    def __init__(self, public_key: Ed25519PublicKey | None = None, *, acknowledge: bool = True) -> None:
        self.public_key = public_key
        self.acknowledge = acknowledge
        self.farewell: protocol.Goodbye | None = None
        """Said instead of Welcome."""
        self.version = protocol.VERSION
        self.frames: list[Any] = []
        self.messages = 0
        self.hellos: list[protocol.Hello] = []
        self.enrolments: list[protocol.EnrolRequest] = []
        self.enrol_answer: web.Response | None = None
        self.reading = asyncio.Event()
        self.reading.set()
        self._news = asyncio.Condition()
        self._seen: dict[type, int] = {}
        self._socket: web.WebSocketResponse | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> ScriptedGateway:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def listen(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get(protocol.SOCKET_PATH, self._serve)
        app.router.add_post(protocol.ENROL_PATH, self._enrol)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        address = self._runner.addresses[0]
        self.url = f"http://127.0.0.1:{address[1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self.drop()
            await self._runner.cleanup()
            self._runner = None

    async def drop(self) -> None:
        """Cut the socket without a word."""
        if self._socket is not None and self._socket._req is not None and self._socket._req.transport is not None:
            self._socket._req.transport.abort()
        self._socket = None

    async def send(self, *frames: Any) -> None:
        assert self._socket is not None
        await self._socket.send_bytes(protocol.encode(list(frames)))

    async def expect(self, kind: type[FrameT], *, timeout_s: float = 5.0) -> FrameT:
        """The next frame of this kind that no earlier call has returned."""
        async with asyncio.timeout(timeout_s), self._news:
            while True:
                start = self._seen.get(kind, 0)
                for index in range(start, len(self.frames)):
                    if isinstance(self.frames[index], kind):
                        self._seen[kind] = index + 1
                        return self.frames[index]
                self._seen[kind] = len(self.frames)
                await self._news.wait()

    async def expect_that(
        self, kind: type[FrameT], condition: Callable[[FrameT], bool], *, timeout_s: float = 5.0
    ) -> FrameT:
        async with asyncio.timeout(timeout_s):
            while True:
                frame = await self.expect(kind, timeout_s=timeout_s)
                if condition(frame):
                    return frame

    def of(self, kind: type[FrameT]) -> list[FrameT]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def text(self, attempt: bytes) -> str:
        return "".join(frame.text for frame in self.of(protocol.Tokens) if frame.attempt == attempt)

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=False, max_msg_size=protocol.MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        nonce = secrets.token_bytes(32)
        await socket.send_bytes(protocol.encode([protocol.Challenge(self.version, nonce, "gw-test")]))
        hello = protocol.decode_from_agent((await socket.receive()).data)[0]
        assert isinstance(hello, protocol.Hello)
        if self.public_key is not None:
            self.public_key.verify(hello.signature, protocol.hello_payload(nonce, hello.node_id, "gw-test"))
        if self.farewell is not None:
            await socket.send_bytes(protocol.encode([self.farewell]))
            await socket.close()
            return socket
        self._socket = socket
        await self._note([hello])
        await socket.send_bytes(protocol.encode([protocol.Welcome(hello.node_id, "gw-test", 0)]))
        async for message in socket:
            await self.reading.wait()
            if message.type is WSMsgType.BINARY:
                self.messages += 1
                await self._note(protocol.decode_from_agent(message.data))
        return socket

    async def _note(self, frames: list[Any]) -> None:
        for frame in frames:
            if isinstance(frame, protocol.Hello):
                self.hellos.append(frame)
            elif self.acknowledge and isinstance(frame, protocol.Finished | protocol.Failed):
                await self.send(protocol.ReportAck(frame.attempt, frame.epoch))
        async with self._news:
            self.frames += frames
            self._news.notify_all()

    async def _enrol(self, request: web.Request) -> web.Response:
        if self.enrol_answer is not None:
            return self.enrol_answer
        asked = msgspec.json.decode(await request.read(), type=protocol.EnrolRequest)
        self.enrolments.append(asked)
        self.public_key = Ed25519PublicKey.from_public_bytes(base64.b64decode(asked.public_key))
        answer = protocol.EnrolAnswer(node_id=NODE_ID, organisation="owner")
        return web.json_response(body=msgspec.json.encode(answer))


class ScriptedEngine:
    """An engine in this process. `script` plays one request; by default it says what the request's body asks."""

    def __init__(
        self,
        *,
        slots: int = 2,
        context_per_slot: int = 1024,
        start_error: str = "",
        slow_start: bool = False,
        deaf: bool = False,
        script: Callable[[ScriptedEngine, EngineRequest], AsyncGenerator[EngineEvent, None]] | None = None,
    ) -> None:
        self.facts_now = EngineFacts("scripted", "1", slots, context_per_slot, True, 0.0, None)
        self.start_error = start_error
        self.slow_start = slow_start
        """True never finishes loading."""
        self.deaf = deaf
        """True goes on working after a cancel."""
        self.script = script or say
        self.working = 0
        self.closed = 0
        self.requests: list[EngineRequest] = []
        self.started = self.stopped = False
        self.grace_s = -1.0
        self.dead = asyncio.Event()

    @property
    def facts(self) -> EngineFacts:
        return self.facts_now

    async def start(self) -> EngineFacts:
        await (asyncio.Event().wait() if self.slow_start else asyncio.sleep(0))
        if self.start_error:
            raise EngineError("engine_error", self.start_error)
        self.started = True
        return self.facts_now

    async def healthy(self) -> bool:
        return not self.dead.is_set()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.requests.append(request)
        self.working += 1
        try:
            async for event in self.script(self, request):
                yield event
        finally:
            self.closed += 1
            if not self.deaf:
                self.working -= 1

    async def idle(self) -> bool:
        return self.working == 0

    async def stop(self, *, grace_s: float = 1.0) -> None:
        self.grace_s = grace_s
        self.stopped = True
        self.dead.set()


async def say(engine: ScriptedEngine, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
    """`{"say": ["a", "b"], "times": 1, "gap_s": 0.01, "end": "stop", "then": "hang" | "die" | code of a failure}`."""
    body: Any = request.body
    words: list[str] = body.get("say", ["hello", " world"]) * body.get("times", 1)
    for word in words:
        if engine.dead.is_set():
            raise EngineError("engine_died", "the scripted engine was killed")
        yield Piece(word)
        await asyncio.sleep(body.get("gap_s", 0))
    match body.get("then", ""):
        case "hang":
            await engine.dead.wait()
            raise EngineError("engine_died", "the scripted engine was killed")
        case "":
            yield Done(body.get("end", "stop"), Usage(8, 0, len(words), 0))
        case code:
            raise EngineError(code, "as the script says")


class StillSource:
    """Devices that never change unless told."""

    def __init__(self) -> None:
        self.report = DeviceReport(
            "cpu", "test cpu", "cpu", memory_total_bytes=8 << 30, memory_used_bytes=1 << 30, utilisation_pct=3.0
        )
        self.closed = False

    def sample(self) -> list[DeviceReport]:
        return [self.report]

    def processes(self) -> Processes:
        return {}

    problem = ""
    needs_restart = False

    def close(self) -> None:
        self.closed = True


def served(variant: str = VARIANT, **changes: Any) -> Served:
    values: dict[str, Any] = {
        "variant": variant,
        "device_id": "cpu",
        "slots": 2,
        "context_per_slot": 1024,
        "input_nano_usd_per_mtok": 50_000_000,
        "cached_input_nano_usd_per_mtok": 10_000_000,
        "output_nano_usd_per_mtok": 200_000_000,
        **changes,
    }
    return Served(**values)


def run_frame(attempt: bytes = b"attempt-1", body: dict[str, Any] | None = None, **changes: Any) -> Run:
    values: dict[str, Any] = {
        "attempt": attempt,
        "epoch": 1,
        "variant_sha256": VARIANT,
        "body": msgspec.json.encode(body or {}),
        "prompt_tokens": 8,
        "max_output_tokens": 64,
        "lease_ms": 15_000,
        "deadline_ms": 60_000,
        **changes,
    }
    return Run(**values)


class Rig:
    """A daemon over scripted engines, connected to a scripted gateway, in this process."""

    def __init__(self, home: Path, **engine_options: Any) -> None:
        self.home = home
        self.engine_options = engine_options
        self.engines: list[ScriptedEngine] = []
        self.source = StillSource()
        self.key = Ed25519PrivateKey.generate()
        self.gateway = ScriptedGateway(self.key.public_key())
        self.config = AgentConfig(owner=OwnerTable(grace_s=0.0, return_s=1.0), stop_grace_s=0.0)
        self.daemon: Daemon | None = None
        self.task: asyncio.Task[int] | None = None

    async def __aenter__(self) -> Rig:
        identities.prepare_home(self.home)
        await self.gateway.listen()
        return self

    async def start(self) -> Rig:
        """Start the daemon and wait for its offer."""
        self.begin()
        await self.offer()
        return self

    def begin(self) -> None:
        """Start the daemon."""
        file = IdentityFile(node_id=NODE_ID, organisation="owner", url=self.gateway.url, name="test")
        self.daemon = Daemon(
            home=self.home,
            identity=Identity(file, self.key),
            config=self.config,
            served=[served()],
            makers={VARIANT: self._make},
            sources=[self.source],
        )
        self.task = asyncio.create_task(self.daemon.run())

    async def offer(self) -> protocol.Inventory:
        return await self.gateway.expect_that(protocol.Inventory, lambda inventory: bool(inventory.offers))

    def _make(self) -> ScriptedEngine:
        engine = ScriptedEngine(**self.engine_options)
        self.engines.append(engine)
        return engine

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[-1]

    async def stop(self) -> int:
        assert self.daemon is not None
        assert self.task is not None
        self.daemon.stop()
        async with asyncio.timeout(10):
            return await self.task

    async def __aexit__(self, *_: object) -> None:
        if self.task is not None and not self.task.done():
            await self.stop()
        await self.gateway.close()


def play(home: Path, scene: Callable[[Rig], Awaitable[None]], **engine_options: Any) -> None:
    """Run a scene with a started rig; nothing of it may be left running."""

    async def act() -> None:
        async with Rig(home, **engine_options) as rig:
            await rig.start()
            await scene(rig)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == [], f"tasks left behind: {left}"

    asyncio.run(act())
