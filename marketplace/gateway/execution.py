"""Running an admitted job: attempts at nodes, each with its durable end, until one row of the outcome table is written.

Interactive requests and queued jobs share this. What differs is where the answer goes (outlets) and who looks for the
next node: the gateway itself for a client that waits, the queue for a job that can.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from agent.protocol import Cancel, Failed, Finished, ReportAck, Run, Tokens, Void
from marketplace.catalog.service import VariantView
from marketplace.core.errors import FallowError, Unavailable
from marketplace.core.logs import get_logger, reason
from marketplace.core.tracing import Span, step
from marketplace.fleet.links import NodeFrame, NodeUnreachable
from marketplace.gateway import receipts, traces
from marketplace.gateway.attempt import AttemptRun
from marketplace.gateway.confirm import was_written
from marketplace.gateway.embeddings.vectors import Embedding, EmbeddingRun
from marketplace.gateway.failures import CANCEL_REASONS
from marketplace.gateway.outcomes import FAULTS, Ending, Payer, Verdict, verdict
from marketplace.gateway.outlets import Outlet
from marketplace.gateway.poison import DEATH, MESSAGE, absolve_victims
from marketplace.gateway.receipts import price_of
from marketplace.gateway.services import Services
from marketplace.jobs.hot import Close
from marketplace.jobs.receipts import receipt_facts
from marketplace.jobs.states import JobState, Outcome
from marketplace.matching.types import OfferView
from marketplace.metering.pricing import Priced
from marketplace.metering.tokens import TokenCounts

log = get_logger(__name__)
CANCEL_WAIT_S: Final = 5.0
"""For this long a stopped node may take to say that its engine stopped."""
DEADLINE_LEAD_S: Final = 2.0
"""A node's own deadline lies this far behind ours, so that it never stops by itself what we end by the table."""
QUIET_LEASES: Final = 1 / 3
"""And never for longer than this part of a lease, which nobody renews meanwhile: a sweeper would take it for lost."""
CLOSE_TRIES: Final = 3
"""Each of them bears the writer's own patience."""

ResultOf = Callable[[Sequence[Tokens], Sequence[str], TokenCounts, Priced | None], str | None]
"""Builds the stored answer of a queued job: pieces, finish reasons of its choices, counts, price."""


@dataclass(slots=True)
class Work:
    """One job, as long as this gateway runs it."""

    job_id: UUID
    request_id: str
    endpoint: str
    organisation_id: UUID
    key_id: UUID
    variant: VariantView
    body: bytes
    """What the engine gets."""
    prompt_tokens: int
    prompt_packed: bytes
    max_output_tokens: int
    deadline_at: float
    """On the event loop's clock."""
    embedding: Embedding | None = None
    """What is due where vectors are asked for."""
    all_or_nothing: bool = False
    """True: an answer that its deadline cuts is worth nothing to the renter, and costs nothing."""
    choices: int = 1
    """Answers that are wanted, each of `max_output_tokens` at most."""
    span: Span | None = None
    """What its attempts and its receipt are parts of."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The row that was written. `tokens` and `priced` are what the renter was charged, zero where nothing."""

    outcome: Outcome
    code: str
    message: str
    finish_reasons: Sequence[str]
    """Of each choice; empty unless the engine ended in order."""
    pieces: Sequence[Tokens]
    tokens: TokenCounts
    priced: Priced | None


class LeaseLost(Exception):
    """Somebody else wrote the end of this attempt; nothing was written here."""


