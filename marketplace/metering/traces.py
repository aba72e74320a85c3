"""Which trace a job belongs to, for whoever works on it later in another process: the worker that places it, the
gateway that runs it, the settlement that books it. Written only for requests whose trace is sent somewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from marketplace.metering.models import JobTrace, Receipt

MAX_OF_JOURNAL: Final = 1_000
"""A settlement's journal shows itself in so many traces at most."""
LIFE: Final = timedelta(days=8)
"""A queued job may wait for seven days; what is older is in nobody's collector any more."""


def note(session: Session, traceparents: Mapping[UUID, str]) -> None:
    """Jobs, by id, and where in a trace what is done for them belongs. A known one keeps its place."""
    if traceparents:
        rows = [{"job_id": job_id, "traceparent": text} for job_id, text in traceparents.items()]
        session.execute(insert(JobTrace).values(rows).on_conflict_do_nothing())


def of_jobs(session: Session, job_ids: Collection[UUID]) -> dict[UUID, str]:
    """The traceparents of those of these jobs that are traced."""
    if not job_ids:
        return {}
    rows = session.execute(select(JobTrace.job_id, JobTrace.traceparent).where(JobTrace.job_id.in_(list(job_ids))))
    return {row.job_id: row.traceparent for row in rows}


def of_journal(session: Session, journal_id: int) -> dict[UUID, str]:
    """The same, of the jobs that a settlement's journal booked."""
    rows = session.execute(
        select(JobTrace.job_id, JobTrace.traceparent)
        .join(Receipt, Receipt.job_id == JobTrace.job_id)
        .where(Receipt.journal_id == journal_id)
        .limit(MAX_OF_JOURNAL)
    )
    return {row.job_id: row.traceparent for row in rows}


def forget(session: Session, *, limit: int) -> int:
    """Drop what is older than LIFE. Returns how many."""
    old = select(JobTrace.job_id).where(JobTrace.at < func.now() - LIFE).limit(limit)
    gone = session.execute(delete(JobTrace).where(JobTrace.job_id.in_(old)).returning(JobTrace.job_id)).all()
    return len(gone)
