"""What a renter asked and was answered is erased a set time after a job's end. Counts, prices and outcomes stay."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import func, null, or_, select, update
from sqlalchemy.orm import Session

from marketplace.jobs.models import Job


def erase_texts(session: Session, *, older_than_s: float, limit: int) -> int:
    """Erase bodies and answers of jobs that ended so long ago, the longest ended first. Returns of how many; jobs that
    another worker looks at are skipped."""
    due = (
        select(Job.id)
        .where(
            Job.ended_at <= func.now() - timedelta(seconds=older_than_s),
            or_(Job.body.is_not(None), Job.result.is_not(None)),
        )
        .order_by(Job.ended_at)
        .limit(limit)
        .with_for_update(skip_locked=True, key_share=True)
    )
    erased = session.execute(
        update(Job).where(Job.id.in_(due.scalar_subquery())).values(body=null(), result=null()).returning(Job.id)
    ).all()
    return len(erased)
