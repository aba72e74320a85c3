"""Endpoints that renters registered, and what is to be said to them. Deliveries are written by the database itself, in
the transaction in which a job or a batch ends (see migrations)."""

from __future__ import annotations

from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import ARRAY, CheckConstraint, ForeignKey, Index, LargeBinary, String, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from marketplace.core.database import Base

DELIVERY_STATES: Final = ("pending", "delivered", "failed")


class WebhookEndpoint(Base):
    """One address, its secret and its health. Without an address: the secret under which the addresses are signed to
    that jobs bring along, one an organisation."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (
        Index("ix_webhook_endpoints_organisation_id", "organisation_id"),
        Index("uq_webhook_endpoints_for_jobs", "organisation_id", unique=True, postgresql_where=text("url is null")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    url: Mapped[str | None]
    events: Mapped[list[str]] = mapped_column(ARRAY(String))
    """Members of events.EVENTS."""
    secret: Mapped[bytes] = mapped_column(LargeBinary)
    previous_secret: Mapped[bytes | None] = mapped_column(LargeBinary)
    """The one before the last rotation..."""
    previous_until: Mapped[datetime | None]
    """...and until when deliveries are signed with it too."""
    failing_since: Mapped[datetime | None]
    """The first failure after the last success."""
    disabled_at: Mapped[datetime | None]
    disabled_reason: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class WebhookDelivery(Base):
    """One event for one endpoint. Tried again until it arrives or is given up; its id stays the same."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("endpoint_id", "event", "subject_id"),
        CheckConstraint(f"state in {DELIVERY_STATES}", name="state"),
        Index("ix_webhook_deliveries_due", "next_try_at", postgresql_where=text("state = 'pending'")),
        Index("ix_webhook_deliveries_endpoint_id_created_at", "endpoint_id", "created_at"),
        Index("ix_webhook_deliveries_ended_at", "ended_at", postgresql_where=text("ended_at is not null")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, server_default=func.gen_random_uuid())
    endpoint_id: Mapped[UUID] = mapped_column(ForeignKey("webhook_endpoints.id", ondelete="CASCADE"))
    organisation_id: Mapped[UUID]
    event: Mapped[str]
    subject_id: Mapped[UUID]
    """Of the job or the batch."""
    url: Mapped[str | None]
    """The address that the job brought along; null: the endpoint's own."""
    state: Mapped[str] = mapped_column(server_default="pending")
    tries: Mapped[int] = mapped_column(server_default="0")
    next_try_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """When it is due; while somebody tries, when that is taken for lost."""
    last_status: Mapped[int | None]
    last_error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
