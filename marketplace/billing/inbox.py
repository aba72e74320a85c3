"""Webhooks: kept raw as they came, answered at once, applied afterwards from the object as it is by then.

The effect and the row's new state are one transaction. An event says only which object to look at, so their order and
number do not matter. What cannot be applied yet waits; what never can is quarantined for a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, cast

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import ledger
from marketplace.billing import effects
from marketplace.billing.models import InboxEvent
from marketplace.billing.payments import port
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import FallowError, NotFound
from marketplace.core.logs import get_logger
from marketplace.core.outbox import enqueue

log = get_logger(__name__)
TASK: Final = "billing.webhook"
MAX_ATTEMPTS: Final = 12
"""Over some two days: longer than anything that an event may run ahead of."""
FIRST_RETRY: Final = timedelta(seconds=30)
LONGEST_RETRY: Final = timedelta(hours=6)
MAX_LISTED: Final = 500
STATES: Final = ("received", "waiting", "applied", "ignored", "quarantined")


class UnknownEvent(NotFound):
    code = "unknown_event"


class WebhooksDisabled(NotFound):
    """There is no secret to check signatures with, so there is no endpoint."""

    code = "webhooks_disabled"


def receive(
    session: Session, payments: port.Payments, body: bytes, signature: str, *, connect: bool, now: datetime
) -> int | None:
    """Keep an event; returns its row's id, or None if it was here before. Raises BadSignature, WebhooksDisabled."""
    if not payments.webhooks_enabled(connect=connect):
        log.warning("webhook_refused", because="the endpoint has no secret", connect=connect)
        raise WebhooksDisabled("This endpoint is disabled: it has no signing secret.")
    event = payments.read_event(body, signature, connect=connect)
    values = {
        "endpoint": "connect" if connect else "platform",
        "event_id": event.event_id,
        "type": event.type,
        "account": event.account,
        "kind": event.kind,
        "object_id": event.object_id,
        "body": body,
        "state": "ignored" if event.kind is None else "received",
        "received_at": now,
        "next_at": now,
    }
    again = insert(InboxEvent).values(values)
    again = again.on_conflict_do_update(
        index_elements=[InboxEvent.endpoint, InboxEvent.event_id],
        set_={"deliveries": InboxEvent.deliveries + 1},
    )
    row = session.execute(again.returning(InboxEvent.id, InboxEvent.deliveries, InboxEvent.state)).one()
    if row.deliveries > 1:
        return None
    if row.state == "received":
        enqueue(session, TASK, row.id)
    return int(row.id)


def process(factory: SessionFactory, payments: port.Payments, event_row: int, now: datetime) -> str:
    """Apply one event; returns the row's state. Blocking: it asks the processor, outside of any transaction."""
    with factory() as session:
        event = session.get(InboxEvent, event_row)
        if event is None or event.state not in ("received", "waiting") or event.next_at > now:
            return "none" if event is None else event.state
        kind, object_id, account = cast("port.ObjectKind", event.kind), event.object_id, event.account
    try:
        views = effects.look(payments, kind, object_id, account)
    except port.PaymentError as error:
        return _put_off(factory, event_row, error.message, now)
    try:
        return _apply(factory, event_row, views, now)
    except (FallowError, ledger.LedgerError, IntegrityError) as error:
        return _put_off(factory, event_row, f"{type(error).__name__}: {error}", now)


def _apply(factory: SessionFactory, event_row: int, views: Sequence[port.View], now: datetime) -> str:
    with transaction(factory) as session:
        event = session.get_one(InboxEvent, event_row, with_for_update=True)
        if event.state not in ("received", "waiting"):
            return event.state
        known = [effects.apply(session, view, now) for view in views]
        if all(known):
            event.state, event.applied_at, event.error = "applied", now, None
        else:
            _later(event, "its object is not ours, or not yet", now)
        return event.state


def _put_off(factory: SessionFactory, event_row: int, error: str, now: datetime) -> str:
    with transaction(factory) as session:
        event = session.get_one(InboxEvent, event_row, with_for_update=True)
        if event.state in ("received", "waiting"):
            _later(event, error, now)
        return event.state


def _later(event: InboxEvent, error: str, now: datetime) -> None:
    event.attempts += 1
    event.error = error[:500]
    event.state = "waiting" if event.attempts < MAX_ATTEMPTS else "quarantined"
    event.next_at = now + min(LONGEST_RETRY, FIRST_RETRY * (1 << min(event.attempts, 16)))
    if event.state == "quarantined":
        log.error("webhook_quarantined", event_id=event.event_id, type=event.type, error=event.error)


def process_due(factory: SessionFactory, payments: port.Payments, now: datetime, *, limit: int = 200) -> int:
    """Apply what waits and is due; returns how many were looked at."""
    with factory() as session:
        query = select(InboxEvent.id).where(InboxEvent.state.in_(("received", "waiting")), InboxEvent.next_at <= now)
        rows = list(session.scalars(query.order_by(InboxEvent.next_at, InboxEvent.id).limit(limit)))
    for row in rows:
        process(factory, payments, row, now)
    return len(rows)


def replay(session: Session, event_row: int, now: datetime) -> InboxEvent:
    """Apply an event again, whatever became of it: its effect happens once all the same. Raises UnknownEvent."""
    event = session.get(InboxEvent, event_row, with_for_update=True)
    if event is None or event.kind is None:
        raise UnknownEvent(f"There is no event {event_row} that says anything to us.")
    event.state, event.attempts, event.next_at, event.error = "received", 0, now, None
    enqueue(session, TASK, event.id)
    return event


def quarantine(session: Session, event_row: int, reason: str) -> InboxEvent:
    """Take an event out by hand. Raises UnknownEvent."""
    event = session.get(InboxEvent, event_row, with_for_update=True)
    if event is None:
        raise UnknownEvent(f"There is no event {event_row}.")
    if event.state in ("received", "waiting"):
        event.state, event.error = "quarantined", reason[:500]
    return event


def read_events(session: Session, state: str | None = None) -> Sequence[InboxEvent]:
    """Events, newest first."""
    query: Any = select(InboxEvent).order_by(InboxEvent.id.desc())
    if state is not None:
        query = query.where(InboxEvent.state == state)
    found: Sequence[InboxEvent] = session.scalars(query.limit(MAX_LISTED)).all()
    return found
