"""A WebSocket whose application takes each message in the call that brought it.

uvicorn's protocol puts a generator-based parser, a queue, a task to wake and two changes of what the kernel watches
between a message's arrival and whoever wants it: more than half of what a streamed chunk cost. Here whole binary
messages are cut out of the stream and handed over at once. Every other frame goes to the library, whole as well, so
that it always stands between two frames, and judges and answers as it would have.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import StatusLike

try:
    from websockets.speedups import apply_mask
except ImportError:
    # As the library does where its compiled part is missing.
    from websockets.utils import apply_mask

from marketplace.core.errors import BadRequest
from marketplace.fleet.socket import LISTEN
from marketplace.gateway.http import new_request_id

WHOLE_BINARY: Final = 0x82
"""First byte of a frame that is a binary message by itself."""
MASKED: Final = 0x80
"""In the second byte; a client must set it."""
LONG: Final = {126: 2, 127: 8}
"""Bytes of an extended length, by what stands in its place."""
HEAD: Final = 2
MASK: Final = 4
SHORT: Final = 126
"""Lengths from here on take two bytes more, from LONGER on eight."""
LONGER: Final = 65_536


class BadHandshake(BadRequest):
    """What came is no WebSocket, or cannot become one now."""

    code = "bad_handshake"


class Handshake(ServerProtocol):
    """The library's, but for its refusals, which are OpenAI's error object like all others."""

    def reject(self, status: StatusLike, text: str) -> Response:
        """The answer to a request that gets no socket."""
        found = HTTPStatus(status)
        message = text.strip() or "No socket is given now. Come back in a few seconds."
        body = msgspec.json.encode(BadHandshake(message).body())
        headers = Headers(
            [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("x-request-id", new_request_id()),
                ("connection", "close"),
            ]
        )
        return Response(found.value, found.phrase, headers, body)


class DirectSocketProtocol(WebSocketsSansIOProtocol):
    """Offers the extension `fallow.listen`: see fleet.socket. Without permessage-deflate, whatever the settings say."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = Handshake(max_size=self.config.ws_max_size, logger=self.logger)
        self._take: Callable[[bytes | None], None] | None = None
        self._partial = bytearray()
        self._needed = 0
        """Bytes that `_partial` must have before it is worth looking at."""

    def handle_connect(self, event: Request) -> None:
        """Called with the handshake."""
        super().handle_connect(event)
        if not self.close_sent:
            self.scope["extensions"][LISTEN] = {"listen": self.listen, "write": self.write_now}

    def listen(self, take: Callable[[bytes | None], None]) -> None:
        """Hand every message to `take` from now on, beginning with those that wait; None stands for a text. It must not
        raise. The end of the connection still comes through `receive`."""
        self._take = take
        waiting = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for event in waiting:
            if event["type"] == "websocket.receive":
                take(event.get("bytes"))
            else:
                self.queue.put_nowait(event)
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    async def send(self, message: Any) -> None:
        """Called by the application."""
        data = message.get("bytes")
        if data is None or not self.write_now(data):
            await super().send(message)

    def write_now(self, data: bytes) -> bool:
        """Send a message without a coroutine. False: it would have to wait, or there is no socket."""
        open_ = self.handshake_complete and not self.disconnected and self.conn.state is State.OPEN
        if not open_ or not self.writable.is_set():
            return False
        # A server's frames carry no mask: a head, and the message as it is.
        self.transport.write(_head(len(data)) + data)
        return True

    def send_receive_event_to_app(self) -> None:
        """Called for messages that went through the library: texts, and those in several frames."""
        if self._take is None:
            super().send_receive_event_to_app()
            return
        whole, self.frames = b"".join(self.frames), []
        if not self.close_sent:
            self._take(whole if self.curr_msg_data_type == "bytes" else None)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if not self.handshake_initiated or self.conn.state is not State.OPEN:
            # What was kept of a frame is its beginning.
            kept, self._partial = bytes(self._partial), bytearray()
            super().data_received(kept + data)
            return
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data, self._partial = bytes(self._partial), bytearray()
        rest = self._split(data)
        if rest < len(data):
            self._partial += memoryview(data)[rest:]

    def _split(self, data: bytes) -> int:
        """Hand over the whole frames. Returns where the first incomplete one begins."""
        at, size = 0, len(data)
        while size - at >= HEAD:
            length = data[at + 1] & ~MASKED
            start = at + HEAD
            if length in LONG:
                start += LONG[length]
                if start > size:
                    self._needed = start - at
                    return at
                length = int.from_bytes(data[at + HEAD : start])
            start += MASK
            if data[at + 1] < MASKED or length > self.config.ws_max_size:
                # No such frame may be: the library says so and closes, whatever follows.
                super().data_received(data[at:])
                return size
            end = start + length
            if end > size:
                self._needed = end - at
                return at
            take = self._take
            # A message in several frames may be under way; none may begin within it, and the library says so. Nor does
            # anything count that follows a frame which ended the connection.
            direct = self.conn.current_size is None and self.conn.state is State.OPEN
            if take is not None and data[at] == WHOLE_BINARY and direct:
                take(apply_mask(data[start:end], data[start - MASK : start]))
            else:
                super().data_received(data[at:end])
            at = end
        self._needed = HEAD
        return at


def _head(size: int) -> bytes:
    """The head of a server's frame that is a binary message by itself."""
    if size < SHORT:
        return bytes((WHOLE_BINARY, size))
    if size < LONGER:
        return bytes((WHOLE_BINARY, 126)) + size.to_bytes(LONG[126])
    return bytes((WHOLE_BINARY, 127)) + size.to_bytes(LONG[127])
