"""FastAPI for everything that is not hot, held to the same rules: OpenAI's error shape, bounded bodies, request ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from marketplace.core.errors import BadRequest, FallowError, NotFound, TooLarge, Unavailable
from marketplace.core.logs import get_logger, reason
from marketplace.gateway.http import (
    Message,
    MethodNotAllowed,
    Receive,
    Scope,
    Send,
    error_headers,
    header,
    new_request_id,
    send_error,
)
from marketplace.gateway.services import Services

log = get_logger(__name__)
AWAY_RETRY_S: Final = 2


def make_api(services: Services, routers: Iterable[APIRouter]) -> FastAPI:
    """The application; its endpoints find the services as `request.app.state.services`."""
    api = FastAPI(title="Fallow", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    api.state.services = services
    for router in routers:
        api.include_router(router)
    api.add_exception_handler(FallowError, _on_error)
    api.add_exception_handler(HTTPException, _on_http_error)
    api.add_exception_handler(RequestValidationError, _on_invalid)
    api.add_exception_handler(ClientDisconnect, _on_left)
    for away in (OperationalError, PoolTimeoutError):
        api.add_exception_handler(away, _on_database_away)
    api.add_exception_handler(Exception, _on_unexpected)
    return api


class Bounded:
    """ASGI around ASGI: gives each exchange its id, refuses a NUL in its address, and bodies beyond the limit, which
    paths in `larger` have of their own."""

    def __init__(self, app: Any, limit_bytes: int, larger: Mapping[str, int] = MappingProxyType({})) -> None:
        self._app = app
        self._limit = limit_bytes
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A request with an Idempotency-Key comes with the id of its claim.
        request_id = scope.setdefault("state", {}).setdefault("request_id", new_request_id())
        id_header = (b"x-request-id", request_id.encode())

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        if "\0" in scope.get("path", "") or b"%00" in scope.get("query_string", b""):
            await send_error(identified, BadRequest("The address holds a NUL (%00), which is not text."))
            return
        declared = header(scope, b"content-length")
        limit = self._larger.get(scope.get("path", ""), self._limit)
        if declared is not None and declared.isdigit() and int(declared) > limit:
            await send_error(identified, _too_large(limit))
            return
        await self._app(scope, _counted(receive, limit), identified)


def _counted(receive: Receive, limit_bytes: int) -> Receive:
    """The body as it comes; raises TooLarge once it is larger than the limit."""
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            if size > limit_bytes:
                raise _too_large(limit_bytes)
        return message

    return counted


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit_bytes} bytes.", headers={"connection": "close"})


def _answer(request: Request, error: FallowError) -> JSONResponse:
    services: Services = request.app.state.services
    services.metrics.http_errors.labels(error.code).inc()
    headers = {name.decode(): value.decode("latin-1") for name, value in error_headers(error)}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, FallowError)
    return _answer(request, error)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    if error.status_code == 404:
        return _answer(request, NotFound(f"There is no {method} {path} here.", param=None))
    if error.status_code == 405:
        return _answer(request, MethodNotAllowed((error.headers or {}).get("Allow", "another method")))
    return _answer(request, BadRequest(str(error.detail)))


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return _answer(request, BadRequest(f"`{field[:160]}`: {first['msg']}.", param=field[:160] or None))


async def _on_left(request: Request, error: Exception) -> JSONResponse:
    """The client left before its body was whole: nobody reads this, and nothing of ours broke."""
    assert isinstance(error, ClientDisconnect)
    return _answer(request, BadRequest("The body broke off."))


async def _on_database_away(request: Request, error: Exception) -> JSONResponse:
    """No connection, no free one, or a statement that was broken off: it passes, so clients are to come back."""
    log.warning("request_without_database", request_id=getattr(request.state, "request_id", ""), error=reason(error))
    message = (
        "The database does not answer. Send the request again; if it changes something, look first whether it did."
    )
    return _answer(request, Unavailable(message, headers={"retry-after": str(AWAY_RETRY_S)}))


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("request_failed", request_id=getattr(request.state, "request_id", ""), exc_info=error)
    return _answer(request, FallowError("Something broke on our side."))
