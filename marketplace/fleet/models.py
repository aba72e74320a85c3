"""Nodes, what they offer, when they offered it, and what they drew."""

from __future__ import annotations

from datetime import datetime
from typing import Any
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
    region: Mapped[str] = mapped_column(server_default="")
    """Where it stands, as its owner or the operator says; empty: not said."""
    data_terms: Mapped[dict[str, Any] | None]
    """What its owner declared last of data that passes through it: matching.types.DataTerms."""
    attested_at: Mapped[datetime | None]
    """When the operator saw proof of that."""
    enrolled_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_seen_at: Mapped[datetime | None]


class NodeStanding(Base):
    """What a node may get now; one row a node, made when it enrols."""

    __tablename__ = "node_standings"
    __table_args__ = (CheckConstraint("standing in ('probation','proven','barred')", name="standing"),)

    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"), primary_key=True)
    standing: Mapped[str] = mapped_column(server_default="probation")
    since: Mapped[datetime] = mapped_column(server_default=func.now())
    completed: Mapped[int] = mapped_column(server_default="0")
    faults: Mapped[int] = mapped_column(server_default="0")
    forgiven: Mapped[int] = mapped_column(server_default="0")
    """Of the window that was judged last: see matching.standing.Record."""
    judged_at: Mapped[datetime | None]


class StandingChange(Base):
    """A change of a node's standing, with the reason that its owner reads. Never changed."""

    __tablename__ = "standing_changes"
    __table_args__ = (Index("ix_standing_changes_node_id_at", "node_id", "at"),)

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"))
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    standing: Mapped[str]
    reason: Mapped[str]


class Appeal(Base):
    """An owner's objection to a node's standing, and what became of it."""

    __tablename__ = "standing_appeals"
    __table_args__ = (
        CheckConstraint("(decided_at is null) = (granted is null)", name="decided"),
        Index("ix_standing_appeals_open", "node_id", unique=True, postgresql_where=text("decided_at is null")),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"))
    made_at: Mapped[datetime] = mapped_column(server_default=func.now())
    body: Mapped[str]
    decided_at: Mapped[datetime | None]
    granted: Mapped[bool | None]
    answer: Mapped[str] = mapped_column(server_default="")


class Amnesty(Base):
    """A time in which we were broken: faults within it count against nobody."""

    __tablename__ = "standing_amnesties"
    __table_args__ = (
        CheckConstraint("ended_at > started_at", name="order"),
        UniqueConstraint("started_at", "ended_at"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime]
    reason: Mapped[str]


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


class HeldInterval(Base):
    """A stretch of time in which a connected node was its owner's alone, and why, as its agent said."""

    __tablename__ = "held_intervals"
    __table_args__ = (
        Index("ix_held_intervals_open", "node_id", unique=True, postgresql_where=text("ended_at is null")),
        Index("ix_held_intervals_node_id_started_at", "node_id", "started_at"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"))
    reason: Mapped[str]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """Moved on while the node is connected; the end where nobody wrote one."""
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
    utilisation_pct: Mapped[float | None] = mapped_column(Double)
    """Mean over the part of the stretch in which the device said it; null: it never did."""
    capped_ms: Mapped[int | None]
    """For so long its power stood at its limit, or the driver held it down for power; null: not known."""


class NodeAbility(Base):
    """What could run on a node, as it said last: what the planner plans with. Worth nothing once it is old."""

    __tablename__ = "node_abilities"

    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"), primary_key=True)
    heard_at: Mapped[datetime] = mapped_column(server_default=func.now())
    body: Mapped[dict[str, Any]]
    """See fleet.plans.Ability."""


class PlanStep(Base):
    """One piece of a plan's advice to a node, with its reason, and what became of it."""

    __tablename__ = "plan_steps"
    __table_args__ = (
        CheckConstraint("action in ('load','evict')", name="action"),
        CheckConstraint("state in ('planned','sent','accepted','refused','expired')", name="state"),
        Index("ix_plan_steps_open", "node_id", postgresql_where=text("state in ('planned','sent')")),
        Index("ix_plan_steps_planned_at", "planned_at"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    plan_id: Mapped[UUID]
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"))
    device_id: Mapped[str]
    variant_id: Mapped[UUID] = mapped_column(ForeignKey("variants.id"))
    action: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="planned")
    reason: Mapped[str]
    """A sentence, which the node's owner reads too."""
    gain_nano: Mapped[int | None]
    """What a load gains over the plan's horizon, by the forecast."""
    needed_bytes: Mapped[int | None]
    """What a load takes of the device, by the catalogue."""
    code: Mapped[str] = mapped_column(server_default="")
    message: Mapped[str] = mapped_column(server_default="")
    """Why the node refused."""
    planned_at: Mapped[datetime] = mapped_column(server_default=func.now())
    sent_at: Mapped[datetime | None]
    answered_at: Mapped[datetime | None]
