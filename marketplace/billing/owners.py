"""What owners are owed: earnings that mature, a reserve while an owner is new, and what is taken back from them.

Every function that moves an owner's money takes the owner's lock first, so that what it reads stays true.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

import ledger
from marketplace.core.errors import BadRequest
from marketplace.core.settings import Settings

SOURCE: Final = "fallow"
BASIS_POINTS: Final = 10_000
_LOCK = text("select pg_advisory_xact_lock(hashtextextended('fallow owner ' || :owner, 0))")


class InvalidWriteOff(BadRequest):
    code = "invalid_write_off"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who earned, and since when."""

    owner_id: UUID
    since: datetime


@dataclass(frozen=True, slots=True)
class OwnerAccounts:
    """Ids of an owner's accounts."""

    pending: int
    available: int
    reserve: int
    transit: int
    receivable: int


@dataclass(frozen=True, slots=True)
class OwnerBalances:
    """What is in them, in nano-USD."""

    pending_nano: int
    available_nano: int
    reserve_nano: int
    transit_nano: int
    receivable_nano: int


@dataclass(frozen=True, slots=True)
class Maturing:
    """What becomes payable now, in nano-USD."""

    released_nano: int
    """Earnings past their hold, the kept part included."""
    reserved_nano: int
    """Of these, kept back."""
    reserve_released_nano: int
    netted_nano: int
    """Set off against what the owner owes."""
    available_nano: int
    """What can be paid then."""
    new_owner: bool


def lock_owner(session: Session, owner_id: UUID) -> None:
    """Let nobody else move this owner's money until the transaction ends."""
    session.execute(_LOCK, {"owner": owner_id.hex})


def open_owner(session: Session, owner_id: UUID) -> OwnerAccounts:
    """The owner's accounts, opened where they are new."""
    ref = owner_id.hex
    codes = (
        ledger.owner_pending(ref),
        ledger.owner_available(ref),
        ledger.owner_reserve(ref),
        ledger.owner_transit(ref),
        ledger.owner_receivable(ref),
    )
    ids = ledger.open_accounts(session, [ledger.charted(code) for code in codes])
    return OwnerAccounts(*(ids[code] for code in codes))


def balances(session: Session, accounts: OwnerAccounts) -> OwnerBalances:
    """What an owner's accounts hold now."""
    return OwnerBalances(
        pending_nano=ledger.balance(session, accounts.pending).nano,
        available_nano=ledger.available(session, accounts.available).posted_nano,
        reserve_nano=ledger.available(session, accounts.reserve).posted_nano,
        transit_nano=ledger.available(session, accounts.transit).posted_nano,
        receivable_nano=ledger.available(session, accounts.receivable).posted_nano,
    )


def find_balances(session: Session, owner_id: UUID) -> OwnerBalances:
    """The same of an owner who may have no accounts yet; opens none."""
    ref = owner_id.hex
    makers = (
        ledger.owner_pending,
        ledger.owner_available,
        ledger.owner_reserve,
        ledger.owner_transit,
        ledger.owner_receivable,
    )
    found = ledger.find_accounts(session, [make(ref) for make in makers])
    held = (ledger.balance(session, found[make(ref)]).nano if make(ref) in found else 0 for make in makers)
    return OwnerBalances(*held)


def list_owners(session: Session) -> list[Owner]:
    """Owners that ever earned."""
    views = ledger.list_accounts(session, prefix="owner:")
    return [
        Owner(UUID(hex=view.code.split(":")[1]), view.opened_at) for view in views if view.code.endswith(":pending")
    ]


def maturing(
    session: Session, accounts: OwnerAccounts, earning_since: datetime, now: datetime, settings: Settings
) -> Maturing:
    """What becomes payable now. Reads only; the owner's lock makes it true until it is written."""
    new_owner = now < earning_since + timedelta(days=settings.payout_new_days)
    hold_days = settings.payout_hold_days_new if new_owner else settings.payout_hold_days
    held = balances(session, accounts)
    released = min(_older_than(session, accounts.pending, now - timedelta(days=hold_days)), max(0, held.pending_nano))
    reserved = released * settings.payout_reserve_basis_points // BASIS_POINTS if new_owner else 0
    back = _older_than(session, accounts.reserve, now - timedelta(days=settings.payout_reserve_days))
    back = min(back, held.reserve_nano)
    payable = held.available_nano + released - reserved + back
    netted = min(payable, max(0, held.receivable_nano))
    return Maturing(released, reserved, back, netted, payable - netted, new_owner)


def _older_than(session: Session, account_id: int, cutoff: datetime) -> int:
    """What came in before a time and has not left since: what left at any time left from the oldest."""
    before = ledger.balance(session, account_id, as_of=cutoff).nano
    since = ledger.movements(session, [account_id], cutoff, None)
    return max(0, before + sum(move.nano for move in since if move.nano < 0))


