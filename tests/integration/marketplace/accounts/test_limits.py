"""The limiter on a real Valkey, with two gateways, and through its loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import pytest
import redis

from marketplace.accounts import limits
from marketplace.accounts.limits import Limiter, LimitState
from marketplace.core.errors import RateLimited
from marketplace.core.valkey import ValkeyPipe, connect_async


@dataclass(frozen=True)
class Key:
    requests_per_minute: int = 600
    parallel_requests: int = 3
    key_id: UUID = field(default_factory=uuid4)


def play(valkey_url: str, act: Callable[[Limiter, Limiter], Awaitable[None]]) -> None:
    """Run with the limiters of two gateways on one Valkey."""

    async def run() -> None:
        pipes = [ValkeyPipe(connect_async(valkey_url)) for _ in range(2)]
        limiters = [Limiter(pipe) for pipe in pipes]
        try:
            await act(limiters[0], limiters[1])
        finally:
            for limiter in limiters:
                await limiter.close()
            for pipe in pipes:
                await pipe.close()

    asyncio.run(run())


async def grants(limiter: Limiter, key: Key, tries: int) -> list[LimitState]:
    outcomes = await asyncio.gather(*(limiter.acquire(key) for _ in range(tries)), return_exceptions=True)
    assert all(isinstance(outcome, LimitState | RateLimited) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, LimitState)]


class TestAtOnce:
    def test_gateways_share_the_slots_of_a_key(self, valkey_url: str) -> None:
        key = Key(parallel_requests=3)

        async def act(one: Limiter, two: Limiter) -> None:
            states = await asyncio.gather(grants(one, key, 20), grants(two, key, 20))
            assert sum(map(len, states)) == 3
            with pytest.raises(RateLimited) as caught:
                await one.acquire(key)
            assert caught.value.status == 429
            assert caught.value.details["limit"] == "parallel_requests"
            assert int(caught.value.headers["retry-after"]) >= 1
            for limiter, granted in zip((one, two), states, strict=True):
                for state in granted:
                    await limiter.release(state)
            assert len(await grants(two, key, 10)) == 3

        play(valkey_url, act)

    def test_a_gateway_that_died_leaks_no_slot(self, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "LEASE_S", 0.3)
        key = Key(parallel_requests=2)

        async def act(one: Limiter, two: Limiter) -> None:
            assert len(await grants(one, key, 5)) == 2
            await one.close()
            assert await grants(two, key, 1) == []
            await asyncio.sleep(0.35)
            assert len(await grants(two, key, 5)) == 2

        play(valkey_url, act)

    def test_a_long_request_keeps_its_slot(self, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "LEASE_S", 0.4)
        monkeypatch.setattr(limits, "RENEW_S", 0.1)
        key = Key(parallel_requests=1)

        async def act(one: Limiter, two: Limiter) -> None:
            state = await one.acquire(key)
            await asyncio.sleep(1.0)
            assert await grants(two, key, 1) == []
            await one.release(state)
            assert len(await grants(two, key, 1)) == 1

        play(valkey_url, act)

    def test_a_released_slot_is_not_brought_back_by_a_renewal(self, valkey_url: str) -> None:
        key = Key(parallel_requests=1)

        async def act(one: Limiter, two: Limiter) -> None:
            for _ in range(50):
                state = await one.acquire(key)
                await asyncio.gather(one.renew_now(), one.release(state))
            assert len(await grants(two, key, 1)) == 1

        play(valkey_url, act)

    def test_a_caller_that_is_cancelled_while_it_asks_leaves_nothing(self, valkey_url: str) -> None:
        key = Key(parallel_requests=1)

        async def act(one: Limiter, two: Limiter) -> None:
            task = asyncio.create_task(one.acquire(key))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert one.running(key.key_id) == 0
            assert len(await grants(two, key, 1)) == 1

        play(valkey_url, act)


class TestAMinute:
    def test_gateways_share_the_minute_of_a_key(self, valkey_url: str) -> None:
        key = Key(requests_per_minute=30, parallel_requests=1_000)

        async def act(one: Limiter, two: Limiter) -> None:
            states = await asyncio.gather(grants(one, key, 40), grants(two, key, 40))
            # What time brings back meanwhile is half a request a second.
            assert 30 <= sum(map(len, states)) <= 32
            with pytest.raises(RateLimited) as caught:
                await one.acquire(key)
            headers = caught.value.headers
            assert headers["x-ratelimit-limit-requests"] == "30"
            assert headers["x-ratelimit-remaining-requests"] == "0"
            assert 1 <= int(headers["retry-after"]) <= 2
            assert caught.value.details["limit"] == "requests"

        play(valkey_url, act)

    def test_the_bucket_refills_with_time(self, valkey_url: str) -> None:
        key = Key(requests_per_minute=600, parallel_requests=2_000)

        async def act(one: Limiter, _: Limiter) -> None:
            assert 600 <= len(await grants(one, key, 1_000)) < 650
            await asyncio.sleep(0.35)
            assert len(await grants(one, key, 3)) == 3

        play(valkey_url, act)

    def test_what_was_refused_for_another_reason_costs_no_quota(self, valkey_url: str) -> None:
        key = Key(requests_per_minute=60, parallel_requests=1)

        async def act(one: Limiter, _: Limiter) -> None:
            state = await one.acquire(key)
            assert state.remaining_requests == 59
            assert await grants(one, key, 200) == []
            await one.release(state)
            assert (await one.acquire(key)).remaining_requests >= 58

        play(valkey_url, act)

    def test_a_granted_request_says_what_is_left(self, valkey_url: str) -> None:
        key = Key(requests_per_minute=60)

        async def act(one: Limiter, _: Limiter) -> None:
            headers = (await one.acquire(key)).headers()
            assert headers["x-ratelimit-limit-requests"] == "60"
            assert headers["x-ratelimit-remaining-requests"] == "59"
            assert headers["x-ratelimit-reset-requests"].endswith("s")

        play(valkey_url, act)


class TestLosingValkey:
    def test_a_valkey_that_forgot_everything_learns_what_is_running(self, valkey_url: str) -> None:
        key = Key(parallel_requests=2)

        async def act(one: Limiter, two: Limiter) -> None:
            assert len(await grants(one, key, 5)) == 2
            with redis.Redis.from_url(valkey_url) as client:
                client.flushall()
                client.script_flush()
            await one.renew_now()
            assert await grants(two, key, 5) == []

        play(valkey_url, act)

    def test_a_valkey_that_is_away_costs_no_request(self) -> None:
        key = Key(parallel_requests=2)

        async def act(one: Limiter, _: Limiter) -> None:
            granted = await grants(one, key, 5)
            assert len(granted) == 2
            for state in granted:
                await one.release(state)
            assert len(await grants(one, key, 5)) == 2
            await one.renew_now()

        play("redis://127.0.0.1:1/0", act)

    def test_keys_in_valkey_end_by_themselves(self, valkey_url: str) -> None:
        key = Key()

        async def act(one: Limiter, _: Limiter) -> None:
            await one.acquire(key)
            with redis.Redis.from_url(valkey_url) as client:
                found = list(client.scan_iter("fallow:limit:*"))
                assert len(found) == 2
                assert all(0 < client.ttl(name) <= 120 for name in found)

        play(valkey_url, act)
