"""A request that kills engines: after the second one the request is at fault, not the nodes."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from sqlalchemy import func, select, update
from sqlalchemy.exc import SQLAlchemyError

from marketplace.core.database import SessionFactory, transaction
from marketplace.fleet.models import Node
from marketplace.jobs.models import Attempt

DEATH: Final = "engine_died"
MESSAGE: Final = "it broke the engines of two nodes, and is not tried on a third"


def absolve_victims(session_factory: SessionFactory, job_id: UUID, attempt_id: UUID) -> list[UUID]:
    """Nodes whose engine died of this job before `attempt_id`. Their record is cleared of it. Blocking.

    Empty if there are none, or if the database does not say: then the failure stays the node's.
    """
    try:
        with transaction(session_factory) as session:
            victims = list(
                session.scalars(
                    select(Attempt.node_id)
                    .where(Attempt.job_id == job_id, Attempt.id != attempt_id, Attempt.end_code == DEATH)
                    .where(Attempt.fault == "node")
                    .order_by(Attempt.node_id)
                )
            )
            if victims:
                cleared = update(Node).where(Node.id.in_(victims)).values(faults=func.greatest(Node.faults - 1, 0))
                session.execute(cleared)
            return victims
    except SQLAlchemyError:
        return []