def mature(session: Session, owner_id: UUID, accounts: OwnerAccounts, due: Maturing, key: str) -> None:
    """Write down what `maturing` found. `key`: names the occasion, once for each owner."""
    kept = due.released_nano - due.reserved_nano
    _move(
        session,
        f"earnings-released:{key}:{owner_id.hex}",
        "earnings_released",
        [(accounts.pending, due.released_nano), (accounts.available, -kept), (accounts.reserve, -due.reserved_nano)],
    )
    back = due.reserve_released_nano
    _move(
        session,
        f"reserve-released:{key}:{owner_id.hex}",
        "reserve_released",
        [(accounts.reserve, back), (accounts.available, -back)],
    )
    _move(
        session,
        f"receivable-netted:{key}:{owner_id.hex}",
        "receivable_netted",
        [(accounts.available, due.netted_nano), (accounts.receivable, -due.netted_nano)],
    )


def taken_from(session: Session, owner_id: UUID, nano: int) -> list[ledger.Line]:
    """Lines that take this much from an owner: from the reserve, then what is pending, then what is payable; the rest
    the owner owes, to be netted with what comes. Takes the owner's lock."""
    lock_owner(session, owner_id)
    accounts = open_owner(session, owner_id)
    ledger.lock_balances(session, (accounts.available, accounts.reserve, accounts.receivable))
    held = balances(session, accounts)
    lines, left = [], nano
    for account, there in (
        (accounts.reserve, held.reserve_nano),
        (accounts.pending, held.pending_nano),
        (accounts.available, held.available_nano),
    ):
        part = min(left, max(0, there))
        if part:
            lines.append(ledger.debit(account, part))
            left -= part
    if left:
        lines.append(ledger.debit(accounts.receivable, left))
    return lines


def grant_bonus(session: Session, owner_id: UUID, nano: int, reason: str, *, key: str, by: str) -> int:
    """Give an owner something of our own, payable as earnings are; returns the journal's id. The same key again changes
    nothing. Raises InvalidWriteOff without a reason."""
    if not reason.strip():
        raise InvalidWriteOff("A bonus needs a reason.", param="reason")
    accounts = open_owner(session, owner_id)
    loss = ledger.open_accounts(session, [ledger.charted(ledger.PROMOTIONS)])[ledger.PROMOTIONS]
    draft = ledger.JournalDraft(
        idempotency_key=f"owner-bonus:{key}",
        kind="owner_bonus",
        source=SOURCE,
        outside_id=key,
        lines=(ledger.debit(loss, nano), ledger.credit(accounts.pending, nano)),
        memo={"reason": reason[:500], "by": by[:200]},
    )
    return ledger.post(session, draft).journal_id


def write_off(session: Session, owner_id: UUID, nano: int, reason: str, *, key: str, by: str) -> int:
    """Give up what an owner owes, in part or whole; returns the journal's id. Raises InvalidWriteOff."""
    if not reason.strip():
        raise InvalidWriteOff("A write-off needs a reason.", param="reason")
    lock_owner(session, owner_id)
    accounts = open_owner(session, owner_id)
    key = f"write-off:{key}"
    owed_nano = balances(session, accounts).receivable_nano
    if nano <= 0 or (nano > owed_nano and ledger_key_is_new(session, key)):
        raise InvalidWriteOff(f"This owner owes {ledger.format_nano(owed_nano)} USD.", param="amount")
    loss = ledger.open_accounts(session, [ledger.charted(ledger.BAD_DEBT)])[ledger.BAD_DEBT]
    draft = ledger.JournalDraft(
        idempotency_key=key,
        kind="receivable_written_off",
        source=SOURCE,
        outside_id=key,
        lines=(ledger.debit(loss, nano), ledger.credit(accounts.receivable, nano)),
        memo={"reason": reason[:500], "by": by[:200]},
    )
    return ledger.post(session, draft).journal_id


def ledger_key_is_new(session: Session, key: str) -> bool:
    """Whether no journal has this key: a repetition answers as the first time, whatever the balance says now."""
    return session.scalar(text("select 1 from ledger_journals where idempotency_key = :key"), {"key": key}) is None


def owed_nano(session: Session) -> int:
    """What the platform owes owners and has not sent to their accounts at the processor, in nano-USD."""
    trial = ledger.trial_balance(session)
    owed = sum(
        row.balance_nano for row in trial.rows if row.code.startswith("owner:") and row.kind is ledger.Kind.LIABILITY
    )
    return owed - sum(row.balance_nano for row in trial.rows if row.code == ledger.CONNECTED)


def _move(session: Session, key: str, kind: str, amounts: list[tuple[int, int]]) -> None:
    lines = tuple(ledger.Line(account, ledger.Money(nano)) for account, nano in amounts if nano)
    if lines:
        draft = ledger.JournalDraft(idempotency_key=key, kind=kind, source=SOURCE, outside_id=key, lines=lines)
        ledger.post(session, draft)
