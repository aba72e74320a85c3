"""Frames on their way to the socket: the first goes at once, what follows within two milliseconds travels together."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from agent.protocol import AgentFrame, Inventory, Tokens, Vectors

HIGH_WATER_FRAMES: Final = 1_024
"""Above it producers wait, and with them the engines' streams."""
LOW_WATER_FRAMES: Final = 256
MAX_BATCH_FRAMES: Final = 512
MAX_BATCH_BYTES: Final = 1024 * 1024
"""A quarter of what one message may hold; one frame alone stays under the rest."""
_FRAME_BYTES: Final = 1_024
_OFFER_BYTES: Final = 512


def size_bound_bytes(frame: AgentFrame) -> int:
    """An upper bound of the frame's encoded size, cheap to take."""
    if isinstance(frame, Tokens):
        return 128 + 4 * len(frame.text) + 9 * len(frame.token_ids) + len(frame.extra)
    if isinstance(frame, Vectors):
        return 128 + len(frame.data)
    if isinstance(frame, Inventory):
        return _FRAME_BYTES + _OFFER_BYTES * len(frame.offers)
    return 4 * _FRAME_BYTES


class Outbox:
    """A queue of one connection. `put` never waits; who produces in a loop asks `congested` and waits for `room`."""

    def __init__(self) -> None:
        self._frames: deque[AgentFrame] = deque()
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: AgentFrame) -> None:
        """Append a frame."""
        self._frames.append(frame)
        self._filled.set()
        self._emptied.clear()
        if len(self._frames) >= HIGH_WATER_FRAMES:
            self._room.clear()

    @property
    def congested(self) -> bool:
        """True while the socket is slower than the producers."""
        return not self._room.is_set()

    async def room(self) -> None:
        """Wait until the socket has caught up."""
        await self._room.wait()

    def release(self) -> None:
        """The connection is over: drop what waits, and let every producer go on."""
        self._frames.clear()
        self._room.set()
        self._emptied.set()

    async def filled(self) -> None:
        """Wait until there is something to take."""
        await self._filled.wait()

    async def emptied(self) -> None:
        """Wait until everything was taken."""
        await self._emptied.wait()

    def take(self) -> list[AgentFrame]:
        """The next batch, in order: at least one frame if there is any, within the bounds of a message."""
        batch: list[AgentFrame] = []
        size_bytes = 0
        while self._frames and len(batch) < MAX_BATCH_FRAMES:
            size_bytes += size_bound_bytes(self._frames[0])
            if batch and size_bytes > MAX_BATCH_BYTES:
                break
            batch.append(self._frames.popleft())
        if not self._frames:
            self._filled.clear()
            self._emptied.set()
        if len(self._frames) <= LOW_WATER_FRAMES:
            self._room.set()
        return batch
