"""The gateway's endpoints that are not hot: models, quotes, health and figures."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from marketplace.core.database import SessionFactory
from marketplace.gateway import metrics, models
from marketplace.gateway.deps import Caller, GatewayServices, Renter
from marketplace.gateway.parse import parse_chat
from marketplace.gateway.quote import find_all, measure, quote

router = APIRouter()
operations = APIRouter(include_in_schema=False)
READY_WITHIN_S: Final = 2.0


@router.get("/v1/models")
async def list_models(services: GatewayServices, _: Caller) -> dict[str, Any]:
    """Every model that is sold, with its lowest live price."""
    return {"object": "list", "data": [models.model_object(services, view) for view in services.catalog.all()]}


@router.get("/v1/models/{model:path}")
async def show_model(model: str, services: GatewayServices, _: Caller) -> dict[str, Any]:
    """One model. Raises UnknownModel."""
    return models.model_object(services, services.catalog.resolve(model))


@router.post("/v1/quote")
async def make_quote(request: Request, services: GatewayServices, principal: Renter) -> dict[str, Any]:
    """What a chat request would cost, and whether there is room for it now. Nothing is held or charged."""
    chat = await asyncio.to_thread(parse_chat, await request.body())
    limits = await services.limiter.acquire(principal)
    try:
        measured = await measure(services, chat)
        ranked = find_all(services, measured.demand(principal.organisation_id))
        return quote(measured, ranked)
    finally:
        services.in_background(services.limiter.release(limits))


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
        principal = await services.authenticator.authenticate(request.headers.get("authorization"))
        principal.require("operator")
    services.metrics.active.set(services.pulse.active)
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
