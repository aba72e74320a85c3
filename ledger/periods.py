"""Periods of a book: open, closing, closed. What counts in a closed one never changes again.

A book's periods follow one another without gaps and close in their order. Before the first one is opened, and after
the last, time is open. Closing takes two transactions: `begin_close` waits for whoever is posting and then lets only
closing entries in; `close` seals what is left and keeps a snapshot, beside ordinary posting. A crash between the two
leaves a period that is closing: call `close`, or `reopen`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from ledger import chain
from ledger.balances import TrialBalance, TrialRow, trial_balance
from ledger.chain import Head
from ledger.chart import Kind
from ledger.errors import InvalidPeriod, PeriodNotReady, UnknownBook, UnknownPeriod
from ledger.journal import MAIN_BOOK
from ledger.models import Book, Journal, Period, Posting

POSTING_LOCK_CLASS = 1818584167
"""Advisory lock, with the book's id: posting holds it shared, the start of a close alone. Known to the database too."""
PERIODS_LOCK_CLASS = 1818584169
"""Advisory lock, with the book's id: closing entries hold it shared, who changes periods alone. Known there as well."""
MAX_PERIODS = 10_000
"""Of one book, listed at once."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a period was closed with. `digest` covers all of it."""

    trial_balance: TrialBalance
    """Before the period's end."""
    head: Head
    """Everything that counts before the period's end stands at or before this link."""
    journals: int
    postings: int
    closed_at: datetime
    digest: bytes


@dataclass(frozen=True, slots=True)
class PeriodView:
    """A period as it stands. `snapshot` only of a closed one."""

    period_id: int
    book_id: int
    starts_at: datetime
    ends_at: datetime
    state: str
    snapshot: Snapshot | None


def open_book(session: Session, code: str) -> int:
    """Open a book, or find it; returns its id."""
    _lock_alone(session, PERIODS_LOCK_CLASS, 0)
    found = session.scalar(select(Book.id).where(Book.code == code))
    if found is not None:
        return found
    book = Book(id=(session.scalar(select(func.max(Book.id))) or 0) + 1, code=code)
    session.add(book)
    session.flush()
    return book.id


def list_books(session: Session) -> list[int]:
    """The ids of all books."""
    return list(session.scalars(select(Book.id).order_by(Book.id)))


def open_period(session: Session, starts_at: datetime, ends_at: datetime, book_id: int = MAIN_BOOK) -> PeriodView:
    """Open the next period of a book; the same one again is found as it is.

    Raises InvalidPeriod for times without zone, an empty period, one that overlaps another, or one that does not begin
    where the last one ended; UnknownBook.
    """
    if starts_at.tzinfo is None or ends_at.tzinfo is None:
        raise InvalidPeriod("A period's times carry their time zone.")
    if starts_at >= ends_at:
        raise InvalidPeriod(f"A period ends after it starts, not from {starts_at} to {ends_at}.")
    _lock_book(session, book_id)
    known = session.scalar(select(Period).where(Period.book_id == book_id, Period.starts_at == starts_at))
    if known is not None and known.ends_at == ends_at:
        return _view(known)
    last_end = session.scalar(select(func.max(Period.ends_at)).where(Period.book_id == book_id))
    if last_end is not None and last_end != starts_at:
        problem = "overlaps another" if starts_at < last_end else "leaves a gap"
        raise InvalidPeriod(f"A period from {starts_at} {problem}: the last one ends at {last_end}.")
    period = Period(book_id=book_id, starts_at=starts_at, ends_at=ends_at, state="open")
    session.add(period)
    session.flush()
    return _view(period)


def begin_close(session: Session, period_id: int) -> PeriodView:
    """From open to closing: whoever is posting ends first, then only closing entries may enter. Commit, then `close`.

    Does nothing to a period that is closing. Raises UnknownPeriod, PeriodNotReady if it is closed, has not ended by the
    database's clock, or an earlier one is not closed.
    """
    period = _lock(session, period_id)
    if period.state == "closing":
        return _view(period)
    _require(period, "open")
    earlier = session.scalar(
        select(func.count())
        .select_from(Period)
        .where(Period.book_id == period.book_id, Period.starts_at < period.starts_at, Period.state != "closed")
    )
    if earlier:
        raise PeriodNotReady("An earlier period of the book is not closed.")
    if session.scalar(select(func.clock_timestamp() < period.ends_at)):
        raise PeriodNotReady(f"The period has not ended: it does at {period.ends_at.isoformat()}.")
    # Last, so that posting stands still no longer than it takes to commit.
    lock_posting(session, period.book_id)
    period.state = "closing"
    session.get_one(Book, period.book_id).closing_through = period.ends_at
    session.flush()
    return _view(period)


def reopen(session: Session, period_id: int) -> PeriodView:
    """From closing back to open. Raises UnknownPeriod, PeriodNotReady if it is closed: that is final."""
    period = _lock(session, period_id)
    if period.state == "open":
        return _view(period)
    _require(period, "closing")
    book = session.get_one(Book, period.book_id)
    # Who posts meanwhile reads the one or the other: both are right.
    period.state, book.closing_through = "open", book.closed_through
    session.flush()
    return _view(period)


