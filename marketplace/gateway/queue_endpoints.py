"""Jobs that can wait: POST /v1/jobs, GET /v1/jobs, GET /v1/jobs/{id}, and their cancelling."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from msgspec import Meta, Struct

from marketplace.accounts.auth import Principal
from marketplace.accounts.limits import LimitState
from marketplace.core import ids
from marketplace.core.amounts import nano_per_mtok
from marketplace.core.errors import BadRequest, FallowError
from marketplace.core.logs import get_logger
from marketplace.core.tracing import Span, ending, step
from marketplace.gateway.bodies import FLEX, ChatBody
from marketplace.gateway.chat import refusal_outcome
from marketplace.gateway.choice import find_all
from marketplace.gateway.deps import GatewayServices, Renter, RequestId
from marketplace.gateway.failures import InsufficientBalance, of_shortfall
from marketplace.gateway.load import Tier
from marketplace.gateway.parse import OFFLOAD_BYTES, ChatRequest, choices_of, to_request
from marketplace.gateway.quote import Measured, asked, dearest, measure, take_tokens
from marketplace.gateway.services import Services
from marketplace.gateway.strict import InvalidBody, decode_strict
from marketplace.gateway.webhooks.addresses import InvalidWebhookUrl, target_of
from marketplace.gateway.webhooks.service import require_secret
from marketplace.jobs import service
from marketplace.jobs.repository import JobView
from marketplace.jobs.schemas import STATES, JobList, JobObject, job_list, job_object
from marketplace.jobs.service import Accepted, Order, Shortfall
from marketplace.jobs.states import JobState
from marketplace.jobs.sweeping import JOBS_ENDPOINT
from marketplace.matching.choice import Choice
from marketplace.matching.types import Demand, Rates, Service

log = get_logger(__name__)
DEFAULT_DEADLINE_S: Final = 3_600
MAX_DEADLINE_S: Final = 7 * 86_400
MAX_PAGE: Final = 100


class MaxPriceNeeded(BadRequest):
    """Nothing is offered now from which a maximum price could be taken."""

    code = "max_price_needed"


class MaxPrice(Struct, frozen=True, forbid_unknown_fields=True):
    """The most that the job may cost, in USD per million tokens, as decimal strings."""

    input: str
    output: str
    cached_input: str | None = None
    """By default as `input`."""


class Submission(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/jobs."""

    request: ChatBody
    deadline_s: Annotated[int, Meta(ge=1, le=MAX_DEADLINE_S)] = DEFAULT_DEADLINE_S
    """From acceptance; a job that has not ended by then ends."""
    max_price: MaxPrice | None = None
    """By default the dearest that is offered now."""
    webhook: str | None = None
    """An https address that is told of this job's end, signed with the secret that the organisation has for such."""


router = APIRouter(prefix=JOBS_ENDPOINT, tags=["jobs"])


@router.post("", status_code=202)
async def submit(
    request: Request, response: Response, services: GatewayServices, principal: Renter, request_id: RequestId
) -> JobObject:
    """Accept a job: its worst case is held at its maximum price, and it waits for idle capacity."""
    services.require_open()
    services.load.require(Tier.WAITING)
    submission, chat = await _read(request)
    span = services.traces.request(request.scope, request_id) if services.traces is not None else None
    try:
        with ending(span):
            async with services.limited(principal) as limits:
                accepted = await _accept(
                    services, principal, limits, request_id, submission=submission, chat=chat, span=span
                )
    except FallowError as error:
        await _record_refusal(services, principal, request_id, error)
        raise
    except Exception:
        # Whatever broke, the request gets its outcome; the application's own edge answers.
        await _record_refusal(services, principal, request_id, FallowError("Something broke on our side."))
        raise
    if services.notes is not None:
        services.notes.conversation(accepted.job_id, principal.organisation_id, chat.messages)
    if services.pump is not None:
        services.pump.wake()
    response.headers.update(limits.headers())
    if accepted.lowered:
        response.headers["x-fallow-max-tokens"] = str(accepted.max_output_tokens)
    return _show(services, await _find(services, principal, accepted.job_id))


