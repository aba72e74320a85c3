"""The agents' socket: a raw ASGI application. Greeting, then frames until the socket closes.

The reader calls sinks directly: between a message's arrival and the renter's chunk stands no task and no queue.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final, Protocol
from uuid import UUID

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from agent import protocol
from agent.protocol import (
    Abilities,
    Accepted,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Inventory,
    PlanAnswer,
    Refused,
    Telemetry,
    Tokens,
    Vectors,
)
from marketplace.core.errors import Unavailable
from marketplace.core.logs import get_logger
from marketplace.fleet.links import GoneReason, Links
from marketplace.fleet.repository import NodeIdentity
from marketplace.fleet.sender import FrameSender
from marketplace.fleet.sessions import NodeSession

log = get_logger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HELLO_TIMEOUT_S: Final = 5.0
MAX_GREETING: Final = 256
"""Sockets that have not proved who they are."""
NEVER: Final = -1.0
CLOSE_POLICY: Final = 1008
CLOSE_BUSY: Final = 1013
WORK: Final = frozenset({Tokens, Vectors, Accepted, Refused, Finished, Failed})
LISTEN: Final = "fallow.listen"
"""ASGI extension of a server that can do without queues and coroutines: `extensions[LISTEN]["listen"](take)` hands over
messages, `["write"](message)` sends one, and is False where that has to wait."""


class Home(Protocol):
    """What the socket needs of the fleet."""

    async def identify(self, node_id: UUID) -> NodeIdentity | None: ...

    async def welcome(self, node: NodeIdentity, agent_version: str, sender: FrameSender) -> NodeSession:
        """Register the node's socket, ending an older one."""
        ...

    async def farewell(self, session: NodeSession) -> None:
        """The socket is closed."""
        ...

    def on_telemetry(self, session: NodeSession, frame: Telemetry) -> None: ...

    def on_inventory(self, session: NodeSession, frame: Inventory) -> None: ...

    def on_plans(self, session: NodeSession, frame: Abilities | PlanAnswer) -> None: ...


