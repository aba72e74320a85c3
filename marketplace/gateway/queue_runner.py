"""Queued jobs on this gateway's nodes: hear of leased attempts, run them, store their answers.

The queue decides what runs where; this only carries it out. An attempt whose nudge was lost is missed here, its lease
ends, and the queue looks for another node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec
import redis.asyncio
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from agent.protocol import Tokens
from marketplace.catalog.service import VariantView
from marketplace.core.errors import FallowError
from marketplace.core.logs import get_logger, reason
from marketplace.core.tracing import Span
from marketplace.core.valkey import connect_async
from marketplace.gateway.answer import usage_object
from marketplace.gateway.dispatched import demand_of, ends_with, offer_of, runs_s
from marketplace.gateway.embeddings.vectors import Embedding
from marketplace.gateway.execution import Execution, LeaseLost, Work
from marketplace.gateway.flex import turn_away
from marketplace.gateway.outcomes import RETRYABLE, Ending
from marketplace.gateway.outlets import WholeOutlet
from marketplace.gateway.parse import choices_of, schema_of
from marketplace.gateway.prefixes import pack
from marketplace.gateway.schemas import check_answers, put_checks
from marketplace.gateway.services import Services
from marketplace.gateway.surface import count_stored, surface_of
from marketplace.jobs.dispatch import attempt_of, dispatch_key
from marketplace.jobs.repository import Dispatch, load_dispatch
from marketplace.jobs.states import JobState
from marketplace.jobs.sweeping import BATCHES_ENDPOINT
from marketplace.jobs.tasks import ASSIGN
from marketplace.matching.types import OfferView
from marketplace.metering.pricing import Priced
from marketplace.metering.tokens import TokenCounts

log = get_logger(__name__)
FLEX_KIND: Final = "flex"
POP_S: Final = 2
"""One blocking read waits this long for a nudge."""
RETRY_S: Final = 1.0
"""Pause while Valkey is away."""
MAX_RUNNING: Final = 2_048
"""Queued attempts at once; the nodes' slots are the real bound."""


