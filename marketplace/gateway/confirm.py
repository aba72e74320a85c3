"""Did a close arrive although its answer was lost? Asked only after a long absence of the database."""

from __future__ import annotations

import asyncio

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from marketplace.core.database import SessionFactory
from marketplace.jobs.hot import Close
from marketplace.jobs.models import Attempt, Job


async def was_written(session_factory: SessionFactory, close: Close) -> bool:
    """True if the rows say exactly what this close wished. False if they do not, or do not answer."""
    return await asyncio.to_thread(_was_written, session_factory, close)


def _was_written(session_factory: SessionFactory, close: Close) -> bool:
    if close.attempt_id is None:
        query = select(Job.outcome == close.outcome).where(Job.id == close.job_id)
    else:
        ended = (Attempt.epoch == close.epoch) & (Attempt.state == "ended") & (Attempt.end_code == close.end_code)
        same = ended if close.outcome is None else ended & (Job.outcome == close.outcome)
        query = select(same).join(Job, Job.id == Attempt.job_id).where(Attempt.id == close.attempt_id)
    try:
        with session_factory() as session:
            return bool(session.scalars(query).one_or_none())
    except SQLAlchemyError:
        return False
