"""uvicorn, set up for this gateway.

Sockets without delay or compression, OpenAI's error shape even for broken HTTP, and an end that lets streams finish.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from http import HTTPStatus
from types import FrameType
from typing import Any, Final, Protocol

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from agent.protocol import MAX_MESSAGE_BYTES, SOCKET_PATH
from marketplace.core.errors import BadRequest
from marketplace.core.settings import Settings
from marketplace.fleet.wire import LINK_PATH
from marketplace.gateway.http import BODY, Receive, Scope, Send, new_request_id
from marketplace.gateway.sockets import DirectSocketProtocol

DRAIN_S: Final = 60.0
"""After SIGTERM running streams may finish for this long."""
CLOSE_S: Final = 5
"""What is then still open is cut after this."""
SOCKETS: Final = frozenset({SOCKET_PATH.encode(), LINK_PATH.encode()})
KEEP_ALIVE_S: Final = 75
"""Longer than proxies keep theirs, so that they are the ones to close."""
PATIENCE_S: Final = 20.0
"""A request that does not go on for one to two of these is cut off."""
MIN_BODY_BYTES: Final = 8 * 1024
"""A body that goes on brings so many in PATIENCE_S, or its end."""
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_AHEAD: Final = 8
"""So many requests may come before the first of them is answered; the rest waits on the wire."""


YOUNG_OBJECTS: Final = 20_000
"""The collector looks for cycles after so many new objects: a request makes some hundreds and no cycles, and Python's
own 700 meant a look with nearly every request."""


class Drainable(Protocol):
    """An ASGI application that knows how to end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...


class RequestTimeout(BadRequest):
    """A request that does not arrive."""

    status = 408
    code = "request_timeout"


class HeadTooLarge(BadRequest):
    """Address and headers beyond MAX_HEAD_BYTES."""

    status = 431
    code = "head_too_large"


