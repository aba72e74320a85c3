"""Receipts: what an attempt delivered, by token class, and what it costs."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, LargeBinary, func, text
from sqlalchemy.orm import Mapped, mapped_column

from marketplace.core.database import Base


class Receipt(Base):
    """One per job that ended with something to account for, written by the gateway in one statement with the job's end.

    Token classes are disjoint; totals are derived. renter = owner + fee - loss, to the nano: `loss_nano` is what the
    platform pays the owner for work that its own failure kept from the renter.
    """

    __tablename__ = "receipts"
    __table_args__ = (
        CheckConstraint(
            "input_uncached_tokens >= 0 and input_cached_tokens >= 0 "
            "and output_visible_tokens >= 0 and output_reasoning_tokens >= 0",
            name="tokens",
        ),
        CheckConstraint("charge_nano + loss_nano = owner_nano + fee_nano", name="split"),
        CheckConstraint(
            "charge_nano + loss_nano = input_uncached_nano + input_cached_nano "
            "+ output_visible_nano + output_reasoning_nano",
            name="classes",
        ),
        CheckConstraint("charge_nano = 0 or loss_nano = 0", name="one_payer"),
        Index("ix_receipts_unsettled", "id", postgresql_where=text("journal_id is null")),
        Index("ix_receipts_owner_organisation_id_at", "owner_organisation_id", "at"),
        Index("ix_receipts_renter_organisation_id_at", "renter_organisation_id", "at"),
        # Receipts are written in order of time: a few pages of index for what the whole market did in a period.
        Index("ix_receipts_at", "at", postgresql_using="brin"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    """The attempt's id."""
    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.id"), unique=True)
    renter_organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"))
    owner_organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"))
    device_id: Mapped[str]
    variant_id: Mapped[UUID] = mapped_column(ForeignKey("variants.id"))
    price_id: Mapped[int] = mapped_column(ForeignKey("prices.id"))
    outcome: Mapped[str]
    input_uncached_tokens: Mapped[int]
    input_cached_tokens: Mapped[int]
    output_visible_tokens: Mapped[int]
    output_reasoning_tokens: Mapped[int]
    input_uncached_nano: Mapped[int]
    input_cached_nano: Mapped[int]
    output_visible_nano: Mapped[int]
    output_reasoning_nano: Mapped[int]
    charge_nano: Mapped[int]
    fee_nano: Mapped[int]
    owner_nano: Mapped[int]
    loss_nano: Mapped[int]
    simulated: Mapped[bool]
    node_signature: Mapped[bytes | None] = mapped_column(LargeBinary)
    journal_id: Mapped[int | None] = mapped_column(index=True)
    """The settlement journal; null until settled."""
    at: Mapped[datetime] = mapped_column(server_default=func.now())


class JobTrace(Base):
    """The trace that a job belongs to: W3C's traceparent. No foreign key: it may be written before its job."""

    __tablename__ = "job_traces"
    __table_args__ = (Index("ix_job_traces_at", "at"),)

    job_id: Mapped[UUID] = mapped_column(primary_key=True)
    traceparent: Mapped[str]
    at: Mapped[datetime] = mapped_column(server_default=func.now())
