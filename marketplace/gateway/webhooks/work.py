"""Sending what is due: take some deliveries, POST them, note what came of it. Each step is a transaction of its own.

A delivery that was taken is due again a minute later, should whoever took it die: it may then arrive twice, under the
same id. Functions that get a session flush; their caller commits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Final, Protocol
from uuid import UUID

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.orm import Session

from marketplace.core.database import SessionFactory, transaction
from marketplace.core.logs import get_logger
from marketplace.gateway.webhooks.events import body_of
from marketplace.gateway.webhooks.models import WebhookDelivery, WebhookEndpoint
from marketplace.gateway.webhooks.post import Answer
from marketplace.gateway.webhooks.retries import delay_s, why_disable
from marketplace.gateway.webhooks.signing import signed_headers

log = get_logger(__name__)
AT_ONCE: Final = 16
"""Deliveries on their way at the same time."""
FOR_ONE: Final = 4
"""Taken up of one renter at once, and none more while so many are on their way: receivers that answer slowly hold up
their own renter only."""
LOOKED_AT: Final = 2_000
"""Of those that are due, the oldest; among them each renter's first goes before anyone's second."""
CLAIM_S: Final = 60
BUDGET_S: Final = 8.0
"""A tick takes up nothing more after this; what is on its way then takes post.TOTAL_S at most."""
KEPT: Final = timedelta(days=30)
"""So long a delivery is shown after its end."""

_DUE: Final = text("""
    select id from (
      select id, next_try_at, row_number() over (partition by organisation_id order by next_try_at, id) as turn
      from (select id, organisation_id, next_try_at from webhook_deliveries
            where state = 'pending' and next_try_at <= now() and organisation_id <> all(:busy)
            order by next_try_at limit :looked_at) oldest
    ) due where turn <= :for_one order by turn, next_try_at limit :limit
