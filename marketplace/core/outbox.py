"""The outbox: a task for the broker is a row of the transaction that wants it, so it leaves only after commit.

A Celery message is only a nudge. It carries ids, the row decides, and a sweeper sends again what was lost.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol

from sqlalchemy import Identity, Index, func, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from marketplace.core.database import Base


class OutboxRow(Base):
    """A nudge that must reach the broker. Deleted once the broker took it."""

    __tablename__ = "outbox"
    __table_args__ = (Index("ix_outbox_created_at", "created_at"),)

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    task: Mapped[str]
    args: Mapped[list[Any]] = mapped_column(server_default=text("'[]'::jsonb"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class TaskSender(Protocol):
    """Sends a task by name. Raises on a broker that does not take it within its bound; the outbox row stays then."""

    def __call__(self, task: str, args: list[Any]) -> None: ...


def enqueue(session: Session, task: str, *args: Any) -> None:
    """Ask for a task by name once this transaction commits; a rollback takes the wish with it."""
    session.add(OutboxRow(task=task, args=list(args)))


def drain(session: Session, send: TaskSender, *, limit: int = 500) -> int:
    """Hand waiting rows to the broker and delete them; returns how many. Rows that another drainer holds are skipped.

    At least once: a crash between send and commit sends again, which tasks must bear (they read the row).
    """
    rows = session.query(OutboxRow).order_by(OutboxRow.id).limit(limit).with_for_update(skip_locked=True).all()
    for row in rows:
        send(row.task, row.args)
        session.delete(row)
    return len(rows)
