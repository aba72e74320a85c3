"""The agent's one connection: greets, keeps alive, sends and receives frames, and comes back when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence
from typing import Final, Protocol

import aiohttp
import msgspec

from agent import protocol
from agent.identity import Identity
from agent.outbox import Outbox
from agent.protocol import AgentFrame, GatewayFrame, Goodbye, RunningAttempt, Welcome

log = logging.getLogger("fallow.agent.client")

GREETING_S: Final = 15.0
"""From opening the connection to Welcome."""
CLOSE_S: Final = 1.0
RETRY_FIRST_S: Final = 0.5
RETRY_MAX_S: Final = 15.0
RETRY_ASKED_MAX_S: Final = 300.0
"""A gateway may ask for a longer pause, up to this."""
REPLACED: Final = "replaced"
REPLACED_PAUSE_S: Final = 5.0
STEADY_S: Final = 30.0
"""A connection that held this long starts the pauses over."""


class Listener(Protocol):
    """Who acts on what the connection brings. Called on the event loop; must not block."""

    def known_attempts(self) -> list[RunningAttempt]: ...

    def on_connected(self, welcome: Welcome) -> None: ...

    def on_frames(self, frames: Sequence[GatewayFrame]) -> None: ...

    def on_disconnected(self, reason: str) -> None: ...


class TurnedAway(Exception):
    """The gateway said not to come back: the key was revoked, or the versions do not fit. The message says which."""


class ConnectionLost(Exception):
    """This connection is over; `retry_after_s` is what the gateway asked for, if it did."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def pause_s(failures: int, asked_s: float | None, rng: random.Random) -> float:
    """How long to wait before the next try: exponential with full jitter, never shorter than asked."""
    ceiling_s = min(RETRY_FIRST_S * 2 ** min(failures, 16), RETRY_MAX_S)
    jittered_s = rng.uniform(RETRY_FIRST_S / 5, ceiling_s)
    return max(jittered_s, min(asked_s or 0.0, RETRY_ASKED_MAX_S))


