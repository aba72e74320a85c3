"""The stand-in engine over HTTP, for peers that speak to engines themselves:
`python -m tests.bench.engine PORT RATE [FIRST_S]`.

Answers POST /v1/chat/completions with as many chunks as max_tokens asks, `RATE` a second (0: all at once), the first
after FIRST_S seconds on average.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import msgspec
import uvicorn

MODEL = "bench"
TICK_S = 0.01
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
LAST = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",'
    b'"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
)
MODELS = msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]})


def first_after_s(mean_s: float) -> float:
    """The time to one answer's first chunk: evenly spread between half of the mean and one and a half."""
    return mean_s * random.uniform(0.5, 1.5)  # a load, no secret


class Engine:
    """One ASGI application."""

    def __init__(self, rate: float, first_s: float = 0.0) -> None:
        self._rate = rate
        self._first_s = first_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["method"] == "POST":
            await self._stream(send, msgspec.json.decode(body).get("max_tokens", 1))
        else:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": MODELS})

    async def _stream(self, send: Any, limit: int) -> None:
        await asyncio.sleep(first_after_s(self._first_s))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        began, sent = asyncio.get_running_loop().time(), 0
        while sent < limit:
            passed_s = asyncio.get_running_loop().time() - began
            due = limit if self._rate == 0 else min(limit, 1 + int(passed_s * self._rate))
            for _ in range(due - sent):
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            sent = due
            if sent < limit:
                await asyncio.sleep(TICK_S)
        await send({"type": "http.response.body", "body": LAST})


if __name__ == "__main__":
    uvicorn.run(
        Engine(*map(float, sys.argv[2:])), host="127.0.0.1", port=int(sys.argv[1]), http="httptools", access_log=False,
        log_level="warning",
    )  # fmt: skip
