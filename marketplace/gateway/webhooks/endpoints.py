"""/v1/webhooks: where a renter wants to hear of jobs and batches that end, and what was said there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from msgspec import Meta, Struct
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from marketplace.accounts.auth import Principal
from marketplace.core import ids
from marketplace.core.database import transaction
from marketplace.gateway.deps import GatewayServices, Renter
from marketplace.gateway.services import Services
from marketplace.gateway.strict import InvalidBody, decode_strict
from marketplace.gateway.webhooks import service
from marketplace.gateway.webhooks.events import EVENTS, Event
from marketplace.gateway.webhooks.schemas import (
    DeliveryList,
    DeliveryObject,
    WebhookDeleted,
    WebhookList,
    WebhookObject,
    WebhookWithSecret,
    delivery_object,
    webhook_object,
    with_secret,
)

MAX_PAGE: Final = 100
T = TypeVar("T")

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])


class Registration(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/webhooks."""

    url: str | None = None
    """Left out: a secret for the addresses that jobs bring along."""
    events: Annotated[list[Event], Meta(min_length=1, max_length=len(EVENTS))] | None = None
    """By default all of them."""


class DeliveryQuery(BaseModel):
    """Which deliveries; `after` is the id of the last one seen."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["pending", "delivered", "failed"] | None = None
    after: Annotated[str | None, Field(max_length=80)] = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 20


@router.post("", status_code=201)
async def register(request: Request, services: GatewayServices, principal: Renter) -> WebhookWithSecret:
    """Register an address. Its secret is in this answer and in no other."""
    asked = decode_strict(await request.body(), Registration)
    if asked.url is None and asked.events is not None:
        raise InvalidBody("`events` belongs to a `url`: a job's own address hears of that job.", param="events")
    events = () if asked.url is None else asked.events or EVENTS
    async with services.limited(principal):
        if asked.url is not None:
            await services.addresses.require(principal.organisation_id, asked.url)
        made = await _in_transaction(
            services, lambda session: service.register(session, principal.organisation_id, asked.url, events)
        )
    return with_secret(made.endpoint, made.secret)


@router.get("")
async def list_webhooks(services: GatewayServices, principal: Renter) -> WebhookList:
    """The organisation's addresses."""
    found = await _in_transaction(services, lambda session: service.all_of(session, principal.organisation_id))
    return WebhookList(data=[webhook_object(endpoint) for endpoint in found])


@router.get("/{webhook_id}")
async def show(services: GatewayServices, principal: Renter, webhook_id: str) -> WebhookObject:
    """One of them."""
    return webhook_object(await _with_id(services, principal, webhook_id, service.find))


@router.delete("/{webhook_id}")
async def delete(services: GatewayServices, principal: Renter, webhook_id: str) -> WebhookDeleted:
    """Forget an address, with all that was or is to be said there."""
    await _with_id(services, principal, webhook_id, service.remove)
    return WebhookDeleted(id=webhook_id)


@router.post("/{webhook_id}/rotate")
async def rotate(services: GatewayServices, principal: Renter, webhook_id: str) -> WebhookWithSecret:
    """A new secret. For a day calls carry signatures by both."""
    made = await _with_id(services, principal, webhook_id, service.rotate)
    return with_secret(made.endpoint, made.secret)


@router.post("/{webhook_id}/enable")
async def enable(services: GatewayServices, principal: Renter, webhook_id: str) -> WebhookObject:
    """Tell an address again that was disabled for taking nothing."""
    return webhook_object(await _with_id(services, principal, webhook_id, service.enable))


@router.get("/{webhook_id}/deliveries")
async def list_deliveries(
    services: GatewayServices, principal: Renter, webhook_id: str, asked: Annotated[DeliveryQuery, Query()]
) -> DeliveryList:
    """What was said there, newest first."""
    last = ids.parse("msg", asked.after) if asked.after is not None else None
    endpoint_id = ids.parse("webhook", webhook_id)
    found, more = await _in_transaction(
        services,
        lambda session: service.deliveries(
            session, principal.organisation_id, endpoint_id, after=last, state=asked.status, limit=asked.limit
        ),
    )
    return DeliveryList(data=[delivery_object(delivery) for delivery in found], has_more=more)


@router.post("/{webhook_id}/deliveries/{delivery_id}/redeliver", status_code=202)
async def redeliver(services: GatewayServices, principal: Renter, webhook_id: str, delivery_id: str) -> DeliveryObject:
    """Say it again, under the same id."""
    endpoint_id, message_id = ids.parse("webhook", webhook_id), ids.parse("msg", delivery_id)
    again = await _in_transaction(
        services, lambda session: service.redeliver(session, principal.organisation_id, endpoint_id, message_id)
    )
    if services.pump is not None:
        services.pump.wake()
    return delivery_object(again)


async def _with_id(services: Services, principal: Principal, webhook_id: str, work: Callable[..., T]) -> T:
    endpoint_id = ids.parse("webhook", webhook_id)
    return await _in_transaction(services, lambda session: work(session, principal.organisation_id, endpoint_id))


async def _in_transaction(services: Services, work: Callable[[Session], T]) -> T:
    def run() -> T:
        with transaction(services.session_factory) as session:
            return work(session)

    return await asyncio.to_thread(run)
