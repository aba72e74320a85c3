"""The group-committing writer of the hot path: many callers' records, one durable statement.

One thread with a connection of its own. When it is idle a record goes at once; what queues while a batch commits goes
together as the next one. Every record may be sent twice without harm, so a lost connection is answered by sending the
batch again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import msgspec
import psycopg
from sqlalchemy.orm import Session

from marketplace.core.errors import FallowError, Unavailable
from marketplace.core.logs import get_logger
from marketplace.jobs.endings import MAX_ATTEMPTS, MAX_PREEMPTIONS
from marketplace.jobs.hot import (
    Admit,
    Admitted,
    Checkpoint,
    Checkpointed,
    Close,
    Closed,
    Lease,
    Leased,
    Refused,
)

log = get_logger(__name__)

Record = Admit | Lease | Checkpoint | Close | Refused
Answer = Admitted | Leased | Checkpointed | Closed | None

MAX_BATCH = 1_024
"""Records in one statement."""
MAX_BATCH_TEXT_BYTES = 8 * 1024 * 1024
"""A batch with this much of bodies and results takes no further record."""
MAX_WAITING = 20_000
"""Records in the queue; beyond them callers are refused at once."""
PATIENCE_S = 5.0
"""A record that could not be written for this long is given up."""
ANSWER_TIMEOUT_S = 15.0
"""A caller waits no longer, whatever the thread is stuck in."""
STATEMENT_TIMEOUT_MS = 4_000
LOCK_TIMEOUT_MS = 250
"""A record that waits longer for a row steps aside, so that the others go on."""
ASIDE_PAUSE_S = 0.02
BUSY_RECORDS_PER_S = 500.0
"""Above this rate a batch waits LINGER_S for company: a commit shared by more costs each less."""
LINGER_S = 0.002
PACE_WINDOW_S = 0.25
RECONNECT_S = (0.02, 0.1, 0.25, 0.5)
"""Pauses between tries to reach the database; the last one repeats."""

_OPTIONS = f"-c timezone=UTC -c statement_timeout={STATEMENT_TIMEOUT_MS} -c lock_timeout={LOCK_TIMEOUT_MS}"
_BATCH = "select hot_batch(%s::json, %s, %s, %s)::text"
_GROUPS: dict[type[Any], tuple[str, type[Any]]] = {
    Admit: ("admits", Admitted),
    Lease: ("leases", Leased),
    Checkpoint: ("checkpoints", Checkpointed),
    Close: ("closes", Closed),
    Refused: ("refusals", type(None)),
}
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, list[Any] | None])


class RecordRejected(FallowError):
    """The database refused one record for what it says: a defect of its writer, logged as such. Nothing was written."""

    code = "record_rejected"

    def __init__(self, record: Record, error: psycopg.Error) -> None:
        super().__init__("The request could not be recorded.")
        self.kind = type(record).__name__
        self.sqlstate = error.sqlstate


def run_batch(connection: psycopg.Connection[Any], records: Sequence[Record], *, replay: bool = False) -> list[Answer]:
    """Write records as one statement in the connection's transaction, and answer each in order.

    All or nothing: one record that the database rejects (psycopg.Error) takes the batch with it. `replay`: this batch
    may have been committed before; a Close that is found written as wished then answers ok.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_GROUPS[type(record)][0], []).append(_storable(record))
    parameters = (_encoder.encode(groups).decode(), replay, MAX_ATTEMPTS, MAX_PREEMPTIONS)
    row = connection.execute(_BATCH, parameters, prepare=True).fetchone()
    assert row is not None
    answers = {name: iter(rows) for name, rows in _decoder.decode(row[0]).items() if rows is not None}
    return [_answer(record, answers) for record in records]


def run_in_session(session: Session, records: Sequence[Record]) -> list[Answer]:
    """`run_batch` in a session's transaction: for tasks and sweeps, which commit at their edge."""
    session.flush()
    connection = session.connection().connection.driver_connection
    assert isinstance(connection, psycopg.Connection)
    answers = run_batch(connection, records)
    session.expire_all()
    return answers


