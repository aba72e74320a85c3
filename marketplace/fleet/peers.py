"""Links between gateways: a renter's gateway reaches a node through the gateway that has the node's socket.

Each gateway keeps one WebSocket open to every other that has offers; over it travel the frames of all attempts that it
runs there. Both ends prove that they know the cluster's secret. Valkey only says who is where: frames never pass it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from agent.protocol import GatewayFrame, Void
from marketplace.core.logs import get_logger
from marketplace.fleet import wire
from marketplace.fleet.links import AttemptFrame, Carrier, GoneReason, Links, NodeUnreachable, Route
from marketplace.fleet.occupancy import Occupancy
from marketplace.fleet.sender import FrameSender
from marketplace.fleet.socket import CLOSE_POLICY, Receive, Scope, Send

log = get_logger(__name__)

GREETING_TIMEOUT_S: Final = 5.0
FIRST_RETRY_S: Final = 0.2
LONGEST_RETRY_S: Final = 5.0
PING_EVERY_S: Final = 5.0
PONG_WITHIN_S: Final = 10.0
MAX_PEERS: Final = 256


class LinkRefused(Exception):
    """The other side is not who it should be, or does not know the secret."""


# --- the caller's side ----------------------------------------------------------------------------------------------


class PeerLink:
    """An open link to the gateway `gateway_id`: the carrier of attempts on its nodes."""

    def __init__(self, gateway_id: str, sender: FrameSender, links: Links) -> None:
        self.gateway_id = gateway_id
        self._sender = sender
        self._links = links
        self._routes: dict[bytes, Route] = {}

    def send(self, node_id: UUID, frame: GatewayFrame) -> bool:
        """Queue a frame for a node of that gateway."""
        return self._sender.put(wire.ToNode(node_id.bytes, frame))  # type: ignore[arg-type]  # greetings never come here

    def opened(self, route: Route) -> None:
        """Ask for the attempt's frames."""
        self._routes[route.attempt] = route
        self._sender.put(wire.OpenRoute(route.attempt, route.node_id.bytes, route.offer_id.bytes))

    def closed(self, route: Route) -> None:
        """Ask for no more of them."""
        if self._routes.pop(route.attempt, None) is not None:
            self._sender.put(wire.CloseRoute(route.attempt))

    def take(self, frames: list[wire.HomeFrame]) -> None:
        """Frames from the other gateway."""
        for frame in frames:
            if isinstance(frame, wire.Gone):
                self._gone(frame)
            elif isinstance(frame, (wire.LinkChallenge, wire.LinkWelcome)):
                raise LinkRefused("a second greeting")
            else:
                # Unknown attempts need no answer: their route is closed there too, or will be.
                self._links.dispatch(self, None, frame)

    def lost(self) -> None:
        """The link broke: so did every attempt on it, and that is our fault, not a node's."""
        self._sender.close()
        for route in list(self._routes.values()):
            self._links.lose(route, GoneReason.LINK_LOST)

    def _gone(self, frame: wire.Gone) -> None:
        route = self._routes.get(frame.attempt)
        if route is None:
            return
        try:
            reason = GoneReason(frame.reason)
        except ValueError:
            reason = GoneReason.LINK_LOST
        self._links.lose(route, reason)


