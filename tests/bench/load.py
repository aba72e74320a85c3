"""Load on one HTTP endpoint of this machine, bounded in time and connections. `python -m tests.bench.load FILE`.

Prints one JSON object: requests, chunks, errors, and times to the first chunk in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any


class Client(asyncio.Protocol):
    """One keep-alive connection that sends the same request again and again."""

    def __init__(self, request: bytes, until: float, count: int) -> None:
        self._request = request
        self._until = until
        self._left = count
        self._transport: asyncio.Transport | None = None
        self._sent_at = 0.0
        self._tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests = 0
        self.chunks = 0
        self.errors = 0
        self.first_ms: list[float] = []
        self._first = False
        self.sample = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        if time.monotonic() >= self._until or self._left == 0:
            self._finish()
            return
        assert self._transport is not None
        self._left -= 1
        self._first, self._tail = True, b""
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        chunks = data.count(b'"content":" word"')
        if self._first and chunks:
            self._first = False
            self.first_ms.append((time.perf_counter() - self._sent_at) * 1000)
        self.chunks += chunks
        joined = self._tail + data
        if joined.endswith(b"0\r\n\r\n"):
            if b"[DONE]" in joined and b'"error"' not in joined:
                self.requests += 1
            else:
                self._fail(joined)
            self._send()
        elif b"HTTP/1.1 " in joined and b"HTTP/1.1 200" not in joined:
            self._fail(joined)
            self._finish()
        self._tail = joined[-512:]

    def _fail(self, data: bytes) -> None:
        self.errors += 1
        self.sample = self.sample or data[-1500:]

    def connection_lost(self, error: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        if self._transport is not None:
            self._transport.close()


async def run(told: dict[str, Any]) -> dict[str, Any]:
    """Keep `connections` requests in the air for `seconds`, at most `count` each; they begin evenly over `spread_s`."""
    body = json.dumps(told["body"]).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {told['key']}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    until = time.monotonic() + told["seconds"]
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    pause_s = told.get("spread_s", 0.0) / told["connections"]
    for _ in range(told["connections"]):
        _, client = await loop.create_connection(
            lambda: Client(request, until, told.get("count", -1)), "127.0.0.1", told["port"]
        )
        clients.append(client)
        if pause_s:
            await asyncio.sleep(pause_s)
    await asyncio.gather(*[client.done for client in clients])
    return {
        "requests": sum(client.requests for client in clients),
        "chunks": sum(client.chunks for client in clients),
        "errors": sum(client.errors for client in clients),
        "first_ms": [value for client in clients for value in client.first_ms],
        "sample": next((client.sample.decode(errors="replace") for client in clients if client.sample), ""),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))))
