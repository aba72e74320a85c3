"""The endpoints that run a model (see surface.SURFACES) as raw ASGI applications: the hot path, beside FastAPI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from marketplace.accounts.auth import Principal
from marketplace.accounts.limits import LimitState
from marketplace.core.errors import FallowError, PaymentRequired, RateLimited
from marketplace.core.logs import bind, get_logger
from marketplace.core.tracing import Span, step
from marketplace.gateway.bodies import FLEX
from marketplace.gateway.embeddings.request import MAX_STORED_VECTOR_BYTES, require_size
from marketplace.gateway.failures import NoCapacity
from marketplace.gateway.flex import Flex, wait_of
from marketplace.gateway.http import (
    BODY,
    Body,
    ClientGoneError,
    Header,
    MethodNotAllowed,
    Receive,
    Scope,
    Send,
    new_request_id,
    read_body,
    send_error,
)
from marketplace.gateway.interactive import Caller, Interactive
from marketplace.gateway.load import Tier
from marketplace.gateway.outcomes import Ending
from marketplace.gateway.outlets import JsonOutlet, StreamOutlet, abort_connection
from marketplace.gateway.parse import OFFLOAD_BYTES, Inference
from marketplace.gateway.quote import ContextLengthExceeded, Measured, asked, measure, take_tokens
from marketplace.gateway.services import Services
from marketplace.gateway.surface import Surface
from marketplace.jobs.states import Outcome

log = get_logger(__name__)


@dataclass(slots=True)
class _Exchange:
    """One HTTP exchange: what is known of it so far."""

    request_id: str
    arrived_at: float
    receive: Receive
    send: Send
    body: Body | None
    headers: list[Header]
    principal: Principal | None = None
    keep_answer: bool = False
    """The request came with an Idempotency-Key."""
    parsed: bool = False
    wait_s: float = 0.0
    """How long its client is willing to wait, if the request is flex."""
    interactive: Interactive | None = None
    outlet: StreamOutlet | JsonOutlet | None = None
    span: Span | None = None

    @property
    def admitted(self) -> bool:
        return self.interactive is not None and self.interactive.admitted

    async def fail(self, error: FallowError) -> None:
        if self.outlet is not None:
            await self.outlet.fail(error)
        else:
            await send_error(self.send, error, self.headers)


class ChatApp:
    """The ASGI application for one surface's path."""

    def __init__(self, services: Services, surface: Surface) -> None:
        self._services = services
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state") or {}
        request_id = state.get("request_id") or new_request_id()
        exchange = _Exchange(
            request_id=request_id,
            arrived_at=asyncio.get_running_loop().time(),
            receive=receive,
            send=send,
            body=scope.get("extensions", {}).get(BODY, {}).get("body"),
            headers=[(b"x-request-id", request_id.encode())],
            keep_answer=bool(state.get("idempotent")),
        )
        bind(request_id=request_id)
        traces = self._services.traces
        if traces is None:
            await self._exchange(scope, exchange)
            return
        span = exchange.span = traces.request(scope, request_id)
        try:
            await self._exchange(scope, exchange)
        finally:
            span.end()

    async def _exchange(self, scope: Scope, exchange: _Exchange) -> None:
        try:
            await self._serve(scope, exchange)
        except ClientGoneError:
            return
        except FallowError as error:
            await self._refuse(exchange, error)
        except Exception:
            # The edge: whatever broke, the client gets an answer, and the request its outcome.
            log.exception("chat_failed")
            await self._refuse(exchange, FallowError("Something broke on our side. Nothing was charged."))

    async def _serve(self, scope: Scope, exchange: _Exchange) -> None:
        services = self._services
        if scope["method"] != "POST":
            raise MethodNotAllowed("POST")
        services.require_open()
        services.load.require(Tier.INTERACTIVE)
        principal = await services.authenticate(scope)
        exchange.principal = principal
        principal.require("renter")
        chat = await self._read(scope, exchange.receive)
        flex = chat.service_tier == FLEX
        if flex:
            services.load.require(Tier.WAITING)
        # From here on a refusal is a row. One for load is none: it would add to what it is there to spare.
        exchange.parsed = True
        if flex:
            exchange.wait_s = wait_of(scope, services.settings.flex_wait_s)
        limits = await services.limiter.acquire(principal)
        try:
            await self._answer(exchange, principal, limits, chat)
        finally:
            used = exchange.interactive.used_tokens if exchange.interactive is not None else 0
            services.in_background(services.limiter.release(limits, refused=not exchange.admitted, used_tokens=used))

    async def _answer(self, exchange: _Exchange, principal: Principal, limits: LimitState, chat: Inference) -> None:
        services = self._services
        own = len(exchange.headers)
        exchange.headers += _encoded(limits)
        if chat.answer_schema is not None:
            await services.schemas.require_schema(chat.answer_schema)
        span = exchange.span
        try:
            with step(span, "measure"):
                measured = await measure(services, chat, principal)
        except ContextLengthExceeded as error:
            self._note_unmet(error)
            raise
        if span is not None:
            span.set(asked(measured))
        if exchange.keep_answer and measured.inputs:
            require_size(len(measured.inputs), measured.variant, MAX_STORED_VECTOR_BYTES)
        if principal.tokens_per_minute is not None:
            await take_tokens(services, principal, limits, measured)
            exchange.headers[own:] = _encoded(limits)
        caller = Caller.now(principal, exchange.request_id, exchange.arrived_at, exchange.keep_answer, span)
        outlet = exchange.outlet = self._outlet(exchange, caller, measured)
        interactive = exchange.interactive = (
            Flex(services, caller, measured, outlet, self._surface, exchange.wait_s)
            if chat.service_tier == FLEX
            else Interactive(services, caller, measured, outlet, self._surface)
        )
        with _watching(exchange, interactive):
            await self._admit(interactive, measured, principal)
            await interactive.run()
        if isinstance(outlet, StreamOutlet) and outlet.cut:
            abort_connection(exchange.send)

    async def _admit(self, interactive: Interactive, measured: Measured, principal: Principal) -> None:
        """Admit, and note for statements what became of it. Raises what `Interactive.admit` raises."""
        services, notes = self._services, self._services.notes
        try:
            await interactive.admit()
        except NoCapacity as error:
            for reason in error.details["refused"]:
                services.metrics.refusals.labels(reason).inc()
            if notes is not None:
                offers = measured.offers
                resting = services.fleet.breakers.resting(
                    (offer.node_id for offer in offers), measured.variant.id, services.now()
                )
                demand = measured.demand(principal.organisation_id)
                notes.refused(demand, offers, rules=services.fleet.rules, resting=resting)
            raise
        if notes is not None:
            notes.conversation(interactive.job_id, principal.organisation_id, measured.chat.opening)

    def _note_unmet(self, error: ContextLengthExceeded) -> None:
        """For statements: what an owner's larger slots would have earned."""
        services = self._services
        if services.notes is not None and error.unmet is not None:
            offers = services.fleet.view.offers(error.unmet.variant_id)
            services.notes.refused(error.unmet, offers, rules=services.fleet.rules)

    def _outlet(self, exchange: _Exchange, caller: Caller, measured: Measured) -> StreamOutlet | JsonOutlet:
        chat = measured.chat
        if not chat.stream:
            return JsonOutlet(exchange.send, exchange.headers)
        settings = self._services.settings
        writers = self._surface.writers(
            chat.choices,
            completion_id=self._surface.answer_id(caller.request_id),
            created=caller.created,
            model=measured.model,
            include_usage=chat.include_usage,
            service_tier=measured.service_tier,
        )
        return StreamOutlet(
            exchange.send,
            exchange.headers,
            writers,
            header_wait_s=settings.header_wait_s,
            keepalive_s=settings.keepalive_s,
            slow_reader_s=settings.slow_reader_s,
            now=exchange.arrived_at,
            body=exchange.body,
        )

    async def _read(self, scope: Scope, receive: Receive) -> Inference:
        body = await read_body(scope, receive, self._services.settings.body_limit_bytes)
        if len(body) > OFFLOAD_BYTES:
            return await asyncio.to_thread(self._surface.parse, body)
        return self._surface.parse(body)

    async def _refuse(self, exchange: _Exchange, error: FallowError) -> None:
        self._services.metrics.http_errors.labels(error.code).inc()
        if exchange.span is not None:
            exchange.span.set({"http.response.status_code": error.status})
            exchange.span.fail(error.code)
        if exchange.parsed and not exchange.admitted and exchange.principal is not None:
            try:
                await self._services.record_refusal(
                    request_id=exchange.request_id,
                    organisation_id=exchange.principal.organisation_id,
                    endpoint=self._surface.endpoint,
                    outcome=refusal_outcome(error),
                    code=error.code,
                )
            except FallowError:
                log.warning("outcome_not_recorded", code=error.code)
        await exchange.fail(error)


def _encoded(limits: LimitState) -> list[Header]:
    return [(name.encode(), value.encode()) for name, value in limits.headers().items()]


def refusal_outcome(error: FallowError) -> Outcome:
    """The row of the outcome table for a request that was refused before anything was held."""
    if isinstance(error, RateLimited):
        return Outcome.RATE_LIMITED
    if isinstance(error, PaymentRequired):
        return Outcome.NO_BALANCE
    if isinstance(error, NoCapacity):
        return Outcome.NO_CAPACITY
    return Outcome.REQUEST_REJECTED if error.status < 500 else Outcome.PLATFORM_FAILED


@contextlib.contextmanager
def _watching(exchange: _Exchange, interactive: Interactive) -> Iterator[None]:
    """Stop the request when its client leaves, streaming or not."""
    body = exchange.body
    if body is not None:
        body.when_gone(lambda: interactive.stop(Ending.CANCELLED))
        try:
            yield
        finally:
            body.when_gone(None)
        return
    watch = asyncio.create_task(_watch(exchange.receive, interactive))
    try:
        yield
    finally:
        watch.cancel()


async def _watch(receive: Receive, interactive: Interactive) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        interactive.stop(Ending.CANCELLED)
