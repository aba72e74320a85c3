"""What FastAPI endpoints ask for: the services, who calls, and the request's id."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from marketplace.accounts.auth import Principal
from marketplace.gateway.services import Services


def services_of(request: Request) -> Services:
    """The gateway's parts."""
    services: Services = request.app.state.services
    return services


def request_id_of(request: Request) -> str:
    """The id that the answer carries as `x-request-id`."""
    request_id: str = request.state.request_id
    return request_id


async def caller(request: Request) -> Principal:
    """Whoever holds the key of this request. Raises Unauthenticated and AddressNotAllowed."""
    return await services_of(request).authenticate(request.scope)


async def renter(principal: Annotated[Principal, Depends(caller)]) -> Principal:
    """A caller that may spend. Raises Forbidden."""
    principal.require("renter")
    return principal


Caller = Annotated[Principal, Depends(caller)]
Renter = Annotated[Principal, Depends(renter)]
RequestId = Annotated[str, Depends(request_id_of)]
GatewayServices = Annotated[Services, Depends(services_of)]