def close(session: Session, period_id: int) -> PeriodView:
    """From closing to closed: seal what is not sealed, and keep the snapshot. A closed one is given as it is.

    Raises UnknownPeriod, PeriodNotReady if it is still open, or holds journals that cannot be sealed.
    """
    period = _lock(session, period_id)
    if period.state == "closed":
        return _view(period)
    _require(period, "closing")
    head = chain.seal_all(session, period.book_id)
    unsealed = chain.unsealed_before(session, period.book_id, period.ends_at)
    if unsealed:
        raise PeriodNotReady(f"{unsealed} journals of the period cannot be sealed: verify the books.")
    counts = session.execute(_counts(period)).one()
    trial = trial_balance(session, period.ends_at, book_id=period.book_id)
    closed_at = session.scalar(select(func.now()))
    assert closed_at is not None
    rows = [[row.code, row.kind.value, row.currency, row.debit_nano, row.credit_nano] for row in trial.rows]
    period.chain_sequence, period.chain_sha256 = head.sequence, head.sha256
    period.journals, period.postings, period.snapshot = counts.journals, counts.postings, rows
    period.closed_at, period.state = closed_at, "closed"
    period.snapshot_sha256 = digest(period)
    book = session.get_one(Book, period.book_id)
    book.closed_through = book.closing_through = period.ends_at
    session.flush()
    return _view(period)


def periods(session: Session, book_id: int = MAIN_BOOK) -> list[PeriodView]:
    """The periods of a book, the earliest first."""
    query = select(Period).where(Period.book_id == book_id).order_by(Period.starts_at).limit(MAX_PERIODS)
    return [_view(period) for period in session.scalars(query)]


def find_period(session: Session, at: datetime, book_id: int = MAIN_BOOK) -> PeriodView | None:
    """The period that a time lies in, if one was opened there."""
    period = session.scalar(
        select(Period).where(Period.book_id == book_id, Period.starts_at <= at, Period.ends_at > at)
    )
    return None if period is None else _view(period)


def get_period(session: Session, period_id: int) -> PeriodView:
    """A period by its id. Raises UnknownPeriod."""
    return _view(_get(session, period_id))


def lock_posting(session: Session, book_id: int) -> None:
    """Wait until nobody is posting to a book, and keep everybody out until this transaction ends."""
    _lock_alone(session, POSTING_LOCK_CLASS, book_id)


def digest(period: Period) -> bytes:
    """What a closed period's snapshot_sha256 must be: SHA-256 of its canonical JSON."""
    assert period.closed_at is not None
    assert period.chain_sha256 is not None
    parts = [
        period.book_id,
        _utc(period.starts_at),
        _utc(period.ends_at),
        _utc(period.closed_at),
        period.chain_sequence,
        period.chain_sha256.hex(),
        period.journals,
        period.postings,
        period.snapshot,
    ]
    return sha256(json.dumps(parts, separators=(",", ":"), ensure_ascii=True).encode()).digest()


def _counts(period: Period) -> Any:
    within = (
        Journal.book_id == period.book_id,
        Journal.effective_at >= period.starts_at,
        Journal.effective_at < period.ends_at,
    )
    journals = select(func.count()).select_from(Journal).where(*within).scalar_subquery()
    postings = (
        select(func.count())
        .select_from(Posting)
        .join(Journal, Journal.id == Posting.journal_id)
        .where(*within)
        .scalar_subquery()
    )
    return select(journals.label("journals"), postings.label("postings"))


def _get(session: Session, period_id: int) -> Period:
    period = session.get(Period, period_id, populate_existing=True)
    if period is None:
        raise UnknownPeriod(f"There is no period {period_id}.")
    return period


def _lock(session: Session, period_id: int) -> Period:
    """A period as nobody else changes it."""
    _lock_book(session, _get(session, period_id).book_id)
    return _get(session, period_id)


def _lock_book(session: Session, book_id: int) -> None:
    _lock_alone(session, PERIODS_LOCK_CLASS, book_id)
    if session.get(Book, book_id, populate_existing=True) is None:
        raise UnknownBook(f"There is no book {book_id}.")


def _lock_alone(session: Session, space: int, number: int) -> None:
    session.execute(text("select pg_advisory_xact_lock(:space, :number)"), {"space": space, "number": number})


def _require(period: Period, state: str) -> None:
    if period.state != state:
        raise PeriodNotReady(f"Period {period.id} is {period.state}, not {state}.")


def _view(period: Period) -> PeriodView:
    return PeriodView(period.id, period.book_id, period.starts_at, period.ends_at, period.state, _snapshot(period))


def _snapshot(period: Period) -> Snapshot | None:
    if period.state != "closed":
        return None
    assert period.chain_sequence is not None
    assert period.chain_sha256 is not None
    assert period.closed_at is not None
    assert period.snapshot_sha256 is not None
    return Snapshot(
        trial_balance=TrialBalance(period.ends_at, _rows(period.snapshot or ())),
        head=Head(period.book_id, period.chain_sequence, period.chain_sha256),
        journals=period.journals or 0,
        postings=period.postings or 0,
        closed_at=period.closed_at,
        digest=period.snapshot_sha256,
    )


def _rows(stored: Sequence[Sequence[Any]]) -> tuple[TrialRow, ...]:
    return tuple(
        TrialRow(code, Kind(kind), currency, debits, credits_) for code, kind, currency, debits, credits_ in stored
    )


def _utc(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()
