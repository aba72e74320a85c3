"""From a line to its receipts, from a receipt to its journal, and back. Only reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

import ledger
from marketplace.catalog.models import Variant
from marketplace.core.errors import NotFound
from marketplace.finance.period import Period
from marketplace.metering.models import Receipt

STREAM_ROWS = 2_000


class UnknownReceipt(NotFound):
    code = "unknown_receipt"


class UnknownJournal(NotFound):
    code = "unknown_journal"


@dataclass(frozen=True, slots=True)
class Line:
    """Which receipts a line of a statement or an invoice stands for. None: any."""

    owner_id: UUID | None = None
    renter_id: UUID | None = None
    period: Period | None = None
    node_id: UUID | None = None
    device_id: str | None = None
    model_id: str | None = None
    key_id: UUID | None = None
    journal_id: int | None = None


@dataclass(frozen=True, slots=True)
class TracedReceipt:
    """A receipt, and the journal that settled it; None: not settled yet, or it came to nothing."""

    receipt: Receipt
    model_id: str
    journal: ledger.JournalView | None


@dataclass(frozen=True, slots=True)
class TracedJournal:
    """A journal, and what the receipts behind it come to, in nano-USD."""

    journal: ledger.JournalView
    receipts: int
    charge_nano: int
    fee_nano: int
    owner_nano: int
    loss_nano: int


def receipts(session: Session, line: Line) -> Iterator[tuple[Receipt, str]]:
    """The receipts behind a line with their models' names, in order of time; streamed."""
    query = (
        select(Receipt, Variant.model_id)
        .join(Variant, Variant.id == Receipt.variant_id)
        .where(*_conditions(line))
        .order_by(Receipt.at, Receipt.id)
        .execution_options(yield_per=STREAM_ROWS)
    )
    for receipt, model_id in session.execute(query):
        yield receipt, model_id
        # A stream over a million must not keep them all.
        session.expunge(receipt)


def receipt(session: Session, receipt_id: UUID) -> TracedReceipt:
    """A receipt with its journal. Raises UnknownReceipt."""
    found = session.get(Receipt, receipt_id)
    if found is None:
        raise UnknownReceipt(f"There is no receipt {receipt_id}.", param="receipt")
    variant = session.get_one(Variant, found.variant_id)
    journal = ledger.find_journal(session, found.journal_id) if found.journal_id else None
    return TracedReceipt(found, variant.model_id, journal)


def journal(session: Session, journal_id: int) -> TracedJournal:
    """A journal with the sum of its receipts. Raises UnknownJournal."""
    found = ledger.find_journal(session, journal_id)
    if found is None:
        raise UnknownJournal(f"There is no journal {journal_id}.", param="journal")
    sums = session.execute(
        select(
            func.count(),
            *(
                func.coalesce(func.sum(column), 0)
                for column in (Receipt.charge_nano, Receipt.fee_nano, Receipt.owner_nano, Receipt.loss_nano)
            ),
        ).where(Receipt.journal_id == journal_id)
    ).one()
    return TracedJournal(found, *(int(value) for value in sums))


def _conditions(line: Line) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    for column, value in (
        (Receipt.owner_organisation_id, line.owner_id),
        (Receipt.renter_organisation_id, line.renter_id),
        (Receipt.node_id, line.node_id),
        (Receipt.device_id, line.device_id),
        (Receipt.key_id, line.key_id),
        (Receipt.journal_id, line.journal_id),
        (Variant.model_id, line.model_id),
    ):
        if value is not None:
            found.append(column == value)
    if line.renter_id is not None and line.journal_id is None:
        # An invoice's lines charge; what the platform paid instead stands on none of them.
        found.append(Receipt.loss_nano == 0)
    if line.period is not None:
        found += [Receipt.at >= line.period.start, Receipt.at < line.period.end]
    return found