class QueueRunner:
    """One reader of this gateway's list, and a task for each attempt."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._client: redis.asyncio.Redis = connect_async(services.settings.valkey_url, timeout_s=POP_S * 3)
        self._key = dispatch_key(services.settings.gateway_id)
        self._listener: asyncio.Task[None] | None = None
        self._quiet = False
        self._running: dict[asyncio.Task[None], Execution | None] = {}
        self._room = asyncio.Semaphore(MAX_RUNNING)

    def start(self) -> None:
        """Begin to listen."""
        self._listener = asyncio.create_task(self._listen())

    async def quiesce(self) -> None:
        """Take up nothing new; what runs goes on."""
        self._quiet = True
        if self._listener is not None:
            self._listener.cancel()
            # The client library may swallow a cancellation while it connects: then the flag ends the loop.
            await asyncio.wait({self._listener}, timeout=POP_S * 3)
            self._listener = None

    async def stop(self) -> None:
        """Hand what runs back to the queue, and end."""
        await self.quiesce()
        for execution in self._running.values():
            if execution is not None:
                execution.stop(Ending.PLATFORM)
        if self._running:
            await asyncio.wait(self._running, timeout=self._services.settings.lease_s)
        await self._client.aclose()

    async def _listen(self) -> None:
        while not self._quiet:
            await self._room.acquire()
            try:
                popped: Any = await self._client.blpop([self._key], timeout=POP_S)
            except (RedisError, OSError, TimeoutError) as error:
                self._room.release()
                log.warning("queue_not_heard", error=type(error).__name__)
                await asyncio.sleep(RETRY_S)
                continue
            except BaseException:
                self._room.release()
                raise
            attempt_id = attempt_of(popped[1]) if popped else None
            if attempt_id is None:
                self._room.release()
                continue
            task = asyncio.create_task(self._run(attempt_id))
            self._running[task] = None
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._room.release()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # An edge: the lease of a broken run ends, and the sweeper takes the job up.
            log.error("queued_attempt_failed", error=reason(error))

    async def _run(self, attempt_id: UUID) -> None:
        try:
            dispatch = await asyncio.to_thread(self._load, attempt_id)
        except SQLAlchemyError as error:
            log.warning("dispatch_not_loaded", attempt=attempt_id.hex, error=type(error).__name__)
            return
        if dispatch is None:
            return
        if dispatch.kind == FLEX_KIND:
            await self._call(dispatch)
            return
        if dispatch.body is None:
            return
        await self._execute(dispatch, dispatch.body)
        if self._services.pump is not None:
            self._services.pump.nudge(ASSIGN)

    def _load(self, attempt_id: UUID) -> Dispatch | None:
        with self._services.session_factory() as session:
            return load_dispatch(session, attempt_id)

    async def _call(self, dispatch: Dispatch) -> None:
        """Its client waits here, or did."""
        if self._services.waiting.call(dispatch):
            return
        try:
            await turn_away(self._services, dispatch)
        except (LeaseLost, FallowError) as error:
            log.warning("queued_attempt_left_to_sweeper", job=dispatch.job_id.hex, error=reason(error))

    async def _execute(self, dispatch: Dispatch, body: dict[str, Any]) -> None:
        services = self._services
        variant = services.catalog.by_id(dispatch.variant_id)
        if variant is None:
            log.error("variant_of_job_unknown", job=dispatch.job_id.hex, variant=dispatch.variant_id.hex)
            return
        span = await self._span_of(dispatch, variant)
        try:
            await self._execute_traced(dispatch, body, variant, span)
        finally:
            if span is not None:
                span.end()

    async def _span_of(self, dispatch: Dispatch, variant: VariantView) -> Span | None:
        traces = self._services.traces
        if traces is None:
            return None
        return await asyncio.to_thread(traces.taken_up, dispatch.job_id, dispatch.endpoint, variant.model_id)

    async def _execute_traced(
        self, dispatch: Dispatch, body: dict[str, Any], variant: VariantView, span: Span | None
    ) -> None:
        services = self._services
        counted = await count_stored(variant, body)
        embedding = None
        if counted.inputs:
            embedding = Embedding(counted.inputs, variant.dimensions, body["encoding_format"])
        work = Work(
            job_id=dispatch.job_id,
            request_id=dispatch.request_id,
            endpoint=dispatch.endpoint,
            organisation_id=dispatch.organisation_id,
            key_id=dispatch.key_id,
            variant=variant,
            body=msgspec.json.encode(body),
            prompt_tokens=dispatch.prompt_tokens,
            prompt_packed=pack(counted.ids),
            max_output_tokens=dispatch.max_output_tokens,
            embedding=embedding,
            deadline_at=asyncio.get_running_loop().time() + dispatch.deadline_left_s,
            all_or_nothing=dispatch.endpoint == BATCHES_ENDPOINT,
            choices=choices_of(body),
            span=span,
        )
        execution = Execution(services, work, WholeOutlet())
        current = asyncio.current_task()
        if current in self._running:
            self._running[current] = execution
        if dispatch.cancel_requested:
            execution.stop(Ending.CANCELLED)
        offer = offer_of(services, dispatch)
        await services.fleet.reservations.renew(offer, dispatch.attempt_id, services.pulse.reservation_s)
        services.fleet.chosen(offer, dispatch.attempt_id, demand_of(dispatch))
        services.pulse.join(execution)
        services.flex.began(
            dispatch.attempt_id, dispatch.job_id, offer.offer_id, runs_s(offer, dispatch), execution.stop
        )
        try:
            await self._carry_out(execution, offer, dispatch, body)
        except (LeaseLost, FallowError) as error:
            log.warning("queued_attempt_left_to_sweeper", job=dispatch.job_id.hex, error=reason(error))
        finally:
            services.flex.ended(dispatch.attempt_id)
            services.pulse.leave(execution)

    async def _carry_out(
        self, execution: Execution, offer: OfferView, dispatch: Dispatch, body: dict[str, Any]
    ) -> None:
        run = await execution.attempt(offer, dispatch.attempt_id, dispatch.epoch)
        if run.ending in RETRYABLE and not ends_with(dispatch.choice, run.ending):
            # Nobody has read anything: the queue tries again, or ends the job where nothing is left to try.
            await execution.pass_on(run, JobState.QUEUED)
            return
        schema = schema_of(body)
        checked: Sequence[dict[str, Any] | None] = ()
        if schema is not None and run.ending is Ending.FINISHED:
            checked = await check_answers(self._services.schemas, schema, run.pieces, run.choices)
        embedding = execution.work.embedding
        if embedding is not None:
            await embedding.write()
        created, model = int(time.time()), execution.work.variant.model_id

        def result(pieces: Sequence[Tokens], reasons: Sequence[str], tokens: TokenCounts, priced: Priced | None) -> str:
            if embedding is not None:
                return msgspec.json.encode(embedding.answer(model=model, tokens=tokens, priced=priced)).decode()
            surface = surface_of(body)
            answer = surface.whole(
                completion_id=f"{surface.id_prefix}{dispatch.job_id.hex}",
                created=created,
                model=model,
                pieces=pieces,
                # What was paid for although it was cut is kept, and reads as cut: by its time, or by its renter.
                finish_reasons=reasons or ("length" if run.ending is Ending.DEADLINE else None,) * run.choices,
                usage=usage_object(tokens, priced),
            )
            put_checks(answer, checked)
            return msgspec.json.encode(answer).decode()

        await execution.conclude(run, result=result)