@router.get("")
async def list_jobs(
    services: GatewayServices,
    principal: Renter,
    status: Annotated[Literal["queued", "running", "ended"] | None, Query()] = None,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
) -> JobList:
    """The organisation's jobs, newest first, without their results. `after` is the id of the last one seen."""
    views, more = await asyncio.to_thread(
        service.page,
        services.session_factory,
        principal.organisation_id,
        after=ids.parse("job", after) if after is not None else None,
        states=STATES[status] if status is not None else (),
        limit=limit,
    )
    return job_list(views, [_model_of(services, view) for view in views], has_more=more)


@router.get("/{job_id}")
async def show(services: GatewayServices, principal: Renter, job_id: str) -> JobObject:
    """One job, with its result once it has one."""
    return _show(services, await _find(services, principal, ids.parse("job", job_id)))


@router.post("/{job_id}/cancel")
@router.delete("/{job_id}")
async def cancel(services: GatewayServices, principal: Renter, job_id: str) -> JobObject:
    """End a waiting job at once and for free; stop a running one, which pays for what was delivered."""
    view = await service.cancel(
        services.session_factory, services.writer, principal.organisation_id, ids.parse("job", job_id)
    )
    return _show(services, view)


async def _accept(
    services: Services,
    principal: Principal,
    limits: LimitState,
    request_id: str,
    *,
    submission: Submission,
    chat: ChatRequest,
    span: Span | None,
) -> Accepted:
    if chat.answer_schema is not None:
        await services.schemas.require_schema(chat.answer_schema)
    with step(span, "measure"):
        measured = await measure(services, chat, principal)
    await asyncio.to_thread(services.require_queue_room, principal.organisation_id)
    if submission.webhook is not None:
        await asyncio.to_thread(_check_webhook, services, principal, submission.webhook)
    await take_tokens(services, principal, limits, measured)
    order = _order(services, principal, request_id, submission, measured)
    if span is not None and services.traces is not None:
        span.set({**asked(measured), "fallow.job.id": ids.show("job", order.job_id)})
        await services.traces.queued(order.job_id, span)
    with step(span, "admit"):
        answer = await _hold(services, order)
    if isinstance(answer, Shortfall):
        raise of_shortfall(answer, measured.max_output_tokens)
    return answer


def _order(
    services: Services, principal: Principal, request_id: str, submission: Submission, measured: Measured
) -> Order:
    """The job as the queue takes it. Raises InvalidBody, MaxPriceNeeded, and InsufficientBalance without an account."""
    ceiling = _ceiling(services, measured, submission.max_price)
    account_id = principal.credit_account_id
    if account_id is None:
        needed_nano = measured.worst_nano(ceiling)
        raise InsufficientBalance(needed_nano=needed_nano, available_nano=0, affordable_output_tokens=0)
    return Order(
        job_id=ids.new_id(),
        organisation_id=principal.organisation_id,
        key_id=principal.key_id,
        credit_account_id=account_id,
        request_id=request_id,
        variant_id=measured.variant.id,
        body=measured.chat.engine_body,
        prompt_tokens=measured.prompt_tokens,
        max_output_tokens=measured.max_output_tokens,
        choices=measured.choices,
        bound_asked=measured.client_bound,
        ceiling=ceiling,
        deadline_s=submission.deadline_s,
        webhook_url=submission.webhook,
        choice=measured.choice,
    )


def _check_webhook(services: Services, principal: Principal, url: str) -> None:
    """Raises InvalidWebhookUrl and WebhookSecretNeeded. What its name resolves to is looked at when it is called."""
    try:
        target_of(url, allow_private=services.settings.webhook_allow_private)
    except InvalidWebhookUrl as error:
        error.param = "webhook"
        raise
    with services.session_factory() as session:
        require_secret(session, principal.organisation_id)


