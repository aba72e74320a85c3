"""Reading journals back: by account and kind for statements, one by one for exports and traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ledger.chart import Kind
from ledger.models import Account, Journal, Posting

STREAM_ROWS = 2_000
"""Lines fetched at a time by `read_journals`."""


@dataclass(frozen=True, slots=True)
class AccountView:
    """An account that exists."""

    account_id: int
    code: str
    kind: Kind
    currency: str
    opened_at: datetime


@dataclass(frozen=True, slots=True)
class Movement:
    """What journals of one kind did to one account, in nanos of its currency and in its normal direction."""

    code: str
    currency: str
    journal_kind: str
    reversal: bool
    """They take others back."""
    nano: int
    journals: int


@dataclass(frozen=True, slots=True)
class LineView:
    """One line as it was posted: debit positive."""

    code: str
    kind: Kind
    currency: str
    nano: int


@dataclass(frozen=True, slots=True)
class JournalView:
    """A journal as it was posted."""

    journal_id: int
    kind: str
    source: str
    outside_id: str
    effective_at: datetime
    recorded_at: datetime
    reverses_id: int | None
    memo: Mapping[str, Any]
    lines: tuple[LineView, ...]


def list_accounts(session: Session, reference: str | None = None, *, prefix: str | None = None) -> list[AccountView]:
    """Accounts by code: of one outside reference, with codes that begin so, or all of them."""
    query = select(Account.id, Account.code, Account.kind, Account.currency, Account.created_at).order_by(Account.code)
    if reference is not None:
        query = query.where(Account.reference == reference)
    if prefix is not None:
        query = query.where(Account.code.startswith(prefix, autoescape=True))
    return [
        AccountView(row.id, row.code, Kind(row.kind), row.currency, row.created_at) for row in session.execute(query)
    ]


def movements(
    session: Session, account_ids: Sequence[int], start: datetime | None, end: datetime | None
) -> list[Movement]:
    """What moved on these accounts by journals effective in [start, end), summed by account and kind of journal."""
    reversal = Journal.reverses_id.is_not(None)
    query = (
        select(
            Account.code,
            Account.kind,
            Account.currency,
            Journal.kind.label("journal_kind"),
            reversal.label("reversal"),
            func.sum(Posting.amount_nano).label("nano"),
            func.count(Journal.id.distinct()).label("journals"),
        )
        .join(Posting, Posting.account_id == Account.id)
        .join(Journal, Journal.id == Posting.journal_id)
        .where(Account.id.in_(account_ids))
        .group_by(Account.id, Journal.kind, reversal)
        .order_by(Account.code, Journal.kind, reversal)
    )
    if start is not None:
        query = query.where(Journal.effective_at >= start)
    if end is not None:
        query = query.where(Journal.effective_at < end)
    return [
        Movement(
            row.code, row.currency, row.journal_kind, row.reversal, Kind(row.kind).sign * int(row.nano), row.journals
        )
        for row in session.execute(query)
    ]


def read_journals(
    session: Session, start: datetime | None = None, end: datetime | None = None
) -> Iterator[JournalView]:
    """Journals effective in [start, end) in order of that time, each with its lines; streamed."""
    query = _lines().order_by(Journal.effective_at, Journal.id, Posting.id)
    if start is not None:
        query = query.where(Journal.effective_at >= start)
    if end is not None:
        query = query.where(Journal.effective_at < end)
    rows = session.execute(query.execution_options(yield_per=STREAM_ROWS))
    for _, lines in groupby(rows, key=lambda row: row.Journal.id):
        yield _view(list(lines))


def find_journal(session: Session, journal_id: int) -> JournalView | None:
    """One journal with its lines, or None."""
    lines = session.execute(_lines().where(Journal.id == journal_id).order_by(Posting.id)).all()
    return _view(lines) if lines else None


def _lines() -> Any:
    return (
        select(Journal, Account.code, Account.kind, Posting.currency, Posting.amount_nano)
        .join(Posting, Posting.journal_id == Journal.id)
        .join(Account, Account.id == Posting.account_id)
    )


def _view(rows: Sequence[Any]) -> JournalView:
    found = rows[0].Journal
    return JournalView(
        journal_id=found.id,
        kind=found.kind,
        source=found.source,
        outside_id=found.outside_id,
        effective_at=found.effective_at,
        recorded_at=found.recorded_at,
        reverses_id=found.reverses_id,
        memo=found.memo,
        lines=tuple(LineView(row.code, Kind(row.kind), row.currency, row.amount_nano) for row in rows),
    )


@dataclass(frozen=True, slots=True)
class DayNet:
    """What one outside reference's accounts gained (or lost: negative) by journals of one UTC day, in nanos.

    A journal that only moves money between accounts of the reference counts nowhere.
    """

    reference: str
    on: datetime
    currency: str
    nano: int


def nets_by_day(session: Session, prefix: str, end: datetime) -> list[DayNet]:
    """Gains and losses, apart, of every reference whose accounts begin with `prefix`, by journals effective before
    `end`. In the direction of a liability: a credit is a gain."""
    each = (
        select(
            Account.reference,
            Posting.currency,
            func.date_trunc("day", Journal.effective_at, "UTC").label("day"),
            (-func.sum(Posting.amount_nano)).label("nano"),
        )
        .join(Posting, Posting.account_id == Account.id)
        .join(Journal, Journal.id == Posting.journal_id)
        .where(Account.code.startswith(prefix, autoescape=True), Journal.effective_at < end)
        .group_by(Account.reference, Posting.currency, Journal.id)
        .subquery()
    )
    gained = each.c.nano > 0
    rows = session.execute(
        select(each.c.reference, each.c.day, each.c.currency, func.sum(each.c.nano).label("nano"))
        .where(each.c.nano != 0)
        .group_by(each.c.reference, each.c.day, each.c.currency, gained)
        .order_by(each.c.reference, each.c.day, gained)
    )
    return [DayNet(row.reference or "", row.day, row.currency, int(row.nano)) for row in rows]
