"""The ledger's tables. It knows accounts, journals and holds; nothing of jobs, tokens or GPUs.

Sign convention, everywhere: a posting's amount is positive for a debit and negative for a credit, so each journal sums
to zero per currency. A *balance* is given in the account's normal direction: debits less credits for asset, expense
and loss accounts, credits less debits for liability and income accounts.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING: dict[str, str] = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class LedgerBase(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger,
        datetime: DateTime(timezone=True),
        UUID: Uuid(),
        dict[str, Any]: JSONB,
    }


class Account(LedgerBase):
    """An account. Its code says what it is for (`renter:<org>:credit`, `platform:fees`); see chart.py."""

    __tablename__ = "ledger_accounts"
    __table_args__ = (
        CheckConstraint("kind in ('asset','liability','income','expense')", name="kind"),
        CheckConstraint("status in ('open','frozen','closed')", name="status"),
        UniqueConstraint("id", "currency"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    code: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    currency: Mapped[str] = mapped_column(String(3))
    reference: Mapped[str | None] = mapped_column(index=True)
    """Opaque to the ledger: whose account it is."""
    checked: Mapped[bool]
    """True: a row in ledger_balances is kept with every posting. False: the balance is derived (hot accounts)."""
    status: Mapped[str] = mapped_column(server_default="open")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Balance(LedgerBase):
    """The running balance of a checked account. `posted_nano` is in the account's normal direction."""

    __tablename__ = "ledger_balances"
    __table_args__ = (
        CheckConstraint("held_nano >= 0", name="held"),
        CheckConstraint("floor_nano is null or posted_nano - held_nano >= floor_nano", name="floor"),
    )

    account_id: Mapped[int] = mapped_column(ForeignKey("ledger_accounts.id"), primary_key=True)
    posted_nano: Mapped[int] = mapped_column(server_default="0")
    held_nano: Mapped[int] = mapped_column(server_default="0")
    floor_nano: Mapped[int | None] = mapped_column(server_default="0")


class Journal(LedgerBase):
    """One balanced entry. Append-only: triggers refuse UPDATE, DELETE and TRUNCATE."""

    __tablename__ = "ledger_journals"
    __table_args__ = (
        UniqueConstraint("source", "kind", "outside_id"),
        Index("ix_ledger_journals_effective_at", "effective_at"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    idempotency_key: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    source: Mapped[str]
    outside_id: Mapped[str]
    body_sha256: Mapped[bytes] = mapped_column(LargeBinary)
    effective_at: Mapped[datetime]
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.now())
    reverses_id: Mapped[int | None] = mapped_column(ForeignKey("ledger_journals.id"), unique=True)
    """The journal that this one takes back in full; at most one does."""
    memo: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))


class Posting(LedgerBase):
    """One line of a journal. Append-only. A deferred trigger checks at commit that each journal sums to zero."""

    __tablename__ = "ledger_postings"
    __table_args__ = (
        CheckConstraint("amount_nano <> 0", name="amount"),
        # Together with the currency: a posting cannot be in another currency than its account.
        ForeignKeyConstraint(["account_id", "currency"], ["ledger_accounts.id", "ledger_accounts.currency"]),
        Index("ix_ledger_postings_account_id_id", "account_id", "id"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    journal_id: Mapped[int] = mapped_column(ForeignKey("ledger_journals.id"), index=True)
    account_id: Mapped[int]
    currency: Mapped[str] = mapped_column(String(3))
    amount_nano: Mapped[int]
    """Debit positive, credit negative."""


class Hold(LedgerBase):
    """Money set aside on a checked account. Its id is the caller's; resolved at most once.

    states: held -> captured (in full or part; the rest is released) | released | expired. `amount_nano` may shrink
    while held, never grow.
    """

    __tablename__ = "ledger_holds"
    __table_args__ = (
        CheckConstraint("state in ('held','captured','released','expired')", name="state"),
        CheckConstraint("amount_nano >= 0", name="amount"),
        CheckConstraint("(state = 'captured') = (captured_nano is not null)", name="captured"),
        CheckConstraint("captured_nano between 0 and amount_nano", name="capture_within"),
        Index("ix_ledger_holds_expires_at_held", "expires_at", postgresql_where=text("state = 'held'")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("ledger_accounts.id"), index=True)
    amount_nano: Mapped[int]
    captured_nano: Mapped[int | None]
    state: Mapped[str] = mapped_column(server_default="held")
    expires_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    resolved_at: Mapped[datetime | None]