async def _hold(services: Services, order: Order) -> Accepted | Shortfall:
    try:
        return await service.accept(services.writer, order, hold_margin_s=services.settings.hold_margin_s)
    except BaseException:
        # It may have been written although nobody could say so: the client will send it again, so it must not run.
        services.in_background(service.withdraw(services.writer, order.job_id))
        raise


def _ceiling(services: Services, measured: Measured, asked: MaxPrice | None) -> Rates:
    """What the job may cost at most, class by class: its own maximum or, by default, the dearest that is offered now
    within its choice, and never above what that says. Raises InvalidBody and MaxPriceNeeded."""
    choice = measured.choice
    if asked is not None:
        input_ = _rate("max_price.input", asked.input)
        cached = _rate("max_price.cached_input", asked.cached_input) if asked.cached_input is not None else input_
        return choice.capped(Rates(input=input_, cached_input=cached, output=_rate("max_price.output", asked.output)))
    rates = dearest(services, measured) or choice.whole_ceiling
    if rates is None:
        raise MaxPriceNeeded(
            "No node that may run this offers the model now, so there is no price to go by. Say `max_price`, and the "
            "job will wait.",
            param="max_price",
        )
    return rates


def _rate(field: str, text: str) -> int:
    try:
        return nano_per_mtok(text)
    except ValueError as error:
        raise InvalidBody(f"`{field}`: {error}.", param=field) from None


async def _read(request: Request) -> tuple[Submission, ChatRequest]:
    body = await request.body()
    if len(body) > OFFLOAD_BYTES:
        return await asyncio.to_thread(_parse, body)
    return _parse(body)


def _parse(body: bytes) -> tuple[Submission, ChatRequest]:
    submission = decode_strict(body, Submission)
    try:
        chat = to_request(submission.request)
    except InvalidBody as error:
        raise InvalidBody(error.message, param=f"request.{error.param}" if error.param else "request") from None
    if chat.stream:
        raise InvalidBody("A job's answer is fetched, not streamed: leave `stream` out.", param="request.stream")
    if chat.service_tier == FLEX:
        raise InvalidBody(
            "A job has its own price, `max_price`: leave `service_tier` out.", param="request.service_tier"
        )
    return submission, chat


async def _record_refusal(services: Services, principal: Principal, request_id: str, error: FallowError) -> None:
    """Write the outcome row of a request that was parsed and not admitted. Never raises for the database's sake."""
    try:
        await services.record_refusal(
            request_id=request_id,
            organisation_id=principal.organisation_id,
            endpoint=JOBS_ENDPOINT,
            outcome=refusal_outcome(error),
            code=error.code,
        )
    except FallowError:
        log.warning("outcome_not_recorded", request_id=request_id, code=error.code)


async def _find(services: Services, principal: Principal, job_id: UUID) -> JobView:
    return await asyncio.to_thread(service.get, services.session_factory, principal.organisation_id, job_id)


def _show(services: Services, view: JobView) -> JobObject:
    waits = view.job.state == JobState.QUEUED.value
    return job_object(view, _model_of(services, view), waiting_for=_waiting_for(services, view) if waits else None)


def _waiting_for(services: Services, view: JobView) -> str:
    """Why a queued job does not run now, as far as this gateway sees the fleet."""
    job = view.job
    choice = Choice.from_row(job.choice).after(view.last_node)
    ceiling = Rates(
        job.max_input_nano_usd_per_mtok, job.max_cached_input_nano_usd_per_mtok, job.max_output_nano_usd_per_mtok
    )
    demand = Demand(
        variant_id=job.variant_id,
        prompt_tokens=job.prompt_tokens,
        max_output_tokens=job.max_output_tokens,
        ceiling=ceiling.before_share(job.price_basis_points),
        organisation_id=job.organisation_id,
        service=Service.FLEX,
        choices=choices_of(job.body or {}),
    )
    ranked = find_all(services, choice.narrow(demand), choice)
    return "its turn: a node has room" if ranked.offers else ranked.refusal.sentence()


def _model_of(services: Services, view: JobView) -> str:
    variant = services.catalog.by_id(view.job.variant_id)
    return variant.model_id if variant is not None else ""
