"""Time. Leases and deadlines are decided by the database's clock alone; this one dates what people read."""

from __future__ import annotations

from datetime import UTC, datetime


def utcnow() -> datetime:
    """The current time, timezone-aware."""
    return datetime.now(UTC)
