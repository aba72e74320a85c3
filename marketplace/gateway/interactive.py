"""A request whose client waits: admitted at the best node, moved on while nothing was read, paid by the table.

The first row of the outcome table that fits is written before the client reads the end of its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from agent.protocol import Tokens
from marketplace.accounts.auth import Principal
from marketplace.core.ids import new_id, show
from marketplace.core.logs import bind, get_logger
from marketplace.core.tracing import Span, step
from marketplace.gateway import kept
from marketplace.gateway.answer import usage_object
from marketplace.gateway.attempt import AttemptRun
from marketplace.gateway.choice import find, find_all, served_by, served_headers
from marketplace.gateway.execution import Execution, LeaseLost, Settled, Work
from marketplace.gateway.failures import (
    InsufficientBalance,
    KeyBudgetExceeded,
    NoCapacity,
    failure,
    of_lost_lease,
)
from marketplace.gateway.outcomes import Ending, moves_on
from marketplace.gateway.outlets import JsonOutlet, StreamOutlet, note_checks
from marketplace.gateway.quote import Measured
from marketplace.gateway.schemas import check_answers, put_checks
from marketplace.gateway.services import Services
from marketplace.gateway.surface import Surface
from marketplace.jobs.endings import MAX_ATTEMPTS, MAX_PREEMPTIONS
from marketplace.jobs.hot import Admit, AttemptLease, Lease
from marketplace.jobs.states import JobState, Outcome
from marketplace.matching.types import Demand, Filter, OfferView, Ranked, Rates, Refusal
from marketplace.metering.pricing import Priced
from marketplace.metering.tokens import TokenCounts

log = get_logger(__name__)
MAX_ADMISSIONS: Final = 4
"""Times that an admission is tried again because the balance was smaller than the worst case."""
ROOM_TRIES: Final = 5
"""Times that a slot is asked for which a queued job has just given up..."""
ROOM_PAUSE_S: Final = 0.05
"""...since Valkey may hear of it a moment later."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and under which name the answer goes out."""

    principal: Principal
    request_id: str
    arrived_at: float
    """On the event loop's clock."""
    created: int
    """Unix seconds."""
    keep_answer: bool = False
    """What is charged is stored with its receipt, to be given again."""
    span: Span | None = None

    @classmethod
    def now(
        cls,
        principal: Principal,
        request_id: str,
        arrived_at: float,
        keep_answer: bool = False,
        span: Span | None = None,
    ) -> Caller:
        return cls(principal, request_id, arrived_at, int(time.time()), keep_answer, span)


@dataclass(slots=True)
class Placement:
    """A leased attempt that has not started."""

    offer: OfferView
    attempt_id: UUID
    epoch: int