def _answer(record: Record, answers: dict[str, Any]) -> Answer:
    name, shape = _GROUPS[type(record)]
    values = next(answers[name])
    return None if values is None else shape(*values)


def _text_bytes(record: Record) -> int:
    """Roughly what the long texts of a record weigh."""
    if isinstance(record, Admit):
        return len(record.body or "")
    if isinstance(record, Close):
        return len(record.result or "")
    return 0


def _storable(record: Record) -> Record:
    """PostgreSQL stores no NUL, and a model may write one. A result must not be lost over it."""
    if isinstance(record, Close):
        if record.result is not None and "\\u0000" in record.result:
            record = replace(record, result=_encoder.encode(_without_nul(msgspec.json.decode(record.result))).decode())
        if record.error_message is not None and "\0" in record.error_message:
            record = replace(record, error_message=record.error_message.replace("\0", "\ufffd"))
    return record


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, list):
        return [_without_nul(item) for item in value]
    if isinstance(value, dict):
        return {_without_nul(key): _without_nul(item) for key, item in value.items()}
    return value


class Pace:
    """How long a batch waits for company: not at all when few records come, LINGER_S when many do."""

    def __init__(self, now_s: float) -> None:
        self._window_started_s = now_s
        self._records = 0
        self._records_per_s = 0.0

    def count(self, records: int) -> None:
        """Records that just went."""
        self._records += records

    def linger_s(self, now_s: float) -> float:
        """Seconds to wait before the next batch is closed."""
        elapsed_s = now_s - self._window_started_s
        if elapsed_s >= PACE_WINDOW_S:
            self._records_per_s = self._records / elapsed_s
            self._window_started_s = now_s
            self._records = 0
        return LINGER_S if self._records_per_s > BUSY_RECORDS_PER_S else 0.0


@dataclass(slots=True)
class _Wish:
    record: Record
    loop: asyncio.AbstractEventLoop | None
    """None: a thread waits."""
    future: Any
    asked_at_s: float = field(default_factory=time.monotonic)
    replay: bool = False
    """It may have been committed by a try whose answer was lost."""

    def late(self, now_s: float) -> bool:
        return now_s - self.asked_at_s > PATIENCE_S


