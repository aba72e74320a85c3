"""Writing journals. Everything that changes a checked balance locks its row first, in order of account id: top-ups,
settlement and holds alike, so that they wait for each other and never deadlock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import Row, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from ledger import journal as pure
from ledger.chart import Kind
from ledger.errors import (
    AboveLimit,
    AccountNotOpen,
    BelowFloor,
    CurrencyMismatch,
    HoldNotOpen,
    IdempotencyMismatch,
    InvalidJournal,
    LedgerError,
    OutsideIdTaken,
    PeriodClosed,
    UnknownAccount,
    UnknownBook,
    UnknownJournal,
    UnknownPeriod,
    UnmatchedCapture,
)
from ledger.journal import JournalDraft, Line
from ledger.models import Hold, Journal, Posting
from ledger.money import Money

_INSERT_JOURNALS = text(
    """
    insert into ledger_journals
      (idempotency_key, kind, source, outside_id, body_sha256, captures_sha256, effective_at, dated, reverses_id,
       memo, book_id, corrects_period_id, closing_entry)
    select key, kind, source, outside_id, body, captures, coalesce(effective_at, now()), effective_at is not null,
           reverses_id, cast(memo as jsonb), book_id, corrects_period_id, closing_entry
    from unnest(cast(:keys as text[]), cast(:kinds as text[]), cast(:sources as text[]), cast(:outside_ids as text[]),
                cast(:bodies as bytea[]), cast(:captures as bytea[]), cast(:times as timestamptz[]),
                cast(:reverses as bigint[]), cast(:memos as text[]), cast(:books as bigint[]),
                cast(:corrects as bigint[]), cast(:closing as boolean[]))
         as w (key, kind, source, outside_id, body, captures, effective_at, reverses_id, memo, book_id,
               corrects_period_id, closing_entry)
    order by key
    on conflict do nothing
    returning idempotency_key, id
    """
)
_LOCK_BALANCES = text(
    """
    select account_id, posted_nano, held_nano, floor_nano, limit_nano from ledger_balances
    where account_id = any(cast(:ids as bigint[])) order by account_id for no key update
    """
)
_UPDATE_BALANCES = text(
    """
    update ledger_balances b set posted_nano = b.posted_nano + d.posted, held_nano = b.held_nano + d.held
    from unnest(cast(:ids as bigint[]), cast(:posted as bigint[]), cast(:held as bigint[])) as d (id, posted, held)
    where b.account_id = d.id
    """
)
_CAPTURE_HOLDS = text(
    """
    update ledger_holds h set state = 'captured', captured_nano = c.taken, resolved_at = now()
    from unnest(cast(:ids as uuid[]), cast(:taken as bigint[])) as c (id, taken)
    where h.id = c.id and h.state = 'held' and c.taken <= h.amount_nano and h.expires_at > clock_timestamp()
    returning h.id, h.account_id, h.amount_nano, h.captured_nano
    """
)
_INSERT_POSTINGS = text(
    """
    insert into ledger_postings (journal_id, account_id, currency, amount_nano, effective_at)
    select p.journal_id, p.account_id, p.currency, p.amount, j.effective_at
    from unnest(cast(:journals as bigint[]), cast(:accounts as bigint[]), cast(:currencies as text[]),
                cast(:amounts as bigint[])) as p (journal_id, account_id, currency, amount)
    left join ledger_journals j on j.id = p.journal_id
    order by p.journal_id, p.account_id
    """
)


_REFUSALS: dict[str, type[LedgerError]] = {
    "ledger_period_open": PeriodClosed,
    "ledger_correction": UnknownPeriod,
    "ledger_reversal": InvalidJournal,
    "fk_ledger_journals_book_id": UnknownBook,
    "fk_ledger_journals_corrects_period_id": UnknownPeriod,
    "fk_ledger_journals_reverses_id": UnknownJournal,
}
"""Constraint -> the error that says the same."""


@dataclass(frozen=True, slots=True)
class PostResult:
    """What became of a draft."""

    journal_id: int
    replayed: bool
    """True: the same draft was posted before under its key; nothing was written now."""


@dataclass(slots=True)
class Change:
    """What happens to one checked balance. `posted_nano` in the account's normal direction."""

    posted_nano: int = 0
    held_nano: int = 0


