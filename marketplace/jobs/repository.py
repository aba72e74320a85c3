"""Every query over jobs, attempts and the queue. The database's clock decides; the hot path's functions write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Row, Select, and_, exists, func, select, text, tuple_, update
from sqlalchemy.orm import Session

from marketplace.fleet.models import Node, Offer
from marketplace.jobs.endings import History, Tried
from marketplace.jobs.models import Attempt, Job
from marketplace.jobs.queue_sql import FIT_NOWHERE, NEXT_IN_LINE, as_arrays
from marketplace.matching.choice import ANY, Choice
from marketplace.matching.types import OfferView, Rates
from marketplace.metering.models import Receipt

MAX_RENTERS = 10_000
"""Renters that one look at one variant's queue considers."""
PATIENCE_S = 600
"""A job counts as due this long after it came, or at its deadline if that is sooner: urgent jobs go first, patient ones
are never starved by them."""
REST_S = 5
"""A node that turned a job away, because of its owner or a race for a slot, is not asked again for this long."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Everything that a gateway needs to run a leased attempt, read in one statement."""

    job_id: UUID
    attempt_id: UUID
    epoch: int
    request_id: str
    organisation_id: UUID
    key_id: UUID
    kind: str
    endpoint: str
    variant_id: UUID
    body: dict[str, Any] | None
    """The body of a queued job, as an engine gets it."""
    prompt_tokens: int
    max_output_tokens: int
    ceiling: Rates
    hold_nano: int
    node_id: UUID
    offer_id: UUID
    device_id: str
    owner_organisation_id: UUID
    simulated: bool
    gateway_id: str
    price_id: int
    rates: Rates
    accepted_tokens: int
    lease_left_s: float
    """Negative once the lease is gone."""
    deadline_left_s: float
    cancel_requested: bool
    client_left_s: float | None = None
    """Of a flex job: for how long its client still counts as waiting, negative once it does not."""
    choice: Choice = ANY
    """Where the job may run."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued job as the matcher needs it."""

    job_id: UUID
    organisation_id: UUID
    variant_id: UUID
    prompt_tokens: int
    max_output_tokens: int
    longest_input_tokens: int | None
    """Of an embeddings request: what its slot must hold at once."""
    ceiling: Rates
    price_basis_points: int
    """The share of a node's ask at which it runs, and in which its ceiling is."""
    cancel_requested: bool
    waited_s: float
    deadline_left_s: float
    choices: int = 1
    """Answers that are wanted, each of `max_output_tokens` at most."""
    gateway_id: str | None = None
    """Of a flex job: the gateway that holds its client and runs its attempts, whichever has the node's socket."""
    choice: Choice = ANY
    """Where it may run."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended, as its row says."""

    job_id: UUID
    outcome: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its renter sees it, with what it cost."""

    job: Job
    attempts: int
    charge_nano: int | None
    """None until the receipt is written."""
    last_node: UUID | None = None
    """Where its latest attempt was; None: it had none."""


# --- one attempt --------------------------------------------------------------------------------------------------


def load_dispatch(session: Session, attempt_id: UUID) -> Dispatch | None:
    """The attempt with that id. None, and so nothing to run, if it ended, its lease ran out, or there is none."""
    row = session.execute(
        _dispatches().where(Attempt.id == attempt_id, Attempt.lease_expires_at > func.now())
    ).one_or_none()
    return _dispatch(row) if row is not None else None


def lost_leases(session: Session, *, limit: int) -> list[Dispatch]:
    """Attempts whose lease ran out, the longest lost first."""
    rows = session.execute(
        _dispatches().where(Attempt.lease_expires_at <= func.now()).order_by(Attempt.lease_expires_at).limit(limit)
    )
    return [_dispatch(row) for row in rows]


def _dispatches() -> Select[Any]:
    return (
        select(
            Job,
            Attempt,
            Offer.device_id,
            Offer.simulated,
            Node.organisation_id.label("owner_organisation_id"),
            _seconds_until(Attempt.lease_expires_at).label("lease_left_s"),
            _seconds_until(Job.deadline_at).label("deadline_left_s"),
            _seconds_until(Job.client_until).label("client_left_s"),
        )
        .join(Job, Job.id == Attempt.job_id)
        .join(Offer, Offer.id == Attempt.offer_id)
        .join(Node, Node.id == Attempt.node_id)
        .where(Attempt.state == "leased")
    )


_CHOICES: Final = func.coalesce(Job.body["n"].as_integer(), 1)
"""How many answers a queued job asks for."""


def _seconds_until(moment: Any) -> Any:
    return func.extract("epoch", moment - func.now())


def _dispatch(row: Row[Any]) -> Dispatch:
    job: Job = row.Job
    attempt: Attempt = row.Attempt
    return Dispatch(
        job_id=job.id,
        attempt_id=attempt.id,
        epoch=attempt.epoch,
        request_id=job.request_id,
        organisation_id=job.organisation_id,
        key_id=job.key_id,
        kind=job.kind,
        endpoint=job.endpoint,
        variant_id=job.variant_id,
        body=job.body,
        prompt_tokens=job.prompt_tokens,
        max_output_tokens=job.max_output_tokens,
        ceiling=_ceiling(job),
        hold_nano=job.hold_nano,
        node_id=attempt.node_id,
        offer_id=attempt.offer_id,
        device_id=row.device_id,
        owner_organisation_id=row.owner_organisation_id,
        simulated=row.simulated,
        gateway_id=attempt.gateway_id,
        price_id=attempt.price_id,
        rates=Rates(
            input=attempt.input_nano_usd_per_mtok,
            cached_input=attempt.cached_input_nano_usd_per_mtok,
            output=attempt.output_nano_usd_per_mtok,
        ),
        accepted_tokens=attempt.accepted_tokens,
        lease_left_s=float(row.lease_left_s),
        deadline_left_s=float(row.deadline_left_s),
        cancel_requested=job.cancel_requested_at is not None,
        client_left_s=float(row.client_left_s) if row.client_left_s is not None else None,
        choice=Choice.from_row(job.choice),
    )


def _ceiling(job: Job) -> Rates:
    return Rates(
        input=job.max_input_nano_usd_per_mtok,
        cached_input=job.max_cached_input_nano_usd_per_mtok,
        output=job.max_output_nano_usd_per_mtok,
    )


# --- the queue ----------------------------------------------------------------------------------------------------


def next_in_line(session: Session, variant_id: UUID, free: Sequence[OfferView], *, limit: int) -> list[Waiting]:
    """Queued jobs of a variant that at least one of the `free` offers could run, in the order of their turn, locked.

    A renter's first job goes before anybody's second, counting those that run; equal turns go by the sooner of deadline
    and PATIENCE_S after arrival. Jobs that another assigner looks at are skipped.
    """
    if not free or limit <= 0:
        return []
    ids = session.scalars(
        NEXT_IN_LINE,
        {
            **as_arrays(free),
            "variant_id": variant_id,
            "patience_s": PATIENCE_S,
            "heads": limit,
            "limit": limit,
            "max_renters": MAX_RENTERS,
        },
    ).all()
    if not ids:
        return []
    locked = session.scalars(
        select(Job.id).where(Job.id.in_(ids), Job.state == "queued").with_for_update(skip_locked=True, key_share=True)
    ).all()
    by_id = {row.job_id: row for row in _waiting(session, _waiting_columns().where(Job.id.in_(locked)))}
    return [by_id[id_] for id_ in ids if id_ in by_id]


def working(session: Session, variant_id: UUID) -> list[tuple[UUID, int, int]]:
    """By renter, what its queued jobs of a variant that run now may take: tokens of prompts, and bounds of answers."""
    outputs = func.sum(Job.max_output_tokens * _CHOICES)
    statement = (
        select(Job.organisation_id, func.sum(Job.prompt_tokens), outputs)
        .join(Attempt, Attempt.job_id == Job.id)
        .where(Attempt.state == "leased", Job.kind != "interactive", Job.variant_id == variant_id)
        .group_by(Job.organisation_id)
    )
    return [(row[0], int(row[1]), int(row[2])) for row in session.execute(statement)]


def misfits(
    session: Session, variant_id: UUID, connected: Sequence[OfferView], *, older_than_s: float, limit: int
) -> list[Waiting]:
    """Queued jobs of a variant, older than that, which none of the connected offers could run even if it were free; and
    those, of any age, whose renter no longer wants them. While nothing that its choice allows is connected, a job may
    still hope."""
    ids = session.scalars(
        FIT_NOWHERE,
        {
            **as_arrays(connected),
            "variant_id": variant_id,
            "older_than_s": older_than_s,
            "limit": limit,
        },
    ).all()
    return _waiting(session, _waiting_columns().where(Job.id.in_(ids))) if ids else []


def queued_variants(session: Session) -> list[UUID]:
    """Variants for which a job waits."""
    statement = text(
        """
        with recursive v(id) as (
            (select variant_id from jobs where state = 'queued' order by variant_id limit 1)
            union all
            select (select j.variant_id from jobs j where j.state = 'queued' and j.variant_id > v.id
                    order by j.variant_id limit 1)
            from v where v.id is not null
        )
        select id from v where id is not null
        """
    )
    return list(session.scalars(statement))


def _waiting_columns() -> Any:
    return select(
        Job.id,
        Job.organisation_id,
        Job.variant_id,
        Job.prompt_tokens,
        Job.max_output_tokens,
        _CHOICES.label("choices"),
        Job.body["longest_input_tokens"].as_integer().label("longest_input_tokens"),
        Job.max_input_nano_usd_per_mtok,
        Job.max_cached_input_nano_usd_per_mtok,
        Job.max_output_nano_usd_per_mtok,
        Job.price_basis_points,
        Job.cancel_requested_at,
        Job.gateway_id,
        Job.choice,
        func.extract("epoch", func.now() - Job.created_at).label("waited_s"),
        _seconds_until(Job.deadline_at).label("deadline_left_s"),
    )


def _waiting(session: Session, statement: Any) -> list[Waiting]:
    return [
        Waiting(
            job_id=row.id,
            organisation_id=row.organisation_id,
            variant_id=row.variant_id,
            prompt_tokens=row.prompt_tokens,
            max_output_tokens=row.max_output_tokens,
            choices=row.choices,
            longest_input_tokens=row.longest_input_tokens,
            ceiling=Rates(
                input=row.max_input_nano_usd_per_mtok,
                cached_input=row.max_cached_input_nano_usd_per_mtok,
                output=row.max_output_nano_usd_per_mtok,
            ),
            price_basis_points=row.price_basis_points,
            cancel_requested=row.cancel_requested_at is not None,
            waited_s=float(row.waited_s),
            deadline_left_s=float(row.deadline_left_s),
            gateway_id=row.gateway_id,
            choice=Choice.from_row(row.choice),
        )
        for row in session.execute(statement)
    ]


def tried(session: Session, job_ids: Sequence[UUID]) -> dict[UUID, Tried]:
    """What has been tried for each of these jobs; those without an attempt and without a pre-emption are left out."""
    preempted = session.execute(select(Job.id, Job.preemptions).where(Job.id.in_(job_ids), Job.preemptions > 0))
    preemptions = {row.id: row.preemptions for row in preempted}
    by_job: dict[UUID, list[Any]] = {job_id: [] for job_id in preemptions}
    rows = session.execute(
        select(
            Attempt.job_id,
            Attempt.node_id,
            Attempt.fault,
            (Attempt.ended_at > func.now() - timedelta(seconds=REST_S)).label("recent"),
        )
        .where(Attempt.job_id.in_(job_ids), Attempt.state == "ended")
        .order_by(Attempt.job_id, Attempt.epoch)
    )
    for row in rows:
        by_job.setdefault(row.job_id, []).append(row)
    return {job_id: _tried(attempts, preemptions.get(job_id, 0)) for job_id, attempts in by_job.items()}


def _tried(attempts: Sequence[Any], preemptions: int) -> Tried:
    return Tried(
        history=History(
            attempts=sum(attempt.fault != "owner" for attempt in attempts),
            preemptions=preemptions,
            last_fault=attempts[-1].fault if attempts else None,
        ),
        failed_nodes=frozenset(attempt.node_id for attempt in attempts if attempt.fault == "node"),
        resting_nodes=frozenset(
            attempt.node_id for attempt in attempts if attempt.recent and attempt.fault in ("owner", None)
        ),
        last_node=attempts[-1].node_id if attempts else None,
    )


# --- what the sweeper looks for -----------------------------------------------------------------------------------


def overdue_jobs(session: Session, *, limit: int) -> list[UUID]:
    """Queued jobs whose deadline passed."""
    statement = (
        select(Job.id)
        .where(Job.state == "queued", Job.deadline_at <= func.now())
        .order_by(Job.deadline_at)
        .limit(limit)
    )
    return list(session.scalars(statement))


def forsaken_jobs(session: Session, *, grace_s: float, limit: int) -> list[UUID]:
    """Jobs that count as running although no attempt of theirs is, `grace_s` after their deadline."""
    living = select(Attempt.job_id).where(Attempt.job_id == Job.id, Attempt.state == "leased")
    statement = (
        select(Job.id)
        .where(
            Job.state == "running",
            Job.deadline_at <= func.now() - timedelta(seconds=grace_s),
            ~exists(living),
        )
        .order_by(Job.deadline_at)
        .limit(limit)
    )
    return list(session.scalars(statement))


def clientless_jobs(session: Session, *, limit: int) -> list[UUID]:
    """Queued jobs whose client counted as waiting and does not any more: its gateway fell silent."""
    statement = (
        select(Job.id)
        .where(Job.state == "queued", Job.client_until.is_not(None), Job.client_until <= func.now())
        .order_by(Job.client_until)
        .limit(limit)
    )
    return list(session.scalars(statement))


def depth(session: Session, *, most: int, organisation_id: UUID | None = None) -> int:
    """How many jobs wait in the queue, of one organisation or of all; counted up to `most`."""
    waiting = select(Job.id).where(Job.state == "queued")
    if organisation_id is not None:
        waiting = waiting.where(Job.organisation_id == organisation_id)
    return session.execute(select(func.count()).select_from(waiting.limit(most).subquery())).scalar_one()


# --- clients that wait at a gateway -------------------------------------------------------------------------------


def keep_clients(session: Session, job_ids: Sequence[UUID], *, lease_s: float) -> list[JobEnd]:
    """Say that the clients of these flex jobs still wait, where a third of the lease has passed since it was said: each
    time costs a row of a large table. Returns those of the jobs that have ended meanwhile."""
    until = func.clock_timestamp() + timedelta(seconds=lease_s)
    due = Job.client_until < until - timedelta(seconds=lease_s / 3)
    in_order = select(Job.id).where(Job.id.in_(job_ids), Job.outcome.is_(None), due).order_by(Job.id)
    open_ids = session.scalars(in_order.with_for_update(key_share=True)).all()
    session.execute(
        update(Job).where(Job.id.in_(open_ids)).values(client_until=until),
        execution_options={"synchronize_session": False},
    )
    ended = select(Job.id, Job.outcome, Job.error_code, Job.error_message)
    rows = session.execute(ended.where(Job.id.in_(job_ids), Job.outcome.is_not(None)))
    return [JobEnd(row.id, row.outcome, row.error_code or row.outcome, row.error_message or "") for row in rows]


_IS_JOB = and_(Job.kind == "queued", Job.endpoint == "/v1/jobs")


# --- what a renter asks -------------------------------------------------------------------------------------------


def find(session: Session, organisation_id: UUID, job_id: UUID) -> JobView | None:
    """That organisation's job with that id, if it came in as one: not a chat, nor a line of a batch."""
    statement = select(Job).where(Job.id == job_id, Job.organisation_id == organisation_id, _IS_JOB)
    job = session.scalars(statement).one_or_none()
    return _views(session, [job])[0] if job is not None else None


