"""What the queue keeps in Valkey: the list over which a gateway hears of its attempts, and for how long a job has been
stuck. Losing either costs time: a lease that nobody took up ends, and the job waits again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import UUID

import redis
from redis.exceptions import NoScriptError, RedisError

from marketplace.core.valkey import Script, ValkeyDownError

MAX_WAITING: Final = 10_000
"""Attempts on one gateway's list; older ones fall off, their leases long gone."""
STUCK_MEMORY_S: Final = 20.0
"""A job that was not seen stuck for this long starts anew."""

_STUCK: Final = Script("""
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local ages = {}
for i, key in ipairs(KEYS) do
  local first = redis.call('GET', key)
  if first then
    redis.call('PEXPIRE', key, ARGV[1])
    ages[i] = now - first
  else
    redis.call('SET', key, now, 'PX', ARGV[1])
    ages[i] = 0
  end
end
return ages
""")


def dispatch_key(gateway_id: str) -> str:
    """The list that a gateway reads from its left end."""
    return f"fallow:dispatch:{gateway_id}"


def attempt_of(item: bytes) -> UUID | None:
    """The attempt that an item of the list names; None for anything else."""
    try:
        return UUID(hex=item.decode("ascii"))
    except (ValueError, UnicodeDecodeError):
        return None


def push(client: redis.Redis, leased: Iterable[tuple[str, UUID]], *, lease_s: float) -> None:
    """Tell each gateway of its attempts, (gateway, attempt), in order. The list of a dead gateway ends by itself.
    Raises ValkeyDownError."""
    by_gateway: dict[str, list[str]] = {}
    for gateway_id, attempt_id in leased:
        by_gateway.setdefault(gateway_id, []).append(attempt_id.hex)
    if not by_gateway:
        return
    pipeline = client.pipeline(transaction=False)
    for gateway_id, attempts in by_gateway.items():
        key = dispatch_key(gateway_id)
        pipeline.rpush(key, *attempts)
        pipeline.ltrim(key, -MAX_WAITING, -1)
        pipeline.expire(key, max(1, int(lease_s * 2)))
    try:
        pipeline.execute()
    except (RedisError, OSError) as error:
        raise ValkeyDownError(str(error)) from error


def stuck_for_s(client: redis.Redis, job_ids: Sequence[UUID]) -> dict[UUID, float]:
    """For how long each of these jobs has been reported stuck, look after look; 0 at the first.

    Raises ValkeyDownError."""
    if not job_ids:
        return {}
    keys = [f"fallow:stuck:{job_id.hex}" for job_id in job_ids]
    ages = _run(client, _STUCK, keys, [int(STUCK_MEMORY_S * 1000)])
    return {job_id: int(age) / 1000 for job_id, age in zip(job_ids, ages, strict=True)}


def _run(client: redis.Redis, script: Script, keys: list[str], args: list[Any]) -> Any:
    try:
        try:
            return client.evalsha(script.sha, len(keys), *keys, *args)
        except NoScriptError:
            return client.eval(script.source, len(keys), *keys, *args)
    except (RedisError, OSError) as error:
        raise ValkeyDownError(str(error)) from error
