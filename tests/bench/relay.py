"""The floor to compare with: a raw ASGI relay over one WebSocket, without money, keys or typed frames.

`python -m tests.bench.relay PORT` serves POST /v1/chat/completions and passes the body to whoever connected to /engine.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import msgspec
import uvicorn


class Relay:
    """One engine's socket, any number of clients."""

    def __init__(self) -> None:
        self._send: Any = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Queue[bytes]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        elif scope["type"] == "websocket":
            await self._engine(receive, send)
        else:
            await self._client(receive, send)

    async def _engine(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        self._send = send
        while (message := await receive())["type"] != "websocket.disconnect":
            for number, chunk in msgspec.msgpack.decode(message["bytes"]):
                if (queue := self._waiting.get(number)) is not None:
                    queue.put_nowait(chunk)

    async def _client(self, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        number = next(self._numbers)
        queue = self._waiting[number] = asyncio.Queue()
        await self._send({"type": "websocket.send", "bytes": msgspec.msgpack.encode((number, body))})
        headers = [(b"content-type", b"text/event-stream")]
        first = await queue.get()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        chunk = first
        while chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await queue.get()
        del self._waiting[number]
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


if __name__ == "__main__":
    uvicorn.run(
        Relay(),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        http="httptools",
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        access_log=False,
        log_level="warning",
    )
