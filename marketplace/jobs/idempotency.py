"""Idempotency keys: one request of an organisation runs, whoever sends it again gets the first answer.

A key is claimed by a row before anything runs, under a lease that its gateway renews. What happens next follows from
what was paid: an answer that was charged is written in one transaction with its receipt (the job's result), so no crash
can part them, and is given again. A request that cost nothing frees its key. A gateway that vanished leaves an expired
lease; whoever takes over uses the same request id unless its job has ended, and a job's request id is unique: two
gateways that both believe to hold the key cannot both be paid.

Every function is one transaction on the database's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import delete, func, null, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from marketplace.core.database import SessionFactory, transaction
from marketplace.core.ids import new_id
from marketplace.jobs.models import IdempotentRequest, Job
from marketplace.jobs.states import JobState

LEASE_S: Final = 30.0
"""A request that nobody renewed for this long has lost its gateway."""
KEPT_S: Final = 86_400.0
"""For this long after its end an answer is given again."""
CLAIM_TRIES: Final = 3
"""Times that a claim is tried again because the row that stood in its way vanished."""
_OPEN: Final = (JobState.QUEUED.value, JobState.RUNNING.value)


class StoredAnswer(msgspec.Struct, frozen=True):
    """An answer as it goes out again: what a job's result holds for an interactive request with a key."""

    status: int
    content_type: str
    body: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """The request is the first: run it under this request id, then `finish` or `free` it."""

    id: UUID
    holder: UUID
    request_id: str


@dataclass(frozen=True, slots=True)
class InProgress:
    """The first one still runs, or its end is not written yet."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key belongs to a request with another body."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Replay:
    """The first one's answer."""

    request_id: str
    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Queued:
    """The first one was accepted as this job, and its gateway died before it could say so."""

    request_id: str
    job_id: UUID


Claim = Claimed | InProgress | Mismatch | Replay | Queued


def claim(factory: SessionFactory, *, organisation_id: UUID, key: str, fingerprint: bytes, request_id: str) -> Claim:
    """Claim a key, or say what stands in the way."""
    for _ in range(CLAIM_TRIES):
        with transaction(factory) as session:
            found = _insert(session, organisation_id, key, fingerprint, request_id) or _judge(
                session, organisation_id, key, fingerprint, request_id
            )
            if found is not None:
                return found
    return InProgress(request_id)


def renew(factory: SessionFactory, holders: Sequence[UUID]) -> None:
    """Move the end of these leases on."""
    with transaction(factory) as session:
        session.execute(
            update(IdempotentRequest)
            .where(IdempotentRequest.holder.in_(holders), IdempotentRequest.ended_at.is_(None))
            .values(lease_expires_at=_in_seconds(LEASE_S))
        )


def finish(factory: SessionFactory, claimed: Claimed, answer: StoredAnswer | None) -> None:
    """The request ended with this answer, or with one that is in its job's row or worth nothing (None).

    What was charged is kept; what cost nothing frees the key, so that the same request may be tried again.
    """
    with transaction(factory) as session:
        job = _job(session, claimed.request_id)
        if job is not None and job.result_kept:
            values: dict[str, Any] = {"status": None, "content_type": None, "answer": None}
        elif answer is not None and answer.status < 300 and (job is None or job.kind == "queued"):
            values = {
                "status": answer.status,
                "content_type": answer.content_type,
                "answer": answer.body.encode(),
            }
        else:
            session.execute(delete(IdempotentRequest).where(*_held_by(claimed)))
            return
        session.execute(
            update(IdempotentRequest).where(*_held_by(claimed)).values(ended_at=func.clock_timestamp(), **values)
        )


