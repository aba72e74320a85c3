"""What is told: names of events, and the body of a delivery. Ids and states only, never a prompt or an answer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal
from uuid import UUID

import msgspec

from marketplace.core.ids import show

Event = Literal[
    "job.completed",
    "job.failed",
    "job.cancelled",
    "job.expired",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
]
EVENTS: Final[tuple[Event, ...]] = (
    "job.completed",
    "job.failed",
    "job.cancelled",
    "job.expired",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
)


def body_of(event: str, subject_id: UUID, at: datetime) -> bytes:
    """The body of a delivery: the same bytes at each try."""
    kind, _, status = event.partition(".")
    moment = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    data = {"id": show(kind, subject_id), "object": kind, "status": status}
    return msgspec.json.encode({"type": event, "timestamp": moment, "data": data})