def post(session: Session, draft: JournalDraft) -> PostResult:
    """Post one journal. See post_many."""
    return post_many(session, [draft])[0]


def post_many(session: Session, drafts: Sequence[JournalDraft]) -> list[PostResult]:
    """Post journals set-based, all or none; returns one result a draft, in order.

    A draft whose key was used for the same body answers with the first result and writes nothing; a draft that is
    being posted under the same key elsewhere is waited for. A failed attempt leaves nothing, not even its key: the
    same key may come again with any body, and is judged anew.

    Raises InvalidJournal, UnknownAccount, UnknownBook, AccountNotOpen, CurrencyMismatch, PeriodClosed,
    UnknownPeriod, IdempotencyMismatch, OutsideIdTaken, AlreadyReversed, BelowFloor, AboveLimit, HoldNotOpen,
    UnmatchedCapture. The caller rolls back then, or posts within a savepoint: what a failed attempt began cannot be
    committed, since the database refuses a journal without its lines.
    """
    for draft in drafts:
        pure.validate(draft)
    unique = {draft.idempotency_key: draft for draft in reversed(drafts)}
    known = _known(session, unique.values())
    written = _insert_journals(session, [draft for key, draft in unique.items() if key not in known])
    fresh = [(written[key], draft) for key, draft in unique.items() if key in written]
    if fresh:
        _apply(session, fresh)
    results = []
    for draft in drafts:
        key = draft.idempotency_key
        if key in written:
            # The first draft of a key is the one that was written; a second one in this list is a repetition.
            results.append(PostResult(written.pop(key), replayed=False))
        else:
            results.append(PostResult(_replay(session, draft), replayed=True))
    return results


def lock_balances(session: Session, account_ids: Iterable[int]) -> dict[int, Row[Any]]:
    """Lock the checked balances among these accounts, in order, and read them. Hot accounts have none."""
    rows = session.execute(_LOCK_BALANCES, {"ids": sorted(set(account_ids))})
    return {row.account_id: row for row in rows}


def change_balances(session: Session, locked: dict[int, Row[Any]], changes: dict[int, Change]) -> None:
    """Write changes to balances that this transaction has locked. Raises BelowFloor or AboveLimit before anything is
    written."""
    for account, change in changes.items():
        row = locked[account]
        after_nano = row.posted_nano + change.posted_nano - row.held_nano - change.held_nano
        spends = change.posted_nano - change.held_nano < 0
        if row.floor_nano is not None and spends and after_nano < row.floor_nano:
            raise BelowFloor(
                account,
                available_nano=row.posted_nano - row.held_nano - row.floor_nano,
                wanted_nano=change.held_nano - change.posted_nano,
            )
        posted_nano = row.posted_nano + change.posted_nano
        if row.limit_nano is not None and change.posted_nano > 0 and posted_nano > row.limit_nano:
            raise AboveLimit(account, limit_nano=row.limit_nano, after_nano=posted_nano)
    ids = sorted(changes)
    parameters = {
        "ids": ids,
        "posted": [changes[account].posted_nano for account in ids],
        "held": [changes[account].held_nano for account in ids],
    }
    session.execute(_UPDATE_BALANCES, parameters)


def _known(session: Session, drafts: Iterable[JournalDraft]) -> set[str]:
    """Keys that were used before, among those of drafts that name their time or a period: a repetition answers with
    the first result even where nothing may be posted any more, so it must not come before the database's guard."""
    keys = [
        draft.idempotency_key
        for draft in drafts
        if not (draft.effective_at is None and draft.reverses_id is None and draft.corrects_period_id is None)
    ]
    if not keys:
        return set()
    query = text("select idempotency_key from ledger_journals where idempotency_key = any(cast(:keys as text[]))")
    return set(session.scalars(query, {"keys": keys}))


