"""A request with `service_tier: "flex"`: cheaper, and instead of being refused it waits for idle capacity.

It is a job of the queue that names the gateway holding its client. The queue decides what runs where, as for jobs that
are fetched later; the attempt runs here, since here the client is, on a node of whichever gateway. Until the client has
read something it gives way to interactive requests and moves on to other nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from marketplace.core.errors import FallowError, RateLimited
from marketplace.core.logs import get_logger
from marketplace.core.tracing import step
from marketplace.gateway.choice import find_all
from marketplace.gateway.dispatched import demand_of, ends_with, offer_of, runs_s
from marketplace.gateway.execution import Execution, LeaseLost, Settled, Work
from marketplace.gateway.failures import NoCapacity, failure, of_shortfall
from marketplace.gateway.http import Scope, header
from marketplace.gateway.interactive import Caller, Interactive
from marketplace.gateway.outcomes import Ending, moves_on
from marketplace.gateway.outlets import JsonOutlet, StreamOutlet, WholeOutlet
from marketplace.gateway.quote import Measured, dearest
from marketplace.gateway.services import Draining, Services
from marketplace.gateway.strict import InvalidBody
from marketplace.gateway.surface import Surface
from marketplace.gateway.waiting import RETRY_S, Seat
from marketplace.jobs import endings, service
from marketplace.jobs.repository import Dispatch, JobEnd
from marketplace.jobs.service import Order, Shortfall
from marketplace.jobs.states import JobState, Outcome
from marketplace.jobs.sweeping import close_waiting
from marketplace.jobs.tasks import ASSIGN
from marketplace.metering.tokens import TokenCounts

log = get_logger(__name__)
WAIT_HEADER: Final = "x-fallow-max-wait-s"
MAX_WAIT_S: Final = 3_600
_FREE: Final = "Nothing was charged."


class ResourceUnavailable(RateLimited):
    """No capacity came free in the time that a flex request was willing to wait: OpenAI's answer to the same."""

    code = "resource_unavailable"


def wait_of(scope: Scope, default_s: float) -> float:
    """For how many seconds the client is willing to wait in the queue. Raises InvalidBody (400)."""
    asked = header(scope, WAIT_HEADER.encode())
    if asked is None:
        return default_s
    text = asked.decode("latin-1").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_WAIT_S)) and 1 <= int(text) <= MAX_WAIT_S):
        raise InvalidBody(f"The header `{WAIT_HEADER}` is a whole number from 1 to {MAX_WAIT_S}.", param=WAIT_HEADER)
    return float(text)


