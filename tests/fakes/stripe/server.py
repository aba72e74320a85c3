"""The HTTP server on loopback: one thread a connection, so that a slow or paused call holds up nobody else."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from tests.fakes.stripe.dispatch import Reply, Request, answer
from tests.fakes.stripe.errors import StripeError
from tests.fakes.stripe.pages import serve_page
from tests.fakes.stripe.world import World

MAX_BODY_BYTES = 1 << 20
IDLE_S = 60.0


class Handler(BaseHTTPRequestHandler):
    """Reads a request, writes its reply in one piece, or breaks the connection where a fault says so."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_S
    world: ClassVar[World]

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            self._write(Reply(413, b'{"error": {"type": "invalid_request_error", "message": "Too large."}}'))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, self.rfile.read(length))
        try:
            reply = self._reply(request)
        except Exception:  # the edge: a mistake of the stand-in must be told apart from its faults
            self.world.accidents.append(f"{request.method} {request.target}: {traceback.format_exc()}")
            reply = Reply(500, b'{"error": {"type": "api_error", "message": "The stand-in itself failed."}}')
        self._write(reply)

    def _reply(self, request: Request) -> Reply:
        if request.target.startswith("/v1/"):
            return answer(self.world, request)
        try:
            return serve_page(self.world, request)
        except StripeError as error:
            return Reply(error.status, f"<p>{error}</p>".encode(), content_type="text/html; charset=utf-8")

    def _write(self, reply: Reply) -> None:
        if reply.lost:
            self._break()
            return
        head = [f"HTTP/1.1 {reply.status} {self.responses.get(reply.status, ('Unknown',))[0]}"]
        head += [f"Content-Type: {reply.content_type}", f"Content-Length: {len(reply.body)}"]
        head += [f"{name}: {value}" for name, value in reply.headers.items()]
        written = "\r\n".join(head).encode() + b"\r\n\r\n" + reply.body
        if reply.cut:
            self.wfile.write(written[: -max(1, len(reply.body) // 2)])
            self._break()
            return
        self.wfile.write(written)

    def _break(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, _format: str, *args: object) -> None:
        """Keep quiet; what a test needs it asks the control handle."""


class Server:
    """Listens on 127.0.0.1; stops with all of its connections."""

    def __init__(self, world: World, port: int = 0) -> None:
        handler = type("WorldHandler", (Handler,), {"world": world})
        self._http = _Http(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, name="stand-in-stripe", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join(5)
        self._http.close_connections()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, address = super().get_request()
        with self._open_lock:
            self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """End idle keep-alive connections, whose threads would wait for their next request."""
        with self._open_lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]
