"""Valkey: what can be rebuilt. Losing it costs speed, never a job and never a cent.

`ValkeyPipe` gathers the script calls that one turn of the event loop makes into one pipelined round trip: alone a call
costs the client some 300 µs of CPU, in a batch about 100.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from hashlib import sha1
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, RedisError

from marketplace.core.logs import get_logger

log = get_logger(__name__)
RETRY_AFTER_S = 1.0
"""After a failure, calls are refused at once for this long."""
TIMEOUT_S = 0.5
"""A round trip that takes longer counts as a failure: the caller goes on without."""
MAX_BATCH = 256
"""Calls in one pipeline."""


class ValkeyDownError(Exception):
    """Valkey did not answer. Every caller has a way to go on without it."""


class Script:
    """A Lua script and its SHA-1, by which Valkey knows it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = sha1(source.encode(), usedforsecurity=False).hexdigest()


def connect(url: str) -> redis.Redis:
    """A synchronous client that cannot hang: worker and command line."""
    return redis.Redis.from_url(url, socket_timeout=TIMEOUT_S * 4, socket_connect_timeout=TIMEOUT_S * 2)


def connect_async(url: str, *, timeout_s: float = TIMEOUT_S) -> redis.asyncio.Redis:
    """An asynchronous client that cannot hang. Blocking reads need a longer timeout than their own."""
    return redis.asyncio.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=TIMEOUT_S)


class ValkeyPipe:
    """Batches script calls. Not thread-safe: one event loop."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._waiting: list[tuple[Script, Sequence[Any], Sequence[Any], asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None
        self._down_until = 0.0
        self._loaded: set[str] = set()

    @property
    def down(self) -> bool:
        """True while calls are refused without trying."""
        return time.monotonic() < self._down_until

    async def run(self, script: Script, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        """Run a script; returns its reply. Raises ValkeyDownError."""
        if self.down:
            raise ValkeyDownError
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((script, keys, args, future))
        if self._task is None:
            self._task = asyncio.create_task(self._flush())
        return await future

    async def close(self) -> None:
        """Refuse what waits and close the connections."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._client.aclose()

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                await self._send(batch)
        finally:
            self._task = None
            left, self._waiting = self._waiting, []
            _fail(left)

    async def _send(self, batch: list[tuple[Script, Sequence[Any], Sequence[Any], asyncio.Future[Any]]]) -> None:
        try:
            await self._load(batch)
            replies = await self._execute(batch)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                # Valkey was restarted and forgot the scripts; nothing of a NOSCRIPT call has run.
                missing = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
                for source in {batch[i][0].source for i in missing}:
                    await self._client.script_load(source)
                for i, reply in zip(missing, await self._execute([batch[i] for i in missing]), strict=True):
                    replies[i] = reply
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("valkey_down", error=str(error), calls=len(batch))
            self._down_until = time.monotonic() + RETRY_AFTER_S
            _fail(batch)
            return
        except BaseException:
            _fail(batch)
            raise
        for (_, _, _, future), reply in zip(batch, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, Exception):
                log.warning("valkey_script_failed", error=str(reply))
                future.set_exception(ValkeyDownError(str(reply)))
            else:
                future.set_result(reply)

    async def _load(self, batch: list[tuple[Script, Sequence[Any], Sequence[Any], asyncio.Future[Any]]]) -> None:
        """Make scripts known before their first use: one that Valkey does not know would run after the rest of its
        batch, and a slot would be asked for before it is given back."""
        for source in {script.source for script, *_ in batch} - self._loaded:
            await self._client.script_load(source)
            self._loaded.add(source)

    async def _execute(
        self, batch: Sequence[tuple[Script, Sequence[Any], Sequence[Any], asyncio.Future[Any]]]
    ) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for script, keys, args, _ in batch:
            pipeline.evalsha(script.sha, len(keys), *keys, *args)
        return await pipeline.execute(raise_on_error=False)


def _fail(calls: Sequence[tuple[Script, Sequence[Any], Sequence[Any], asyncio.Future[Any]]]) -> None:
    for *_, future in calls:
        if not future.done():
            future.set_exception(ValkeyDownError())
