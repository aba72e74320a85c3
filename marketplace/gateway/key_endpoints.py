"""GET /v1/key: what the key in use may do, and what is left of it."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel

from marketplace.accounts import service
from marketplace.accounts.models import ApiKey
from marketplace.accounts.service import BudgetState
from marketplace.core.amounts import usd
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.ids import show
from marketplace.gateway.bodies import ProviderBody
from marketplace.gateway.choice import choice_of
from marketplace.gateway.deps import Caller, GatewayServices
from marketplace.gateway.strict import decode_strict

router = APIRouter()


class KeyLimits(BaseModel):
    """Over all gateways; null: not limited."""

    requests_per_minute: int
    tokens_per_minute: int | None
    parallel_requests: int


class KeyBudgetObject(BaseModel):
    """In USD, as decimal strings. `held` is the worst case of what runs now."""

    limit: str
    period: str
    spent: str
    held: str
    left: str


class KeyObject(BaseModel):
    """A key, without its secret."""

    id: str
    object: str = "key"
    name: str
    organisation: str
    roles: list[str]
    limits: KeyLimits
    budget: KeyBudgetObject | None
    models: list[str] | None
    networks: list[str] | None
    provider: dict[str, Any] | None
    expires_at: datetime | None


@router.get("/v1/key", tags=["keys"])
async def show_key(services: GatewayServices, principal: Caller) -> KeyObject:
    """The key of this request: its limits, its budget and what is left of it."""
    key, budget = await asyncio.to_thread(_find, services.session_factory, principal.key_id)
    return key_object(key, budget, principal.organisation_name)


def key_object(key: ApiKey, budget: BudgetState | None, organisation: str) -> KeyObject:
    """A key as it is shown."""
    return KeyObject(
        id=show("key", key.id),
        name=key.name,
        organisation=organisation,
        roles=key.roles,
        limits=KeyLimits(
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            parallel_requests=key.parallel_requests,
        ),
        budget=_budget_object(budget) if budget is not None else None,
        models=key.models,
        networks=key.networks,
        provider=key.routing,
        expires_at=key.expires_at,
    )


@router.put("/v1/key/routing", tags=["keys"])
async def set_routing(request: Request, services: GatewayServices, principal: Caller) -> KeyObject:
    """Make a `provider` object the default of this key's requests; `{}` takes it away. Gateways know within two
    seconds."""
    asked = decode_strict(await request.body(), ProviderBody)
    choice_of(asked, None)
    await asyncio.to_thread(_store, services.session_factory, principal.key_id, msgspec.to_builtins(asked) or None)
    return await show_key(services, principal)


def _store(factory: SessionFactory, key_id: UUID, routing: dict[str, Any] | None) -> None:
    with transaction(factory) as session:
        service.set_routing(session, key_id, routing)


def _find(factory: SessionFactory, key_id: UUID) -> tuple[ApiKey, BudgetState | None]:
    with factory() as session:
        return service.find_key(session, key_id), service.budget_of(session, key_id)


def _budget_object(budget: BudgetState) -> KeyBudgetObject:
    return KeyBudgetObject(
        limit=usd(budget.limit_nano),
        period=budget.period,
        spent=usd(budget.spent_nano),
        held=usd(budget.held_nano),
        left=usd(budget.left_nano),
    )
