"""Sending what was written down. Each step commits by itself; after a crash anywhere the next step knows what to do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from marketplace.billing import effects, outgoing, payouts
from marketplace.billing.payments import port
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.logs import get_logger

log = get_logger(__name__)
LOOK_BACK: Final = timedelta(hours=1)
"""Clocks differ: a look-up begins this long before the first sending."""
UNCOVERED_RETRY: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class _Step:
    wish: port.AnyWish
    key: str
    organisation_id: UUID
    fresh: bool
    """Never sent before, or refused for sure the last time."""
    since: datetime


def drive(factory: SessionFactory, payments: port.Payments, call_id: UUID, now: datetime) -> str:
    """Take one wish a step on; returns its state. Never raises a PaymentError: it is written down."""
    step = _claim(factory, call_id, now)
    if step is None:
        return "waits"
    try:
        view = None if step.fresh else payments.find(step.wish, step.since - LOOK_BACK)
        if view is None:
            # The same key, whether the processor still knows it or not: if it does, it answers as the first time; if
            # it does not, a day has passed and the look-up has just shown that there is nothing.
            view = payments.send(step.wish, step.key)
    except port.Declined as error:
        return _refuse(factory, call_id, f"{error.reason}: {error.message}", now)
    except port.PaymentError as error:
        sure = step.fresh and isinstance(error, port.NotDone)
        return _put_off(factory, call_id, "intended" if sure else "unknown", error.message)
    return _finish(factory, payments, call_id, view, now)


def _claim(factory: SessionFactory, call_id: UUID, now: datetime) -> _Step | None:
    with transaction(factory) as session:
        call = outgoing.lock(session, call_id)
        if call.state not in outgoing.OPEN or call.next_at > now:
            return None
        if call.kind == port.TransferWish.__name__ and call.state == "intended" and not payouts.covered(session):
            call.next_at = now + UNCOVERED_RETRY
            return None
        fresh = call.state == "intended"
        call.state = "sent" if fresh else call.state
        call.attempts += 1
        call.first_sent_at = call.first_sent_at or now
        call.next_at = outgoing.retry_at(now, call.attempts)
        wish = outgoing.wish_of(call)
        return _Step(wish, call.idempotency_key, call.organisation_id, fresh, call.first_sent_at)


def _finish(factory: SessionFactory, payments: port.Payments, call_id: UUID, view: port.View, now: datetime) -> str:
    with transaction(factory) as session:
        call = outgoing.lock(session, call_id)
        if call.state in outgoing.OPEN:
            effects.apply(session, view, now)
            call.state, call.ended_at, call.error = "done", now, None
    if isinstance(view, port.CheckoutView):
        _follow(factory, payments, view, now)
    return "done"


def _follow(factory: SessionFactory, payments: port.Payments, view: port.CheckoutView, now: datetime) -> None:
    """A session that is paid already: credit it now, not with the next look."""
    try:
        found = effects.followed(payments, view)[1:]
    except port.PaymentError as error:
        log.info("payment_not_read", session=view.session_id, error=error.message)
        return
    for each in found:
        with transaction(factory) as session:
            effects.apply(session, each, now)


def _refuse(factory: SessionFactory, call_id: UUID, reason: str, now: datetime) -> str:
    with transaction(factory) as session:
        call = outgoing.lock(session, call_id)
        if call.state in outgoing.OPEN:
            call.state, call.ended_at, call.error = "refused", now, reason[:500]
            session.flush()
            effects.refuse(session, call, reason, now)
    log.info("outgoing_refused", call=call_id.hex, reason=reason[:200])
    return "refused"


def _put_off(factory: SessionFactory, call_id: UUID, state: str, error: str) -> str:
    with transaction(factory) as session:
        call = outgoing.lock(session, call_id)
        if call.state in outgoing.OPEN:
            call.state, call.error = state, error[:500]
    log.info("outgoing_put_off", call=call_id.hex, state=state, error=error[:200])
    return state


def drive_due(factory: SessionFactory, payments: port.Payments, now: datetime, *, limit: int = 200) -> int:
    """Take each due wish a step on; returns how many. What one step leads to is due at once."""
    total = 0
    while total < limit:
        with transaction(factory) as session:
            calls = outgoing.due(session, now, limit - total)
        if not calls:
            break
        for call_id in calls:
            drive(factory, payments, call_id, now)
        total += len(calls)
    return total
