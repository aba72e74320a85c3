"""The outgoing side of one socket: a bounded queue of frames and the one task that writes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from agent.protocol import Run, Tokens, Vectors, encode

MAX_FRAMES: Final = 8_192
MAX_QUEUED_BYTES: Final = 64 * 1024 * 1024
BATCH_BYTES: Final = 1024 * 1024
"""A message is closed once it holds this much; one frame may exceed it."""
WRITE_TIMEOUT_S: Final = 15.0
"""A peer that takes nothing for this long is gone."""
FRAME_BYTES: Final = 128
"""What a small frame is taken for in the queue's bound."""


def size_of(frame: Any) -> int:
    """About how many bytes a frame takes."""
    if type(frame) is Tokens:
        return FRAME_BYTES + len(frame.text) + 5 * len(frame.token_ids) + len(frame.extra)
    if type(frame) is Vectors:
        return FRAME_BYTES + len(frame.data)
    inner = getattr(frame, "frame", frame)
    return FRAME_BYTES + (len(inner.body) if type(inner) is Run else 0)


class FrameSender:
    """Frames put within one turn of the event loop leave as one message."""

    def __init__(
        self, write: Callable[[bytes], Awaitable[None]], write_now: Callable[[bytes], bool] = lambda _: False
    ) -> None:
        """`write_now` is asked first, where there is one; it says False if the message has to wait."""
        self._write = write
        self._write_now = write_now
        self._frames: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once nothing more is taken."""
        return self._closed

    def put(self, frame: Any) -> bool:
        """Queue a frame. False if the socket is closing, or its peer is too slow for what it is sent."""
        size = size_of(frame)
        if self._closed or len(self._frames) >= MAX_FRAMES or self._bytes + size > MAX_QUEUED_BYTES:
            return False
        self._frames.append((frame, size))
        self._bytes += size
        self._ready.set()
        return True

    def close(self) -> None:
        """Take no more; what is queued still goes."""
        self._closed = True
        self._ready.set()

    async def run(self) -> None:
        """Write until closed and drained. Raises what the socket raises, and TimeoutError for a peer that stopped."""
        while not (self._closed and not self._frames):
            await self._ready.wait()
            self._ready.clear()
            while self._frames:
                message = encode(self._take())
                if self._write_now(message):
                    continue
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await self._write(message)

    def _take(self) -> list[Any]:
        batch: list[Any] = []
        total = 0
        while self._frames and (not batch or total + self._frames[0][1] <= BATCH_BYTES):
            frame, size = self._frames.popleft()
            batch.append(frame)
            total += size
            self._bytes -= size
        return batch
