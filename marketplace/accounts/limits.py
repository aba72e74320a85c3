"""Limits per key: requests a minute, tokens a minute, requests at once. Counted in Valkey: all gateways share them.

Requests a minute are a token bucket that holds one minute's worth. Requests at once are leases in a sorted set: each
ends by itself unless its gateway renews it, so a gateway that dies leaks none. One script decides both, and takes from
neither unless both allow. Without Valkey each gateway goes on with the same rules over what it knows itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from marketplace.core.errors import RateLimited
from marketplace.core.logs import get_logger
from marketplace.core.valkey import Script, ValkeyDownError, ValkeyPipe

log = get_logger(__name__)
LEASE_S: Final = 30.0
"""A parallel slot ends this long after its last renewal."""
RENEW_S: Final = 10.0
RENEW_BATCH: Final = 500
"""Leases of one key in one renewal call."""
MAX_LOCAL_KEYS: Final = 10_000
"""Keys whose bucket a gateway keeps in its own memory while Valkey is away."""
PARALLEL_RETRY_S: Final = 1.0
"""A refusal for too many at once cannot know when one ends; it suggests this."""

ACQUIRE = Script(
    """
    local rate, parallel = tonumber(ARGV[1]), tonumber(ARGV[2])
    local lease, lease_ms = ARGV[3], tonumber(ARGV[4])
    local t = redis.call('TIME')
    local now = t[1] * 1000 + math.floor(t[2] / 1000)
    local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'at')
    local tokens = tonumber(bucket[1]) or rate
    local at = tonumber(bucket[2]) or now
    if now > at then tokens = math.min(rate, tokens + (now - at) * rate / 60000) end
    tokens = math.min(tokens, rate)
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    local running = redis.call('ZCARD', KEYS[2])
    local code = 0
    if tokens < 1 then code = 1 elseif running >= parallel then code = 2 end
    if code == 0 then
        tokens = tokens - 1
        running = running + 1
        redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', tokens), 'at', string.format('%d', now))
        redis.call('PEXPIRE', KEYS[1], 120000)
        redis.call('ZADD', KEYS[2], now + lease_ms, lease)
        redis.call('PEXPIRE', KEYS[2], lease_ms * 2)
    end
    return {code, math.floor(tokens * 1000000), running}
    """
)
"""KEYS: bucket, leases. ARGV: requests a minute, parallel requests, lease, its milliseconds.
Returns code (0 granted, 1 rate, 2 parallel), what the bucket holds in millionths, requests running."""

RENEW = Script(
    """
    local t = redis.call('TIME')
    local now = t[1] * 1000 + math.floor(t[2] / 1000)
    local lease_ms = tonumber(ARGV[1])
    for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + lease_ms, ARGV[i]) end
    redis.call('PEXPIRE', KEYS[1], lease_ms * 2)
    return #ARGV - 1
    """
)
"""Moves the end of leases on, and brings back those that a restarted Valkey forgot."""

TAKE_TOKENS = Script(
    """
    local rate, amount = tonumber(ARGV[1]), tonumber(ARGV[2])
    local t = redis.call('TIME')
    local now = t[1] * 1000 + math.floor(t[2] / 1000)
    local bucket = redis.call('HMGET', KEYS[1], 'model_tokens', 'model_tokens_at')
    local tokens = tonumber(bucket[1]) or rate
    local at = tonumber(bucket[2]) or now
    if now > at then tokens = math.min(rate, tokens + (now - at) * rate / 60000) end
    tokens = math.min(tokens, rate)
    if tokens < amount then return {1, math.floor(tokens)} end
    redis.call('HSET', KEYS[1], 'model_tokens', string.format('%.3f', tokens - amount),
               'model_tokens_at', string.format('%d', now))
    redis.call('PEXPIRE', KEYS[1], 120000)
    return {0, math.floor(tokens - amount)}
    """
)
"""KEYS: bucket. ARGV: tokens a minute, tokens wanted. Returns code (0 granted, 1 too few), what the bucket holds."""

RELEASE = Script(
    """
    redis.call('ZREM', KEYS[2], ARGV[1])
    local back = {{'tokens', tonumber(ARGV[2]), tonumber(ARGV[3])},
                  {'model_tokens', tonumber(ARGV[4]), tonumber(ARGV[5])}}
    for _, entry in ipairs(back) do
        if entry[2] > 0 then
            local held = redis.call('HGET', KEYS[1], entry[1])
            if held then
                redis.call('HSET', KEYS[1], entry[1],
                           string.format('%.6f', math.min(entry[3], tonumber(held) + entry[2])))
            end
        end
    end
    return 1
    """
)
"""KEYS: bucket, leases. ARGV: lease; requests to give back, requests a minute; tokens to give back, tokens a minute."""


class Limited(Protocol):
    """What the limiter must know of a caller; a Principal has it."""

    @property
    def key_id(self) -> UUID: ...
    @property
    def requests_per_minute(self) -> int: ...
    @property
    def parallel_requests(self) -> int: ...


@dataclass(slots=True)
class LimitState:
    """A granted request: give it to `release` when it ends."""

    key_id: UUID
    lease: str
    limit_requests: int
    remaining_requests: int
    reset_s: float
    """Until the bucket is full again."""
    tokens: TokenState | None = None
    """Of a key whose tokens a minute are limited, once it took some."""

    def headers(self) -> dict[str, str]:
        """OpenAI's rate-limit headers."""
        headers = _headers(self.limit_requests, self.remaining_requests, self.reset_s)
        return {**headers, **self.tokens.headers()} if self.tokens is not None else headers


