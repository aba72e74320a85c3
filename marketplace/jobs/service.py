"""Jobs that can wait: accepting one, showing it, cancelling it. The queue's own work is assignment and sweeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from uuid import UUID

from sqlalchemy.orm import Session

from marketplace.core.database import SessionFactory
from marketplace.core.errors import Conflict, FallowError, NotFound, RateLimited
from marketplace.core.ids import show
from marketplace.core.logs import get_logger
from marketplace.jobs import endings, repository
from marketplace.jobs.hot import Admit
from marketplace.jobs.repository import JobView
from marketplace.jobs.states import JobState, Outcome
from marketplace.jobs.sweeping import close_waiting
from marketplace.jobs.writer import HotWriter
from marketplace.matching.choice import ANY, Choice
from marketplace.metering.pricing import BASIS_POINTS, Rates, affordable_output, worst_case

log = get_logger(__name__)
FULL_RETRY_S: Final = 30
AMPLE_ROOM: Final = 10_000
"""With room for more jobs than this..."""
AMPLE_S: Final = 1.0
"""...the queue is not counted again for so long."""
MAX_TRIES: Final = 3
"""Times that something is tried again because the balance, or the job, moved meanwhile."""
WITHDRAW_TRIES: Final = 6
WITHDRAW_PAUSE_S: Final = 2.0
CANCELLED: Final = frozenset({Outcome.CANCELLED.value, Outcome.CANCELLED_EARLY.value})


class JobEnded(Conflict):
    """A job that has ended cannot be cancelled."""

    code = "job_ended"


class JobBusy(Conflict):
    """The job changed hands faster than we could cancel it."""

    code = "job_busy"
    retryable = True


class QueueFull(RateLimited):
    """As many jobs wait as may, of this organisation or of all."""

    code = "queue_full"


@dataclass(frozen=True, slots=True)
class Order:
    """A job as its renter asks for it, checked and counted."""

    job_id: UUID
    organisation_id: UUID
    key_id: UUID
    credit_account_id: int
    request_id: str
    variant_id: UUID
    body: Callable[[int], bytes] | None
    """JSON of the chat request that an engine gets, given its bound on output. None: its client's gateway has it."""
    prompt_tokens: int
    max_output_tokens: int
    """Of each answer."""
    bound_asked: bool
    """True: the client asked for this bound, so it is not lowered to what the balance affords."""
    ceiling: Rates
    deadline_s: float
    choices: int = 1
    """Answers that are wanted."""
    kind: Literal["queued", "flex"] = "queued"
    endpoint: str | None = None
    """Where it came in; None: `/v1/jobs`."""
    price_basis_points: int = BASIS_POINTS
    """The share of a node's ask at which it runs; the ceiling is in this share."""
    gateway_id: str | None = None
    """The gateway that holds its client..."""
    client_lease_s: float | None = None
    """...and for how long the client counts as waiting, unless that gateway says so again."""
    webhook_url: str | None = None
    """Where its end is told, beside its organisation's endpoints."""
    choice: Choice = ANY
    """Where it may run."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The job is durable and its worst case is held."""

    job_id: UUID
    max_output_tokens: int
    lowered: bool
    """True if the balance did not cover the model's own bound."""
    hold_nano: int


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The balance covers neither what was asked nor, where that may be lowered, one token. Nothing was written."""

    needed_nano: int
    available_nano: int
    affordable_output_tokens: int
    """What the balance would cover at this prompt and price, of each answer; 0: not even one token."""
    by_budget: bool = False
    """True if the key's budget, and not the balance, was too small."""


async def accept(writer: HotWriter, order: Order, *, hold_margin_s: float) -> Accepted | Shortfall:
    """Hold the worst case at the job's own maximum price, and queue it, in one durable statement.

    Raises Unavailable if the database does not answer; the job may have been written all the same (see `withdraw`).
    """
    bound = order.max_output_tokens
    for _ in range(MAX_TRIES):
        needed_nano = worst_case(order.ceiling, order.prompt_tokens, bound * order.choices)
        admitted = await writer.submit(_admission(order, bound, needed_nano, hold_margin_s))
        if admitted.ok:
            return Accepted(order.job_id, bound, bound < order.max_output_tokens, needed_nano)
        affordable = affordable_output(order.ceiling, order.prompt_tokens, admitted.available_nano) // order.choices
        shortfall = Shortfall(needed_nano, admitted.available_nano, affordable, admitted.by_budget)
        if order.bound_asked or affordable < 1:
            return shortfall
        bound = min(bound, affordable)
    return shortfall