class _Rejected(Exception):
    def __init__(self, code: str, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.goodbye = Goodbye(code, message, retry_after_s)


class AgentSocket:
    """The ASGI application at protocol.SOCKET_PATH."""

    def __init__(self, gateway_id: str, home: Home, links: Links) -> None:
        self._gateway_id = gateway_id
        self._home = home
        self._links = links
        self._greeting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket until it closes."""
        await receive()
        if self._greeting >= MAX_GREETING:
            await send({"type": "websocket.close", "code": CLOSE_BUSY})
            return
        await send({"type": "websocket.accept"})

        async def write(message: bytes) -> None:
            await send({"type": "websocket.send", "bytes": message})

        direct = scope.get("extensions", {}).get(LISTEN)
        sender = FrameSender(write, direct["write"]) if direct is not None else FrameSender(write)
        self._greeting += 1
        try:
            session, rest = await self._greet(receive, write, sender)
        except _Rejected as rejected:
            log.info("agent_rejected", code=rejected.goodbye.code, reason=rejected.goodbye.message)
            with suppress(OSError):
                await write(protocol.encode([rejected.goodbye]))
                await send({"type": "websocket.close", "code": CLOSE_POLICY})
            return
        except OSError:
            return
        finally:
            self._greeting -= 1
        await self._run(session, rest, scope, receive, send)

    # --- greeting -------------------------------------------------------------------------------------------------

    async def _greet(
        self, receive: Receive, write: Callable[[bytes], Awaitable[None]], sender: FrameSender
    ) -> tuple[NodeSession, list[protocol.AgentFrame]]:
        nonce = secrets.token_bytes(32)
        await write(protocol.encode([protocol.Challenge(protocol.VERSION, nonce, self._gateway_id)]))
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                event = await receive()
        except TimeoutError:
            raise _Rejected("hello_timeout", "No greeting came.", 1.0) from None
        if event["type"] != "websocket.receive":
            raise OSError("closed before the greeting")
        hello, rest = _parse_hello(event)
        node = await self._identify(hello)
        self._verify(node, hello, nonce)
        try:
            session = await self._home.welcome(node, hello.agent_version[:200], sender)
        except Unavailable as error:
            raise _Rejected(error.code, error.message, 2.0) from None
        now_ms = time.time_ns() // 1_000_000
        sender.put(protocol.Welcome(str(node.node_id), self._gateway_id, now_ms, plans=True))
        session.resumes, session.plans = hello.resumes, hello.plans
        session.gives_choices = hello.choices
        points, unknown = self._links.resume(session, node.node_id, hello.attempts[:4_096])
        if points:
            log.info("attempts_resumed", node=node.node_id.hex, attempts=len(points))
            sender.put(protocol.Resume(points))
        for running in unknown:
            # Nobody here waits for it: whatever the agent still runs of it has lost its lease.
            sender.put(protocol.Void(running.attempt, running.epoch))
        return session, rest

    async def _identify(self, hello: Hello) -> NodeIdentity:
        if hello.version != protocol.VERSION:
            raise _Rejected("wrong_version", f"This gateway speaks version {protocol.VERSION}.", NEVER)
        try:
            node_id = UUID(hello.node_id)
        except ValueError:
            raise _Rejected("unknown_node", "There is no such node. Enrol it first.", NEVER) from None
        try:
            node = await self._home.identify(node_id)
        except Unavailable as error:
            raise _Rejected(error.code, error.message, 2.0) from None
        if node is None:
            raise _Rejected("unknown_node", "There is no such node. Enrol it first.", NEVER)
        return node

    def _verify(self, node: NodeIdentity, hello: Hello, nonce: bytes) -> None:
        payload = protocol.hello_payload(nonce, hello.node_id, self._gateway_id)
        try:
            Ed25519PublicKey.from_public_bytes(node.public_key).verify(hello.signature, payload)
        except InvalidSignature:
            raise _Rejected("bad_signature", "The signature does not fit the node's key.", NEVER) from None
        # Only the node itself may learn that it is suspended.
        if node.state == "suspended":
            raise _Rejected("node_suspended", "This node is suspended.", 300.0)
        if node.state != "active":
            raise _Rejected("node_retired", "This node is retired.", NEVER)

    # --- serving --------------------------------------------------------------------------------------------------

    async def _run(
        self, session: NodeSession, rest: list[protocol.AgentFrame], scope: Scope, receive: Receive, send: Send
    ) -> None:
        writer = asyncio.create_task(_write(session, send))
        listening = scope.get("extensions", {}).get(LISTEN)
        try:
            goodbye = self._take(session, rest)
            if goodbye is None and listening is not None:
                goodbye = await self._listen(session, listening["listen"], receive)
            elif goodbye is None:
                goodbye = await self._serve(session, receive)
            reason = GoneReason.PROTOCOL if goodbye else GoneReason.NODE_GONE
            session.end(self._links, reason, goodbye, resumable=goodbye is None)
            if goodbye is not None:
                log.warning("agent_dismissed", node=session.node.node_id.hex, code=goodbye.code)
                await asyncio.wait({writer}, timeout=HELLO_TIMEOUT_S)
        finally:
            session.end(self._links, GoneReason.NODE_GONE, None)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await asyncio.shield(self._home.farewell(session))

    async def _serve(self, session: NodeSession, receive: Receive) -> Goodbye | None:
        """Take messages until the socket closes (None) or the node breaks the protocol."""
        while True:
            event = await receive()
            if event["type"] != "websocket.receive" or session.sender.closed:
                return None
            goodbye = self._take_message(session, event.get("bytes"))
            if goodbye is not None:
                return goodbye

    async def _listen(
        self, session: NodeSession, listen: Callable[[Callable[[bytes | None], None]], None], receive: Receive
    ) -> Goodbye | None:
        """`_serve`, by a server that hands over each message in the call that brought it."""
        over: asyncio.Future[Goodbye | None] = asyncio.get_running_loop().create_future()

        def take(message: bytes | None) -> None:
            if over.done():
                return
            try:
                goodbye = self._take_message(session, message)
            except Exception:
                # The edge of the server's protocol, which must not break: this socket ends, as if it had.
                log.exception("agent_message_failed", node=session.node.node_id.hex)
                over.set_result(None)
                return
            if goodbye is not None or session.sender.closed:
                over.set_result(goodbye)

        listen(take)
        closed = asyncio.ensure_future(receive())
        ends: tuple[asyncio.Future[Any], ...] = (over, closed)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
        return over.result() if over.done() else None

    def _take_message(self, session: NodeSession, message: bytes | None) -> Goodbye | None:
        if message is None or len(message) > protocol.MAX_MESSAGE_BYTES:
            return Goodbye("bad_message", "Messages are binary and at most 4 MiB.", 5.0)
        try:
            frames = protocol.decode_from_agent(message)
        except msgspec.DecodeError as error:
            return Goodbye("bad_message", f"Not a list of frames: {error}", 5.0)
        return self._take(session, frames)

    def _take(self, session: NodeSession, frames: list[protocol.AgentFrame]) -> Goodbye | None:
        session.heard_at_s = time.monotonic()
        dispatch = self._links.dispatch
        node_id = session.node.node_id
        for frame in frames:
            if type(frame) in WORK:
                if not dispatch(session, node_id, frame):  # type: ignore[arg-type]  # WORK is AttemptFrame
                    if not session.stray.take(session.heard_at_s):
                        return Goodbye("flood", "Too many frames about attempts that are not yours.", 10.0)
                    _answer_stray(session, frame)
            elif not session.control.take(session.heard_at_s):
                return Goodbye("flood", "Too many reports.", 10.0)
            elif type(frame) is Telemetry:
                self._home.on_telemetry(session, frame)
            elif type(frame) is Inventory:
                self._home.on_inventory(session, frame)
            elif isinstance(frame, Abilities | PlanAnswer):
                self._home.on_plans(session, frame)
            elif type(frame) is Goodbye:
                session.resumes = False  # it leaves on purpose
                session.sender.close()
                return None
            else:
                return Goodbye("bad_message", "A second greeting.", 5.0)
        return None


async def _write(session: NodeSession, send: Send) -> None:
    """The writer's task: frames out until the session ends, then the close."""
    with suppress(OSError, TimeoutError):
        await session.sender.run()
    session.sender.close()
    with suppress(OSError, RuntimeError, TimeoutError):
        # RuntimeError: the server's word for a socket that is closed already.
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await send({"type": "websocket.close", "code": 1000})


def _parse_hello(event: MutableMapping[str, Any]) -> tuple[Hello, list[protocol.AgentFrame]]:
    message = event.get("bytes") or b""
    if len(message) > protocol.MAX_MESSAGE_BYTES:
        raise _Rejected("bad_message", "Messages are at most 4 MiB.", 5.0)
    try:
        frames = protocol.decode_from_agent(message)
    except msgspec.DecodeError as error:
        raise _Rejected("bad_message", f"Not a list of frames: {error}", 5.0) from None
    if not frames or not isinstance(frames[0], Hello):
        raise _Rejected("bad_message", "The first frame must be the greeting.", 5.0)
    if not frames[0].agent_version.isprintable():
        raise _Rejected("bad_message", "The agent's version is not printable text.", 5.0)
    return frames[0], frames[1:]


def _answer_stray(session: NodeSession, frame: protocol.AgentFrame) -> None:
    """A frame about an attempt that nobody here waits for: a report is taken off the agent's hands, work is stopped."""
    if isinstance(frame, (Finished, Failed)):
        session.sender.put(protocol.ReportAck(frame.attempt, frame.epoch))
    elif isinstance(frame, (Tokens, Vectors, Accepted)) and session.should_void(frame.attempt, session.heard_at_s):
        session.sender.put(protocol.Void(frame.attempt, frame.epoch))
