"""Slot reservations: leases in Valkey, one sorted set an offer, scored by expiry on Valkey's own clock.

A reservation is advice that keeps gateways from racing for a slot; the agent has the last word. With Valkey away each
gateway counts for itself, and an agent refuses what is one too many, without blame. After Valkey came back empty, the
next renewals write the truth anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final
from uuid import UUID

import redis
from redis.exceptions import NoScriptError, RedisError

from marketplace.core.valkey import Script, ValkeyDownError, ValkeyPipe
from marketplace.fleet.occupancy import Occupancy
from marketplace.matching.rules import DEFAULT_RULES, Rules
from marketplace.matching.types import OfferView, Ranked

CANDIDATES: Final = 8
"""Offers that one round trip considers: the best few, as each costs the gateway a key to write."""
MAX_ROUNDS: Final = 8
"""Round trips before a ranking counts as taken."""

# ARGV: attempt, ttl in ms, how many of the first are tied, slots of each key. Answers {index from 1 or 0, slots taken
# there}. Of the tied ones the emptiest is taken, so that gateways with one old snapshot do not all press on one node.
_RESERVE: Final = Script("""
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local ttl = tonumber(ARGV[2])
local tied = tonumber(ARGV[3])
local best, best_load, best_count = 0, 2, 0
for i, key in ipairs(KEYS) do
  if i > tied and best > 0 then break end
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  local slots = tonumber(ARGV[3 + i])
  local count = redis.call('ZCARD', key)
  if redis.call('ZSCORE', key, ARGV[1]) then
    best, best_count = i, count - 1
    break
  end
  if count < slots and count / slots < best_load then
    best, best_load, best_count = i, count / slots, count
  end
end
if best == 0 then return {0, 0} end
redis.call('ZADD', KEYS[best], now + ttl, ARGV[1])
if redis.call('PTTL', KEYS[best]) < ttl then redis.call('PEXPIRE', KEYS[best], ttl) end
return {best, best_count + 1}
""")

_RENEW: Final = Script("""
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return redis.call('ZCARD', KEYS[1])
""")

_RELEASE: Final = Script("redis.call('ZREM', KEYS[1], ARGV[1]) return redis.call('ZCARD', KEYS[1])")


def slots_key(offer_id: UUID) -> str:
    """Where an offer's reservations are in Valkey."""
    return f"fallow:slots:{offer_id.hex}"


def _reserve_call(
    rules: Rules, offers: Sequence[OfferView], tied: int, attempt_id: UUID, *, ttl_s: float
) -> tuple[list[Any], list[Any]]:
    keys = [slots_key(offer.offer_id) for offer in offers]
    return keys, [attempt_id.bytes, _ms(ttl_s), tied, *(rules.slots_of(offer) for offer in offers)]


def _ms(ttl_s: float) -> int:
    return max(1, int(ttl_s * 1000))


def _rounds(ranked: Ranked) -> Iterator[tuple[Sequence[OfferView], int]]:
    """Slices of a ranking, each with how many of its first are tied."""
    for start in range(0, min(len(ranked.offers), CANDIDATES * MAX_ROUNDS), CANDIDATES):
        yield ranked.offers[start : start + CANDIDATES], max(1, ranked.tied - start)


