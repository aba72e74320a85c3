"""What a renter used, summed over receipts: by day, key and model, in the renter's own time zone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from statistics import median_low
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import Date, cast, func, select
from sqlalchemy.orm import Session

from marketplace.metering.models import Receipt
from marketplace.metering.tokens import TokenCounts

GroupBy = Literal["day", "key", "model"]
MAX_ROWS: Final = 10_000
HISTORY: Final = 200
"""Answers that tell how long the next one will likely be."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The sum over one group. What was not asked to group by is None."""

    day: date | None
    key_id: UUID | None
    variant_id: UUID | None
    requests: int
    """Requests with a receipt: those that delivered something."""
    tokens: TokenCounts
    charge_nano: int


def usage_of(
    session: Session,
    organisation_id: UUID,
    start: datetime,
    end: datetime,
    *,
    zone: str,
    group_by: Sequence[GroupBy],
    limit: int = MAX_ROWS,
) -> list[UsageRow]:
    """Sums over receipts with start <= time < end, at most `limit` groups. `zone` is an IANA name; it says where a day
    begins."""
    columns: dict[GroupBy, Any] = {
        "day": cast(func.timezone(zone, Receipt.at), Date),
        "key": Receipt.key_id,
        "model": Receipt.variant_id,
    }
    groups = [columns[name].label(name) for name in columns if name in group_by]
    sums = (
        func.count().label("requests"),
        func.coalesce(func.sum(Receipt.input_uncached_tokens), 0).label("uncached"),
        func.coalesce(func.sum(Receipt.input_cached_tokens), 0).label("cached"),
        func.coalesce(func.sum(Receipt.output_visible_tokens), 0).label("visible"),
        func.coalesce(func.sum(Receipt.output_reasoning_tokens), 0).label("reasoning"),
        func.coalesce(func.sum(Receipt.charge_nano), 0).label("charge_nano"),
    )
    statement = (
        select(*groups, *sums)
        .where(
            Receipt.renter_organisation_id == organisation_id,
            Receipt.at >= start,
            Receipt.at < end,
            # What our own failure kept from the renter is the platform's to pay, and no use of the renter's.
            Receipt.loss_nano == 0,
        )
        .group_by(*groups)
        .order_by(*groups)
        .limit(limit)
    )
    return [_row(row._mapping) for row in session.execute(statement) if row.requests]


def _row(row: Any) -> UsageRow:
    return UsageRow(
        day=row.get("day"),
        key_id=row.get("key"),
        variant_id=row.get("model"),
        requests=row["requests"],
        tokens=TokenCounts(int(row["uncached"]), int(row["cached"]), int(row["visible"]), int(row["reasoning"])),
        charge_nano=int(row["charge_nano"]),
    )


def receipt_of(session: Session, job_id: UUID) -> Receipt | None:
    """What a job delivered and cost; None where nothing was, or not yet."""
    return session.scalars(select(Receipt).where(Receipt.job_id == job_id)).one_or_none()


def tokens_of(receipt: Receipt) -> TokenCounts:
    """The classes of a receipt."""
    return TokenCounts(
        receipt.input_uncached_tokens,
        receipt.input_cached_tokens,
        receipt.output_visible_tokens,
        receipt.output_reasoning_tokens,
    )


def likely_output_tokens(session: Session, organisation_id: UUID, variant_id: UUID) -> tuple[int, int] | None:
    """How long this renter's answers of a variant usually are: the median of the last HISTORY receipts, and how many of
    them were of this variant. None without any."""
    recent = (
        select(Receipt.variant_id, (Receipt.output_visible_tokens + Receipt.output_reasoning_tokens).label("output"))
        .where(Receipt.renter_organisation_id == organisation_id)
        .order_by(Receipt.at.desc())
        .limit(HISTORY)
        .subquery()
    )
    lengths = session.scalars(select(recent.c.output).where(recent.c.variant_id == variant_id)).all()
    return (median_low(lengths), len(lengths)) if lengths else None