def page(
    session: Session, organisation_id: UUID, *, after: UUID | None, states: Sequence[str], limit: int
) -> list[JobView]:
    """Queued-kind jobs of an organisation, newest first, those older than `after`."""
    statement = select(Job).where(Job.organisation_id == organisation_id, _IS_JOB)
    if states:
        statement = statement.where(Job.state.in_(states))
    if after is not None:
        cursor = select(Job.created_at, Job.id).where(Job.id == after, Job.organisation_id == organisation_id)
        statement = statement.where(tuple_(Job.created_at, Job.id) < cursor.scalar_subquery())
    statement = statement.order_by(Job.created_at.desc(), Job.id.desc()).limit(limit)
    return _views(session, list(session.scalars(statement)))


def _views(session: Session, jobs: Sequence[Job]) -> list[JobView]:
    ids = [job.id for job in jobs]
    tries = select(Attempt.job_id, Attempt.node_id).where(Attempt.job_id.in_(ids)).order_by(Attempt.epoch)
    nodes: dict[UUID, list[UUID]] = {}
    for row in session.execute(tries):
        nodes.setdefault(row.job_id, []).append(row.node_id)
    receipts = session.execute(select(Receipt.job_id, Receipt.charge_nano).where(Receipt.job_id.in_(ids)))
    charges = {row.job_id: row.charge_nano for row in receipts}
    return [
        JobView(job, len(tried_), charges.get(job.id), tried_[-1] if tried_ else None)
        for job, tried_ in ((job, nodes.get(job.id, [])) for job in jobs)
    ]


def request_cancel(session: Session, job_id: UUID) -> bool:
    """Note the wish on a running job, for the next checkpoint of the gateway that runs it. False: it does not run."""
    found = session.scalars(
        update(Job)
        .where(Job.id == job_id, Job.state == "running")
        .values(cancel_requested_at=func.coalesce(Job.cancel_requested_at, func.now()))
        .returning(Job.id)
    ).one_or_none()
    return found is not None
