"""The gateway's spans: what a request, an attempt and an answer say about themselves.

`POST /v1/chat/completions` has `measure`, `match`, `reserve`, `admit`, an `attempt` for each node that tried,
`receipt`, and later `settlement`. A queued job's request ends with `admit`; below it stand `assign` and `job MODEL`,
with the rest.
An attempt has what its node reports of itself: `agent`, with `prefill` and `decode` of the engine. A node's durations
count from the instant at which it was asked, so that no two clocks are compared.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from agent.protocol import Failed, Finished
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.ids import show
from marketplace.core.logs import get_logger
from marketplace.core.settings import Settings
from marketplace.core.tracing import Span, Tracing, Value
from marketplace.gateway.attempt import AttemptRun
from marketplace.gateway.http import Scope, header
from marketplace.gateway.outcomes import Ending
from marketplace.jobs.states import Outcome
from marketplace.jobs.sweeping import CHAT_ENDPOINT, EMBEDDINGS_ENDPOINT, TEXT_ENDPOINT
from marketplace.matching.types import OfferView
from marketplace.metering import traces
from marketplace.metering.tokens import TokenCounts

log = get_logger(__name__)
PROVIDER: Final = "fallow"
FLUSH_S: Final = 1.0
MAX_WAITING: Final = 10_000
"""Jobs whose trace is not written yet; what comes then is settled outside its trace."""
MAX_HEADER_BYTES: Final = 128
OPERATIONS: Final = {CHAT_ENDPOINT: "chat", TEXT_ENDPOINT: "text_completion", EMBEDDINGS_ENDPOINT: "embeddings"}
NS_PER_MS: Final = 1_000_000
MAX_MS: Final = 1e9


class Traces:
    """Begins the traces of one gateway, and writes which trace a job is in. One event loop."""

    def __init__(self, tracing: Tracing, settings: Settings, session_factory: SessionFactory) -> None:
        self.tracing = tracing
        self._gateway_id = settings.gateway_id
        self._session_factory = session_factory
        self._waiting: dict[UUID, str] = {}
        self._task: asyncio.Task[None] | None = None

    def request(self, scope: Scope, request_id: str) -> Span:
        """A request that came in over HTTP: a part of the client's own trace if it says one."""
        endpoint = scope["path"]
        said = header(scope, b"traceparent") or b""
        server = scope.get("server") or ("", None)
        attributes: dict[str, Value] = {
            "http.request.method": scope["method"],
            "http.route": endpoint,
            "url.path": endpoint,
            "url.scheme": scope.get("scheme", "http"),
            "server.address": server[0],
            "gen_ai.operation.name": OPERATIONS.get(endpoint, "chat"),
            "gen_ai.provider.name": PROVIDER,
            "fallow.request.id": request_id,
            "fallow.gateway.id": self._gateway_id,
        }
        if server[1]:
            attributes["server.port"] = server[1]
        parent = said.decode("latin-1") if len(said) <= MAX_HEADER_BYTES else ""
        return self.tracing.start(f"{scope['method']} {endpoint}", attributes, kind="server", parent=parent)

    async def queued(self, job_id: UUID, span: Span) -> None:
        """A job is about to be queued: whoever takes it up must find its trace. A failure costs the trace alone."""
        if span.sampled:
            await asyncio.to_thread(self._write, {job_id: span.traceparent})

    def admitted(self, job_id: UUID, span: Span) -> None:
        """A job runs here: settlement, later, must find its trace."""
        if span.sampled and len(self._waiting) < MAX_WAITING:
            self._waiting[job_id] = span.traceparent

    def taken_up(self, job_id: UUID, endpoint: str, model: str) -> Span | None:
        """A queued job runs here now. None where it is not traced. Reads the database: off the event loop."""
        try:
            with self._session_factory() as session:
                parent = traces.of_jobs(session, [job_id]).get(job_id)
        except SQLAlchemyError as error:
            log.warning("trace_not_read", error=type(error).__name__)
            return None
        if parent is None:
            return None
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": OPERATIONS.get(endpoint, "chat"),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "fallow.job.id": show("job", job_id),
            "fallow.gateway.id": self._gateway_id,
        }
        return self.tracing.start(f"job {model}", attributes, kind="consumer", parent=parent)

    def start(self) -> None:
        """Write every second from now on."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write and send what is left."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        await self.flush()
        await asyncio.to_thread(self.tracing.close)

    async def flush(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, {}
        if waiting:
            await asyncio.to_thread(self._write, waiting)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    def _write(self, traceparents: dict[UUID, str]) -> None:
        try:
            with transaction(self._session_factory) as session:
                traces.note(session, traceparents)
        except SQLAlchemyError as error:
            log.warning("traces_not_written", error=type(error).__name__, jobs=len(traceparents))


def answered(
    span: Span, outcome: Outcome, *, model: str, finish_reasons: Sequence[str], tokens: TokenCounts, priced: bool
) -> None:
    """What became of it. `priced`: the tokens were charged to somebody. A node's own words are not repeated."""
    attributes: dict[str, Value] = {"fallow.outcome": outcome.value, "gen_ai.response.model": model}
    if finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = list(finish_reasons)
    if priced:
        attributes["gen_ai.usage.input_tokens"] = tokens.input
        attributes["gen_ai.usage.output_tokens"] = tokens.output
        attributes["gen_ai.usage.cache_read.input_tokens"] = tokens.input_cached
        attributes["gen_ai.usage.reasoning.output_tokens"] = tokens.output_reasoning
    span.set(attributes)
    if outcome is not Outcome.COMPLETE:
        span.fail(outcome.value)


