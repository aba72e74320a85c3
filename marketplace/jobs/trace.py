"""What became of one request, by the id that its answer carried: for whoever asks afterwards, or meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from marketplace.core.database import SessionFactory
from marketplace.core.errors import NotFound
from marketplace.jobs.models import Attempt, Job, Outcome
from marketplace.metering.models import Receipt
from marketplace.metering.usage import receipt_of


@dataclass(frozen=True, slots=True)
class Trace:
    """One request. `outcome` is None while it runs; `job` is None where it was refused at the door."""

    request_id: str
    outcome: Outcome | None
    job: Job | None
    receipt: Receipt | None
    attempts: int
    accepted_tokens: int
    """Of the last attempt, at its last checkpoint: output that the gateway accepted so far."""

    @property
    def variant_id(self) -> UUID | None:
        return self.job.variant_id if self.job is not None else None

    @property
    def began_at(self) -> datetime | None:
        return self.job.created_at if self.job is not None else self.outcome.at if self.outcome is not None else None


def trace(factory: SessionFactory, organisation_id: UUID, request_id: str) -> Trace:
    """The organisation's request with that id. Raises NotFound."""
    with factory() as session:
        return _trace(session, organisation_id, request_id)


def _trace(session: Session, organisation_id: UUID, request_id: str) -> Trace:
    outcome = session.scalars(
        select(Outcome).where(Outcome.request_id == request_id, Outcome.organisation_id == organisation_id)
    ).one_or_none()
    job = session.scalars(
        select(Job).where(Job.request_id == request_id, Job.organisation_id == organisation_id)
    ).one_or_none()
    if outcome is None and job is None:
        raise NotFound(f"There is no request with the id {request_id[:80]!r}.")
    if job is None:
        return Trace(request_id, outcome, None, None, 0, 0)
    count = session.scalar(select(func.count()).select_from(Attempt).where(Attempt.job_id == job.id)) or 0
    last = session.scalars(
        select(Attempt.accepted_tokens).where(Attempt.job_id == job.id).order_by(Attempt.epoch.desc()).limit(1)
    ).one_or_none()
    return Trace(request_id, outcome, job, receipt_of(session, job.id), count, last or 0)
