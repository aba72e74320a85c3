"""Webhooks as the API shows them. Times are Unix seconds."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from marketplace.core.ids import show
from marketplace.gateway.webhooks.models import WebhookDelivery, WebhookEndpoint


class WebhookObject(BaseModel):
    """One endpoint, without its secret."""

    id: str
    object: Literal["webhook"] = "webhook"
    url: str | None
    """Null: the secret for the addresses that jobs bring along."""
    events: list[str]
    status: Literal["enabled", "failing", "disabled"]
    disabled_reason: str | None
    failing_since: int | None
    """The first failure since something arrived."""
    created_at: int


class WebhookWithSecret(WebhookObject):
    """An endpoint that was just made, or whose secret was just turned."""

    secret: str
    """Shown this once."""


class WebhookList(BaseModel):
    """All endpoints of an organisation, oldest first."""

    object: Literal["list"] = "list"
    data: list[WebhookObject]


class WebhookDeleted(BaseModel):
    """An endpoint that is no more."""

    id: str
    object: Literal["webhook"] = "webhook"
    deleted: Literal[True] = True


class DeliveryObject(BaseModel):
    """One event for one endpoint."""

    id: str
    """What the receiver reads as `webhook-id`."""
    object: Literal["webhook.delivery"] = "webhook.delivery"
    event: str
    subject: str
    """The job or the batch."""
    url: str | None
    """The address that the job brought along; null: the webhook's own."""
    status: str
    """`pending`, `delivered`, or `failed`: given up."""
    tries: int
    last_status: int | None
    """HTTP status of the last answer; null: there was none."""
    last_error: str | None
    next_try_at: int | None
    created_at: int
    ended_at: int | None


class DeliveryList(BaseModel):
    """A page of deliveries, newest first."""

    object: Literal["list"] = "list"
    data: list[DeliveryObject]
    has_more: bool


def webhook_object(endpoint: WebhookEndpoint) -> WebhookObject:
    """An endpoint for its renter."""
    return WebhookObject(
        id=show("webhook", endpoint.id),
        url=endpoint.url,
        events=endpoint.events,
        status="disabled" if endpoint.disabled_at is not None else "failing" if endpoint.failing_since else "enabled",
        disabled_reason=endpoint.disabled_reason,
        failing_since=_unix(endpoint.failing_since),
        created_at=int(endpoint.created_at.timestamp()),
    )


def with_secret(endpoint: WebhookEndpoint, secret: str) -> WebhookWithSecret:
    """An endpoint with its secret."""
    return WebhookWithSecret(**webhook_object(endpoint).model_dump(), secret=secret)


def delivery_object(delivery: WebhookDelivery) -> DeliveryObject:
    """A delivery for its renter."""
    pending = delivery.state == "pending"
    return DeliveryObject(
        id=show("msg", delivery.id),
        event=delivery.event,
        subject=show(delivery.event.partition(".")[0], delivery.subject_id),
        url=delivery.url,
        status=delivery.state,
        tries=delivery.tries,
        last_status=delivery.last_status,
        last_error=delivery.last_error,
        next_try_at=_unix(delivery.next_try_at) if pending else None,
        created_at=int(delivery.created_at.timestamp()),
        ended_at=_unix(delivery.ended_at),
    )


def _unix(moment: datetime | None) -> int | None:
    return int(moment.timestamp()) if moment is not None else None