class HotWriter:
    """See the module. `start` once, `submit` from any event loop or `submit_sync` from any thread, `stop` at the end.

    Errors of both: Unavailable when the queue is full, the writer is stopped, or the database did not take the record
    within PATIENCE_S (it may have been written all the same; ask again with the same ids); RecordRejected.
    """

    def __init__(self, database_url: str, *, max_waiting: int = MAX_WAITING) -> None:
        self._database_url = database_url
        self._max_waiting = max_waiting
        self._queue: queue.SimpleQueue[_Wish | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._accepting = False
        self._connection: psycopg.Connection[Any] | None = None
        self._aside: list[_Wish] = []
        """What waits for a lock that somebody else holds; the rest goes on meanwhile."""
        self.batches = 0
        """Statements that were committed, since the start."""
        self.records = 0
        """Records in them."""

    @property
    def waiting(self) -> int:
        """Records in the queue now."""
        return self._queue.qsize()

    def start(self) -> None:
        """Start the thread. The database need not answer yet."""
        if self._thread is not None:
            raise RuntimeError("the writer was started before")
        self._accepting = True
        self._thread = threading.Thread(target=self._run, name="hot-writer", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = PATIENCE_S * 2) -> None:
        """Take no more records, write those that wait, close the connection. Returns within `timeout_s`."""
        thread = self._thread
        if thread is None or not self._accepting:
            return
        self._accepting = False
        self._queue.put(None)
        thread.join(timeout_s)
        if thread.is_alive():
            log.error("hot_writer_stuck", waiting=self.waiting)

    @overload
    async def submit(self, record: Admit) -> Admitted: ...
    @overload
    async def submit(self, record: Lease) -> Leased: ...
    @overload
    async def submit(self, record: Checkpoint) -> Checkpointed: ...
    @overload
    async def submit(self, record: Close) -> Closed: ...
    @overload
    async def submit(self, record: Refused) -> None: ...

    async def submit(self, record: Record) -> Answer:
        """Write a record durably and answer. A caller that is cancelled meanwhile does not take its record back."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._put(_Wish(record, loop, future))
        guard = loop.call_later(ANSWER_TIMEOUT_S, _give_up, future)
        try:
            return await future
        finally:
            guard.cancel()

    @overload
    def submit_sync(self, record: Admit) -> Admitted: ...
    @overload
    def submit_sync(self, record: Lease) -> Leased: ...
    @overload
    def submit_sync(self, record: Checkpoint) -> Checkpointed: ...
    @overload
    def submit_sync(self, record: Close) -> Closed: ...
    @overload
    def submit_sync(self, record: Refused) -> None: ...

    def submit_sync(self, record: Record) -> Answer:
        """`submit` for a thread. Never call it on an event loop's thread: it blocks."""
        future: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        self._put(_Wish(record, None, future))
        try:
            return future.result(ANSWER_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise _away() from None

    def _put(self, wish: _Wish) -> None:
        if not self._accepting:
            raise Unavailable("This server is shutting down. Send the request again.", headers={"Retry-After": "1"})
        if self._queue.qsize() >= self._max_waiting:
            raise Unavailable("Too many requests wait to be recorded.", headers={"Retry-After": "1"})
        self._queue.put(wish)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pace = Pace(time.monotonic())
        running = True
        while running:
            try:
                first = self._queue.get(timeout=ASIDE_PAUSE_S if self._aside else None)
            except queue.Empty:
                self._guarded(self._retry_aside, [])
                continue
            if first is None:
                break
            linger_s = pace.linger_s(time.monotonic())
            if linger_s:
                time.sleep(linger_s)
            wishes, running = self._gather(first)
            pace.count(len(wishes))
            self._guarded(lambda: self._write(wishes), wishes)  # noqa: B023  # called within this turn
            if self._aside:
                self._guarded(self._retry_aside, [])
        while self._aside:
            time.sleep(ASIDE_PAUSE_S)
            self._guarded(self._retry_aside, [])
        self._refuse_rest()
        self._disconnect()

    def _guarded(self, step: Callable[[], None], wishes: list[_Wish]) -> None:
        try:
            step()
        except Exception as error:  # the thread's edge: a defect must not end the writer
            log.exception("hot_writer_failed", records=len(wishes) + len(self._aside))
            failed, self._aside = [*wishes, *self._aside], []
            _settle([(wish, _internal(error)) for wish in failed])

    def _gather(self, first: _Wish) -> tuple[list[_Wish], bool]:
        """What waits now, within the bounds of a batch; and whether to go on after it."""
        wishes = [first]
        text_bytes = _text_bytes(first.record)
        while len(wishes) < MAX_BATCH and text_bytes < MAX_BATCH_TEXT_BYTES:
            try:
                wish = self._queue.get_nowait()
            except queue.Empty:
                break
            if wish is None:
                return wishes, False
            wishes.append(wish)
            text_bytes += _text_bytes(wish.record)
        return wishes, True

    def _refuse_rest(self) -> None:
        """Wishes that slipped in behind the stop."""
        left = []
        with contextlib.suppress(queue.Empty):
            while True:
                wish = self._queue.get_nowait()
                if wish is not None:
                    left.append(wish)
        _settle([(wish, _away()) for wish in left])

    def _write(self, wishes: list[_Wish]) -> None:
        """Write together, again and again while the database is away. What it rejects is taken apart."""
        tries = 0
        while wishes:
            error = self._try(wishes)
            if error is None:
                return
            if self._reachable():
                self._take_apart(wishes, error)
                return
            if self._connection is not None:
                # The commit may have happened before the connection was lost.
                for wish in wishes:
                    wish.replay = True
            self._disconnect()
            wishes = self._after_failure(wishes, error, tries)
            tries += 1

    def _try(self, wishes: list[_Wish]) -> psycopg.Error | None:
        """One try. None: written and answered."""
        try:
            answers = run_batch(
                self._connect(), [wish.record for wish in wishes], replay=any(wish.replay for wish in wishes)
            )
        except psycopg.Error as error:
            return error
        self.batches += 1
        self.records += len(wishes)
        _settle(zip(wishes, answers, strict=True))
        return None

    def _take_apart(self, wishes: list[_Wish], error: psycopg.Error) -> None:
        """One record is poisoned, or must wait for a lock: it fails, or waits aside, alone."""
        if len(wishes) > 1:
            log.warning("hot_batch_taken_apart", records=len(wishes), **_facts(error))
            for wish in wishes:
                self._write([wish])
        elif _transient(error):
            self._aside += wishes
        else:
            log.error("hot_record_rejected", kind=type(wishes[0].record).__name__, **_facts(error))
            _settle([(wishes[0], RecordRejected(wishes[0].record, error))])

    def _retry_aside(self) -> None:
        """Try once more what had to wait, together; it goes on waiting aside if it still must."""
        now_s = time.monotonic()
        late = [wish for wish in self._aside if wish.late(now_s)]
        wishes, self._aside = [wish for wish in self._aside if not wish.late(now_s)], []
        if late:
            log.warning("hot_records_given_up", records=len(late))
            _settle([(wish, _away()) for wish in late])
        if not wishes:
            return
        error = self._try(wishes)
        if error is None:
            return
        if self._reachable() and _transient(error):
            self._aside = wishes
        else:
            self._write(wishes)

    def _after_failure(self, wishes: list[_Wish], error: psycopg.Error, tries: int) -> list[_Wish]:
        """Give up what waited too long, pause, and return what to try again."""
        now_s = time.monotonic()
        late = [wish for wish in wishes if wish.late(now_s)]
        if late or tries == 0:
            log.warning("hot_writer_waits", records=len(wishes), given_up=len(late), **_facts(error))
        _settle([(wish, _away()) for wish in late])
        left = [wish for wish in wishes if not wish.late(now_s)]
        if left:
            time.sleep(RECONNECT_S[min(tries, len(RECONNECT_S) - 1)])
        return left

    def _connect(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            self._connection = psycopg.connect(
                self._database_url,
                autocommit=True,
                application_name="fallow-hot-writer",
                connect_timeout=2,
                tcp_user_timeout=int(PATIENCE_S * 1000),
                options=_OPTIONS,
            )
        return self._connection

    def _reachable(self) -> bool:
        return self._connection is not None and not self._connection.broken and not self._connection.closed

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()


_TRANSIENT_SQLSTATES = frozenset({"40001", "40P01", "55P03", "57014"})
"""Serialisation failure, deadlock, lock not available, statement timeout: nothing was written, try again."""


def _transient(error: psycopg.Error) -> bool:
    return error.sqlstate in _TRANSIENT_SQLSTATES or (error.sqlstate or "")[:2] in {"08", "53", "57"}


def _facts(error: psycopg.Error) -> dict[str, str | None]:
    """What may be logged of an error. Its details may quote the row, and with it a renter's prompt."""
    diagnosis = error.diag
    return {
        "error": diagnosis.message_primary or type(error).__name__,
        "sqlstate": error.sqlstate,
        "constraint": diagnosis.constraint_name,
    }


def _away() -> Unavailable:
    return Unavailable("The database does not answer. Send the request again.", headers={"Retry-After": "2"})


def _internal(error: Exception) -> FallowError:
    failure = FallowError("The request could not be recorded.")
    failure.__cause__ = error
    return failure


def _give_up(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(_away())


def _settle(results: Iterable[tuple[_Wish, Answer | FallowError]]) -> None:
    """Answer callers. Those of one event loop together: waking a loop costs more than the answer."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Any, Answer | FallowError]]] = {}
    for wish, result in results:
        if wish.loop is not None:
            by_loop.setdefault(wish.loop, []).append((wish.future, result))
        elif not wish.future.done():
            _resolve(wish.future, result)
    for loop, answers in by_loop.items():
        # The loop may have been closed; nobody waits there any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve_all, answers)


def _resolve_all(answers: list[tuple[Any, Answer | FallowError]]) -> None:
    for future, result in answers:
        if not future.done():
            _resolve(future, result)


def _resolve(future: Any, result: Answer | FallowError) -> None:
    if isinstance(result, FallowError):
        future.set_exception(result)
    else:
        future.set_result(result)
