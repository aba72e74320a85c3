"""When a connected node was its owner's alone, and why: what an owner's explanations of idle hours read."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from sqlalchemy import ColumnElement, func, update
from sqlalchemy.orm import Session

from marketplace.fleet.models import HeldInterval

UNSAID = "the owner has the machine"


def sync(session: Session, node_id: UUID, reason: str | None) -> None:
    """The node is held for this reason from now on; None: it is not. The same reason goes on."""
    going_on = _open(node_id) & (HeldInterval.reason == (reason or UNSAID))
    if reason is not None:
        known = session.execute(
            update(HeldInterval).where(going_on).values(seen_at=func.now()).returning(HeldInterval.id)
        ).first()
        if known is not None:
            return
    session.execute(update(HeldInterval).where(_open(node_id)).values(ended_at=func.now(), seen_at=func.now()))
    if reason is not None:
        session.add(HeldInterval(node_id=node_id, reason=reason or UNSAID))
        session.flush()


def touch(session: Session, node_ids: Collection[UUID]) -> None:
    """These nodes are still connected: what holds them goes on."""
    session.execute(
        update(HeldInterval)
        .where(HeldInterval.node_id.in_(node_ids), HeldInterval.ended_at.is_(None))
        .values(seen_at=func.now())
    )


def end(session: Session, node_id: UUID) -> None:
    """The node's socket is gone, or new: an open stretch ends where it was last seen."""
    session.execute(update(HeldInterval).where(_open(node_id)).values(ended_at=HeldInterval.seen_at))


def _open(node_id: UUID) -> ColumnElement[bool]:
    return (HeldInterval.node_id == node_id) & HeldInterval.ended_at.is_(None)
