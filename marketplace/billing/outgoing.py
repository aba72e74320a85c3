"""What is asked of the processor: written down and committed first, sent afterwards, each wish with a key of its own.

A wish keeps its key for ever. Without a sure answer it is unknown; then only a look-up of what was made, or the same
key again, leads on, also when the processor has forgotten the key. An organisation with an unknown wish gets no payout.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from marketplace.billing.models import OutgoingCall
from marketplace.billing.payments import port

OPEN: Final = ("intended", "sent", "unknown")
IN_DOUBT: Final = ("sent", "unknown")
FIRST_RETRY: Final = timedelta(seconds=60)
"""Longer than a call can take: whoever finds a sent call after this knows that nobody waits for its answer."""
LONGEST_RETRY: Final = timedelta(hours=6)
MAX_DUE: Final = 500


def intend(
    session: Session, wish: port.AnyWish, *, organisation_id: UUID, now: datetime, after: timedelta = timedelta()
) -> OutgoingCall:
    """Write a wish down. The same wish for the same row again is the next of its kind: only after a final refusal."""
    kind, subject = type(wish).__name__, UUID(wish.reference)
    before = session.scalars(
        select(OutgoingCall).where(OutgoingCall.kind == kind, OutgoingCall.subject_id == subject)
    ).all()
    if any(call.state not in ("refused", "cancelled") for call in before):
        raise ValueError(f"there is a {kind} for {subject} already")
    number = len(before) + 1
    call = OutgoingCall(
        kind=kind,
        subject_id=subject,
        number=number,
        organisation_id=organisation_id,
        idempotency_key=f"fallow-{kind}-{subject.hex}-{number}",
        wish=msgspec.to_builtins(wish),
        next_at=now + after,
        created_at=now,
        state="intended",
        attempts=0,
    )
    session.add(call)
    session.flush()
    return call


def wish_of(call: OutgoingCall) -> port.AnyWish:
    """The wish as it was written down."""
    wish: port.AnyWish = msgspec.convert(call.wish, type=port.AnyWish)
    return wish


def lock(session: Session, call_id: UUID) -> OutgoingCall:
    """The call, locked: whoever sends, answers or cancels it holds this lock."""
    return session.get_one(OutgoingCall, call_id, with_for_update={"key_share": True}, populate_existing=True)


def of_subject(session: Session, wish: type[Any], subject_id: UUID, *, locked: bool = False) -> OutgoingCall | None:
    """The newest call of a kind about a row."""
    query = select(OutgoingCall).where(OutgoingCall.kind == wish.__name__, OutgoingCall.subject_id == subject_id)
    query = query.order_by(OutgoingCall.number.desc()).limit(1)
    if locked:
        query = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    return session.scalars(query).first()


def due(session: Session, now: datetime, limit: int = MAX_DUE) -> list[UUID]:
    """Calls that wait for being sent or looked up, oldest first."""
    query = select(OutgoingCall.id).where(OutgoingCall.state.in_(OPEN), OutgoingCall.next_at <= now)
    return list(session.scalars(query.order_by(OutgoingCall.next_at, OutgoingCall.id).limit(limit)))


def in_doubt(session: Session, organisation_id: UUID) -> bool:
    """Whether something is under way for them of which nobody knows whether it happened."""
    query = select(exists().where(OutgoingCall.organisation_id == organisation_id, OutgoingCall.state.in_(IN_DOUBT)))
    return bool(session.scalar(query))


def retry_at(now: datetime, attempts: int) -> datetime:
    """When to look again: after a minute, then ever later, at most six hours."""
    doublings = min(max(attempts - 1, 0), 20)
    return now + min(LONGEST_RETRY, FIRST_RETRY * (1 << doublings))