class Client:
    """Keeps one WebSocket to the marketplace at `url` (http or https). Frames sent while there is none are dropped."""

    def __init__(self, url: str, identity: Identity, agent_version: str, listener: Listener) -> None:
        self._url = url.rstrip("/") + protocol.SOCKET_PATH
        self._identity = identity
        self._version = agent_version
        self._listener = listener
        self._outbox: Outbox | None = None
        self._rng = random.Random()  # noqa: S311 - jitter, no secret
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._leaving = False
        self.gateway_id = ""
        self.last_error = ""

    @property
    def connected(self) -> bool:
        """True between Welcome and the loss of the socket."""
        return self._outbox is not None

    def send(self, frame: AgentFrame) -> None:
        """Queue a frame, or drop it if there is no connection."""
        if self._outbox is not None:
            self._outbox.put(frame)

    @property
    def congested(self) -> bool:
        """True while the socket is slower than what is sent."""
        return self._outbox is not None and self._outbox.congested

    async def room(self) -> None:
        """Wait until the socket has caught up; returns at once without one."""
        if self._outbox is not None:
            await self._outbox.room()

    async def run(self) -> None:
        """Connect, and connect again, until cancelled or after `leave`. Raises TurnedAway."""
        failures = 0
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=GREETING_S)
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not self._leaving:
                started = loop.time()
                asked_s: float | None = None
                try:
                    await self._connect(session)
                except ConnectionLost as lost:
                    asked_s = lost.retry_after_s
                    self._note_loss(str(lost))
                except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                    self._note_loss(str(error) or type(error).__name__)
                failures = 0 if loop.time() - started >= STEADY_S else failures + 1
                if not self._leaving:
                    await asyncio.sleep(pause_s(failures, asked_s, self._rng))

    async def leave(self, code: str, message: str) -> None:
        """Say Goodbye after everything queued, and close. Bounded by a few seconds; `run` then returns."""
        self._leaving = True
        outbox, socket = self._outbox, self._socket
        if outbox is None or socket is None:
            return
        outbox.put(Goodbye(code, message))
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(CLOSE_S):
                await outbox.emptied()
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            await socket.close()

    def _note_loss(self, reason: str) -> None:
        if reason != self.last_error and not self._leaving:
            log.warning("gateway_away url=%s reason=%r", self._url, reason)
        self.last_error = reason

    async def _connect(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(GREETING_S):
            socket = await session.ws_connect(
                self._url,
                compress=0,
                heartbeat=protocol.HEARTBEAT_S,
                max_msg_size=protocol.MAX_MESSAGE_BYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )
        try:
            async with asyncio.timeout(GREETING_S):
                early = await self._greet(socket)
            await self._converse(socket, early)
        finally:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await socket.close()

    async def _greet(self, socket: aiohttp.ClientWebSocketResponse) -> list[GatewayFrame]:
        """Challenge, Hello, Welcome. Returns frames that came with Welcome."""
        challenge, *_ = await _receive(socket)
        if isinstance(challenge, Goodbye):
            raise _farewell(challenge)
        if not isinstance(challenge, protocol.Challenge):
            raise ConnectionLost(f"the gateway began with {type(challenge).__name__}")
        if challenge.version != protocol.VERSION:
            raise ConnectionLost(
                f"the gateway speaks protocol {challenge.version}, this agent {protocol.VERSION}", RETRY_ASKED_MAX_S
            )
        node_id = self._identity.file.node_id
        payload = protocol.hello_payload(challenge.nonce, node_id, challenge.gateway_id)
        hello = protocol.Hello(
            version=protocol.VERSION,
            node_id=node_id,
            signature=self._identity.sign(payload),
            agent_version=self._version,
            attempts=self._listener.known_attempts(),
            resumes=True,
            choices=True,
            plans=True,
        )
        await socket.send_bytes(protocol.encode([hello]))
        welcome, *early = await _receive(socket)
        if isinstance(welcome, Goodbye):
            raise _farewell(welcome)
        if not isinstance(welcome, Welcome):
            raise ConnectionLost(f"the gateway answered Hello with {type(welcome).__name__}")
        self.gateway_id = welcome.gateway_id
        self._socket, self._outbox = socket, Outbox()
        self.last_error = ""
        log.info("connected gateway=%s node=%s", welcome.gateway_id, welcome.node_id)
        self._listener.on_connected(welcome)
        return early

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse, early: list[GatewayFrame]) -> None:
        assert self._outbox is not None
        writer = asyncio.create_task(self._write(socket, self._outbox), name="socket-writer")
        reason = "the agent is leaving"
        try:
            self._take(early)
            while True:
                self._take(await _receive(socket))
        except (ConnectionLost, TurnedAway, aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            outbox, self._outbox, self._socket = self._outbox, None, None
            outbox.release()
            writer.cancel()
            await asyncio.wait({writer})
            self._listener.on_disconnected(reason)

    def _take(self, frames: list[GatewayFrame]) -> None:
        for position, frame in enumerate(frames):
            if isinstance(frame, Goodbye):
                self._listener.on_frames(frames[:position])
                raise _farewell(frame)
        if frames:
            self._listener.on_frames(frames)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse, outbox: Outbox) -> None:
        loop = asyncio.get_running_loop()
        sent_at = float("-inf")
        try:
            while True:
                await outbox.filled()
                company_s = sent_at + protocol.COALESCE_S - loop.time()
                if company_s > 0:
                    await asyncio.sleep(company_s)
                await socket.send_bytes(protocol.encode(list(outbox.take())))
                sent_at = loop.time()
        except (aiohttp.ClientError, OSError):
            # The reader learns of the same loss, and it owns the connection's end.
            await socket.close()


async def _receive(socket: aiohttp.ClientWebSocketResponse) -> list[GatewayFrame]:
    """The next message's frames, at least one. Raises ConnectionLost, DecodeError."""
    while True:
        message = await socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            frames = protocol.decode_from_gateway(message.data)
            if frames:
                return frames
        elif message.type is aiohttp.WSMsgType.TEXT:
            raise ConnectionLost("the gateway sent text where frames are expected")
        elif message.type is aiohttp.WSMsgType.ERROR:
            raise ConnectionLost(f"the connection broke: {socket.exception()}")
        else:
            raise ConnectionLost(f"the gateway closed the connection (code {socket.close_code})")


def _farewell(goodbye: Goodbye) -> Exception:
    if goodbye.code == REPLACED:
        # Our own newer socket may have raced with the older one: only the gateway can tell which was last. To end for
        # good would leave a healthy machine silent, so try again, slowly enough for two copies of a node not to fight.
        return ConnectionLost(
            "another connection of this node took over; is its folder in use twice?", REPLACED_PAUSE_S
        )
    if goodbye.retry_after_s < 0:
        return TurnedAway(f"{goodbye.message} ({goodbye.code})")
    return ConnectionLost(f"the gateway said goodbye: {goodbye.message} ({goodbye.code})", goodbye.retry_after_s)