class Peers:
    """Keeps a link to every other gateway that is named."""

    def __init__(self, gateway_id: str, secret: str, links: Callable[[], Links]) -> None:
        self._gateway_id = gateway_id
        self._secret = secret
        self._links = links
        self._open: dict[str, PeerLink] = {}
        self._tasks: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._warned = False

    def get(self, gateway_id: str) -> PeerLink | None:
        """The open link to a gateway, or None."""
        return self._open.get(gateway_id)

    def linked(self, gateway_id: str) -> bool:
        """True if the link is open, which proves the gateway alive."""
        return gateway_id in self._open

    def follow(self, gateways: Mapping[str, str]) -> None:
        """Have links to exactly these gateways (id -> URL)."""
        if not self._secret:
            if not self._warned and gateways.keys() - {self._gateway_id}:
                self._warned = True
                log.warning(
                    "no_cluster_secret", effect="other gateways' nodes are out of reach", set="FALLOW_CLUSTER_SECRET"
                )
            return
        for gateway_id, (url, task) in list(self._tasks.items()):
            if gateways.get(gateway_id) != url or task.done():
                task.cancel()
                del self._tasks[gateway_id]
        for gateway_id, url in list(gateways.items())[:MAX_PEERS]:
            if gateway_id not in self._tasks and gateway_id != self._gateway_id:
                self._tasks[gateway_id] = (url, asyncio.create_task(self._keep(gateway_id, url)))

    async def stop(self) -> None:
        """Close all links."""
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, gateway_id: str, url: str) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            try:
                async with connect(
                    _socket_url(url),
                    compression=None,
                    max_size=wire.MAX_MESSAGE_BYTES,
                    open_timeout=GREETING_TIMEOUT_S,
                    close_timeout=1.0,
                    ping_interval=PING_EVERY_S,
                    ping_timeout=PONG_WITHIN_S,
                    proxy=None,
                ) as connection:
                    await self._greet(connection, gateway_id)
                    delay_s = FIRST_RETRY_S
                    await self._serve(connection, gateway_id)
            except (OSError, TimeoutError, WebSocketException, InvalidHandshake, LinkRefused, ValueError) as error:
                log.warning("peer_link_down", peer=gateway_id, error=str(error))
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311  # spreads retries, guards nothing
            delay_s = min(delay_s * 2, LONGEST_RETRY_S)

    async def _greet(self, connection: ClientConnection, gateway_id: str) -> None:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            challenge = await _first_frame(connection)
            if not isinstance(challenge, wire.LinkChallenge) or challenge.version != wire.VERSION:
                raise LinkRefused("it does not speak this version")
            if challenge.gateway_id != gateway_id:
                raise LinkRefused(f"{challenge.gateway_id} answers at its address")
            nonce = secrets.token_bytes(32)
            parties = wire.Parties(self._gateway_id, gateway_id, nonce, challenge.nonce)
            proof = wire.prove(self._secret, "caller", parties)
            hello = wire.LinkHello(wire.VERSION, self._gateway_id, nonce, proof)
            await connection.send(_encode([hello]))
            welcome = await _first_frame(connection)
            expected = wire.prove(self._secret, "home", parties)
            if not isinstance(welcome, wire.LinkWelcome) or not wire.proves(welcome.proof, expected):
                raise LinkRefused("it does not know the secret")

    async def _serve(self, connection: ClientConnection, gateway_id: str) -> None:
        sender = FrameSender(connection.send)
        link = PeerLink(gateway_id, sender, self._links())
        writer = asyncio.create_task(_run_quietly(sender))
        self._open[gateway_id] = link
        log.info("peer_link_up", peer=gateway_id)
        try:
            async for message in connection:
                if isinstance(message, str):
                    raise LinkRefused("text on a binary link")
                link.take(wire.decode_from_home(message))
        finally:
            if self._open.get(gateway_id) is link:
                del self._open[gateway_id]
            link.lost()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)


# --- the home's side ------------------------------------------------------------------------------------------------


class PeerSink:
    """Passes an attempt's frames on to the gateway that runs it."""

    def __init__(self, attempt: bytes, sender: FrameSender, on_closed: Callable[[bytes], None]) -> None:
        self._attempt = attempt
        self._sender = sender
        self._on_closed = on_closed

    def on_frame(self, frame: AttemptFrame) -> None:
        """Queue the frame for the link. A link that cannot take it is broken: a gap would look like the node's lie."""
        if not self._sender.put(frame):
            self._sender.close()

    def on_gone(self, reason: GoneReason) -> None:
        """Queue the news for the link."""
        self._sender.put(wire.Gone(self._attempt, reason.value))
        self._on_closed(self._attempt)


class _Caller:
    """One accepted link: the routes that it opened here."""

    def __init__(self, sender: FrameSender, links: Links, find_local: Callable[[UUID], Carrier | None]) -> None:
        self.sender = sender
        self._links = links
        self._find_local = find_local
        self.routes: dict[bytes, Route] = {}

    def take(self, frame: wire.CallerFrame, counts: ForeignCounts) -> None:
        if isinstance(frame, wire.ToNode):
            with contextlib.suppress(NodeUnreachable):
                # Its attempts hear of it by Gone.
                self._links.send(UUID(bytes=frame.node_id), frame.frame)
        elif isinstance(frame, wire.OpenRoute):
            self._open(frame, counts)
        elif isinstance(frame, wire.CloseRoute):
            self.close(frame.attempt, counts)
        else:
            raise LinkRefused("a second greeting")

    def _open(self, frame: wire.OpenRoute, counts: ForeignCounts) -> None:
        node_id, offer_id = UUID(bytes=frame.node_id), UUID(bytes=frame.offer_id)
        carrier = self._find_local(node_id)
        sink = PeerSink(frame.attempt, self.sender, lambda attempt: self._forget(attempt, counts))
        if carrier is None:
            self.sender.put(wire.Gone(frame.attempt, GoneReason.NODE_GONE.value))
            return
        route = Route(UUID(bytes=frame.attempt).bytes, node_id, offer_id, carrier, sink)
        try:
            self._links.attach(route)
        except (NodeUnreachable, ValueError):
            self.sender.put(wire.Gone(frame.attempt, GoneReason.LINK_LOST.value))
            return
        self.routes[frame.attempt] = route
        counts.add(offer_id, 1)

    def close(self, attempt: bytes, counts: ForeignCounts) -> None:
        if attempt in self.routes:
            self._links.close(UUID(bytes=attempt))
            self._forget(attempt, counts)

    def _forget(self, attempt: bytes, counts: ForeignCounts) -> None:
        route = self.routes.pop(attempt, None)
        if route is not None:
            counts.add(route.offer_id, -1)


