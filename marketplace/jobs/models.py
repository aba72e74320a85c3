"""Jobs, their attempts with leases, and the outcome of every parsed request."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, LargeBinary, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from marketplace.core.database import Base

JOB_STATES = ("queued", "running", "delivered", "settled", "voided")


class Job(Base):
    """One admitted request for inference. Its hold in the ledger has the same id."""

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(f"state in {JOB_STATES}", name="state"),
        CheckConstraint("kind in ('interactive','queued','flex')", name="kind"),
        CheckConstraint("price_basis_points between 1 and 10000", name="price_basis_points"),
        # Two orders over one queue, so that the head of each renter's line is found without reading the line.
        Index(
            "ix_jobs_queue_age",
            "variant_id",
            "organisation_id",
            "created_at",
            postgresql_where=text("state = 'queued'"),
        ),
        Index(
            "ix_jobs_queue_deadline",
            "variant_id",
            "organisation_id",
            "deadline_at",
            postgresql_where=text("state = 'queued'"),
        ),
        Index("ix_jobs_open_deadline", "deadline_at", postgresql_where=text("state in ('queued','running')")),
        Index(
            "ix_jobs_client_until",
            "client_until",
            postgresql_where=text("state = 'queued' and client_until is not null"),
        ),
        Index("ix_jobs_organisation_id_created_at", "organisation_id", "created_at"),
        Index(
            "ix_jobs_unerased",
            "ended_at",
            postgresql_where=text("ended_at is not null and (body is not null or result is not null)"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"))
    request_id: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    """`interactive`: its client gets a slot at once or not at all; `flex`: its client waits for idle capacity, at the
    gateway that `gateway_id` names; `queued`: nobody waits, its answer is stored."""
    state: Mapped[str]
    variant_id: Mapped[UUID] = mapped_column(ForeignKey("variants.id"))
    body: Mapped[dict[str, Any] | None]
    """The chat body of a queued job. What a client waits for is never stored."""
    prompt_tokens: Mapped[int]
    max_output_tokens: Mapped[int]
    max_input_nano_usd_per_mtok: Mapped[int]
    max_cached_input_nano_usd_per_mtok: Mapped[int]
    max_output_nano_usd_per_mtok: Mapped[int]
    """The pinned ceiling: no attempt of this job may cost more, class by class."""
    endpoint: Mapped[str] = mapped_column(server_default="/v1/chat/completions")
    """Where it came in, as its outcome row says."""
    price_basis_points: Mapped[int] = mapped_column(server_default="10000")
    """The share of a node's ask at which it runs; the ceiling is already in this share."""
    hold_nano: Mapped[int]
    gateway_id: Mapped[str | None]
    """The gateway that holds the client of an interactive or a flex job."""
    client_until: Mapped[datetime | None]
    """Until when a flex job's client counts as waiting; its gateway moves it on. Null: no client waits in the queue."""
    webhook_url: Mapped[str | None]
    """Where the end of this job is told, beside its organisation's endpoints."""
    choice: Mapped[dict[str, Any] | None]
    """Where what waits in the queue may run, as matching.choice writes it; null: anywhere."""
    deadline_at: Mapped[datetime]
    cancel_requested_at: Mapped[datetime | None]
    preemptions: Mapped[int] = mapped_column(server_default="0")
    outcome: Mapped[str | None]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    result: Mapped[dict[str, Any] | None]
    """The answer of a queued job, an OpenAI chat completion."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class Attempt(Base):
    """One try of a job on one node, with its lease. A frame with another epoch is void."""

    __tablename__ = "attempts"
    __table_args__ = (
        UniqueConstraint("job_id", "epoch"),
        CheckConstraint("state in ('leased','ended')", name="state"),
        Index("ix_attempts_lease", "lease_expires_at", postgresql_where=text("state = 'leased'")),
        Index("ix_attempts_node_id_leased_at", "node_id", "leased_at"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.id"), index=True)
    epoch: Mapped[int]
    """1, 2, 3... within the job."""
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"))
    offer_id: Mapped[UUID] = mapped_column(ForeignKey("offers.id"))
    gateway_id: Mapped[str]
    """The gateway that runs the attempt and writes its receipt."""
    state: Mapped[str] = mapped_column(server_default="leased")
    price_id: Mapped[int] = mapped_column(ForeignKey("prices.id"))
    input_nano_usd_per_mtok: Mapped[int]
    cached_input_nano_usd_per_mtok: Mapped[int]
    output_nano_usd_per_mtok: Mapped[int]
    lease_expires_at: Mapped[datetime]
    accepted_tokens: Mapped[int] = mapped_column(server_default="0")
    """Checkpoint: output tokens that the gateway accepted from the node so far."""
    leased_at: Mapped[datetime] = mapped_column(server_default=func.now())
    first_token_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    busy_ms: Mapped[int | None]
    """Time the engine worked on it, as the node reports, at most the lease's length."""
    end_code: Mapped[str | None]
    """`delivered`, `cancelled`, or a failure code."""
    fault: Mapped[str | None]
    """`node`, `owner`, `request`, `platform`, or null when nothing went wrong."""


class Outcome(Base):
    """Exactly one row for every parsed request to a billable endpoint, admitted or refused."""

    __tablename__ = "outcomes"
    __table_args__ = (Index("ix_outcomes_organisation_id_at", "organisation_id", "at"),)

    request_id: Mapped[str] = mapped_column(primary_key=True)
    organisation_id: Mapped[UUID | None]
    endpoint: Mapped[str]
    outcome: Mapped[str]
    """A member of jobs.states.Outcome."""
    code: Mapped[str | None]
    job_id: Mapped[UUID | None]
    at: Mapped[datetime] = mapped_column(server_default=func.now())


class IdempotentRequest(Base):
    """The first request that an organisation sent with an Idempotency-Key; erased with its answer a day after its end.

    An answer that was charged is in its job's row, written with the receipt; any other is here.
    """

    __tablename__ = "idempotent_requests"
    __table_args__ = (
        UniqueConstraint("organisation_id", "key"),
        Index("ix_idempotent_requests_ended_at", "ended_at", postgresql_where=text("ended_at is not null")),
        Index("ix_idempotent_requests_lease_expires_at", "lease_expires_at", postgresql_where=text("ended_at is null")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    key: Mapped[str]
    fingerprint: Mapped[bytes] = mapped_column(LargeBinary)
    """SHA-256 of method, path and body."""
    request_id: Mapped[str]
    """Of the job that it may have become."""
    holder: Mapped[UUID]
    """Changes with each taking over, so that a gateway that was given up cannot write any more."""
    lease_expires_at: Mapped[datetime]
    """Until when its gateway is believed to run it."""
    status: Mapped[int | None]
    content_type: Mapped[str | None]
    answer: Mapped[bytes | None] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