class Interactive:
    """One request from its admission to its end. Used once."""

    def __init__(
        self,
        services: Services,
        caller: Caller,
        measured: Measured,
        outlet: StreamOutlet | JsonOutlet,
        surface: Surface,
    ) -> None:
        self._services = services
        self._surface = surface
        self._caller = caller
        self._measured = measured
        self._outlet = outlet
        self._job_id = new_id()
        self._max_output = measured.max_output_tokens
        self._excluded: set[UUID] = set()
        self._attempts = 0
        self._preemptions = 0
        self._cached_tokens = services.prefixes.held(
            caller.principal.organisation_id, measured.variant.id, measured.prompt_packed
        )
        self._served_by: dict[str, Any] = {}
        self.used_tokens = 0
        """Of prompt and answer, as they were charged."""
        self.admitted = False
        """True once a hold and a lease exist: from then on the job's own row tells how it ended."""
        self._schema_checks: Sequence[dict[str, Any] | None] = ()
        """Choice by choice, where there is a schema."""
        self._embedding = measured.new_embedding()
        self._execution: Execution | None = None
        self._placement: Placement | None = None
        self._limit_s = services.settings.request_timeout_s
        """From the start of its run to its deadline."""
        self._gone: Ending | None = None

    @property
    def _answer_id(self) -> str:
        return self._surface.answer_id(self._caller.request_id)

    @property
    def job_id(self) -> UUID:
        """The job that an admission makes."""
        return self._job_id

    def stop(self, ending: Ending) -> None:
        """The client left, or the gateway shuts down."""
        if self._gone is None:
            self._gone = ending
        if self._execution is not None:
            self._execution.stop(ending)

    # --- admission ------------------------------------------------------------------------------------------------

    async def admit(self) -> None:
        """Reserve a slot, hold the worst case, lease the first attempt. Raises NoCapacity, InsufficientBalance and
        Unavailable; nothing is held then."""
        available_nano: int | None = None
        by_budget = False
        for _ in range(MAX_ADMISSIONS):
            attempt_id = new_id()
            offer = await self._reserve(attempt_id, most_nano=available_nano)
            try:
                with step(self._caller.span, "admit"):
                    admitted = await self._services.writer.submit(self._admission(offer, attempt_id))
            except BaseException:
                self._release(offer, attempt_id)
                raise
            if admitted.ok:
                self.admitted = True
                bind(job=self._job_id.hex)
                self._note_settlement()
                now = asyncio.get_running_loop().time()
                self._services.metrics.admission.observe(now - self._caller.arrived_at)
                self._services.fleet.retries.request(offer.variant_id, self._services.now())
                self._placement = Placement(offer, attempt_id, 1)
                return
            # Awaited: what comes next must see the slot free again.
            await self._services.fleet.reservations.release(offer, attempt_id)
            available_nano, by_budget = admitted.available_nano, admitted.by_budget
            self._afford(offer, available_nano, by_budget)
        raise self._short_of_balance(available_nano or 0, by_budget)

    def _note_settlement(self) -> None:
        """Whoever settles the job later must find its trace."""
        span, traces = self._caller.span, self._services.traces
        if span is not None and traces is not None:
            self._show_job(span)
            traces.admitted(self._job_id, span)

    def _show_job(self, span: Span) -> None:
        span.set({"fallow.job.id": show("job", self._job_id), "gen_ai.response.id": self._answer_id})

    async def _reserve(
        self, attempt_id: UUID, *, ceiling: Rates | None = None, most_nano: int | None = None
    ) -> OfferView:
        """A slot at the best offer that has one. Raises NoCapacity."""
        services = self._services
        demand = self._demand(ceiling, most_nano)
        choice = self._measured.choice
        with step(self._caller.span, "match"):
            ranked = find(services, demand, choice)
        taken = await self._take(ranked, attempt_id)
        full = taken is None and not ranked.offers and not choice.lists
        if full and await services.flex.make_room(lambda: services.fleet.view.full(demand)):
            for _ in range(ROOM_TRIES):
                ranked = services.fleet.rank(demand)
                taken = await self._take(ranked, attempt_id)
                if taken is not None:
                    break
                await asyncio.sleep(ROOM_PAUSE_S)
        if taken is None:
            nodes = len({offer.node_id for offer in ranked.offers})
            raise NoCapacity(Refusal({**ranked.refusal.refused, Filter.RESERVED: nodes}) if nodes else ranked.refusal)
        services.fleet.chosen(taken, attempt_id, demand)
        return taken

    async def _take(self, ranked: Ranked, attempt_id: UUID) -> OfferView | None:
        """A slot at the best of these offers that has one, or None."""
        if not ranked.offers:
            return None
        services = self._services
        with step(self._caller.span, "reserve"):
            return await services.fleet.reservations.reserve_first(ranked, attempt_id, services.pulse.reservation_s)

    def _demand(self, ceiling: Rates | None = None, most_nano: int | None = None) -> Demand:
        return self._measured.demand(
            self._caller.principal.organisation_id,
            ceiling=ceiling,
            excluded=frozenset(self._excluded),
            cached_tokens=self._cached_tokens,
            max_output_tokens=self._max_output,
            most_nano=most_nano,
            moving=self.admitted,
        )

    def _admission(self, offer: OfferView, attempt_id: UUID) -> Admit:
        principal, settings, measured = self._caller.principal, self._services.settings, self._measured
        return Admit(
            job_id=self._job_id,
            organisation_id=principal.organisation_id,
            key_id=principal.key_id,
            credit_account_id=principal.credit_account_id or 0,
            request_id=self._caller.request_id,
            kind="interactive",
            variant_id=measured.variant.id,
            body=None,
            prompt_tokens=measured.prompt_tokens,
            max_output_tokens=self._max_output,
            ceiling=offer.rates,
            hold_nano=self._worst(offer),
            hold_margin_s=settings.hold_margin_s,
            gateway_id=settings.gateway_id,
            deadline_s=settings.request_timeout_s,
            attempt=self._lease_of(offer, attempt_id),
            endpoint=self._surface.endpoint,
        )

    def _lease_of(self, offer: OfferView, attempt_id: UUID) -> AttemptLease:
        settings = self._services.settings
        return AttemptLease(
            attempt_id=attempt_id,
            node_id=offer.node_id,
            offer_id=offer.offer_id,
            price_id=offer.price_id,
            rates=offer.rates,
            gateway_id=settings.gateway_id,
            lease_s=settings.lease_s,
        )

    def _worst(self, offer: OfferView) -> int:
        return self._measured.worst_nano(offer.rates, self._max_output)

    def _afford(self, refused: OfferView, available_nano: int, by_budget: bool) -> None:
        """Balance or budget do not hold this offer's worst case: another try may take a cheaper one, or, where
        there is none and the client did not bound the answer, any once it is lowered. Raises InsufficientBalance."""
        offers = find_all(self._services, self._demand(), self._measured.choice).offers
        if any(self._worst(offer) <= available_nano for offer in offers):
            return
        affords = self._measured.affordable_output
        affordable = affords(refused.rates, available_nano)
        if affordable < 1:
            affordable = max((affords(offer.rates, available_nano) for offer in offers), default=0)
        if self._measured.client_bound or affordable < 1 or self._caller.principal.credit_account_id is None:
            raise self._short_of_balance(available_nano, by_budget)
        self._max_output = min(self._max_output, affordable)

    def _offers_now(self) -> Sequence[OfferView]:
        offers = self._services.fleet.view.offers(self._measured.variant.id)
        return [offer for offer in offers if self._measured.choice.admits(offer)]

    def _short_of_balance(self, available_nano: int, by_budget: bool) -> InsufficientBalance:
        measured = self._measured
        offers = self._offers_now()
        output = self._max_output if measured.client_bound else 1
        kind = KeyBudgetExceeded if by_budget else InsufficientBalance
        return kind(
            needed_nano=min((measured.worst_nano(offer.rates, output) for offer in offers), default=0),
            available_nano=available_nano,
            affordable_output_tokens=min(
                max((measured.affordable_output(offer.rates, available_nano) for offer in offers), default=0),
                self._max_output,
            ),
        )

    def _release(self, offer: OfferView, attempt_id: UUID) -> None:
        self._services.in_background(self._services.fleet.reservations.release(offer, attempt_id))

    # --- the run --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run an admitted request to its end, and show the client what became of it."""
        execution = self._execution = Execution(self._services, self._work(), self._outlet)
        if self._gone is not None:
            execution.stop(self._gone)
        self._announce_cap()
        self._services.pulse.join(execution)
        try:
            await self._show(await self._attempts_of(execution))
        except LeaseLost:
            await self._outlet.fail(of_lost_lease())
        except BaseException:
            self._services.in_background(execution.abandon())
            raise
        finally:
            self._services.pulse.leave(execution)

    def _work(self) -> Work:
        measured, caller = self._measured, self._caller
        return Work(
            job_id=self._job_id,
            request_id=caller.request_id,
            endpoint=self._surface.endpoint,
            organisation_id=caller.principal.organisation_id,
            key_id=caller.principal.key_id,
            variant=measured.variant,
            body=measured.chat.engine_body(self._max_output),
            prompt_tokens=measured.prompt_tokens,
            prompt_packed=measured.prompt_packed,
            max_output_tokens=self._max_output,
            embedding=self._embedding,
            deadline_at=asyncio.get_running_loop().time() + self._limit_s,
            choices=measured.choices,
            span=caller.span,
        )

    async def _attempts_of(self, execution: Execution) -> Settled:
        placement = self._placement
        assert placement is not None
        first = placement.offer
        while True:
            self._announce_node(placement.offer)
            run = await execution.attempt(placement.offer, placement.attempt_id, placement.epoch)
            self._observe_first_token(run)
            reserved = await self._next(run, first)
            if reserved is None:
                return await self._conclude(execution, run)
            offer, attempt_id = reserved
            try:
                await execution.pass_on(run, JobState.RUNNING)
                leased = await self._services.writer.submit(Lease(self._job_id, self._lease_of(offer, attempt_id)))
            except BaseException:
                self._release(offer, attempt_id)
                raise
            if not leased.epoch:
                self._release(offer, attempt_id)
                log.warning("retry_refused", reason=leased.reason)
                return await execution.give_up(run)
            placement = Placement(offer, attempt_id, leased.epoch)

    async def _conclude(self, execution: Execution, run: AttemptRun) -> Settled:
        """Write the end. Raises LeaseLost and Unavailable."""
        result = self._kept_answer if self._caller.keep_answer else None
        await self._check_schema(run)
        if self._embedding is not None:
            await self._embedding.write()
        return await execution.conclude(run, prefill_due=await self._prefill_due(run), result=result)

    async def _next(self, run: AttemptRun, first: OfferView) -> tuple[OfferView, UUID] | None:
        """A slot for another attempt, or None where there may be none, or is none."""
        assert run.ending is not None
        if self._gone is not None or not moves_on(run.ending, exposed=self._outlet.exposed, accepted=run.produced):
            return None
        if self._measured.choice.first_only:
            return None
        self._excluded.add(run.offer.node_id)
        if not self._may_retry(run.ending, first):
            return None
        attempt_id = new_id()
        try:
            return await self._reserve(attempt_id, ceiling=first.rates), attempt_id
        except NoCapacity:
            return None

    def _may_retry(self, ending: Ending, first: OfferView) -> bool:
        if ending is Ending.OWNER:
            self._preemptions += 1
            return self._preemptions < MAX_PREEMPTIONS
        self._attempts += 1
        if self._attempts >= MAX_ATTEMPTS:
            return False
        return self._services.fleet.retries.try_retry(first.variant_id, self._services.now())

    async def _check_schema(self, run: AttemptRun) -> None:
        """See whether a whole answer follows the schema that it was to follow: paid for either way, and said."""
        schema = self._measured.chat.answer_schema
        if schema is not None and run.ending is Ending.FINISHED:
            self._schema_checks = await check_answers(self._services.schemas, schema, run.pieces, run.choices)

    async def _prefill_due(self, run: AttemptRun) -> bool:
        """True if a client that left before its first token must pay the prefill that a node did for it."""
        early = run.ending in (Ending.CANCELLED, Ending.SLOW_READER) and not self._outlet.delivered(run)
        if not early:
            return False
        free = await self._services.cancels.is_free(self._caller.principal.key_id)
        return not free and run.accepted

    # --- what the client sees -------------------------------------------------------------------------------------

    @property
    def _lowered(self) -> bool:
        return self._max_output < self._measured.max_output_tokens

    def _announce_cap(self) -> None:
        if self._lowered:
            self._outlet.headers.append((b"x-fallow-max-tokens", b"%d" % self._max_output))

    def _announce_node(self, offer: OfferView) -> None:
        """Who serves: said in the headers, unless they are out already, and at the end of the answer."""
        headers, own = self._outlet.headers, served_headers(offer, self._measured.variant)
        names = {name for name, _ in own}
        headers[:] = [entry for entry in headers if entry[0] not in names] + own
        self._served_by = served_by(offer, self._measured.variant)

    def _observe_first_token(self, run: AttemptRun) -> None:
        if run.first_token_at is not None:
            metrics = self._services.metrics
            ttft_s = run.first_token_at - self._caller.arrived_at
            metrics.ttft.observe(ttft_s)
            if self._caller.span is not None:
                self._caller.span.set({"gen_ai.response.time_to_first_chunk": ttft_s})
            if run.token_count > 1:
                took_s = asyncio.get_running_loop().time() - run.first_token_at
                metrics.tpot.observe(took_s / (run.token_count - 1))

    async def _show(self, settled: Settled) -> None:
        self.used_tokens = settled.tokens.input + settled.tokens.output
        if settled.outcome is Outcome.COMPLETE:
            await self._finish(settled, settled.finish_reasons)
        elif settled.outcome is Outcome.DEADLINE and isinstance(self._outlet, JsonOutlet):
            # What was paid for is handed over: a prefix of the answer, marked as cut.
            await self._finish(settled, self._cut)
        elif settled.outcome not in (Outcome.CANCELLED, Outcome.CANCELLED_EARLY, Outcome.SLOW_READER):
            await self._outlet.fail(failure(settled.outcome, settled.code, settled.message))

    @property
    def _cut(self) -> Sequence[str]:
        """The finish reasons of what ended before its answers did."""
        return ("length",) * self._measured.choices

    async def _finish(self, settled: Settled, reasons: Sequence[str]) -> None:
        if isinstance(self._outlet, StreamOutlet):
            usage = self._usage(settled.tokens, settled.priced) if self._measured.chat.include_usage else None
            self._outlet.note_checks(self._schema_checks)
            await self._outlet.finish(reasons, usage, self._served_by)
            return
        whole = self._vectors(settled.tokens, settled.priced)
        if whole is None:
            whole = self._whole(settled.pieces, reasons, self._usage(settled.tokens, settled.priced))
        await self._outlet.finish(whole)

    def _vectors(self, tokens: TokenCounts, priced: Priced | None) -> dict[str, Any] | None:
        """The answer of an embeddings request; None of any other."""
        if self._embedding is None:
            return None
        answer = self._embedding.answer(model=self._measured.model, tokens=tokens, priced=priced)
        return {**answer, "provider": self._served_by}

    def _whole(self, pieces: Sequence[Tokens], reasons: Sequence[str], usage: dict[str, Any]) -> dict[str, Any]:
        body = self._surface.whole(
            completion_id=self._answer_id,
            created=self._caller.created,
            model=self._measured.model,
            pieces=pieces,
            finish_reasons=reasons,
            usage=usage,
        )
        put_checks(body, self._schema_checks)
        if self._measured.service_tier is not None:
            body["service_tier"] = self._measured.service_tier
        body["provider"] = self._served_by
        return body

    def _kept_answer(
        self, pieces: Sequence[Tokens], reasons: Sequence[str], tokens: TokenCounts, priced: Priced | None
    ) -> str | None:
        """What a later request with the same Idempotency-Key gets: the answer as far as it was paid for, in the same
        bytes. None where nothing was delivered: then the key is free again."""
        if not pieces and not reasons:
            return None
        vectors = self._vectors(tokens, priced)
        if vectors is not None:
            return kept.whole(vectors) if self._embedding is not None and self._embedding.complete else None
        usage = self._usage(tokens, priced)
        chat = self._measured.chat
        if not chat.stream:
            return kept.whole(self._whole(pieces, reasons or self._cut, usage))
        writers = self._surface.writers(
            chat.choices,
            completion_id=self._answer_id,
            created=self._caller.created,
            model=self._measured.model,
            include_usage=chat.include_usage,
            service_tier=self._measured.service_tier,
        )
        note_checks(writers, self._schema_checks)
        return kept.stream(writers, pieces, reasons, usage if chat.include_usage else None, self._served_by)

    def _usage(self, tokens: TokenCounts, priced: Priced | None) -> dict[str, Any]:
        usage = usage_object(tokens, priced)
        if self._lowered:
            usage["output_cap"] = {"max_tokens": self._max_output, "reason": "balance"}
        return usage
