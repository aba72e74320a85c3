"""Nodes, what they offer, when they offered it, and what they drew."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, Double, ForeignKey, Identity, Index, LargeBinary, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from marketplace.core.database import Base
from marketplace.core.ids import new_id


class EnrolmentToken(Base):
    """A one-time token with which a node joins an organisation. Only its SHA-256 is kept."""

    __tablename__ = "enrolment_tokens"

    sha256: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    node_id: Mapped[UUID | None] = mapped_column(ForeignKey("nodes.id"))


class Node(Base):
    """One owner's machine, known by an Ed25519 key that never leaves it."""

    __tablename__ = "nodes"
    __table_args__ = (CheckConstraint("state in ('active','suspended','retired')", name="state"),)

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"), index=True)
    name: Mapped[str]
    public_key: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    state: Mapped[str] = mapped_column(server_default="active")
    agent_version: Mapped[str]
    declared_idle_mw: Mapped[int | None]
    declared_load_mw: Mapped[int | None]
    faults: Mapped[int] = mapped_column(server_default="0")
    """Attempts that failed by the node's own fault."""
    enrolled_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_seen_at: Mapped[datetime | None]


class Device(Base):
    """One GPU, or the CPU, of a node."""

    __tablename__ = "devices"

    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    kind: Mapped[str]
    memory_total_bytes: Mapped[int | None]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Offer(Base):
    """A variant on a node at a price."""

    __tablename__ = "offers"
    __table_args__ = (UniqueConstraint("node_id", "variant_id", "device_id"),)

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"), index=True)
    variant_id: Mapped[UUID] = mapped_column(ForeignKey("variants.id"), index=True)
    device_id: Mapped[str]
    price_id: Mapped[int] = mapped_column(ForeignKey("prices.id"))
    slots: Mapped[int]
    context_per_slot: Mapped[int]
    engine: Mapped[str]
    engine_version: Mapped[str]
    simulated: Mapped[bool]
    decode_tokens_per_s: Mapped[float | None] = mapped_column(Double)
    """Of one request, as the node measured it; null where it does not say."""
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class OfferedInterval(Base):
    """A stretch of time in which an offer was live: the denominator of rented and busy share."""

    __tablename__ = "offered_intervals"
    __table_args__ = (Index("ix_offered_intervals_open", "node_id", postgresql_where=text("ended_at is null")),)

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    offer_id: Mapped[UUID] = mapped_column(ForeignKey("offers.id"))
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"), index=True)
    device_id: Mapped[str]
    gateway_id: Mapped[str]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """Moved on while the node is connected; a gateway that died leaves it as the end."""
    ended_at: Mapped[datetime | None]


class EnergySample(Base):
    """Energy of one device over one stretch of time, labelled by its source."""

    __tablename__ = "energy_samples"
    __table_args__ = (
        CheckConstraint("source in ('nvml_counter','nvml_integrated','declared','unknown')", name="source"),
        CheckConstraint("(source = 'unknown') = (energy_mj is null)", name="unknown"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"), index=True)
    device_id: Mapped[str]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime]
    energy_mj: Mapped[int | None]
    source: Mapped[str]
