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
from typing import Any, Final

import hiredis
import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import BusyLoadingError, RedisError

from marketplace.core.logs import get_logger

log = get_logger(__name__)
RETRY_AFTER_S = 1.0
"""After a failure, calls are refused at once for this long."""
TIMEOUT_S = 0.5
"""A round trip that takes longer counts as a failure: the caller goes on without."""
_MORE: Final = object()
"""What the parser answers while a reply is not whole."""
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


class _Line(asyncio.Protocol):
    """A connection that the client has opened and greeted, and whose bytes are ours from then on: commands leave in one
    write, replies are read in the call that brings them, and one timer stands for the round trip."""

    def __init__(self, connection: AbstractConnection) -> None:
        writer = connection._writer
        assert writer is not None
        self._connection = connection
        self._transport = writer.transport
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._asked: asyncio.Future[list[Any]] | None = None
        self._wanted = 0
        self._replies: list[Any] = []
        self.open = True
        self._transport.set_protocol(self)

    async def ask(self, commands: Iterable[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """Send commands together and wait for a reply to each; a refusal is a reply. One caller at a time. Raises
        OSError and TimeoutError, after which the line is of no use."""
        packed = [hiredis.pack_command(command) for command in commands]
        self._wanted, self._replies = len(packed), []
        asked: asyncio.Future[list[Any]] = self._loop.create_future()
        self._asked = asked
        guard = self._loop.call_later(timeout_s, self._fail, TimeoutError())
        self._transport.write(b"".join(packed))
        try:
            return await asked
        finally:
            guard.cancel()
            self._asked = None

    async def close(self) -> None:
        """Drop the connection."""
        self.open = False
        await self._connection.disconnect(nowait=True)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        asked = self._asked
        if asked is None:
            # Nothing was asked: what follows cannot be told apart from replies.
            self.open = False
            return
        try:
            self._reader.feed(data)
            while len(self._replies) < self._wanted:
                reply = self._reader.gets()
                if reply is _MORE:
                    return
                self._replies.append(reply)
        except hiredis.HiredisError as error:
            self._fail(ConnectionError(f"no reply of Valkey's: {error}"))
            return
        if self._reader.has_data():
            self.open = False
        if not asked.done():
            asked.set_result(self._replies)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop."""
        self._fail(error if isinstance(error, OSError) else ConnectionError("Valkey closed the connection"))

    def _fail(self, error: OSError) -> None:
        self.open = False
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(error)


class ValkeyPipe:
    """Batches script calls. Not thread-safe: one event loop."""

    def __init__(self, client: redis.asyncio.Redis, *, timeout_s: float = TIMEOUT_S) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._line: _Line | None = None
        self._waiting: list[_Call] = []
        self._task: asyncio.Task[None] | None = None
        self._rest: asyncio.Future[None] | None = None
        """What the task waits for while there is nothing to send."""
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
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush())
        elif self._rest is not None and not self._rest.done():
            self._rest.set_result(None)
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
        loop = asyncio.get_running_loop()
        try:
            while True:
                while self._waiting:
                    batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                    await self._send(batch)
                self._rest = loop.create_future()
                await self._rest
        finally:
            left, self._waiting = self._waiting, []
            _fail(left)

    async def _send(self, batch: Sequence[_Call]) -> None:
        try:
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
            if isinstance(reply, hiredis.ReplyError):
                log.warning("valkey_script_failed", error=str(reply))
                future.set_exception(ValkeyDownError(str(reply)))
            else:
                future.set_result(reply)

    async def _replies(self, batch: Sequence[_Call]) -> list[Any]:
        line = self._line
        if line is None or not line.open:
            line = await self._connect()
        # Scripts are made known before their first use: one that Valkey does not know would run after the rest of its
        # batch, and a slot would be asked for before it is given back.
        await self._load(line, {script.source for script, *_ in batch} - self._loaded)
        replies = await line.ask(map(_words, batch), self._timeout_s)
        # Valkey was restarted, or told to forget, between the two; nothing of a NOSCRIPT call has run.
        missing = [i for i, reply in enumerate(replies) if _refused(reply, "NOSCRIPT")]
        if missing:
            await self._load(line, {batch[i][0].source for i in missing})
            again = await line.ask([_words(batch[i]) for i in missing], self._timeout_s)
            for i, reply in zip(missing, again, strict=True):
                replies[i] = reply
        if any(_refused(reply, "LOADING") for reply in replies):
            raise BusyLoadingError("Valkey reads its data")
        return replies

    async def _load(self, line: _Line, sources: Iterable[str]) -> None:
        for source in sources:
            await line.ask([("SCRIPT", "LOAD", source)], self._timeout_s)
            self._loaded.add(source)

    async def _connect(self) -> _Line:
        await self._disconnect()
        made: AbstractConnection = self._client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._timeout_s):
                await made.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await made.disconnect(nowait=True)
            raise
        self._line = _Line(made)
        return self._line

    async def _disconnect(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.close()


def _words(call: _Call) -> tuple[Any, ...]:
    script, keys, args, _ = call
    return ("EVALSHA", script.sha, len(keys), *keys, *args)


def _refused(reply: Any, word: str) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(word)


def _fail(calls: Sequence[_Call]) -> None:
    for *_, future in calls:
        if not future.done():
            future.set_exception(ValkeyDownError())