class Execution:
    """One job's run through this gateway. `stop` may be called at any time, from the event loop."""

    def __init__(self, services: Services, work: Work, outlet: Outlet) -> None:
        self._services = services
        self.work = work
        self.outlet = outlet
        self.run: AttemptRun | None = None
        self._attempt: traces.AttemptSpan | None = None
        self._stopped: Ending | None = None

    def stop(self, ending: Ending) -> None:
        """End the job: the client left, the deadline passed, the gateway shuts down. The first reason counts."""
        if self._stopped is None:
            self._stopped = ending
        if self.run is not None:
            self.run.stop(self._stopped)

    def tick(self, now: float) -> None:
        """Called by the pulse."""
        if now >= self.work.deadline_at:
            self.stop(Ending.DEADLINE)
        self.outlet.tick(now, self.run)

    async def attempt(self, offer: OfferView, attempt_id: UUID, epoch: int) -> AttemptRun:
        """Run a leased attempt to its ending. Its end is not written yet."""
        run = self._new_run(offer, attempt_id, epoch)
        run.lease_until = asyncio.get_running_loop().time() + self._services.settings.lease_s
        self.run = run
        if self.work.span is not None:
            self._attempt = traces.AttemptSpan(self.work.span, offer, epoch)
        if self._stopped is None:
            self._start(run, attempt_id)
        else:
            run.reported = True
            run.stop(self._stopped)
        await self.outlet.pump(run)
        if not run.reported:
            await self._quiet(run)
        await self._judge_node(run)
        return run

    def _new_run(self, offer: OfferView, attempt_id: UUID, epoch: int) -> AttemptRun:
        embedding = self.work.embedding
        if embedding is not None:
            return EmbeddingRun(offer, attempt_id.bytes, epoch, embedding)
        return AttemptRun(offer, attempt_id.bytes, epoch, self.work.max_output_tokens, self.work.choices)

    def _start(self, run: AttemptRun, attempt_id: UUID) -> None:
        work, offer = self.work, run.offer
        embedding = work.embedding
        now = asyncio.get_running_loop().time()
        frame = Run(
            attempt=run.attempt_id,
            epoch=run.epoch,
            variant_sha256=work.variant.sha256,
            body=work.body,
            prompt_tokens=work.prompt_tokens,
            max_output_tokens=work.max_output_tokens,
            lease_ms=int(self._services.settings.lease_s * 1000),
            deadline_ms=max(1, int((work.deadline_at - now + DEADLINE_LEAD_S) * 1000)),
            cache_scope=self._services.cache_scope(work.organisation_id, offer.node_id),
            device_id=offer.device_id,
            choices=work.choices,
            traceparent=self._attempt.traceparent if self._attempt is not None else "",
            task=work.variant.task,
            inputs=len(embedding.inputs) if embedding is not None else 0,
            longest_input_tokens=embedding.longest_input_tokens if embedding is not None else 0,
        )
        try:
            self._services.fleet.links.open(offer, attempt_id, run)
            self._services.fleet.links.send(offer.node_id, frame)
        except NodeUnreachable as error:
            run.reported = True
            run.stop(Ending.RACE, "node_unreachable", error.message)

    async def _quiet(self, run: AttemptRun) -> None:
        """The gateway ended the attempt, the node does not know yet: stop its engine, and hear that it stopped."""
        assert run.ending is not None
        if run.ending is Ending.LEASE_LOST:
            self._send(run, Void(run.attempt_id, run.epoch))
            return
        self._send(run, Cancel(run.attempt_id, run.epoch, CANCEL_REASONS.get(run.ending, "stopped")))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(CANCEL_WAIT_S, self._services.settings.lease_s * QUIET_LEASES)):
                while not run.reported:
                    await run.wait()

    def _send(self, run: AttemptRun, frame: NodeFrame) -> None:
        try:
            self._services.fleet.links.send(run.offer.node_id, frame)
        except NodeUnreachable:
            # It cannot speak to us either; its lease ends by itself.
            run.reported = True

    async def _judge_node(self, run: AttemptRun) -> None:
        breakers, node_id, variant_id = self._services.fleet.breakers, run.offer.node_id, self.work.variant.id
        if run.ending is Ending.NODE and run.code == DEATH and run.epoch > 1:
            await self._suspect_request(run)
        if run.ending is Ending.FINISHED:
            breakers.succeeded(node_id, variant_id)
        elif run.ending is not None and FAULTS.get(run.ending) == "node":
            breakers.failed(node_id, variant_id, self._services.now())

    async def _suspect_request(self, run: AttemptRun) -> None:
        """An engine died, and not the first one of this job: then it is the request that kills."""
        victims = await asyncio.to_thread(
            absolve_victims, self._services.session_factory, self.work.job_id, UUID(bytes=run.attempt_id)
        )
        if victims:
            log.warning("request_kills_engines", job=self.work.job_id.hex)
            run.ending, run.message = Ending.REQUEST, MESSAGE
            for node_id in victims:
                self._services.fleet.breakers.forgive(node_id, self.work.variant.id)

    # --- ends -----------------------------------------------------------------------------------------------------

    async def conclude(self, run: AttemptRun, *, prefill_due: bool = False, result: ResultOf | None = None) -> Settled:
        """Write the job's last row, by the outcome table, and let the node go. Raises LeaseLost and Unavailable."""
        try:
            if run.ending is None or run.ending is Ending.LEASE_LOST:
                raise LeaseLost
            pieces = self.outlet.delivered(run)
            started = any(piece.text or piece.extra for piece in pieces)
            if self.work.all_or_nothing and run.ending is Ending.DEADLINE:
                started = False
            ruling = verdict(run.ending, started=started, accepted=run.produced, prefill_due=prefill_due)
            if ruling.payer is Payer.PLATFORM:
                pieces = run.pieces
            with step(self.work.span, "receipt"):
                settled = await self._settle(run, ruling, pieces)
                signature = await self._signature(run) if settled.priced is not None else None
                await self._write(self._close_of(run, ruling, settled, signature, result))
        finally:
            await self.let_go(run)
        self._remember_prefix(run, settled)
        self._count(run, settled)
        return settled

    async def pass_on(self, run: AttemptRun, job_state: JobState) -> None:
        """End the attempt alone: the job goes on elsewhere, with its hold. Raises LeaseLost and Unavailable."""
        assert run.ending is not None
        try:
            await self._write(
                self._close(run, job_state, outcome=None, fault=FAULTS.get(run.ending), accepted=run.token_count)
            )
        finally:
            await self.let_go(run)

    async def give_up(self, run: AttemptRun) -> Settled:
        """Void a job whose last attempt was passed on, but that got no other. Raises LeaseLost and Unavailable."""
        assert run.ending is not None
        ruling = verdict(run.ending, started=False, accepted=False)
        settled = self._nothing(run, ruling, ())
        close = Close(
            job_id=self.work.job_id,
            attempt_id=None,
            epoch=0,
            job_state=JobState.VOIDED.value,
            outcome=settled.outcome.value,
            end_code=run.code,
            fault=None,
            accepted_tokens=0,
            busy_ms=None,
            first_token=False,
            error_code=run.code,
            error_message=run.message or None,
        )
        await self._write(close)
        self._count(run, settled)
        return settled

    async def abandon(self) -> None:
        """This gateway broke the job while an attempt ran: end it as our failure, whatever the node says, so that no
        hold waits for the sweeper. Never raises: what cannot be written is left to it."""
        run = self.run
        if run is None:
            return
        run.ending, run.code = Ending.PLATFORM, Ending.PLATFORM.value
        try:
            if not run.reported:
                await self._quiet(run)
            await self.conclude(run)
        except (LeaseLost, FallowError) as error:
            log.warning("abandoned_attempt_left_to_sweeper", job=self.work.job_id.hex, error=reason(error))

    async def _settle(self, run: AttemptRun, ruling: Verdict, pieces: Sequence[Tokens]) -> Settled:
        if ruling.payer is Payer.NOBODY:
            return self._nothing(run, ruling, pieces)
        services = self._services
        assert ruling.outcome is not None
        counted = await self._counted(run, pieces)
        run.token_count = counted.accepted
        return Settled(
            outcome=ruling.outcome,
            code=run.code,
            message=run.message,
            finish_reasons=run.finish_reasons,
            pieces=pieces,
            tokens=counted.tokens,
            priced=price_of(counted.tokens, run.offer.rates, services.settings.fee_basis_points, ruling.payer),
        )

    async def _counted(self, run: AttemptRun, pieces: Sequence[Tokens]) -> receipts.Counted:
        work = self.work
        if work.embedding is not None:
            # No prefix is reused, and nothing is written: what was read for the vectors that came is all there is.
            return receipts.Counted(TokenCounts.of(prompt=work.embedding.accepted_tokens, cached=0, output=0), 0)
        return await receipts.count(
            work.variant,
            pieces,
            accepted_tokens=run.token_count,
            prompt_tokens=work.prompt_tokens,
            max_output_tokens=work.max_output_tokens,
            report=run.report,
            proven_prefix=self._services.prefixes.proven(
                work.organisation_id, work.variant.id, run.offer.node_id, work.prompt_packed
            ),
            choices=work.choices,
        )

    def _nothing(self, run: AttemptRun, ruling: Verdict, pieces: Sequence[Tokens]) -> Settled:
        assert ruling.outcome is not None
        return Settled(
            outcome=ruling.outcome,
            code=run.code,
            message=run.message,
            finish_reasons=(),
            pieces=pieces,
            tokens=TokenCounts(0, 0, 0, 0),
            priced=None,
        )

    async def _signature(self, run: AttemptRun) -> bytes | None:
        if not isinstance(run.report, Finished):
            return None
        return await self._services.signatures.proven(run.offer.node_id, run.report, run.pieces, run.vectors)

    def _close_of(
        self, run: AttemptRun, ruling: Verdict, settled: Settled, signature: bytes | None, result: ResultOf | None
    ) -> Close:
        assert ruling.outcome is not None
        complete = ruling.outcome is Outcome.COMPLETE
        receipt = None
        stored = None
        if settled.priced is not None:
            receipt = receipt_facts(
                settled.tokens,
                settled.priced,
                owner_organisation_id=run.offer.owner_organisation_id,
                device_id=run.offer.device_id,
                simulated=run.offer.simulated,
                node_signature=signature,
                paid_by_platform=ruling.payer is Payer.PLATFORM,
            )
            if result is not None and ruling.payer is Payer.RENTER:
                stored = result(settled.pieces, settled.finish_reasons, settled.tokens, settled.priced)
        return self._close(
            run,
            ruling.job_state,
            outcome=ruling.outcome,
            fault=ruling.fault,
            accepted=run.token_count,
            error=None if complete else (run.code, run.message),
            result=stored,
            receipt=receipt,
        )

    def _close(
        self,
        run: AttemptRun,
        job_state: JobState,
        *,
        outcome: Outcome | None,
        fault: str | None,
        accepted: int,
        error: tuple[str, str] | None = None,
        result: str | None = None,
        receipt: Any = None,
    ) -> Close:
        report = run.report
        code, message = error or (None, None)
        return Close(
            job_id=self.work.job_id,
            attempt_id=UUID(bytes=run.attempt_id),
            epoch=run.epoch,
            job_state=job_state.value,
            outcome=outcome.value if outcome is not None else None,
            end_code=run.code,
            fault=fault,
            accepted_tokens=accepted,
            busy_ms=_busy_ms(report),
            first_token=bool(run.pieces) or run.produced,
            error_code=code,
            error_message=message or None,
            result=result,
            receipt=receipt,
        )

    async def _write(self, close: Close) -> None:
        """Make an end durable. The writer repeats what a lost connection left open; beyond its patience this repeats
        the record, and asks the database whether an earlier try had arrived after all."""
        unsure = False
        for remaining in reversed(range(CLOSE_TRIES)):
            try:
                closed = await self._services.writer.submit(close)
            except Unavailable:
                unsure = True
                if not remaining:
                    raise
                continue
            if closed.ok:
                return
            if unsure and await was_written(self._services.session_factory, close):
                return
            log.warning(
                "close_refused",
                job=close.job_id.hex,
                state=close.job_state,
                outcome=close.outcome,
                reason=closed.reason,
            )
            raise LeaseLost

    async def let_go(self, run: AttemptRun) -> None:
        """Acknowledge the report, forget the route, free the slot. A node that did not say that it stopped keeps its
        reservation until that ends by itself."""
        attempt_id = UUID(bytes=run.attempt_id)
        if run.ending is not None:
            self._services.metrics.attempts.labels(run.ending.value).inc()
        if self._attempt is not None:
            self._attempt.end(run)
            self._attempt = None
        if run.report is not None:
            self._send(run, ReportAck(run.attempt_id, run.epoch))
        self._services.fleet.links.close(attempt_id)
        if run.ending is Ending.FINISHED:
            self._services.fleet.view.wrote(attempt_id, run.token_count)
        self.run = None
        if run.reported:
            self._services.in_background(self._services.fleet.reservations.release(run.offer, attempt_id))

    def _remember_prefix(self, run: AttemptRun, settled: Settled) -> None:
        if settled.priced is not None:
            work = self.work
            self._services.prefixes.remember(
                work.organisation_id,
                work.variant.id,
                run.offer.node_id,
                work.prompt_packed,
                for_s=run.offer.prefix_cache_s,
            )

    def _count(self, run: AttemptRun, settled: Settled) -> None:
        if self.work.span is not None:
            traces.answered(
                self.work.span,
                settled.outcome,
                model=self.work.variant.model_id,
                finish_reasons=settled.finish_reasons,
                tokens=settled.tokens,
                priced=settled.priced is not None,
            )
        metrics = self._services.metrics
        metrics.outcomes.labels(self.work.endpoint, settled.outcome.value).inc()
        if settled.priced is None:
            return
        if settled.outcome is Outcome.PLATFORM_FAILED:
            metrics.losses.inc(settled.priced.owner_nano)
        else:
            metrics.charged.inc(settled.priced.gross_nano)
            metrics.fees.inc(settled.priced.fee_nano)
            metrics.add_tokens(settled.tokens)


def _busy_ms(report: Finished | Failed | None) -> int | None:
    """What the node says, if it says something sane; the database bounds it by the lease."""
    if report is None or not 0 <= report.busy_ms < 1e12:
        return None
    return round(report.busy_ms)
