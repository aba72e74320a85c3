"""Organisations and the keys that speak for them."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import ARRAY, CheckConstraint, ForeignKey, LargeBinary, String, func
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
        CheckConstraint("roles <@ array['renter','owner','finance','operator']::varchar[]", name="roles"),
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
