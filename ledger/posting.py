"""Writing journals. Everything that changes a checked balance locks its row first, in order of account id: top-ups,
settlement and holds alike, so that they wait for each other and never deadlock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, select, text
from sqlalchemy.orm import Session

from ledger import journal as pure
from ledger.chart import Kind
from ledger.errors import (
    AccountNotOpen,
    AlreadyReversed,
    BelowFloor,
    HoldNotOpen,
    IdempotencyMismatch,
    OutsideIdTaken,
    UnknownAccount,
    UnknownJournal,
    UnmatchedCapture,
)
from ledger.journal import JournalDraft, Line
from ledger.models import Hold, Journal, Posting
from ledger.money import Money

_INSERT_JOURNALS = text(
    """
    insert into ledger_journals
      (idempotency_key, kind, source, outside_id, body_sha256, effective_at, reverses_id, memo)
    select key, kind, source, outside_id, body, coalesce(effective_at, now()), reverses_id, cast(memo as jsonb)
    from unnest(cast(:keys as text[]), cast(:kinds as text[]), cast(:sources as text[]), cast(:outside_ids as text[]),
                cast(:bodies as bytea[]), cast(:times as timestamptz[]), cast(:reverses as bigint[]),
                cast(:memos as text[]))
         as w (key, kind, source, outside_id, body, effective_at, reverses_id, memo)
    order by key
    on conflict do nothing
    returning idempotency_key, id
    """
)
_LOCK_BALANCES = text(
    """
    select account_id, posted_nano, held_nano, floor_nano from ledger_balances
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
    where h.id = c.id and h.state = 'held' and c.taken <= h.amount_nano
    returning h.id, h.account_id, h.amount_nano, h.captured_nano
    """
)
_INSERT_POSTINGS = text(
    """
    insert into ledger_postings (journal_id, account_id, currency, amount_nano)
    select * from unnest(cast(:journals as bigint[]), cast(:accounts as bigint[]), cast(:currencies as text[]),
                         cast(:amounts as bigint[])) as p (journal_id, account_id, currency, amount)
    order by journal_id, account_id
    """
)


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

    A draft whose key was used for the same body answers with the first result and writes nothing. Raises
    InvalidJournal, UnknownAccount, IdempotencyMismatch, OutsideIdTaken, AlreadyReversed, BelowFloor, HoldNotOpen,
    UnmatchedCapture; the caller rolls back then, or posts within a savepoint. The transaction commits only if each
    journal balances.
    """
    for draft in drafts:
        pure.validate(draft)
    unique = {draft.idempotency_key: draft for draft in reversed(drafts)}
    written = _insert_journals(session, list(unique.values()))
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


def reverse(
    session: Session,
    journal_id: int,
    *,
    idempotency_key: str,
    source: str,
    outside_id: str,
    kind: str = "reversal",
    effective_at: datetime | None = None,
    memo: dict[str, Any] | None = None,
) -> PostResult:
    """Take a journal back in full, by a new one that names it. Holds that it captured stay resolved.

    Raises UnknownJournal, AlreadyReversed, and what post_many raises.
    """
    lines = _lines(session, journal_id)
    if not lines:
        raise UnknownJournal(f"There is no journal {journal_id}.")
    draft = JournalDraft(
        idempotency_key=idempotency_key,
        kind=kind,
        source=source,
        outside_id=outside_id,
        lines=pure.inverse(lines),
        effective_at=effective_at,
        reverses_id=journal_id,
        memo=memo or {},
    )
    return post(session, draft)


def lock_balances(session: Session, account_ids: Iterable[int]) -> dict[int, Row[Any]]:
    """Lock the checked balances among these accounts, in order, and read them. Hot accounts have none."""
    rows = session.execute(_LOCK_BALANCES, {"ids": sorted(set(account_ids))})
    return {row.account_id: row for row in rows}


