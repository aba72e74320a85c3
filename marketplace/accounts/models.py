"""Organisations and the keys that speak for them."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, CheckConstraint, ForeignKey, LargeBinary, String, UniqueConstraint, func
from sqlalchemy.orm import Mapped, mapped_column

from marketplace.core.database import Base
from marketplace.core.ids import new_id


class Organisation(Base):
    """A renter, an owner, or both: whoever money is owed by or to."""

    __tablename__ = "organisations"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(unique=True)
    credit_account_id: Mapped[int | None]
    """The ledger account that this organisation spends from; kept here so that admission needs no look-up."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKey(Base):
    """A key. Only its SHA-256 is kept: the key itself is 256 random bits, so a slow hash would add nothing."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("roles <@ array['renter','owner','finance','operator','admin']::varchar[]", name="roles"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"), index=True)
    name: Mapped[str]
    shown_prefix: Mapped[str]
    """First characters, so that a person recognises the key."""
    sha256: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    roles: Mapped[list[str]] = mapped_column(ARRAY(String))
    requests_per_minute: Mapped[int]
    parallel_requests: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    tokens_per_minute: Mapped[int | None]
    """Of prompts and answers; None: not limited."""
    models: Mapped[list[str] | None] = mapped_column(ARRAY(String))
    """Ids of the models that it may use; None: all."""
    networks: Mapped[list[str] | None] = mapped_column(ARRAY(String))
    """CIDR blocks that it may come from; None: anywhere."""
    routing: Mapped[dict[str, Any] | None]
    """A `provider` object that its requests have unless they bring their own."""
    member_id: Mapped[UUID | None] = mapped_column(ForeignKey("members.id", ondelete="SET NULL"), index=True)
    """The person that it was made for: it is revoked when they leave."""


class KeyBudget(Base):
    """What a key may spend in a period. Judged and kept by the hot path's functions (see migrations)."""

    __tablename__ = "key_budgets"
    __table_args__ = (
        CheckConstraint("period in ('total','day','week','month')", name="period"),
        CheckConstraint("limit_nano >= 0 and spent_nano >= 0 and held_nano >= 0", name="not_negative"),
    )

    key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    limit_nano: Mapped[int]
    period: Mapped[str]
    """Days, weeks (from Monday) and months begin at midnight UTC; `total` never begins again."""
    period_started_at: Mapped[datetime]
    spent_nano: Mapped[int] = mapped_column(server_default="0")
    held_nano: Mapped[int] = mapped_column(server_default="0")
    """Worst cases of what runs now."""


class Member(Base):
    """A person of an organisation, and what they may do for it."""

    __tablename__ = "members"
    __table_args__ = (
        UniqueConstraint("organisation_id", "email"),
        CheckConstraint("roles <@ array['renter','owner','finance','operator','admin']::varchar[]", name="roles"),
        CheckConstraint("email = lower(email)", name="email"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    email: Mapped[str]
    roles: Mapped[list[str]] = mapped_column(ARRAY(String))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