def _admission(order: Order, bound: int, hold_nano: int, hold_margin_s: float) -> Admit:
    return Admit(
        job_id=order.job_id,
        organisation_id=order.organisation_id,
        key_id=order.key_id,
        credit_account_id=order.credit_account_id,
        request_id=order.request_id,
        kind=order.kind,
        variant_id=order.variant_id,
        body=order.body(bound).decode() if order.body is not None else None,
        prompt_tokens=order.prompt_tokens,
        max_output_tokens=bound,
        ceiling=order.ceiling,
        hold_nano=hold_nano,
        hold_margin_s=hold_margin_s,
        gateway_id=order.gateway_id,
        deadline_s=order.deadline_s,
        attempt=None,
        endpoint=order.endpoint,
        price_basis_points=order.price_basis_points,
        client_lease_s=order.client_lease_s,
        webhook_url=order.webhook_url,
        choice=order.choice.to_row(),
    )


class QueueRoom:
    """Whether the queue takes one more job, as one gateway sees it. Any thread.

    Those who ask at the same moment may all be let in: the bound keeps the queue from growing without end, it is no
    exact figure. So far below it the whole queue is not counted anew for each job: that costs as much as it is long.
    """

    def __init__(
        self, factory: SessionFactory, *, most: int, most_own: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._factory = factory
        self._most = most
        self._most_own = most_own
        self._clock = clock
        self._ample_until = 0.0

    def require(self, organisation_id: UUID) -> None:
        """Raises QueueFull if as many jobs wait as may, of this organisation or of all."""
        with self._factory() as session:
            own = repository.depth(session, most=self._most_own, organisation_id=organisation_id)
            full = own < self._most_own and self._is_full(session)
        if own < self._most_own and not full:
            return
        why = "too many jobs wait, of all renters" if full else f"{own} of your jobs wait, and no more may"
        raise QueueFull(
            f"The queue is full: {why}. Send it again later. Nothing was charged.",
            headers={"retry-after": str(FULL_RETRY_S)},
        )

    def _is_full(self, session: Session) -> bool:
        now = self._clock()
        if now < self._ample_until:
            return False
        left = self._most - repository.depth(session, most=self._most)
        if left > AMPLE_ROOM:
            self._ample_until = now + AMPLE_S
        return left <= 0


async def withdraw(writer: HotWriter, job_id: UUID) -> None:
    """Void a job whose acceptance could not be confirmed, should it have been written. Gives up after WITHDRAW_TRIES:
    the job then runs, or ends at its deadline."""
    for _ in range(WITHDRAW_TRIES):
        try:
            await writer.submit(close_waiting(job_id, endings.unwanted()))
        except FallowError:
            await asyncio.sleep(WITHDRAW_PAUSE_S)
        else:
            return
    log.warning("withdrawal_given_up", job=job_id.hex)


def get(factory: SessionFactory, organisation_id: UUID, job_id: UUID) -> JobView:
    """One of the organisation's jobs. Raises NotFound."""
    with factory() as session:
        view = repository.find(session, organisation_id, job_id)
    if view is None:
        raise NotFound(f"There is no job with the id {show('job', job_id)!r}.")
    return view


def page(
    factory: SessionFactory, organisation_id: UUID, *, after: UUID | None, states: Sequence[str], limit: int
) -> tuple[list[JobView], bool]:
    """Up to `limit` jobs, newest first, and whether more follow."""
    with factory() as session:
        views = repository.page(session, organisation_id, after=after, states=states, limit=limit + 1)
    return views[:limit], len(views) > limit


async def cancel(factory: SessionFactory, writer: HotWriter, organisation_id: UUID, job_id: UUID) -> JobView:
    """End a waiting job now; ask the gateway that runs a running one to stop it at its next checkpoint.

    A job that was cancelled before is returned as it is. Raises NotFound, JobEnded, JobBusy, Unavailable.
    """
    for _ in range(MAX_TRIES):
        view = await asyncio.to_thread(get, factory, organisation_id, job_id)
        state = JobState(view.job.state)
        if view.job.outcome in CANCELLED or (state is JobState.RUNNING and view.job.cancel_requested_at is not None):
            return view
        if state is JobState.QUEUED:
            if (await writer.submit(close_waiting(job_id, endings.unwanted()))).ok:
                return await asyncio.to_thread(get, factory, organisation_id, job_id)
        elif state is JobState.RUNNING:
            if await asyncio.to_thread(_request_cancel, factory, job_id):
                return await asyncio.to_thread(get, factory, organisation_id, job_id)
        else:
            raise JobEnded(f"Job {show('job', job_id)} has ended: {view.job.outcome}.")
    raise JobBusy(f"Job {show('job', job_id)} is changing hands just now. Cancel it again.")


def _request_cancel(factory: SessionFactory, job_id: UUID) -> bool:
    with factory() as session, session.begin():
        return repository.request_cancel(session, job_id)