class Flex(Interactive):
    """One flex request from its admission to its end. Used once."""

    def __init__(  # noqa: PLR0917 - as its base, and the patience
        self,
        services: Services,
        caller: Caller,
        measured: Measured,
        outlet: StreamOutlet | JsonOutlet,
        surface: Surface,
        wait_s: float,
    ) -> None:
        super().__init__(services, caller, measured, outlet, surface)
        self._patience_s = wait_s
        """What is left of the time that it may spend waiting."""
        self._limit_s = wait_s + services.settings.request_timeout_s
        self._seat: Seat | None = None

    def stop(self, ending: Ending) -> None:
        """The client left, or the gateway shuts down."""
        super().stop(ending)
        if self._seat is not None:
            self._seat.wake()

    # --- admission ------------------------------------------------------------------------------------------------

    async def admit(self) -> None:
        """Hold the worst case at the dearest price there is now, at flex's share of it, and queue the job.

        Raises InvalidBody, NoCapacity while nobody offers the model, QueueFull, TooManyWaiting, InsufficientBalance
        and Unavailable; nothing is held then.
        """
        services, organisation_id = self._services, self._caller.principal.organisation_id
        order = self._order()
        await asyncio.to_thread(services.require_queue_room, organisation_id)
        seat = self._seat = services.waiting.sit(self._job_id, organisation_id)
        try:
            await self._note_trace()
            with step(self._caller.span, "admit"):
                accepted = await service.accept(services.writer, order, hold_margin_s=services.settings.hold_margin_s)
            if isinstance(accepted, Shortfall):
                raise of_shortfall(accepted, self._max_output)
        except BaseException as error:
            services.waiting.leave(seat)
            if not isinstance(error, FallowError) or error.status >= 500:
                # It may have been written although nobody could say so: its client gets an error, so it must not run.
                services.in_background(service.withdraw(services.writer, order.job_id))
            raise
        self.admitted = True
        self._max_output = accepted.max_output_tokens
        services.metrics.admission.observe(asyncio.get_running_loop().time() - self._caller.arrived_at)
        if services.pump is not None:
            services.pump.wake()

    async def _note_trace(self) -> None:
        """The worker that places the job must find its trace."""
        span, traces = self._caller.span, self._services.traces
        if span is not None and traces is not None:
            self._show_job(span)
            await traces.queued(self._job_id, span)

    def _order(self) -> Order:
        services, caller, measured = self._services, self._caller, self._measured
        rates = dearest(services, measured)
        if rates is None:
            demand = measured.demand(caller.principal.organisation_id)
            raise NoCapacity(find_all(services, demand, measured.choice).refusal)
        settings = services.settings
        return Order(
            job_id=self._job_id,
            organisation_id=caller.principal.organisation_id,
            key_id=caller.principal.key_id,
            credit_account_id=caller.principal.credit_account_id or 0,
            request_id=caller.request_id,
            variant_id=measured.variant.id,
            body=_only_choices(measured.choices),
            prompt_tokens=measured.prompt_tokens,
            max_output_tokens=self._max_output,
            bound_asked=measured.client_bound,
            ceiling=rates.at_share(settings.flex_price_basis_points),
            deadline_s=self._limit_s,
            choices=measured.choices,
            kind="flex",
            endpoint=self._surface.endpoint,
            price_basis_points=settings.flex_price_basis_points,
            gateway_id=settings.gateway_id,
            client_lease_s=settings.lease_s,
            choice=measured.choice,
        )

    # --- the run --------------------------------------------------------------------------------------------------

    async def _attempts_of(self, execution: Execution) -> Settled:
        seat = self._seat
        assert seat is not None
        try:
            while True:
                dispatch = await self._turn(seat)
                if dispatch is None:
                    # The client left while it waited: there is nobody to show anything to.
                    return Settled(Outcome.CANCELLED_EARLY, "cancelled", "", (), (), TokenCounts(0, 0, 0, 0), None)
                settled = await self._carry_out(execution, dispatch)
                if settled is not None:
                    return settled
        finally:
            self._services.waiting.leave(seat)

    async def _turn(self, seat: Seat) -> Dispatch | None:
        """Wait for a leased attempt; None once the client left and the job is void. Raises how the job ended, by
        itself or because it waited in vain, and LeaseLost."""
        loop = asyncio.get_running_loop()
        waits_until = loop.time() + self._patience_s
        while True:
            if (dispatch := seat.take()) is not None:
                self._patience_s = max(0.0, waits_until - loop.time())
                return dispatch
            if seat.ended is not None:
                raise _as_error(seat.ended)
            if self._gone is not None or seat.sent_away or loop.time() >= waits_until:
                return await self._give_up(seat)
            due = await self._outlet.keep_alive(loop.time())
            if due is None:
                self.stop(Ending.SLOW_READER)
                continue
            await seat.wait(min(due, waits_until) - loop.time())

    async def _give_up(self, seat: Seat) -> Dispatch | None:
        """Void the job while it waits; what is leased just now runs all the same. Raises as `_turn` does."""
        ending, error = self._reason(seat)
        closed = await self._services.writer.submit(close_waiting(self._job_id, ending))
        if closed.ok:
            assert ending.outcome is not None
            self._services.metrics.outcomes.labels(self._surface.endpoint, ending.outcome.value).inc()
            if error is not None:
                raise error
            await self._services.cancels.is_free(self._caller.principal.key_id)
            return None
        # Somebody else has it: a node whose attempt we are about to hear of, or whoever ended it.
        await self._services.waiting.look()
        until = asyncio.get_running_loop().time() + self._services.settings.lease_s
        while seat.dispatch is None and seat.ended is None:
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                log.warning("flex_turn_not_heard", job=self._job_id.hex, reason=closed.reason)
                raise LeaseLost
            await seat.wait(left_s)
        if seat.ended is not None:
            raise _as_error(seat.ended)
        return seat.take()

    def _reason(self, seat: Seat) -> tuple[endings.Ending, FallowError | None]:
        """Why it does not wait any longer, for its row and for its client, if there is one."""
        if self._gone is not None:
            return endings.unwanted(), None
        if seat.sent_away:
            message = f"This gateway is shutting down; send the request again. {_FREE}"
            error: FallowError = Draining(message, headers={"retry-after": "1"})
            outcome = Outcome.PLATFORM_FAILED
        else:
            message = f"No capacity came free in the time that this request could wait. {_FREE}"
            error = ResourceUnavailable(message, headers={"retry-after": str(RETRY_S)})
            outcome = Outcome.NO_CAPACITY
        return endings.Ending(JobState.VOIDED, outcome, error.code, message), error

    async def _carry_out(self, execution: Execution, dispatch: Dispatch) -> Settled | None:
        """Run one leased attempt; None if the job waits again. Raises LeaseLost and Unavailable."""
        services = self._services
        offer = offer_of(services, dispatch)
        await services.fleet.reservations.renew(offer, dispatch.attempt_id, services.pulse.reservation_s)
        services.fleet.chosen(offer, dispatch.attempt_id, demand_of(dispatch))
        if dispatch.cancel_requested or self._gone is not None:
            execution.stop(self._gone or Ending.CANCELLED)
        self._announce_node(offer)

        def step_aside(ending: Ending) -> None:
            # The attempt alone: the job goes on.
            if execution.run is not None:
                execution.run.stop(ending)

        services.flex.began(
            dispatch.attempt_id,
            dispatch.job_id,
            offer.offer_id,
            runs_s(offer, dispatch),
            step_aside,
            may_stop=lambda: not self._outlet.exposed,
        )
        try:
            run = await execution.attempt(offer, dispatch.attempt_id, dispatch.epoch)
            assert run.ending is not None
            accepted = run.token_count > 0
            free = self._gone is None and not ends_with(self._measured.choice, run.ending)
            if free and moves_on(run.ending, exposed=self._outlet.exposed, accepted=accepted):
                await execution.pass_on(run, JobState.QUEUED)
                if services.pump is not None:
                    services.pump.nudge(ASSIGN)
                return None
            return await self._conclude(execution, run)
        finally:
            services.flex.ended(dispatch.attempt_id)


