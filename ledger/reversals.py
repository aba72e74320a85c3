"""Taking journals back, in full or in part. A correction is always a new journal that names the original."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from ledger import journal as pure
from ledger.errors import AlreadyReversed, IdempotencyMismatch, InvalidJournal, UnknownJournal
from ledger.journal import JournalDraft, Line
from ledger.models import Journal
from ledger.money import Money
from ledger.posting import PostResult, lines_of, post

_LOCK = text("select pg_advisory_xact_lock(hashtextextended('ledger_reversal', :journal_id))")
"""The same lock that the database's own check takes at commit."""
_TAKEN = text(
    """
    select account_id, currency, sum(amount_nano) as nano from ledger_postings
    where journal_id in (select id from ledger_journals where reverses_id = :journal_id)
    group by account_id, currency
    """
)


def reverse(
    session: Session,
    journal_id: int,
    *,
    idempotency_key: str,
    source: str,
    outside_id: str,
    amount_nano: int | None = None,
    lines: Sequence[Line] | None = None,
    kind: str = "reversal",
    effective_at: datetime | None = None,
    memo: dict[str, Any] | None = None,
) -> PostResult:
    """Take a journal back by a new one that names it. Holds that it captured stay resolved.

    In full, that is whatever is left of it; or `amount_nano` of its debits, spread over all its lines in proportion
    (see journal.portion); or exactly these `lines`. Reversals add up and never exceed the original, on any account.
    One of a journal that counted in a closed period counts in an open one and is flagged with that period.

    Raises UnknownJournal, AlreadyReversed when less is left than is asked for, InvalidJournal for a reversal of a
    reversal, InvalidAmount, and what post_many raises.
    """
    session.execute(_LOCK, {"journal_id": journal_id})
    original = session.get(Journal, journal_id)
    if original is None:
        raise UnknownJournal(f"There is no journal {journal_id}.")
    if original.reverses_id is not None:
        raise InvalidJournal(f"Journal {journal_id} is itself a reversal: post what is meant anew.")
    draft = JournalDraft(
        idempotency_key=idempotency_key,
        kind=kind,
        source=source,
        outside_id=outside_id,
        lines=_lines_back(session, journal_id, idempotency_key, amount_nano, lines),
        effective_at=effective_at,
        reverses_id=journal_id,
        memo=memo or {},
        book_id=original.book_id,
    )
    return post(session, draft)


def left_of(session: Session, journal_id: int) -> tuple[Line, ...]:
    """What of a journal was not taken back: one line an account and currency, in the direction of the original."""
    return _left(lines_of(session, journal_id), _taken(session, journal_id))


def _lines_back(
    session: Session, journal_id: int, key: str, amount_nano: int | None, lines: Sequence[Line] | None
) -> tuple[Line, ...]:
    if lines is not None and amount_nano is not None:
        raise InvalidJournal("A part is named by an amount or by its lines, not by both.")
    before = session.scalar(select(Journal).where(Journal.idempotency_key == key))
    if before is not None and before.reverses_id == journal_id:
        return _repeated(session, before, amount_nano, lines)
    left = left_of(session, journal_id)
    if lines is not None:
        _check_within(journal_id, left, lines)
        return tuple(lines)
    if amount_nano is None:
        if not left:
            raise AlreadyReversed(f"Journal {journal_id} was taken back before.")
        return pure.inverse(left)
    left_nano = sum(line.amount.nano for line in left if line.amount.nano > 0)
    if amount_nano > left_nano:
        raise AlreadyReversed(f"Of journal {journal_id} only {left_nano} nano are left, not {amount_nano}.")
    return pure.portion(left, amount_nano)


def _repeated(
    session: Session, before: Journal, amount_nano: int | None, lines: Sequence[Line] | None
) -> tuple[Line, ...]:
    """The lines of a repetition: those of the first time, unless another part is asked for now."""
    if lines is not None:
        return tuple(lines)
    written = lines_of(session, before.id)
    written_nano = sum(line.amount.nano for line in written if line.amount.nano > 0)
    if amount_nano is None or amount_nano == written_nano:
        return written
    raise IdempotencyMismatch(before.idempotency_key, ["lines"])


def _left(original: Sequence[Line], taken: dict[tuple[int, str], int]) -> tuple[Line, ...]:
    totals: dict[tuple[int, str], int] = defaultdict(int)
    for line in original:
        totals[line.account_id, line.amount.currency] += line.amount.nano
    left = {key: nano + taken.get(key, 0) for key, nano in totals.items()}
    return tuple(Line(account, Money(nano, currency)) for (account, currency), nano in sorted(left.items()) if nano)


def _taken(session: Session, journal_id: int) -> dict[tuple[int, str], int]:
    rows = session.execute(_TAKEN, {"journal_id": journal_id})
    return {(row.account_id, row.currency): int(row.nano) for row in rows}


def _check_within(journal_id: int, left: Sequence[Line], lines: Sequence[Line]) -> None:
    room = {(line.account_id, line.amount.currency): line.amount.nano for line in left}
    wanted: dict[tuple[int, str], int] = defaultdict(int)
    for line in lines:
        wanted[line.account_id, line.amount.currency] -= line.amount.nano
    for key, nano in wanted.items():
        left_nano = room.get(key, 0)
        if nano * left_nano < 0 or abs(nano) > abs(left_nano):
            raise AlreadyReversed(f"Of journal {journal_id} only {left_nano} nano are left on account {key[0]}.")
