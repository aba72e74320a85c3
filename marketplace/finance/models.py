"""What owners declare of their machines' cost. Nothing is assumed where nothing is declared."""

from __future__ import annotations

from datetime import date, datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, Date, ForeignKey, Identity, Index, func
from sqlalchemy.orm import Mapped, mapped_column

from marketplace.core.database import Base


class NodeCost(Base):
    """One declaration of one node's cost, append-only: the newest that is valid at a period's end counts for it.

    A column that is null is not declared. Money is in nano-USD.
    """

    __tablename__ = "node_costs"
    __table_args__ = (
        CheckConstraint(
            "capital_nano > 0 and residual_nano >= 0 and residual_nano <= capital_nano and life_months > 0",
            name="capital",
        ),
        CheckConstraint(
            "num_nulls(capital_nano, residual_nano, life_months, depreciation, in_service_on) in (0, 5)", name="whole"
        ),
        CheckConstraint("depreciation in ('straight_line','declining')", name="depreciation"),
        CheckConstraint(
            "energy_nano_usd_per_kwh >= 0 and pue_milli >= 1000 and other_nano_usd_per_hour >= 0", name="costs"
        ),
        Index("ix_node_costs_node_id_valid_from", "node_id", "valid_from"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    node_id: Mapped[UUID] = mapped_column(ForeignKey("nodes.id"))
    valid_from: Mapped[datetime]
    capital_nano: Mapped[int | None]
    """What it cost, the share of its host included."""
    residual_nano: Mapped[int | None]
    """What it will fetch at the end of its life."""
    life_months: Mapped[int | None]
    depreciation: Mapped[str | None]
    in_service_on: Mapped[date | None] = mapped_column(Date)
    energy_nano_usd_per_kwh: Mapped[int | None]
    pue_milli: Mapped[int | None]
    """1,000 times the energy drawn from the grid over that drawn by the machine."""
    other_nano_usd_per_hour: Mapped[int | None]
    """Rent, network, insurance."""
    declared_at: Mapped[datetime] = mapped_column(server_default=func.now())