async def turn_away(services: Services, dispatch: Dispatch) -> None:
    """End an attempt whose client does not wait here any more. Raises LeaseLost and Unavailable."""
    variant = services.catalog.by_id(dispatch.variant_id)
    if variant is None:
        log.error("variant_of_job_unknown", job=dispatch.job_id.hex, variant=dispatch.variant_id.hex)
        return
    work = Work(
        job_id=dispatch.job_id,
        request_id=dispatch.request_id,
        endpoint=dispatch.endpoint,
        organisation_id=dispatch.organisation_id,
        key_id=dispatch.key_id,
        variant=variant,
        body=b"",
        prompt_tokens=dispatch.prompt_tokens,
        prompt_packed=b"",
        max_output_tokens=dispatch.max_output_tokens,
        deadline_at=asyncio.get_running_loop().time() + dispatch.deadline_left_s,
    )
    execution = Execution(services, work, WholeOutlet())
    execution.stop(Ending.CANCELLED if dispatch.cancel_requested else Ending.PLATFORM)
    await execution.conclude(await execution.attempt(offer_of(services, dispatch), dispatch.attempt_id, dispatch.epoch))


def _only_choices(choices: int) -> Callable[[int], bytes] | None:
    """What the queue must know of the body: how many answers are wanted, if not one. The text stays here."""
    return (lambda bound: b'{"n":%d}' % choices) if choices > 1 else None


def _as_error(end: JobEnd) -> FallowError:
    """What the client of a job that somebody else ended is told."""
    if end.outcome == Outcome.NO_CAPACITY.value:
        return ResourceUnavailable(end.message or f"Nothing can run this request now. {_FREE}")
    return failure(Outcome(end.outcome), end.code, end.message)
