"""The gateway's endpoints that are not hot: models, quotes, health and figures."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any, Final
from uuid import UUID

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from marketplace.billing.service import balance
from marketplace.core.database import SessionFactory
from marketplace.gateway import gauges, metrics, models
from marketplace.gateway.bodies import FLEX
from marketplace.gateway.choice import find_all
from marketplace.gateway.deps import Caller, GatewayServices, Renter
from marketplace.gateway.explanations import explain_request
from marketplace.gateway.quote import Purse, measure, quote
from marketplace.gateway.surface import parse_any
from marketplace.gateway.tokenize import parse_tokenize, tokenize
from marketplace.metering.pricing import BASIS_POINTS
from marketplace.metering.usage import likely_output_tokens

router = APIRouter()
operations = APIRouter(include_in_schema=False)
READY_WITHIN_S: Final = 2.0
UNBOUNDED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Answered however many requests are in hand: whoever asks decides whether this gateway is to get more."""


@router.get("/v1/models")
async def list_models(services: GatewayServices, principal: Caller) -> dict[str, Any]:
    """Every model that is sold and that the key may use, with its lowest live price."""
    views = [view for view in services.catalog.all() if principal.may_use(view.model_id)]
    return {"object": "list", "data": [models.model_object(services, view) for view in views]}


@router.get("/v1/models/{model:path}")
async def show_model(model: str, services: GatewayServices, principal: Caller) -> dict[str, Any]:
    """One model. Raises UnknownModel and ModelNotAllowed."""
    variant = services.catalog.resolve(model)
    principal.require_model(variant.model_id)
    return models.model_object(services, variant)


@router.post("/v1/quote")
async def make_quote(request: Request, services: GatewayServices, principal: Renter) -> dict[str, Any]:
    """What a chat or a text completion would cost, and whether there is room for it now. Nothing is held or charged."""
    chat = await asyncio.to_thread(parse_any, await request.body())
    async with services.limited(principal):
        measured = await measure(services, chat, principal)
        cached = services.prefixes.held(principal.organisation_id, measured.variant.id, measured.prompt_packed)
        ranked = find_all(services, measured.demand(principal.organisation_id, cached_tokens=cached), measured.choice)
        available_nano, usual = await asyncio.to_thread(
            _purse, services.session_factory, principal.organisation_id, measured.variant.id
        )
        flex = chat.service_tier == FLEX
        share = services.settings.flex_price_basis_points if flex else BASIS_POINTS
        return quote(measured, ranked, Purse(available_nano, usual, cached), share)


@router.post("/v1/explain")
async def explain(request: Request, services: GatewayServices, principal: Renter) -> dict[str, Any]:
    """Where a chat or a text completion would go now: who was refused by what, the best five with their costs, and why
    the first. Nothing is held or charged."""
    chat = await asyncio.to_thread(parse_any, await request.body())
    async with services.limited(principal):
        measured = await measure(services, chat, principal)
        cached = services.prefixes.held(principal.organisation_id, measured.variant.id, measured.prompt_packed)
        demand = measured.demand(principal.organisation_id, cached_tokens=cached)
        return explain_request(services, measured, demand)


@router.post("/v1/tokenize")
async def tokens_of(request: Request, services: GatewayServices, principal: Renter) -> dict[str, Any]:
    """A text or a chat as the model's tokenizer and template read it. Free, and counted against the key's limits."""
    asked = await asyncio.to_thread(parse_tokenize, await request.body())
    async with services.limited(principal):
        variant = services.catalog.resolve(asked.model)
        principal.require_model(variant.model_id)
        return await tokenize(variant, asked)


def _purse(factory: SessionFactory, organisation_id: UUID, variant_id: UUID) -> tuple[int, tuple[int, int] | None]:
    with factory() as session:
        available_nano = balance(session, organisation_id).available_nano
        return available_nano, likely_output_tokens(session, organisation_id, variant_id)


@operations.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process lives."""
    return {"status": "ok"}


@operations.get("/readyz")
async def readyz(services: GatewayServices) -> JSONResponse:
    """The gateway can take requests: it is not draining, and the database answers. Valkey may be away."""
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            database = await asyncio.to_thread(_database_answers, services.session_factory)
    except TimeoutError:
        database = False
    ready = database and not services.draining
    status = "draining" if services.draining else "ready" if ready else "unavailable"
    return JSONResponse(
        {
            "status": status,
            "database": database,
            "valkey": not services.pipe.down,
            "nodes": services.fleet.nodes_connected,
            "models": len(services.catalog.all()),
        },
        status_code=200 if ready else 503,
    )


@operations.get("/metrics")
async def figures(request: Request, services: GatewayServices) -> Response:
    """Prometheus's text format: to this machine, or to a key with the role `operator`."""
    if not _is_loopback(request):
        principal = await services.authenticate(request.scope)
        principal.require("operator")
    await gauges.refresh(services)
    return Response(services.metrics.render(), media_type=metrics.CONTENT_TYPE)


def _database_answers(session_factory: SessionFactory) -> bool:
    try:
        with session_factory() as session:
            session.execute(text("select 1"))
    except SQLAlchemyError:
        return False
    return True


def _is_loopback(request: Request) -> bool:
    if request.client is None or "x-forwarded-for" in request.headers:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
