"""Early cancels are counted by hour and key, with Valkey and without."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from uuid import UUID, uuid4

from marketplace.core.valkey import ValkeyDownError, ValkeyPipe
from marketplace.gateway.cancels import HOUR_S, EarlyCancels

KEY = UUID(int=1)


class Pipe:
    """Counts as Valkey does, or is away."""

    def __init__(self, *, down: bool = False) -> None:
        self.down = down
        self.counts: dict[str, int] = {}

    async def run(self, script: Any, keys: list[str], args: list[Any]) -> int:
        if self.down:
            raise ValkeyDownError
        self.counts[keys[0]] = self.counts.get(keys[0], 0) + 1
        return self.counts[keys[0]]


def cancels(pipe: Pipe, clock: list[float]) -> EarlyCancels:
    return EarlyCancels(cast("ValkeyPipe", pipe), free_per_hour=2, clock=lambda: clock[0])


class TestEarlyCancels:
    def test_are_free_up_to_a_number_an_hour_and_key(self) -> None:
        async def story(*, down: bool) -> None:
            clock = [10.0 * HOUR_S]
            counted = cancels(Pipe(down=down), clock)
            assert [await counted.is_free(KEY) for _ in range(3)] == [True, True, False]
            assert await counted.is_free(uuid4())
            clock[0] += HOUR_S
            assert await counted.is_free(KEY)

        for down in (False, True):
            asyncio.run(story(down=down))
