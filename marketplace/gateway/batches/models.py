"""Files, batches and their lines."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, LargeBinary, Text, func, text
from sqlalchemy.orm import Mapped, mapped_column

from marketplace.core.database import Base

ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch in which something is still to be done."""
_ANY_SQL = "status in ('validating','failed','in_progress','finalizing','completed','expired','cancelling','cancelled')"
_ACTIVE_SQL = "status in ('validating','in_progress','finalizing','cancelling')"


class File(Base):
    """A file of an organisation. Erased, its content is gone and nobody sees it; the row stays for its batches."""

    __tablename__ = "files"
    __table_args__ = (
        CheckConstraint("purpose in ('batch','batch_output')", name="purpose"),
        Index(
            "ix_files_organisation_id_created_at",
            "organisation_id",
            "created_at",
            postgresql_where=text("erased_at is null"),
        ),
        Index("ix_files_expires_at", "expires_at", postgresql_where=text("erased_at is null")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    purpose: Mapped[str]
    filename: Mapped[str]
    size_bytes: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    erased_at: Mapped[datetime | None]


class FileChunk(Base):
    """A piece of a file's content, so that neither writing nor reading one needs the whole in memory."""

    __tablename__ = "file_chunks"

    file_id: Mapped[UUID] = mapped_column(ForeignKey("files.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class Batch(Base):
    """Requests of one file, all to one endpoint. OpenAI's states and times."""

    __tablename__ = "batches"
    __table_args__ = (
        CheckConstraint(_ANY_SQL, name="status"),
        Index("ix_batches_organisation_id_created_at", "organisation_id", "created_at"),
        Index("ix_batches_active", "created_at", postgresql_where=text(_ACTIVE_SQL)),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"))
    input_file_id: Mapped[UUID] = mapped_column(ForeignKey("files.id"))
    output_file_id: Mapped[UUID | None] = mapped_column(ForeignKey("files.id"))
    error_file_id: Mapped[UUID | None] = mapped_column(ForeignKey("files.id"))
    endpoint: Mapped[str]
    status: Mapped[str]
    completion_window: Mapped[str]
    price_basis_points: Mapped[int]
    """The share of a node's ask that its lines cost."""
    routing: Mapped[dict[str, Any] | None]
    """The default `provider` of its lines: that of its key when it began. Null: anywhere."""
    tags: Mapped[dict[str, Any] | None] = mapped_column("metadata")
    errors: Mapped[list[Any] | None]
    """Why it failed, line by line; null unless it did."""
    total_lines: Mapped[int] = mapped_column(server_default="0")
    completed_lines: Mapped[int] = mapped_column(server_default="0")
    failed_lines: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    in_progress_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    completed_at: Mapped[datetime | None]
    failed_at: Mapped[datetime | None]
    expired_at: Mapped[datetime | None]
    cancelling_at: Mapped[datetime | None]
    cancelled_at: Mapped[datetime | None]


class BatchLine(Base):
    """One request of a batch: waiting with its body, open as a job, or ended with what goes into a file."""

    __tablename__ = "batch_lines"
    __table_args__ = (
        CheckConstraint("state in ('waiting','open','completed','failed')", name="state"),
        Index("ix_batch_lines_waiting", "batch_id", "number", postgresql_where=text("state = 'waiting'")),
        Index("ix_batch_lines_open", "batch_id", "number", postgresql_where=text("state = 'open'")),
    )

    batch_id: Mapped[UUID] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    custom_id: Mapped[str]
    state: Mapped[str]
    request_id: Mapped[str | None]
    body: Mapped[str | None] = mapped_column(Text)
    """The request's body as it was sent, until it becomes a job."""
    job_id: Mapped[UUID | None] = mapped_column(ForeignKey("jobs.id"), unique=True)
    status_code: Mapped[int | None]
    """What the request would have been answered with over HTTP; null if it never ran."""
    result: Mapped[str | None] = mapped_column(Text)
    """JSON of the answer, until it is in the batch's file."""
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
