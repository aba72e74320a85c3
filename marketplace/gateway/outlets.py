"""Where an answer goes: to a client as a stream, to a client whole, or to the job's row.

An outlet pumps the pieces of an attempt until it ends, says how much of it counts as delivered, and shows the end. It
never decides who pays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from agent.protocol import Tokens
from marketplace.core.errors import FallowError
from marketplace.core.logs import get_logger
from marketplace.gateway import sse
from marketplace.gateway.answer import Extra, read_extra
from marketplace.gateway.attempt import AttemptRun
from marketplace.gateway.http import Body, Header, Send, send_error, send_json
from marketplace.gateway.outcomes import Ending, moves_on
from marketplace.gateway.surface import Writer

log = get_logger(__name__)
MAX_WRITE_BYTES = 64 * 1024
"""Chunks are gathered up to this into one write."""
SILENCE_S = 3_600.0
"""A whole answer breaks no silence; whoever waits looks again after this."""
STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Outlet(Protocol):
    """What an execution needs of wherever its answer goes."""

    @property
    def exposed(self) -> bool:
        """True once somebody may have read a part of the answer: no other node may start it again."""
        ...

    def delivered(self, run: AttemptRun) -> Sequence[Tokens]:
        """The pieces that count as delivered."""
        ...

    async def pump(self, run: AttemptRun) -> None:
        """Move pieces until the attempt has ended and nothing of it is left to move."""
        ...

    def tick(self, now: float, run: AttemptRun | None) -> None:
        """Look at the clock; must not block."""
        ...

    async def keep_alive(self, now: float) -> float | None:
        """Called while no attempt runs: break the silence if that is due. Returns when it is due next; None: the client
        takes nothing and was cut."""
        ...


class WholeOutlet:
    """Keeps the answer until it is whole: for answers that are not streamed, and for queued jobs.

    What was accepted when it ends early counts as delivered, since the engine did the work on the client's word.
    """

    exposed = False

    def delivered(self, run: AttemptRun) -> Sequence[Tokens]:
        return run.pieces

    async def pump(self, run: AttemptRun) -> None:
        run.eager = False
        while run.ending is None:
            await run.wait()

    def tick(self, now: float, run: AttemptRun | None) -> None:
        """A whole answer has nothing to say before its end."""

    async def keep_alive(self, now: float) -> float | None:
        return now + SILENCE_S


class JsonOutlet(WholeOutlet):
    """One JSON object over HTTP."""

    def __init__(self, send: Send, headers: list[Header]) -> None:
        self._send = send
        self.headers = headers

    async def finish(self, body: dict[str, Any]) -> None:
        """Send the whole answer."""
        await send_json(self._send, 200, body, self.headers)

    async def fail(self, error: FallowError) -> None:
        """Send an error instead."""
        await send_error(self._send, error, self.headers)


class StreamOutlet:
    """Server-sent events. Headers wait for the first token or `header_wait_s`, so that a refusal keeps its status."""

    def __init__(
        self,
        send: Send,
        headers: list[Header],
        writers: Sequence[Writer],
        *,
        header_wait_s: float,
        keepalive_s: float,
        slow_reader_s: float,
        now: float,
        body: Body | None = None,
    ) -> None:
        """`writers`: one a choice."""
        self._asgi_send = send
        self.headers = headers
        self._writers = writers
        self._keepalive_s = keepalive_s
        self._slow_reader_s = slow_reader_s
        self._body = body
        """Takes pieces without waking anybody, where the server has one."""
        self._started = False
        self._sent = 0
        """Pieces of the current attempt that were handed to the server and taken."""
        self._due_at = now + header_wait_s
        """When silence must be broken next."""
        self._due = False
        self._sending_since: float | None = None
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self.cut = False
        """The client took nothing for too long; nothing more is sent."""
        self.exposed = False

    def delivered(self, run: AttemptRun) -> Sequence[Tokens]:
        return run.pieces[: self._sent]

    async def pump(self, run: AttemptRun) -> None:
        self._sent = 0
        run.direct = self._send_now if self._body is not None else None
        pieces = run.pieces
        while True:
            if len(pieces) > self._sent and self._wanted(run):
                count, chunks = self._next_chunks(pieces)
                # Before the first byte leaves: whoever asks meanwhile must not start the answer again.
                self.exposed = True
                if not await self._write(chunks):
                    run.stop(Ending.SLOW_READER)
                    return
                self._sent = count
            elif run.ending is not None:
                return
            elif self._due:
                self._due = False
                if not await self._write(sse.KEEPALIVE):
                    run.stop(Ending.SLOW_READER)
            else:
                await run.wait()

    def _send_now(self, piece: Tokens) -> bool:
        """Hand the newest piece to the server in the call that brought it: waking the pump for it would cost more than
        all else that is done with a piece. False: the pump must, since nothing was sent yet or the client is slow."""
        body = self._body
        if body is None or not self._started or self.cut or not body.writable:
            return False
        self.exposed = True
        chunk = chunk_of(self._writers[piece.choice], piece)
        if chunk:
            body.write(chunk)
            self._due_at = self._loop.time() + self._keepalive_s
        self._sent += 1
        return True

    def tick(self, now: float, run: AttemptRun | None) -> None:
        since = self._sending_since
        if since is not None:
            if now - since > self._slow_reader_s and not self.cut:
                self.cut = True
                assert self._task is not None
                # The task hangs in send: this is what gets it out (see _write).
                self._task.cancel()
        elif now >= self._due_at and run is not None:
            self._due = True
            run.wake()

    async def keep_alive(self, now: float) -> float | None:
        if now >= self._due_at and not await self._write(sse.KEEPALIVE):
            return None
        return self._due_at

    def note_checks(self, checks: Sequence[dict[str, Any] | None]) -> None:
        """What was found of the schema that the answer is to follow, choice by choice."""
        note_checks(self._writers, checks)

    async def finish(self, reasons: Sequence[str], usage: dict[str, Any] | None, provider: dict[str, Any]) -> None:
        """Send the finish chunk of each choice, the last of which says who served the answer, usage if it was asked
        for, and [DONE]."""
        await self._write(end_of(self._writers, reasons, usage, provider), last=True)

    async def fail(self, error: FallowError) -> None:
        """Before the headers, an error of its own status; after them, an error event and the end of the stream."""
        if self.cut:
            return
        if not self._started:
            await send_error(self._asgi_send, error, self.headers)
            return
        await self._write(sse.error_event(error.body()), last=True)

    def _wanted(self, run: AttemptRun) -> bool:
        """Pieces that came before an ending still go out, unless nobody reads, or another node may start over."""
        ending = run.ending
        if ending is None:
            return True
        if ending in (Ending.CANCELLED, Ending.SLOW_READER, Ending.LEASE_LOST):
            return False
        return not moves_on(ending, exposed=self.exposed, accepted=bool(run.token_count))

    def _next_chunks(self, pieces: Sequence[Tokens]) -> tuple[int, bytes]:
        """What is written next: how many pieces are then sent, and their chunks. Bounded, since the server takes any
        write whole before it makes the next one wait for the client."""
        position, total = self._sent, len(pieces)
        writers, piece = self._writers, pieces[position]
        first = chunk_of(writers[piece.choice], piece)
        position += 1
        if position == total:
            return position, first
        parts = [first]
        size = len(first)
        while position < total and size < MAX_WRITE_BYTES:
            piece = pieces[position]
            chunk = chunk_of(writers[piece.choice], piece)
            parts.append(chunk)
            size += len(chunk)
            position += 1
        return position, b"".join(parts)

    async def _write(self, body: bytes, *, last: bool = False) -> bool:
        """Send bytes; False if the client was cut because it took nothing."""
        if self.cut:
            return False
        now = self._loop.time()
        self._sending_since = now
        self._due_at = now + self._keepalive_s
        try:
            if not self._started:
                self._started = True
                headers = [*STREAM_HEADERS, *self.headers]
                await self._asgi_send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._asgi_send({"type": "http.response.body", "body": body, "more_body": not last})
        except asyncio.CancelledError:
            if not self._was_cut():
                raise
            return False
        finally:
            self._sending_since = None
        return True

    def _was_cut(self) -> bool:
        """True if the cancellation came from `tick`, and is taken back now."""
        if self.cut and self._task is not None:
            self._task.uncancel()
        return self.cut


def chunk_of(writer: Writer, piece: Tokens) -> bytes:
    """The bytes of one piece in a stream; none for a piece that says nothing. Raises BadExtraError."""
    if piece.extra:
        return _extra_chunk(writer, piece, read_extra(piece.extra))
    if piece.reasoning:
        return writer.reasoning(piece.text) if piece.text else b""
    return writer.text(piece.text) if piece.text else b""


def _extra_chunk(writer: Writer, piece: Tokens, extra: Extra) -> bytes:
    members: dict[str, Any] = {}
    if piece.text or extra.logprobs is not None:
        members["reasoning_content" if piece.reasoning else "content"] = piece.text
    if extra.tool_calls:
        members["tool_calls"] = extra.tool_calls
    return writer.delta(members, extra.logprobs)


def note_checks(writers: Sequence[Writer], checks: Sequence[dict[str, Any] | None]) -> None:
    """Let the finish chunks tell what was found of the schema; none was looked at, or none is to be told: nothing."""
    for writer, check in zip(writers, checks, strict=False):
        if check is not None:
            writer.note_check(check)


def end_of(
    writers: Sequence[Writer], reasons: Sequence[str], usage: dict[str, Any] | None, provider: dict[str, Any]
) -> bytes:
    """What ends a complete stream: a finish chunk a choice, the last with who served it, usage if asked, [DONE]."""
    tail = sse.with_provider(
        b"".join([writer.finish(reason) for writer, reason in zip(writers, reasons, strict=True)]), provider
    )
    if usage is not None:
        tail += writers[0].usage(usage)
    return tail + sse.DONE


def abort_connection(send: Send) -> None:
    """Drop a connection whose client does not read: closing it in order would wait for that client.

    ASGI has no word for it; uvicorn's `send` is a method of an object that knows the transport.
    """
    abort = getattr(getattr(getattr(send, "__self__", None), "transport", None), "abort", None)
    if callable(abort):
        abort()
    else:
        log.warning("cannot_abort_connection")
