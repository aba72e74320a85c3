"""Cancels before the first token are free, up to a number an hour and key; beyond them the prefill is paid.

Counted in Valkey over a fixed hour, so that all gateways share the count; without it, each gateway counts for itself.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final
from uuid import UUID

from marketplace.core.valkey import Script, ValkeyDownError, ValkeyPipe

HOUR_S: Final = 3_600
MAX_LOCAL_KEYS: Final = 10_000

COUNT = Script(
    """
    local count = redis.call('INCR', KEYS[1])
    if count == 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
    return count
    """
)


class EarlyCancels:
    """Counts early cancels. One event loop."""

    def __init__(self, pipe: ValkeyPipe, *, free_per_hour: int, clock: Callable[[], float] = time.time) -> None:
        self._pipe = pipe
        self._free = free_per_hour
        self._clock = clock
        self._local: OrderedDict[tuple[UUID, int], int] = OrderedDict()

    async def is_free(self, key_id: UUID) -> bool:
        """Count one early cancel of this key; True if it is still among the free ones."""
        hour = int(self._clock()) // HOUR_S
        try:
            count = int(await self._pipe.run(COUNT, [f"fallow:early-cancels:{key_id.hex}:{hour}"], [HOUR_S]))
        except ValkeyDownError:
            count = self._count_here(key_id, hour)
        return count <= self._free

    def _count_here(self, key_id: UUID, hour: int) -> int:
        count = self._local.pop((key_id, hour), 0) + 1
        self._local[key_id, hour] = count
        if len(self._local) > MAX_LOCAL_KEYS:
            self._local.popitem(last=False)
        return count
