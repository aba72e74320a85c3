"""Holds: money set aside, resolved once. A hold is captured by the journal that takes its money (see Capture).

Each function locks the account's balance before it touches the hold, in the order that all writers keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from ledger.errors import AccountNotOpen, HoldMismatch, HoldNotOpen, InvalidAmount, UnknownAccount
from ledger.models import Account, Hold
from ledger.money import positive_nano, whole_nano
from ledger.posting import Change, change_balances, lock_balances

_EXPIRE = text(
    """
    update ledger_holds set state = 'expired', resolved_at = now()
    where id = any(:ids) and state = 'held' and expires_at <= clock_timestamp()
    returning account_id, amount_nano
    """
)


@dataclass(frozen=True, slots=True)
class HoldView:
    """A hold as it stands, in nanos. `state`: held, captured, released or expired."""

    hold_id: UUID
    account_id: int
    amount_nano: int
    captured_nano: int | None
    state: str
    expires_at: datetime


def reserve(session: Session, hold_id: UUID, account_id: int, amount_nano: int, expires_at: datetime) -> HoldView:
    """Set money aside on a checked account until `expires_at`, by the database's clock.

    The same id, account and amount again changes nothing and says what has become of the hold. A failed attempt leaves
    nothing: its id is free. Raises BelowFloor (with what is available), HoldMismatch for an id in other use,
    AccountNotOpen for a frozen or closed account, UnknownAccount for one that keeps no balance, InvalidAmount for an
    amount that is not positive and for a time without zone.
    """
    positive_nano(amount_nano)
    if expires_at.tzinfo is None:
        raise InvalidAmount("A hold expires at a time with a time zone.")
    locked = lock_balances(session, [account_id])
    if account_id not in locked:
        raise UnknownAccount(f"Account {account_id} keeps no balance to hold on.")
    known = _find(session, hold_id)
    if known is not None:
        if (known.account_id, known.amount_nano) != (account_id, amount_nano):
            raise HoldMismatch(f"Hold {hold_id.hex} is {known.amount_nano} nano on account {known.account_id}.")
        return _view(known)
    if session.scalar(select(Account.status).where(Account.id == account_id)) != "open":
        raise AccountNotOpen(f"Account {account_id} is not open.")
    change_balances(session, locked, {account_id: Change(held_nano=amount_nano)})
    hold = Hold(id=hold_id, account_id=account_id, amount_nano=amount_nano, state="held", expires_at=expires_at)
    session.add(hold)
    session.flush()
    return _view(hold)


def find_hold(session: Session, hold_id: UUID) -> HoldView | None:
    """A hold by its id, if there is one."""
    hold = _find(session, hold_id)
    return None if hold is None else _view(hold)


def shrink(session: Session, hold_id: UUID, amount_nano: int) -> None:
    """Lower an open hold to this amount; the difference is free at once. Raises HoldNotOpen; it never grows."""
    if whole_nano(amount_nano) < 0:
        raise InvalidAmount("A hold cannot be negative.")
    hold, locked = _lock(session, hold_id)
    if hold.state != "held":
        raise HoldNotOpen(hold_id, f"is {hold.state}")
    if amount_nano > hold.amount_nano:
        raise HoldNotOpen(hold_id, f"holds {hold.amount_nano} nano and cannot grow to {amount_nano}")
    change_balances(session, locked, {hold.account_id: Change(held_nano=amount_nano - hold.amount_nano)})
    session.execute(update(Hold).where(Hold.id == hold_id).values(amount_nano=amount_nano))


def release(session: Session, hold_id: UUID) -> bool:
    """Free an open hold in full. False: it was free before. Raises HoldNotOpen if it was captured, or never was."""
    hold, locked = _lock(session, hold_id)
    if hold.state == "captured":
        raise HoldNotOpen(hold_id, "was captured")
    if hold.state != "held":
        return False
    change_balances(session, locked, {hold.account_id: Change(held_nano=-hold.amount_nano)})
    session.execute(update(Hold).where(Hold.id == hold_id).values(state="released", resolved_at=text("now()")))
    return True


def overdue(session: Session, limit: int) -> list[UUID]:
    """Open holds past their expiry, oldest first. Whoever set them decides which may go: a charge may be waiting."""
    past = select(Hold.id).where(Hold.state == "held", Hold.expires_at <= text("now()"))
    return list(session.scalars(past.order_by(Hold.expires_at).limit(limit)))


def expire(session: Session, hold_ids: Iterable[UUID]) -> int:
    """Free those of these holds that are open and past their expiry. Returns how many."""
    ids = list(hold_ids)
    accounts = session.scalars(select(Hold.account_id).where(Hold.id.in_(ids)).distinct())
    locked = lock_balances(session, accounts)
    changes: dict[int, Change] = defaultdict(Change)
    rows = session.execute(_EXPIRE, {"ids": ids}).all()
    for row in rows:
        changes[row.account_id].held_nano -= row.amount_nano
    if changes:
        change_balances(session, locked, changes)
    return len(rows)


def _view(hold: Hold) -> HoldView:
    return HoldView(hold.id, hold.account_id, hold.amount_nano, hold.captured_nano, hold.state, hold.expires_at)


def _find(session: Session, hold_id: UUID) -> Hold | None:
    return session.get(Hold, hold_id, populate_existing=True)


def _lock(session: Session, hold_id: UUID) -> tuple[Hold, dict[int, Any]]:
    account_id = session.scalar(select(Hold.account_id).where(Hold.id == hold_id))
    if account_id is None:
        raise HoldNotOpen(hold_id, "does not exist")
    locked = lock_balances(session, [account_id])
    hold = _find(session, hold_id)
    assert hold is not None  # holds are never deleted
    return hold, locked