def _insert_journals(session: Session, drafts: Sequence[JournalDraft]) -> dict[str, int]:
    if not drafts:
        return {}
    parameters = {
        "keys": [draft.idempotency_key for draft in drafts],
        "kinds": [draft.kind for draft in drafts],
        "sources": [draft.source for draft in drafts],
        "outside_ids": [draft.outside_id for draft in drafts],
        "bodies": [pure.body_sha256(draft) for draft in drafts],
        "captures": [pure.captures_sha256(draft.captures) for draft in drafts],
        "times": [draft.effective_at for draft in drafts],
        "reverses": [draft.reverses_id for draft in drafts],
        "memos": [json.dumps(dict(draft.memo)) for draft in drafts],
        "books": [draft.book_id for draft in drafts],
        "corrects": [draft.corrects_period_id for draft in drafts],
        "closing": [draft.closing_entry for draft in drafts],
    }
    try:
        rows = session.execute(_INSERT_JOURNALS, parameters).all()
    except IntegrityError as error:
        raise _refusal(error) from error
    return {row.idempotency_key: row.id for row in rows}


def _refusal(error: IntegrityError) -> Exception:
    """The database's refusal of a journal, in the ledger's words."""
    facts = error.orig.diag if isinstance(error.orig, psycopg.Error) else None
    if facts is None or facts.constraint_name not in _REFUSALS:
        return error
    return _REFUSALS[facts.constraint_name](f"{facts.message_primary}.")


def _apply(session: Session, journals: Sequence[tuple[int, JournalDraft]]) -> None:
    """Move balances, resolve holds and write the lines of journals that were just inserted."""
    captures = [capture for _, draft in journals for capture in draft.captures]
    holders = _holders(session, [capture.hold_id for capture in captures])
    accounts = _accounts(session, {line.account_id for _, draft in journals for line in draft.lines})
    for _, draft in journals:
        _admit(draft, accounts, holders)
    signs = {account: Kind(row.kind).sign for account, row in accounts.items()}
    locked = lock_balances(session, signs.keys() | set(holders.values()))

    changes: dict[int, Change] = defaultdict(Change)
    for _, draft in journals:
        for line in draft.lines:
            if line.account_id in locked:
                changes[line.account_id].posted_nano += signs[line.account_id] * line.amount.nano
    if captures:
        captured = _capture(session, captures)
        _match_captures(changes, captured)
        for row in captured:
            changes[row.account_id].held_nano -= row.amount_nano
    if changes:
        change_balances(session, locked, changes)
    _insert_postings(session, journals)


def _accounts(session: Session, ids: set[int]) -> dict[int, Row[Any]]:
    """What these accounts are. Raises UnknownAccount, AccountNotOpen for a closed one."""
    query = text(
        "select id, code, kind, status, currency, book_id from ledger_accounts where id = any(cast(:ids as bigint[]))"
    )
    rows = {row.id: row for row in session.execute(query, {"ids": sorted(ids)})}
    unknown = sorted(ids - rows.keys())
    if unknown:
        raise UnknownAccount(f"There is no account with the id {unknown[0]}.")
    closed = [row.code for row in rows.values() if row.status == "closed"]
    if closed:
        raise AccountNotOpen(f"Account {closed[0]!r} is closed.")
    return rows


def _admit(draft: JournalDraft, accounts: dict[int, Row[Any]], holders: dict[UUID, int]) -> None:
    """Raise unless each line fits its account. A frozen one gives only what is held already, or taken back."""
    frozen: dict[int, int] = {}
    for line in draft.lines:
        account = accounts[line.account_id]
        if account.currency != line.amount.currency:
            raise CurrencyMismatch(f"Account {account.code!r} is in {account.currency}, not {line.amount.currency}.")
        if account.book_id != draft.book_id:
            raise InvalidJournal(f"Account {account.code!r} is not of book {draft.book_id}.")
        if account.status == "frozen" and draft.reverses_id is None:
            moved_nano = Kind(account.kind).sign * line.amount.nano
            frozen[account.id] = frozen.get(account.id, 0) + moved_nano
    for capture in draft.captures if frozen else ():
        holder = holders.get(capture.hold_id)
        if holder in frozen:
            frozen[holder] += capture.amount_nano
    spending = [account for account, nano in frozen.items() if nano < 0]
    if spending:
        raise AccountNotOpen(f"Account {accounts[spending[0]].code!r} is frozen.")