class Reservations:
    """A gateway's reservations. One event loop. What `rules` grant a node on probation holds over all gateways."""

    def __init__(self, pipe: ValkeyPipe, occupancy: Occupancy, rules: Rules = DEFAULT_RULES) -> None:
        self._pipe = pipe
        self._rules = rules
        self._occupancy = occupancy

    async def reserve(self, offer: OfferView, attempt_id: UUID, ttl_s: float) -> bool:
        """Take one slot of this offer for `ttl_s` seconds. False: none is free. Repeating it renews."""
        return await self._reserve((offer,), 1, attempt_id, ttl_s) is not None

    async def reserve_first(self, ranked: Ranked, attempt_id: UUID, ttl_s: float) -> OfferView | None:
        """Take a slot at the best offer that has one, in one round trip; None: all were taken meanwhile.

        Among the ranking's tied offers the emptiest by live count wins. The pick shows in the view at once, before the
        round trip, so that the next request of this gateway already sees it.
        """
        for offers, tied in _rounds(ranked):
            taken = await self._reserve(offers, tied, attempt_id, ttl_s)
            if taken is not None:
                return taken
        return None

    async def renew(self, offer: OfferView, attempt_id: UUID, ttl_s: float) -> None:
        """The slot is still in use. Writes it anew if Valkey lost it."""
        self._occupancy.take(offer.offer_id, attempt_id, ttl_s)
        try:
            count = await self._pipe.run(_RENEW, [slots_key(offer.offer_id)], [attempt_id.bytes, _ms(ttl_s)])
        except ValkeyDownError:
            return
        self._occupancy.seen(offer.offer_id, int(count))

    async def release(self, offer: OfferView, attempt_id: UUID) -> None:
        """The slot is free. Never raises for a Valkey that is away: the reservation ends by itself then."""
        self._occupancy.drop(offer.offer_id, attempt_id)
        try:
            count = await self._pipe.run(_RELEASE, [slots_key(offer.offer_id)], [attempt_id.bytes])
        except ValkeyDownError:
            return
        self._occupancy.seen(offer.offer_id, int(count))

    async def _reserve(
        self, offers: Sequence[OfferView], tied: int, attempt_id: UUID, ttl_s: float
    ) -> OfferView | None:
        guess = offers[0]
        self._occupancy.take(guess.offer_id, attempt_id, ttl_s)
        keys, args = _reserve_call(self._rules, offers, tied, attempt_id, ttl_s=ttl_s)
        try:
            index, count = (int(figure) for figure in await self._pipe.run(_RESERVE, keys, args))
        except ValkeyDownError:
            self._occupancy.drop(guess.offer_id, attempt_id)
            return self._reserve_locally(offers, tied, attempt_id, ttl_s)
        except BaseException:
            self._occupancy.drop(guess.offer_id, attempt_id)
            raise
        if index != 1:
            self._occupancy.drop(guess.offer_id, attempt_id)
        if index == 0:
            for offer in offers:
                self._occupancy.seen(offer.offer_id, self._rules.slots_of(offer))
            return None
        taken = offers[index - 1]
        self._occupancy.take(taken.offer_id, attempt_id, ttl_s)
        self._occupancy.seen(taken.offer_id, count)
        return taken

    def _reserve_locally(
        self, offers: Sequence[OfferView], tied: int, attempt_id: UUID, ttl_s: float
    ) -> OfferView | None:
        free = [offer for offer in offers if self._occupancy.busy(offer.offer_id) < self._rules.slots_of(offer)]
        if not free:
            return None
        among = [offer for offer in offers[:tied] if offer in free] or free[:1]
        taken = min(among, key=lambda offer: self._occupancy.busy(offer.offer_id) / offer.slots)
        self._occupancy.take(taken.offer_id, attempt_id, ttl_s)
        return taken


class SyncReservations:
    """The worker's twin. Raises ValkeyDownError where the gateway would go on alone: a worker has nobody to ask."""

    def __init__(self, client: redis.Redis, rules: Rules = DEFAULT_RULES) -> None:
        self._client = client
        self._rules = rules

    def reserve(self, offer: OfferView, attempt_id: UUID, ttl_s: float) -> bool:
        """Take one slot of this offer for `ttl_s` seconds. False: none is free. Repeating it renews."""
        keys, args = _reserve_call(self._rules, (offer,), 1, attempt_id, ttl_s=ttl_s)
        return bool(self._run(_RESERVE, keys, args)[0])

    def reserve_first(self, ranked: Ranked, attempt_id: UUID, ttl_s: float) -> OfferView | None:
        """Take a slot at the best offer that has one; None: all were taken meanwhile."""
        for offers, tied in _rounds(ranked):
            keys, args = _reserve_call(self._rules, offers, tied, attempt_id, ttl_s=ttl_s)
            index = int(self._run(_RESERVE, keys, args)[0])
            if index:
                return offers[index - 1]
        return None

    def renew(self, offer_id: UUID, attempt_id: UUID, ttl_s: float) -> None:
        """The slot is still in use."""
        self._run(_RENEW, [slots_key(offer_id)], [attempt_id.bytes, _ms(ttl_s)])

    def release(self, offer_id: UUID, attempt_id: UUID) -> None:
        """The slot is free."""
        self._run(_RELEASE, [slots_key(offer_id)], [attempt_id.bytes])

    def _run(self, script: Script, keys: list[Any], args: list[Any]) -> Any:
        try:
            try:
                return self._client.evalsha(script.sha, len(keys), *keys, *args)
            except NoScriptError:
                return self._client.eval(script.source, len(keys), *keys, *args)
        except (RedisError, OSError) as error:
            raise ValkeyDownError(str(error)) from error