""")


class Sends(Protocol):
    """What sends; see post.Poster."""

    def send(self, url: str, headers: dict[str, str], body: bytes) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """A delivery that is ours to send now."""

    delivery_id: UUID
    endpoint_id: UUID
    organisation_id: UUID
    event: str
    subject_id: UUID
    created_at: datetime
    tries: int
    """This one counted; it fences what is noted afterwards."""
    url: str
    keys: tuple[bytes, ...]


def send_due(factory: SessionFactory, sends: Sends, rng: Random) -> int:
    """Send what is due, taking up more as answers come, within BUDGET_S. Returns how many arrived."""
    ends_at = time.monotonic() + BUDGET_S
    arrived = 0
    on_their_way: dict[Future[Answer], Taken] = {}
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="webhook") as pool:
        while True:
            room = AT_ONCE - len(on_their_way)
            if room and time.monotonic() < ends_at:
                with transaction(factory) as session:
                    taken = take(session, limit=room, busy=_busy(on_their_way.values()))
                on_their_way |= {pool.submit(_send, each, sends): each for each in taken}
            if not on_their_way:
                return arrived
            answered, _ = wait(on_their_way, return_when=FIRST_COMPLETED)
            for future in answered:
                # One by one: together they would lock several endpoints, in no order.
                with transaction(factory) as session:
                    note(session, on_their_way.pop(future), future.result(), rng)
                arrived += future.result().ok


def _busy(on_their_way: Collection[Taken]) -> list[UUID]:
    """Renters of whom enough is on its way."""
    counts = Counter(each.organisation_id for each in on_their_way)
    return [organisation_id for organisation_id, count in counts.items() if count >= FOR_ONE]


def _send(taken: Taken, sends: Sends) -> Answer:
    body = body_of(taken.event, taken.subject_id, taken.created_at)
    return sends.send(taken.url, signed_headers(taken.delivery_id, int(time.time()), body, taken.keys), body)


def take(session: Session, *, limit: int, busy: Sequence[UUID] = ()) -> list[Taken]:
    """Some of the deliveries that are due, ours for CLAIM_S, but none of the `busy` renters."""
    asked = {"looked_at": LOOKED_AT, "limit": limit, "for_one": FOR_ONE, "busy": list(busy)}
    ids = session.scalars(_DUE, asked).all()
    if not ids:
        return []
    rows = session.execute(
        select(WebhookDelivery, WebhookEndpoint)
        .join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
        .where(
            WebhookDelivery.id.in_(ids),
            WebhookDelivery.state == "pending",
            WebhookDelivery.next_try_at <= func.now(),
        )
        .order_by(WebhookDelivery.id)
        .with_for_update(skip_locked=True, of=WebhookDelivery)
    ).all()
    now = _now(session)
    taken = []
    for delivery, endpoint in rows:
        delivery.tries += 1
        delivery.next_try_at = now + timedelta(seconds=CLAIM_S)
        taken.append(
            Taken(
                delivery_id=delivery.id,
                endpoint_id=endpoint.id,
                organisation_id=delivery.organisation_id,
                event=delivery.event,
                subject_id=delivery.subject_id,
                created_at=delivery.created_at,
                tries=delivery.tries,
                url=delivery.url or endpoint.url or "",
                keys=_keys(endpoint, now),
            )
        )
    session.flush()
    return taken


def _keys(endpoint: WebhookEndpoint, now: datetime) -> tuple[bytes, ...]:
    old = endpoint.previous_secret
    if old is None or endpoint.previous_until is None or endpoint.previous_until <= now:
        return (endpoint.secret,)
    return (endpoint.secret, old)


def note(session: Session, taken: Taken, answer: Answer, rng: Random) -> None:
    """Write what came of a try, unless somebody else has taken the delivery up meanwhile."""
    # The endpoint first, as whoever deletes it: the other way round the two would wait for each other. Its key stays
    # free, so that no job's end waits for this.
    endpoint = session.get(
        WebhookEndpoint, taken.endpoint_id, with_for_update={"key_share": True}, populate_existing=True
    )
    delivery = session.scalars(
        select(WebhookDelivery)
        .where(
            WebhookDelivery.id == taken.delivery_id,
            WebhookDelivery.tries == taken.tries,
            WebhookDelivery.state == "pending",
        )
        .with_for_update()
    ).one_or_none()
    if endpoint is None or delivery is None:
        return
    now = _now(session)
    delivery.last_status, delivery.last_error = answer.status, answer.error or None
    wait_s = delay_s(taken.tries, rng)
    if answer.ok:
        delivery.state, delivery.ended_at = "delivered", now
    elif wait_s is None:
        delivery.state, delivery.ended_at = "failed", now
        log.warning("webhook_given_up", delivery=delivery.id.hex, tries=taken.tries)
    else:
        delivery.next_try_at = now + timedelta(seconds=wait_s)
    session.flush()
    _judge(session, endpoint, answer, now)


def _judge(session: Session, endpoint: WebhookEndpoint, answer: Answer, now: datetime) -> None:
    """The endpoint's health. What one job brought along says nothing about the next one's."""
    if endpoint.url is None:
        return
    if answer.ok:
        endpoint.failing_since = None
        return
    endpoint.failing_since = endpoint.failing_since or now
    reason = why_disable(answer.status, now - endpoint.failing_since)
    if reason is not None and endpoint.disabled_at is None:
        endpoint.disabled_at, endpoint.disabled_reason = now, reason
        session.execute(
            update(WebhookDelivery)
            .where(WebhookDelivery.endpoint_id == endpoint.id, WebhookDelivery.state == "pending")
            .values(state="failed", ended_at=now, last_error="The endpoint was disabled.")
        )
        log.warning("webhook_endpoint_disabled", endpoint=endpoint.id.hex, reason=reason)
    session.flush()


def erase_old(session: Session, *, limit: int) -> int:
    """Forget deliveries that ended KEPT ago. Returns how many."""
    old = (
        select(WebhookDelivery.id)
        .where(WebhookDelivery.ended_at < func.now() - KEPT)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    gone: Sequence[UUID] = session.scalars(
        delete(WebhookDelivery)
        .where(WebhookDelivery.id.in_(old))
        .returning(WebhookDelivery.id)
        .execution_options(synchronize_session=False)
    ).all()
    return len(gone)


def _now(session: Session) -> datetime:
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return now