def change_balances(session: Session, locked: dict[int, Row[Any]], changes: dict[int, Change]) -> None:
    """Write changes to balances that this transaction has locked. Raises BelowFloor before anything is written."""
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
    ids = sorted(changes)
    parameters = {
        "ids": ids,
        "posted": [changes[account].posted_nano for account in ids],
        "held": [changes[account].held_nano for account in ids],
    }
    session.execute(_UPDATE_BALANCES, parameters)


def _insert_journals(session: Session, drafts: Sequence[JournalDraft]) -> dict[str, int]:
    rows = session.execute(
        _INSERT_JOURNALS,
        {
            "keys": [draft.idempotency_key for draft in drafts],
            "kinds": [draft.kind for draft in drafts],
            "sources": [draft.source for draft in drafts],
            "outside_ids": [draft.outside_id for draft in drafts],
            "bodies": [pure.body_sha256(draft) for draft in drafts],
            "times": [draft.effective_at for draft in drafts],
            "reverses": [draft.reverses_id for draft in drafts],
            "memos": [json.dumps(dict(draft.memo)) for draft in drafts],
        },
    )
    return {row.idempotency_key: row.id for row in rows}


def _apply(session: Session, journals: Sequence[tuple[int, JournalDraft]]) -> None:
    """Move balances, resolve holds and write the lines of journals that were just inserted."""
    captures = [capture for _, draft in journals for capture in draft.captures]
    holders = _holders(session, [capture.hold_id for capture in captures])
    signs = _signs(session, {line.account_id for _, draft in journals for line in draft.lines})
    locked = lock_balances(session, signs.keys() | holders)

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


def _signs(session: Session, ids: set[int]) -> dict[int, int]:
    """Account -> the sign of its normal direction. Raises UnknownAccount, AccountNotOpen for a closed one."""
    query = text("select id, code, kind, status from ledger_accounts where id = any(cast(:ids as bigint[]))")
    rows = session.execute(query, {"ids": sorted(ids)}).all()
    unknown = sorted(ids - {row.id for row in rows})
    if unknown:
        raise UnknownAccount(f"There is no account with the id {unknown[0]}.")
    closed = [row.code for row in rows if row.status == "closed"]
    if closed:
        raise AccountNotOpen(f"Account {closed[0]!r} is closed.")
    return {row.id: Kind(row.kind).sign for row in rows}


def _holders(session: Session, ids: Sequence[UUID]) -> set[int]:
    """The accounts of these holds. A hold never moves to another account, so they are readable before the lock."""
    if not ids:
        return set()
    query = text("select distinct account_id from ledger_holds where id = any(cast(:ids as uuid[]))")
    return set(session.scalars(query, {"ids": list(ids)}))


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
        raise _conflict(session, draft)
    if stored.body_sha256 != pure.body_sha256(draft):
        raise IdempotencyMismatch(
            draft.idempotency_key, pure.differing(pure.body(draft), _stored_body(session, stored))
        )
    return stored.id


def _conflict(session: Session, draft: JournalDraft) -> OutsideIdTaken | AlreadyReversed:
    other = session.scalar(
        select(Journal.id).where(
            Journal.source == draft.source, Journal.kind == draft.kind, Journal.outside_id == draft.outside_id
        )
    )
    if other is not None:
        return OutsideIdTaken(f"Journal {other} already stands for {draft.source} {draft.kind} {draft.outside_id!r}.")
    return AlreadyReversed(f"Journal {draft.reverses_id} was reversed before.")


def _stored_body(session: Session, stored: Journal) -> dict[str, Any]:
    lines = _lines(session, stored.id)
    return {
        "kind": stored.kind,
        "source": stored.source,
        "outside_id": stored.outside_id,
        "lines": sorted([line.account_id, line.amount.currency, line.amount.nano] for line in lines),
        "effective_at": stored.effective_at.astimezone(UTC).isoformat(),
        "reverses_id": stored.reverses_id,
        "memo": stored.memo,
    }


def _lines(session: Session, journal_id: int) -> tuple[Line, ...]:
    rows = session.scalars(select(Posting).where(Posting.journal_id == journal_id).order_by(Posting.id))
    return tuple(Line(row.account_id, Money(row.amount_nano, row.currency)) for row in rows)
