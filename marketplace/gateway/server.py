"""uvicorn, set up for this gateway.

Sockets without delay or compression, OpenAI's error shape even for broken HTTP, and an end that lets streams finish.
"""

from __future__ import annotations

import asyncio
from types import FrameType
from typing import Any, Final, Protocol

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agent.protocol import MAX_MESSAGE_BYTES, SOCKET_PATH
from marketplace.core.errors import BadRequest
from marketplace.core.settings import Settings
from marketplace.fleet.wire import LINK_PATH
from marketplace.gateway.http import Receive, Scope, Send, new_request_id

DRAIN_S: Final = 60.0
"""After SIGTERM running streams may finish for this long."""
CLOSE_S: Final = 5
"""What is then still open is cut after this."""
SOCKETS: Final = frozenset({SOCKET_PATH.encode(), LINK_PATH.encode()})
KEEP_ALIVE_S: Final = 75
"""Longer than proxies keep theirs, so that they are the ones to close."""


class Drainable(Protocol):
    """An ASGI application that knows how to end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...


class JsonHttpProtocol(HttpToolsProtocol):
    """Says in JSON that a request is not HTTP, and upgrades to sockets where there are some."""

    def send_400_response(self, msg: str) -> None:
        """Answer and close. Called by uvicorn where its parser gives up."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The application hears that its client is gone; what it has begun to say is not mixed with this.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        body = msgspec.json.encode(BadRequest(msg).body())
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Elsewhere the wish is passed over, as HTTP allows, and the request is answered like any other."""
        return self.url.partition(b"?")[0] in SOCKETS and super()._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing to warn of: clients offer upgrades that they can do without."""


class DrainingServer(uvicorn.Server):
    """The first signal drains: uvicorn alone would close the agents' sockets at once, and every stream with them. The
    second one ends at once."""

    def __init__(self, config: uvicorn.Config, app: Drainable, drain_s: float) -> None:
        super().__init__(config)
        self._app = app
        self._drain_s = drain_s
        self._asked = False
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        if self._asked:
            super().handle_exit(sig, frame)
            return
        self._asked = True
        self._captured_signals.append(sig)

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


def make_server(app: Drainable, settings: Settings, *, drain_s: float = DRAIN_S, **changes: Any) -> DrainingServer:
    """A server for one gateway on the settings' host and port; `run()` returns after SIGTERM or SIGINT. `changes` go to
    uvicorn's configuration."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        host=settings.host,
        port=settings.port,
        http=JsonHttpProtocol,
        ws="websockets-sansio",
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
    return DrainingServer(config, app, drain_s)
