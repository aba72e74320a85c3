"""Valkey: what can be rebuilt. Losing it costs speed, never a job and never a cent.

`ValkeyPipe` gathers the script calls that one turn of the event loop makes into one pipelined round trip, on a
connection of its own: the client's pool, its timeout around each reply and its packing cost more than the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from hashlib import sha1
from typing import Any

import hiredis
import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from marketplace.core.logs import get_logger

log = get_logger(__name__)
RETRY_AFTER_S = 1.0
"""After a failure, calls are refused at once for this long."""
TIMEOUT_S = 0.5
"""A round trip that takes longer counts as a failure: the caller goes on without."""
MAX_BATCH = 256
"""Calls in one pipeline."""
MAX_WAITING = 20_000
"""Calls that wait for their turn; beyond them callers go on without, as when Valkey is away."""


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


_Call = tuple[Script, Sequence[Any], Sequence[Any], "asyncio.Future[Any]"]
"""A script with its keys and arguments, and who waits for the reply."""


class ValkeyPipe:
    """Batches script calls. Not thread-safe: one event loop."""

    def __init__(self, client: redis.asyncio.Redis, *, timeout_s: float = TIMEOUT_S) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._connection: AbstractConnection | None = None
        self._waiting: list[_Call] = []
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
        if len(self._waiting) >= MAX_WAITING:
            raise ValkeyDownError("too many calls wait")
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
        await self._disconnect()
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

    async def _send(self, batch: Sequence[_Call]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                replies = await self._replies(batch)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("valkey_down", error=str(error) or type(error).__name__, calls=len(batch))
            self._down_until = time.monotonic() + RETRY_AFTER_S
            _fail(batch)
            # Replies that still come would be taken for those of the next batch.
            await self._disconnect()
            return
        except BaseException:
            _fail(batch)
            await self._disconnect()
            raise
        for (_, _, _, future), reply in zip(batch, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, Exception):
                log.warning("valkey_script_failed", error=str(reply))
                future.set_exception(ValkeyDownError(str(reply)))
            else:
                future.set_result(reply)

    async def _replies(self, batch: Sequence[_Call]) -> list[Any]:
        connection = await self._connected()
        # Scripts are made known before their first use: one that Valkey does not know would run after the rest of its
        # batch, and a slot would be asked for before it is given back.
        await self._load(connection, {script.source for script, *_ in batch} - self._loaded)
        replies = await _round_trip(connection, map(_words, batch))
        # Valkey was restarted, or told to forget, between the two; nothing of a NOSCRIPT call has run.
        missing = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:
            await self._load(connection, {batch[i][0].source for i in missing})
            for i, reply in zip(
                missing, await _round_trip(connection, [_words(batch[i]) for i in missing]), strict=True
            ):
                replies[i] = reply
        return replies

    async def _load(self, connection: AbstractConnection, sources: Iterable[str]) -> None:
        for source in sources:
            await _round_trip(connection, [("SCRIPT", "LOAD", source)])
            self._loaded.add(source)

    async def _connected(self) -> AbstractConnection:
        connection = self._connection
        if connection is not None and await connection.can_read():
            # Nothing was asked: Valkey closed it, while it restarted say.
            await self._disconnect()
            connection = None
        if connection is None:
            made: AbstractConnection = self._client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
            # One timeout stands around the whole round trip instead.
            made.socket_timeout = None
            connection = self._connection = made
        if not connection.is_connected:
            await connection.connect()  # type: ignore[no-untyped-call]
        return connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)


def _words(call: _Call) -> tuple[Any, ...]:
    script, keys, args, _ = call
    return ("EVALSHA", script.sha, len(keys), *keys, *args)


async def _round_trip(connection: AbstractConnection, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Send commands together and read a reply to each; a refusal is a reply."""
    packed = [hiredis.pack_command(command) for command in commands]
    await connection.send_packed_command(packed, check_health=False)
    replies: list[Any] = []
    for _ in packed:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies


def _fail(calls: Sequence[_Call]) -> None:
    for *_, future in calls:
        if not future.done():
            future.set_exception(ValkeyDownError())