def _holders(session: Session, ids: Sequence[UUID]) -> dict[UUID, int]:
    """Hold -> its account. A hold never moves to another account, so this may be read before the lock."""
    if not ids:
        return {}
    query = text("select id, account_id from ledger_holds where id = any(cast(:ids as uuid[]))")
    return {row.id: row.account_id for row in session.execute(query, {"ids": list(ids)})}


def _match_captures(changes: dict[int, Change], captured: Sequence[Row[Any]]) -> None:
    """What the lines take from an account must be what its holds give."""
    given: dict[int, int] = defaultdict(int)
    for row in captured:
        given[row.account_id] += row.captured_nano
    for account, nano in given.items():
        taken_nano = -changes[account].posted_nano
        if taken_nano != nano:
            raise UnmatchedCapture(f"The lines take {taken_nano} nano from account {account}, its holds give {nano}.")


def _capture(session: Session, captures: Sequence[pure.Capture]) -> Sequence[Row[Any]]:
    parameters = {"ids": [c.hold_id for c in captures], "taken": [c.amount_nano for c in captures]}
    rows = session.execute(_CAPTURE_HOLDS, parameters).all()
    if len(rows) != len(captures):
        done = {row.id for row in rows}
        capture = next(c for c in captures if c.hold_id not in done)
        raise HoldNotOpen(capture.hold_id, _story(session, capture))
    return rows


def _story(session: Session, capture: pure.Capture) -> str:
    hold = session.get(Hold, capture.hold_id, populate_existing=True)
    if hold is None:
        return "does not exist"
    if hold.state != "held":
        return f"is {hold.state}"
    if capture.amount_nano <= hold.amount_nano:
        return f"expired at {hold.expires_at.isoformat()}"
    return f"holds {hold.amount_nano} nano, less than the {capture.amount_nano} to be taken"


def _insert_postings(session: Session, journals: Sequence[tuple[int, JournalDraft]]) -> None:
    lines = [(journal_id, line) for journal_id, draft in journals for line in draft.lines]
    session.execute(
        _INSERT_POSTINGS,
        {
            "journals": [journal_id for journal_id, _ in lines],
            "accounts": [line.account_id for _, line in lines],
            "currencies": [line.amount.currency for _, line in lines],
            "amounts": [line.amount.nano for _, line in lines],
        },
    )


def _replay(session: Session, draft: JournalDraft) -> int:
    """The journal that this draft became before. Raises if its key, outside event or reversal belongs to another."""
    stored = session.scalar(select(Journal).where(Journal.idempotency_key == draft.idempotency_key))
    if stored is None:
        raise OutsideIdTaken(
            f"Another journal already stands for {draft.source} {draft.kind} {draft.outside_id!r}: its key is not "
            f"{draft.idempotency_key!r}."
        )
    if stored.body_sha256 != pure.body_sha256(draft):
        differing = pure.differing(pure.body(draft), _stored_body(session, stored))
        raise IdempotencyMismatch(draft.idempotency_key, differing or ["body"])
    return stored.id


def _stored_body(session: Session, stored: Journal) -> dict[str, Any]:
    return pure.make_body(
        kind=stored.kind,
        source=stored.source,
        outside_id=stored.outside_id,
        lines=[(line.account_id, line.amount.currency, line.amount.nano) for line in lines_of(session, stored.id)],
        effective_at=stored.effective_at if stored.dated else None,
        captures_sha256=stored.captures_sha256,
        reverses_id=stored.reverses_id,
        memo=stored.memo,
        book_id=stored.book_id,
        corrects_period_id=stored.corrects_period_id,
        closing_entry=stored.closing_entry,
    )


def lines_of(session: Session, journal_id: int) -> tuple[Line, ...]:
    """The lines of a journal, in the order in which they were written; none if there is no such journal."""
    rows = session.scalars(select(Posting).where(Posting.journal_id == journal_id).order_by(Posting.id))
    return tuple(Line(row.account_id, Money(row.amount_nano, row.currency)) for row in rows)