@dataclass(frozen=True, slots=True)
class TokenState:
    """Tokens taken for a request: what it turns out not to need goes back."""

    taken: int
    limit: int
    remaining: int

    def headers(self) -> dict[str, str]:
        """OpenAI's rate-limit headers."""
        return {
            "x-ratelimit-limit-tokens": str(self.limit),
            "x-ratelimit-remaining-tokens": str(self.remaining),
            "x-ratelimit-reset-tokens": f"{(self.limit - self.remaining) * 60.0 / self.limit:.3f}s",
        }


class RequestTooLargeForKey(RateLimited):
    """Not even a full bucket would do: waiting cannot help."""

    code = "tokens_limit_too_small"
    retryable = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What a bucket and the running requests allow. `code`: 0 granted, 1 over the rate, 2 too many at once."""

    code: int
    tokens: float
    """What the bucket holds afterwards."""
    running: int


@dataclass(slots=True)
class Bucket:
    """A token bucket in this process's memory, with the script's arithmetic."""

    tokens: float
    at_s: float

    def take(self, rate: int, amount: int, now_s: float) -> bool:
        """Refill to now and take so many, or nothing."""
        self._refill(rate, now_s)
        if self.tokens < amount:
            return False
        self.tokens -= amount
        return True

    def give_back(self, rate: int, amount: int) -> None:
        """Take back what was not needed."""
        self.tokens = min(float(rate), self.tokens + amount)

    def _refill(self, rate: int, now_s: float) -> None:
        self.tokens = min(float(rate), self.tokens + max(0.0, now_s - self.at_s) * rate / 60.0)
        self.at_s = now_s

    def decide(self, rate: int, parallel: int, running: int, now_s: float) -> Decision:
        """Refill to now and take one token, unless the rate or the requests running forbid it."""
        self._refill(rate, now_s)
        if self.tokens < 1.0:
            return Decision(1, self.tokens, running)
        if running >= parallel:
            return Decision(2, self.tokens, running)
        self.tokens -= 1.0
        return Decision(0, self.tokens, running + 1)


class Limiter:
    """Grants requests and takes them back. One event loop. A task renews the leases while any is held."""

    def __init__(self, pipe: ValkeyPipe, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe = pipe
        self._clock = clock
        self._held: dict[UUID, set[str]] = {}
        self._buckets: OrderedDict[tuple[UUID, str], Bucket] = OrderedDict()
        self._renewal: asyncio.Task[None] | None = None

    async def acquire(self, principal: Limited) -> LimitState:
        """Count one request of this key, for as long as it runs.

        Raises RateLimited (with Retry-After and x-ratelimit headers) over either limit; a refusal takes nothing.
        """
        lease = secrets.token_hex(8)
        try:
            decision = await self._decide(principal, lease)
        except asyncio.CancelledError:
            # The question may be on its way: what it takes is given back behind it.
            lost = LimitState(principal.key_id, lease, principal.requests_per_minute, 0, 0.0)
            await self._give_back(lost, requests=1, tokens=0)
            raise
        if decision.code:
            raise _limited(principal, decision)
        self._hold(principal.key_id, lease)
        rate = principal.requests_per_minute
        remaining, reset_s = _remaining(rate, decision.tokens)
        return LimitState(principal.key_id, lease, rate, remaining, reset_s)

    async def take_tokens(self, state: LimitState, limit: int, wanted: int, least: int) -> None:
        """Count `wanted` tokens of a granted request against `limit` a minute: at most as much as the limit itself, but
        never less than `least`, which the request needs in any case.

        Raises RateLimited, and RequestTooLargeForKey where the bucket could never hold it; a refusal takes nothing.
        """
        amount = max(min(wanted, limit), least)
        if amount > limit:
            raise RequestTooLargeForKey(
                f"This request may need {amount} tokens, and this key may use {limit} a minute.", limit="tokens"
            )
        granted, remaining = await self._take(state.key_id, limit, amount)
        if not granted:
            raise _too_many_tokens(limit, amount, remaining)
        state.tokens = TokenState(amount, limit, remaining)

    async def release(self, state: LimitState, *, refused: bool = False, used_tokens: int = 0) -> None:
        """The request ended. `refused`: it ran nothing, so it gives back all that it took; else only the tokens that it
        did not use. Never raises for Valkey's sake; doing it twice changes nothing."""
        if self._let_go(state.key_id, state.lease):
            tokens = 0
            if state.tokens is not None:
                tokens = state.tokens.taken if refused else max(state.tokens.taken - used_tokens, 0)
            await self._give_back(state, requests=1 if refused else 0, tokens=tokens)

    def running(self, key_id: UUID) -> int:
        """Requests of this key that run in this gateway."""
        return len(self._held.get(key_id, ()))

    async def close(self) -> None:
        """Stop renewing."""
        if self._renewal is not None:
            self._renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewal
            self._renewal = None

    async def _decide(self, principal: Limited, lease: str) -> Decision:
        rate, parallel = principal.requests_per_minute, principal.parallel_requests
        bucket_key, leases_key = _keys(principal.key_id)
        try:
            code, millionths, running = await self._pipe.run(
                ACQUIRE, [bucket_key, leases_key], [rate, parallel, lease, int(LEASE_S * 1000)]
            )
        except ValkeyDownError:
            bucket = self._bucket(principal.key_id, "requests", rate)
            return bucket.decide(rate, parallel, self.running(principal.key_id), self._clock())
        return Decision(int(code), int(millionths) / 1_000_000, int(running))

    async def _take(self, key_id: UUID, limit: int, amount: int) -> tuple[bool, int]:
        try:
            code, remaining = await self._pipe.run(TAKE_TOKENS, [_keys(key_id)[0]], [limit, amount])
        except ValkeyDownError:
            bucket = self._bucket(key_id, "tokens", limit)
            return bucket.take(limit, amount, self._clock()), math.floor(bucket.tokens)
        return not int(code), int(remaining)

    def _bucket(self, key_id: UUID, kind: str, rate: int) -> Bucket:
        bucket = self._buckets.get((key_id, kind))
        if bucket is None:
            bucket = self._buckets[key_id, kind] = Bucket(float(rate), self._clock())
            if len(self._buckets) > MAX_LOCAL_KEYS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end((key_id, kind))
        return bucket

    def _hold(self, key_id: UUID, lease: str) -> None:
        self._held.setdefault(key_id, set()).add(lease)
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())

    def _let_go(self, key_id: UUID, lease: str) -> bool:
        leases = self._held.get(key_id)
        if leases is None or lease not in leases:
            return False
        leases.remove(lease)
        if not leases:
            del self._held[key_id]
        return True

    async def _give_back(self, state: LimitState, *, requests: int, tokens: int) -> None:
        token_limit = state.tokens.limit if state.tokens is not None else 0
        args = [state.lease, requests, state.limit_requests, tokens, token_limit]
        try:
            await self._pipe.run(RELEASE, _keys(state.key_id), args)
        except ValkeyDownError:
            for kind, rate, amount in (("requests", state.limit_requests, requests), ("tokens", token_limit, tokens)):
                bucket = self._buckets.get((state.key_id, kind))
                if bucket is not None and amount:
                    bucket.give_back(rate, amount)

    async def _renew(self) -> None:
        while self._held:
            await asyncio.sleep(RENEW_S)
            await self.renew_now()

    async def renew_now(self) -> None:
        """Move the end of all held leases on. Failures are left to the next round: a lease bears two of them."""
        outcomes = await asyncio.gather(*map(self._renew_key, list(self._held)), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed:
            log.warning("limit_renewal_failed", error=repr(failed[0]), keys=len(failed))

    async def _renew_key(self, key_id: UUID) -> None:
        known = list(self._held.get(key_id, ()))
        for start in range(0, len(known), RENEW_BATCH):
            # Looked at in the same turn in which the call enters the pipe: a release made later arrives later.
            held = self._held.get(key_id, set())
            leases = [lease for lease in known[start : start + RENEW_BATCH] if lease in held]
            if leases:
                await self._pipe.run(RENEW, [_keys(key_id)[1]], [int(LEASE_S * 1000), *leases])


def _keys(key_id: UUID) -> tuple[str, str]:
    # The braces keep both keys of one API key in one slot of a cluster.
    return f"fallow:limit:{{{key_id.hex}}}:rate", f"fallow:limit:{{{key_id.hex}}}:running"


def _remaining(rate: int, tokens: float) -> tuple[int, float]:
    return math.floor(tokens), max(0.0, (rate - tokens) * 60.0 / rate)


def _headers(limit: int, remaining: int, reset_s: float) -> dict[str, str]:
    return {
        "x-ratelimit-limit-requests": str(limit),
        "x-ratelimit-remaining-requests": str(remaining),
        "x-ratelimit-reset-requests": f"{reset_s:.3f}s",
    }


def _too_many_tokens(limit: int, amount: int, remaining: int) -> RateLimited:
    wait_s = max(0.001, (amount - remaining) * 60.0 / limit)
    headers = TokenState(0, limit, remaining).headers()
    headers["retry-after"] = str(math.ceil(wait_s))
    headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    message = (
        f"This key may use {limit} tokens a minute; {remaining} are left, and this request may need {amount}. "
        f"Try again in {wait_s:.1f} s, or lower max_tokens."
    )
    return RateLimited(message, headers=headers, limit="tokens")


def _limited(principal: Limited, decision: Decision) -> RateLimited:
    rate, parallel = principal.requests_per_minute, principal.parallel_requests
    remaining, reset_s = _remaining(rate, decision.tokens)
    if decision.code == 1:
        wait_s = max(0.001, (1.0 - decision.tokens) * 60.0 / rate)
        message = f"This key may make {rate} requests a minute; the next is possible in {wait_s:.1f} s."
    else:
        wait_s = PARALLEL_RETRY_S
        message = f"This key may run {parallel} requests at once, and {decision.running} are running."
    headers = _headers(rate, remaining, reset_s)
    headers["retry-after"] = str(math.ceil(wait_s))
    headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    return RateLimited(message, headers=headers, limit="requests" if decision.code == 1 else "parallel_requests")