class AttemptSpan:
    """One try at one node, with what the node reports of its own work."""

    __slots__ = ("_asked_at_ns", "_span")

    def __init__(self, parent: Span, offer: OfferView, epoch: int) -> None:
        self._asked_at_ns = time.time_ns()
        attributes: dict[str, Value] = {
            "fallow.node.id": show("node", offer.node_id),
            "fallow.offer.id": show("offer", offer.offer_id),
            "fallow.attempt.epoch": epoch,
            "fallow.node.gateway.id": offer.gateway_id,
        }
        self._span = parent.child("attempt", attributes, kind="client", start_ns=self._asked_at_ns)

    @property
    def traceparent(self) -> str:
        """What the node is told."""
        return self._span.traceparent

    def end(self, run: AttemptRun) -> None:
        """It ended, however. Why is told in our own words, not in the node's."""
        ending = run.ending or Ending.LEASE_LOST
        self._span.set({"fallow.ending": ending.value, "fallow.accepted_tokens": run.token_count})
        if ending is not Ending.FINISHED:
            self._span.fail(ending.value)
        if run.report is not None:
            self._show(run.report)
        self._span.end()

    def _show(self, report: Finished | Failed) -> None:
        """The node's own durations, as far as they fit into the time that has passed."""
        queued_ms, first_ms = (report.queued_ms, report.ttft_ms) if isinstance(report, Finished) else (0.0, None)
        began_ns = self._within(queued_ms, self._asked_at_ns)
        ended_ns = self._within(report.busy_ms, began_ns)
        agent = self._span.child("agent", {"fallow.reported_by_node": True}, start_ns=self._asked_at_ns)
        first_ns = ended_ns if first_ms is None else min(self._within(first_ms, self._asked_at_ns), ended_ns)
        agent.child("prefill", start_ns=began_ns).end(max(first_ns, began_ns))
        if first_ms is not None:
            agent.child("decode", start_ns=max(first_ns, began_ns)).end(ended_ns)
        agent.end(ended_ns)

    @staticmethod
    def _within(after_ms: float, start_ns: int) -> int:
        """So long after an instant, and not later than now; a figure without sense counts as nothing."""
        if not (math.isfinite(after_ms) and after_ms > 0):
            return start_ns
        return max(start_ns, min(start_ns + int(min(after_ms, MAX_MS) * NS_PER_MS), time.time_ns()))