def erase(session: Session, *, limit: int) -> int:
    """Erase what ended KEPT_S ago, the answers in job rows with it, and claims that were given up for as long. Returns
    how many keys were forgotten."""
    old = func.clock_timestamp() - timedelta(seconds=KEPT_S)
    ids = session.scalars(
        select(IdempotentRequest.id)
        .where(
            (IdempotentRequest.ended_at < old)
            | (IdempotentRequest.ended_at.is_(None) & (IdempotentRequest.lease_expires_at < old))
        )
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    if ids:
        gone = delete(IdempotentRequest).where(IdempotentRequest.id.in_(ids)).returning(IdempotentRequest.request_id)
        _forget_results(session, session.scalars(gone).all())
    return len(ids)


def _insert(session: Session, organisation_id: UUID, key: str, fingerprint: bytes, request_id: str) -> Claimed | None:
    claimed = Claimed(new_id(), new_id(), request_id)
    inserted = session.scalar(
        insert(IdempotentRequest)
        .values(
            id=claimed.id,
            organisation_id=organisation_id,
            key=key,
            fingerprint=fingerprint,
            request_id=request_id,
            holder=claimed.holder,
            lease_expires_at=_in_seconds(LEASE_S),
        )
        .on_conflict_do_nothing()
        .returning(IdempotentRequest.id)
    )
    return claimed if inserted is not None else None


def _judge(session: Session, organisation_id: UUID, key: str, fingerprint: bytes, request_id: str) -> Claim | None:
    """What became of the request that has the key. None: it freed the key just now."""
    found = session.execute(
        select(
            IdempotentRequest,
            (IdempotentRequest.lease_expires_at < func.clock_timestamp()).label("lost"),
            (IdempotentRequest.ended_at < func.clock_timestamp() - timedelta(seconds=KEPT_S)).label("over"),
        )
        .where(IdempotentRequest.organisation_id == organisation_id, IdempotentRequest.key == key)
        .with_for_update()
    ).one_or_none()
    if found is None:
        return None
    row, lost, over = found
    if over:
        _forget_results(session, [row.request_id])
        session.delete(row)
        return None
    if bytes(row.fingerprint) != fingerprint:
        return Mismatch(row.request_id)
    if row.ended_at is not None:
        return _replay(session, row) or _take_over(row, request_id)
    return _after_loss(session, row, request_id) if lost else InProgress(row.request_id)


def _after_loss(session: Session, row: IdempotentRequest, request_id: str) -> Claim:
    """The gateway that ran it vanished before it wrote the end: the job, if there is one, tells how far it came."""
    job = _job(session, row.request_id)
    if job is None:
        # The gateway that vanished may only be slow: with the same request id its job and ours exclude each other.
        return _take_over(row, row.request_id)
    if job.kind == "queued":
        return Queued(row.request_id, job.id)
    if job.state in _OPEN:
        return InProgress(row.request_id)
    return _replay(session, row) or _take_over(row, request_id)


def _forget_results(session: Session, request_ids: Sequence[str]) -> None:
    jobs = update(Job).where(Job.request_id.in_(request_ids), Job.kind != "queued")
    session.execute(jobs.values(result=null()))


def _take_over(row: IdempotentRequest, request_id: str) -> Claimed:
    row.holder, row.request_id = new_id(), request_id
    row.ended_at = row.status = row.content_type = row.answer = None
    row.lease_expires_at = _in_seconds(LEASE_S)
    return Claimed(row.id, row.holder, request_id)


def _replay(session: Session, row: IdempotentRequest) -> Replay | None:
    if row.answer is not None and row.status is not None:
        return Replay(row.request_id, row.status, row.content_type or "application/json", bytes(row.answer))
    result = session.scalar(select(Job.result).where(Job.request_id == row.request_id, Job.kind != "queued"))
    if result is None:
        return None
    stored = msgspec.convert(result, StoredAnswer)
    return Replay(row.request_id, stored.status, stored.content_type, stored.body.encode())


@dataclass(frozen=True, slots=True)
class _JobFacts:
    id: UUID
    kind: str
    state: str
    result_kept: bool


def _job(session: Session, request_id: str) -> _JobFacts | None:
    found = session.execute(
        select(Job.id, Job.kind, Job.state, (Job.kind != "queued") & Job.result.is_not(None)).where(
            Job.request_id == request_id
        )
    ).one_or_none()
    return _JobFacts(*found) if found is not None else None


def _held_by(claimed: Claimed) -> tuple[Any, Any]:
    return IdempotentRequest.id == claimed.id, IdempotentRequest.holder == claimed.holder


def _in_seconds(seconds: float) -> Any:
    return func.clock_timestamp() + timedelta(seconds=seconds)
