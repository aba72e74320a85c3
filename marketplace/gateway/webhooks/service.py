"""Registering endpoints, turning their secrets, showing what was told to them, and telling it again. Services flush;
the edge commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import delete, func, select, tuple_
from sqlalchemy.orm import Session

from marketplace.core.errors import BadRequest, Conflict, NotFound
from marketplace.core.ids import new_id, show
from marketplace.core.logs import get_logger
from marketplace.core.outbox import enqueue
from marketplace.core.settings import Settings
from marketplace.gateway.webhooks import signing
from marketplace.gateway.webhooks.models import WebhookDelivery, WebhookEndpoint

log = get_logger(__name__)
MAX_ENDPOINTS: Final = 20
"""Of one organisation."""
OVERLAP: Final = timedelta(hours=24)
"""So long after a rotation the old secret signs too."""
SEND: Final = "webhooks.send"


class TooManyWebhooks(Conflict):
    """The organisation has as many endpoints as it may have."""

    code = "too_many_webhooks"


class WebhookExists(Conflict):
    """The organisation has its secret for the addresses that jobs bring along."""

    code = "webhook_exists"


class WebhookSecretNeeded(BadRequest):
    """A job names an address, and there is no secret to sign with."""

    code = "webhook_secret_needed"


@dataclass(frozen=True, slots=True)
class Registered:
    """An endpoint with its secret, which nobody is shown again."""

    endpoint: WebhookEndpoint
    secret: str


def register(session: Session, organisation_id: UUID, url: str | None, events: Sequence[str]) -> Registered:
    """Add an endpoint; without a URL, the secret for those that jobs bring along. Raises TooManyWebhooks and
    WebhookExists."""
    own = select(WebhookEndpoint).where(WebhookEndpoint.organisation_id == organisation_id)
    # Two registrations at once wait for each other here.
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"webhooks:{organisation_id}", 0))))
    known = session.scalars(own).all()
    if len(known) >= MAX_ENDPOINTS:
        raise TooManyWebhooks(f"An organisation has at most {MAX_ENDPOINTS} webhooks: delete one first.")
    if url is None:
        for endpoint in known:
            if endpoint.url is None:
                raise WebhookExists(
                    f"Your jobs' own addresses have a secret already, {show('webhook', endpoint.id)}: rotate it."
                )
    secret = signing.new_secret()
    endpoint = WebhookEndpoint(
        id=new_id(), organisation_id=organisation_id, url=url, events=list(dict.fromkeys(events)), secret=secret
    )
    session.add(endpoint)
    session.flush()
    session.refresh(endpoint)
    return Registered(endpoint, signing.show_secret(secret))


def find(session: Session, organisation_id: UUID, endpoint_id: UUID, *, lock: bool = False) -> WebhookEndpoint:
    """One of the organisation's endpoints. Raises NotFound."""
    # Its key stays free: the end of a job, which writes what is to be told here, waits for nobody.
    endpoint = session.get(WebhookEndpoint, endpoint_id, with_for_update={"key_share": True} if lock else None)
    if endpoint is None or endpoint.organisation_id != organisation_id:
        raise NotFound(f"There is no webhook with the id {show('webhook', endpoint_id)!r}.")
    return endpoint


def all_of(session: Session, organisation_id: UUID) -> Sequence[WebhookEndpoint]:
    """The organisation's endpoints, oldest first."""
    own = select(WebhookEndpoint).where(WebhookEndpoint.organisation_id == organisation_id)
    return session.scalars(own.order_by(WebhookEndpoint.created_at, WebhookEndpoint.id)).all()


def remove(session: Session, organisation_id: UUID, endpoint_id: UUID) -> None:
    """Delete an endpoint, with what was to be told to it. Raises NotFound."""
    find(session, organisation_id, endpoint_id)
    session.execute(delete(WebhookEndpoint).where(WebhookEndpoint.id == endpoint_id))


def rotate(session: Session, organisation_id: UUID, endpoint_id: UUID) -> Registered:
    """Give an endpoint a new secret; for OVERLAP both sign. Raises NotFound."""
    endpoint = find(session, organisation_id, endpoint_id, lock=True)
    secret = signing.new_secret()
    endpoint.previous_secret, endpoint.secret = endpoint.secret, secret
    endpoint.previous_until = func.now() + OVERLAP
    session.flush()
    session.refresh(endpoint)
    return Registered(endpoint, signing.show_secret(secret))


def enable(session: Session, organisation_id: UUID, endpoint_id: UUID) -> WebhookEndpoint:
    """Tell an endpoint again what happens from now on. Raises NotFound."""
    endpoint = find(session, organisation_id, endpoint_id, lock=True)
    endpoint.disabled_at = endpoint.disabled_reason = endpoint.failing_since = None
    session.flush()
    return endpoint


def deliveries(
    session: Session, organisation_id: UUID, endpoint_id: UUID, *, after: UUID | None, state: str | None, limit: int
) -> tuple[list[WebhookDelivery], bool]:
    """Up to `limit` of what was told to an endpoint, newest first, and whether more follow. Raises NotFound."""
    find(session, organisation_id, endpoint_id)
    statement = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint_id)
    if state is not None:
        statement = statement.where(WebhookDelivery.state == state)
    if after is not None:
        cursor = select(WebhookDelivery.created_at, WebhookDelivery.id).where(
            WebhookDelivery.id == after, WebhookDelivery.endpoint_id == endpoint_id
        )
        statement = statement.where(tuple_(WebhookDelivery.created_at, WebhookDelivery.id) < cursor.scalar_subquery())
    statement = statement.order_by(WebhookDelivery.created_at.desc(), WebhookDelivery.id.desc()).limit(limit + 1)
    found = list(session.scalars(statement))
    return found[:limit], len(found) > limit


def redeliver(session: Session, organisation_id: UUID, endpoint_id: UUID, delivery_id: UUID) -> WebhookDelivery:
    """Tell something again, under the same id, from the first try on. Raises NotFound, and Conflict if the endpoint is
    disabled."""
    endpoint = find(session, organisation_id, endpoint_id)
    if endpoint.disabled_at is not None:
        raise Conflict(f"This webhook is disabled ({endpoint.disabled_reason}) Enable it first.")
    delivery = session.get(WebhookDelivery, delivery_id, with_for_update=True)
    if delivery is None or delivery.endpoint_id != endpoint_id:
        raise NotFound(f"There is no delivery with the id {show('msg', delivery_id)!r}.")
    delivery.state, delivery.tries, delivery.ended_at = "pending", 0, None
    delivery.next_try_at = func.now()
    enqueue(session, SEND)
    session.flush()
    session.refresh(delivery)
    return delivery


def require_secret(session: Session, organisation_id: UUID) -> None:
    """Raises WebhookSecretNeeded unless the addresses that jobs bring along can be signed to."""
    signer = select(WebhookEndpoint.id).where(
        WebhookEndpoint.organisation_id == organisation_id, WebhookEndpoint.url.is_(None)
    )
    if session.scalar(signer) is None:
        raise WebhookSecretNeeded(
            "There is no secret yet to sign such a call with: POST /v1/webhooks with an empty object once.",
            param="webhook",
        )


def warn_of_private(settings: Settings) -> None:
    """Say in the log that calls may go to private addresses, if they may."""
    if settings.webhook_allow_private:
        log.warning("webhooks_may_call_private_addresses", setting="FALLOW_WEBHOOK_ALLOW_PRIVATE")