class ForeignCounts:
    """Attempts of other gateways on nodes connected here, by offer."""

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._counts: dict[UUID, int] = {}

    def add(self, offer_id: UUID, by: int) -> None:
        """Count one more or one less."""
        count = self._counts.get(offer_id, 0) + by
        if count > 0:
            self._counts[offer_id] = count
        else:
            self._counts.pop(offer_id, None)
        self._occupancy.foreign(offer_id, count)


class PeerSocket:
    """The ASGI application at wire.LINK_PATH."""

    def __init__(
        self,
        gateway_id: str,
        secret: str,
        links: Links,
        counts: ForeignCounts,
        find_local: Callable[[UUID], Carrier | None],
    ) -> None:
        self._gateway_id = gateway_id
        self._secret = secret
        self._links = links
        self._counts = counts
        self._find_local = find_local
        self._callers: set[_Caller] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one link until it closes."""
        await receive()
        if not self._secret or len(self._callers) >= MAX_PEERS:
            await send({"type": "websocket.close", "code": CLOSE_POLICY})
            return
        await send({"type": "websocket.accept"})

        async def write(message: bytes) -> None:
            await send({"type": "websocket.send", "bytes": message})

        try:
            peer = await self._greet(receive, write)
        except (LinkRefused, msgspec.DecodeError, TimeoutError) as error:
            log.warning("peer_link_refused", error=str(error))
            await send({"type": "websocket.close", "code": CLOSE_POLICY})
            return
        log.info("peer_link_accepted", peer=peer)
        await self._serve(peer, FrameSender(write), receive, send)

    def stop(self) -> None:
        """Close all links; the callers hear that their attempts are gone."""
        for caller in self._callers:
            caller.sender.close()

    async def _greet(self, receive: Receive, write: Callable[[bytes], Any]) -> str:
        nonce = secrets.token_bytes(32)
        await write(_encode([wire.LinkChallenge(wire.VERSION, self._gateway_id, nonce)]))
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            event = await receive()
        frames = wire.decode_from_caller(event.get("bytes") or b"")
        hello = frames[0] if frames else None
        if not isinstance(hello, wire.LinkHello) or hello.version != wire.VERSION:
            raise LinkRefused("no greeting of this version")
        parties = wire.Parties(hello.gateway_id, self._gateway_id, hello.nonce, nonce)
        if not wire.proves(hello.proof, wire.prove(self._secret, "caller", parties)):
            raise LinkRefused("it does not know the secret")
        await write(_encode([wire.LinkWelcome(wire.prove(self._secret, "home", parties))]))
        return hello.gateway_id

    async def _serve(self, peer: str, sender: FrameSender, receive: Receive, send: Send) -> None:
        caller = _Caller(sender, self._links, self._find_local)
        self._callers.add(caller)
        writer = asyncio.create_task(_run_and_close(sender, send))
        try:
            await self._read(caller, receive)
        except (LinkRefused, msgspec.DecodeError, ValueError) as error:
            log.warning("peer_link_broken", peer=peer, error=str(error))
        finally:
            self._callers.discard(caller)
            self._abandon(caller)
            sender.close()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, caller: _Caller, receive: Receive) -> None:
        while True:
            event = await receive()
            if event["type"] != "websocket.receive" or caller.sender.closed:
                return
            message = event.get("bytes")
            if message is None or len(message) > wire.MAX_MESSAGE_BYTES:
                raise LinkRefused("not a message of this wire")
            for frame in wire.decode_from_caller(message):
                caller.take(frame, self._counts)

    def _abandon(self, caller: _Caller) -> None:
        """The gateway behind the link is gone, and its renters with it: stop their work, free the slots."""
        for attempt, route in list(caller.routes.items()):
            if not route.done:
                route.carrier.send(route.node_id, Void(attempt, route.epoch))
            caller.close(attempt, self._counts)


# --- both -----------------------------------------------------------------------------------------------------------


_encode = msgspec.msgpack.Encoder().encode


async def _first_frame(connection: ClientConnection) -> wire.HomeFrame:
    message = await connection.recv()
    if isinstance(message, str):
        raise LinkRefused("text on a binary link")
    frames = wire.decode_from_home(message)
    if len(frames) != 1:
        raise LinkRefused("no greeting")
    return frames[0]


async def _run_quietly(sender: FrameSender) -> None:
    with contextlib.suppress(OSError, TimeoutError, WebSocketException):
        await sender.run()
    sender.close()


async def _run_and_close(sender: FrameSender, send: Send) -> None:
    await _run_quietly(sender)
    with contextlib.suppress(OSError, RuntimeError):
        await send({"type": "websocket.close", "code": 1000})


def _socket_url(url: str) -> str:
    """`http://host` -> `ws://host/...`."""
    scheme, _, rest = url.rstrip("/").partition("://")
    return f"{'wss' if scheme == 'https' else 'ws'}://{rest}{wire.LINK_PATH}"
