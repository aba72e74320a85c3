"""The limiter without Valkey: the same rules, over what one gateway knows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.accounts import limits
from marketplace.accounts.limits import Bucket, Limiter, LimitState
from marketplace.core.errors import RateLimited
from marketplace.core.valkey import ValkeyDownError


class DownPipe:
    """A Valkey that never answers."""

    async def run(self, *_: Any) -> Any:
        raise ValkeyDownError


@dataclass(frozen=True)
class Key:
    requests_per_minute: int = 60
    parallel_requests: int = 3
    key_id: UUID = field(default_factory=uuid4)


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.limiter = Limiter(DownPipe(), clock=lambda: self.now)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


class TestWithoutValkey:
    def test_requests_at_once_are_still_bounded(self, world: World) -> None:
        key = Key(parallel_requests=3)

        async def act() -> None:
            granted = [await world.limiter.acquire(key) for _ in range(3)]
            with pytest.raises(RateLimited) as caught:
                await world.limiter.acquire(key)
            assert caught.value.details["limit"] == "parallel_requests"
            await world.limiter.release(granted[0])
            await world.limiter.acquire(key)
            await world.limiter.close()

        asyncio.run(act())

    def test_requests_a_minute_are_still_bounded_and_come_back_with_time(self, world: World) -> None:
        key = Key(requests_per_minute=60, parallel_requests=1_000)

        async def act() -> None:
            for _ in range(60):
                await world.limiter.release(await world.limiter.acquire(key))
            with pytest.raises(RateLimited) as caught:
                await world.limiter.acquire(key)
            assert caught.value.details["limit"] == "requests"
            assert caught.value.headers["retry-after"] == "1"
            world.now += 1.0
            await world.limiter.acquire(key)
            await world.limiter.close()

        asyncio.run(act())

    def test_a_refusal_takes_nothing(self, world: World) -> None:
        key = Key(requests_per_minute=60, parallel_requests=1)

        async def act() -> LimitState:
            first = await world.limiter.acquire(key)
            for _ in range(500):
                with pytest.raises(RateLimited):
                    await world.limiter.acquire(key)
            await world.limiter.release(first)
            second = await world.limiter.acquire(key)
            await world.limiter.close()
            return second

        assert asyncio.run(act()).remaining_requests == 58

    def test_releasing_twice_changes_nothing(self, world: World) -> None:
        key = Key(parallel_requests=2)

        async def act() -> None:
            state = await world.limiter.acquire(key)
            await world.limiter.acquire(key)
            await world.limiter.release(state)
            await world.limiter.release(state)
            assert world.limiter.running(key.key_id) == 1
            await world.limiter.close()

        asyncio.run(act())

    def test_keys_do_not_share(self, world: World) -> None:
        async def act() -> None:
            for _ in range(5):
                await world.limiter.acquire(Key(parallel_requests=1))
            await world.limiter.close()

        asyncio.run(act())

    def test_the_memory_of_buckets_is_bounded(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MAX_LOCAL_KEYS", 10)

        async def act() -> None:
            for _ in range(50):
                await world.limiter.release(await world.limiter.acquire(Key()))
            assert len(world.limiter._buckets) == 10
            await world.limiter.close()

        asyncio.run(act())


class TestBucket:
    @given(
        rate=st.integers(1, 1_000),
        steps=st.lists(st.floats(0.0, 30.0, allow_nan=False), min_size=1, max_size=60),
    )
    def test_over_any_time_it_grants_one_minutes_worth_and_what_time_brought(
        self, rate: int, steps: list[float]
    ) -> None:
        bucket, now, granted = Bucket(float(rate), 0.0), 0.0, 0
        for step in steps:
            now += step
            granted += bucket.decide(rate, 1, 0, now).code == 0
            assert 0.0 <= bucket.tokens <= rate
        assert granted <= rate + now * rate / 60.0 + 1e-6

    def test_a_clock_that_steps_back_gives_nothing(self) -> None:
        bucket = Bucket(0.0, 100.0)
        assert bucket.decide(60, 1, 0, 50.0).code == 1
        assert bucket.decide(60, 1, 0, 50.5).code == 1