class ChunkedBody:
    """The http.Body of one exchange."""

    __slots__ = ("_cycle", "hear_gone")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.hear_gone: Callable[[], None] | None = None

    @property
    def writable(self) -> bool:
        cycle = self._cycle
        goes_on = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        return goes_on and bool(cycle.chunked_encoding) and not cycle.flow.write_paused

    def write(self, part: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def when_gone(self, hear: Callable[[], None] | None) -> None:
        self.hear_gone = hear
        if hear is None:
            return
        # uvicorn may have stopped reading behind a large body, and would not notice that the client leaves.
        self._cycle.flow.resume_reading()
        if self._cycle.disconnected:
            hear()


class HeadKeeper:
    """The transport of one exchange until its head has left: with the first part of the body, in one write and one
    packet, or by itself if this turn of the event loop brings none."""

    __slots__ = ("_cycle", "_head", "_loop", "_transport")

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._head = b""
        self._loop = loop

    def write(self, data: bytes) -> None:
        """Called by the exchange: the head first, then the body."""
        if not self._cycle.response_started:
            # An interim response (100) is nothing that may wait.
            self._transport.write(data)
        elif self._head:
            self._head += data
            self._leave()
        else:
            self._head = data
            self._loop.call_soon(self._leave)

    def is_closing(self) -> bool:
        """Called by the exchange."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Called by the exchange after its end."""
        self._leave()
        self._transport.close()

    def abort(self) -> None:
        """What was not sent is not sent."""
        self._transport.abort()

    def _leave(self) -> None:
        head, self._head = self._head, b""
        self._cycle.transport = self._transport
        if head and not self._transport.is_closing():
            self._transport.write(head)


class JsonHttpProtocol(HttpToolsProtocol):
    """Says in JSON what is no request, waits for none for ever, and upgrades to sockets where there are some.

    Each PATIENCE_S it looks whether a head has been awaited, or a body has grown by less than MIN_BODY_BYTES, since it
    looked the last time. What the application does not read is not held against the client.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._look: asyncio.TimerHandle | None = None
        self._awaited: object = self
        """The exchange that was incomplete at the last look; None: a connection's first. `self`: nothing was."""
        self._running: RequestResponseCycle | None = None
        """The exchange that is being answered; uvicorn's own `cycle` is the newest, which may have to wait for it."""
        self._body: ChunkedBody | None = None
        """Its answer."""
        self._in_head = True
        self._body_bytes = 0
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Called by the loop."""
        super().connection_made(transport)
        self._look = self.loop.call_later(PATIENCE_S, self._look_again)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._stop_looking()
        self._tell_gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadTooLarge(f"Address and headers have at most {MAX_HEAD_BYTES} bytes."))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_AHEAD:
            # uvicorn stops reading here, and would not notice that the client leaves.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._in_head = True
        super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Called by the exchange that was answered."""
        if self._running is not None:
            # It and its body know each other: the collector would have to find every request.
            self._running.scope.pop("extensions", None)
        self._body = None
        super().on_response_complete()

    def handle_websocket_upgrade(self) -> None:
        """Sockets have their own patience."""
        self._stop_looking()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Answer and close. Called by uvicorn where its parser gives up."""
        self._refuse(BadRequest(msg))

    def _refuse(self, error: BadRequest) -> None:
        running = self._tell_gone()
        if running is not None and (running.response_started or running is not self.cycle):
            # What it has begun to say, or will not say any more, is not mixed with this.
            self.transport.close()
            return
        body = msgspec.json.encode(error.body())
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _tell_gone(self) -> RequestResponseCycle | None:
        """Let the exchange that is being answered hear that its client is gone. Returns it, if there is one."""
        running = self._running
        if running is None or running.response_complete:
            return None
        running.disconnected = True
        running.message_event.set()
        if self._body is not None and self._body.hear_gone is not None:
            self._body.hear_gone()
        return running

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._body = ChunkedBody(cycle)
        cycle.scope["extensions"] = {BODY: {"body": self._body}}
        cycle.transport = HeadKeeper(cycle, self.loop)  # type: ignore[assignment]  # what an exchange uses of it
        super()._start_asgi_task(cycle, app)

    def _awaits_head(self) -> bool:
        """True if a request should come or go on. Between requests uvicorn's own timer waits."""
        between = self.cycle is None or self.cycle.response_complete
        return between and self.timeout_keep_alive_task is None

    def _awaits_body(self) -> bool:
        cycle = self.cycle
        open_ = cycle is not None and not cycle.response_complete and cycle.more_body
        return open_ and not self.flow.read_paused

    def _look_again(self) -> None:
        awaits_head = self._awaits_head()
        stuck = awaits_head or (self._awaits_body() and self._body_bytes < MIN_BODY_BYTES)
        if stuck and self._awaited is self.cycle:
            what = "headers" if awaits_head else "body"
            self._refuse(RequestTimeout(f"The request's {what} did not arrive in time."))
            return
        self._awaited = self.cycle if stuck else self
        self._body_bytes = 0
        self._look = self.loop.call_later(PATIENCE_S, self._look_again)

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _should_upgrade(self) -> bool:
        """Elsewhere the wish is passed over, as HTTP allows, and the request is answered like any other."""
        return self.url.partition(b"?")[0] in SOCKETS and super()._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing to warn of: clients offer upgrades that they can do without."""


def spare_the_collector() -> None:
    """Tell the collector that what lives now lives as long as the process: else each full look walks through all code
    and tables, a quarter of a second in which no stream moves. For a process that is one gateway."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


class DrainingServer(uvicorn.Server):
    """The first signal drains: uvicorn alone would close the agents' sockets at once, and every stream with them. The
    second one ends at once."""

    def __init__(self, config: uvicorn.Config, app: Drainable, drain_s: float, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._on_started = started
        self._drain_s = drain_s
        self._asked = False
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        if self._asked:
            super().handle_exit(sig, frame)
            return
        # Not captured: uvicorn would raise it again at the end, and what ended in order would look killed.
        self._asked = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn; afterwards requests come."""
        await super().startup(sockets)
        self._on_started()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second by uvicorn; True ends its main loop."""
        if self._asked and self._draining is None:
            self._draining = asyncio.create_task(self._end())
        return await super().on_tick(counter)

    async def _end(self) -> None:
        try:
            await self._app.drain(self._drain_s)
            await self._app.stop()
        finally:
            self.should_exit = True


def make_server(
    app: Drainable,
    settings: Settings,
    *,
    drain_s: float = DRAIN_S,
    started: Callable[[], None] = lambda: None,
    **changes: Any,
) -> DrainingServer:
    """A server for one gateway on the settings' host and port; `run()` returns after SIGTERM or SIGINT. `started` is
    called once it listens. `changes` go to uvicorn's configuration."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        host=settings.host,
        port=settings.port,
        http=JsonHttpProtocol,
        ws=DirectSocketProtocol,
        ws_per_message_deflate=False,
        ws_max_size=MAX_MESSAGE_BYTES,
        # Whom to believe about a client's address is a setting of ours (see http.client_address).
        proxy_headers=False,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
        **changes,
    )
    return DrainingServer(config, app, drain_s, started)
