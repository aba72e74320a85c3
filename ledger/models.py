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
    false,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, ExcludeConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING: dict[str, str] = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


GENESIS = "'\\x" + "00" * 32 + "'::bytea"
"""SQL: what the first link of a chain follows."""


class LedgerBase(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger,
        datetime: DateTime(timezone=True),
        UUID: Uuid(),
        dict[str, Any]: JSONB,
    }


class Currency(LedgerBase):
    """A currency that accounts may be in. One more is one more row."""

    __tablename__ = "ledger_currencies"
    __table_args__ = (CheckConstraint("minor_places between 0 and 9", name="minor_places"),)

    code: Mapped[str] = mapped_column(String(3), primary_key=True)
    minor_places: Mapped[int]
    """Decimal places of what leaves the platform: 2 for cents."""


class Book(LedgerBase):
    """A set of accounts with periods and a hash chain of its own. No journal spans two."""

    __tablename__ = "ledger_books"
    __table_args__ = (CheckConstraint("id between 1 and 2147483647", name="id"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    code: Mapped[str] = mapped_column(unique=True)
    closed_through: Mapped[datetime | None]
    """Nothing is posted with an effective time before it."""
    closing_through: Mapped[datetime | None]
    """Before it only closing entries are posted."""
    sealed_sequence: Mapped[int] = mapped_column(server_default="0")
    sealed_sha256: Mapped[bytes] = mapped_column(LargeBinary, server_default=text(GENESIS))
    """The chain's newest link, again: a chain that was cut shows."""
    fingerprints_after_id: Mapped[int] = mapped_column(server_default="0")
    """Older journals were written before fingerprints could be recomputed."""


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
    currency: Mapped[str] = mapped_column(String(3), ForeignKey("ledger_currencies.code"))
    book_id: Mapped[int] = mapped_column(ForeignKey("ledger_books.id"), server_default="1")
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
        CheckConstraint("limit_nano is null or posted_nano <= limit_nano", name="limit"),
    )

    account_id: Mapped[int] = mapped_column(ForeignKey("ledger_accounts.id"), primary_key=True)
    posted_nano: Mapped[int] = mapped_column(server_default="0")
    held_nano: Mapped[int] = mapped_column(server_default="0")
    floor_nano: Mapped[int | None] = mapped_column(server_default="0")
    """The least that may be available."""
    limit_nano: Mapped[int | None]
    """The most that may be posted."""


class Journal(LedgerBase):
    """One balanced entry. Append-only: triggers refuse UPDATE, DELETE and TRUNCATE."""

    __tablename__ = "ledger_journals"
    __table_args__ = (
        UniqueConstraint("source", "kind", "outside_id"),
        Index("ix_ledger_journals_effective_at", "effective_at"),
        Index("ix_ledger_journals_reverses_id", "reverses_id", postgresql_where=text("reverses_id is not null")),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    book_id: Mapped[int] = mapped_column(ForeignKey("ledger_books.id"), server_default="1")
    idempotency_key: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    source: Mapped[str]
    outside_id: Mapped[str]
    body_sha256: Mapped[bytes] = mapped_column(LargeBinary)
    effective_at: Mapped[datetime]
    """When it counts."""
    dated: Mapped[bool] = mapped_column(server_default=false())
    """The caller named that time; otherwise it is that of the writing."""
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """When its transaction began, whatever the caller says."""
    captures_sha256: Mapped[bytes | None] = mapped_column(LargeBinary)
    """Which holds it captured, as a fingerprint; none: it captured none."""
    reverses_id: Mapped[int | None] = mapped_column(ForeignKey("ledger_journals.id"))
    """The journal that this one takes back, in full or in part; together they never take more than it moved."""
    corrects_period_id: Mapped[int | None] = mapped_column(ForeignKey("ledger_periods.id"))
    """It sets right what counted in this period, which is closed."""
    closing_entry: Mapped[bool] = mapped_column(server_default=false())
    """It belongs to the closing of its period, and may enter while that is closing."""
    memo: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))


class Posting(LedgerBase):
    """One line of a journal. Append-only. A deferred trigger checks at commit that each journal sums to zero."""

    __tablename__ = "ledger_postings"
    __table_args__ = (
        CheckConstraint("amount_nano <> 0", name="amount"),
        # Together with the currency: a posting cannot be in another currency than its account.
        ForeignKeyConstraint(["account_id", "currency"], ["ledger_accounts.id", "ledger_accounts.currency"]),
        Index(
            "ix_ledger_postings_account_id_effective_at",
            "account_id",
            "effective_at",
            postgresql_include=["amount_nano"],
        ),
        Index(
            "ix_ledger_postings_account_id_recorded_at",
            "account_id",
            "recorded_at",
            postgresql_include=["amount_nano"],
        ),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    journal_id: Mapped[int] = mapped_column(ForeignKey("ledger_journals.id"), index=True)
    account_id: Mapped[int]
    currency: Mapped[str] = mapped_column(String(3))
    amount_nano: Mapped[int]
    """Debit positive, credit negative."""
    effective_at: Mapped[datetime]
    """Its journal's; the database sees to it."""
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Period(LedgerBase):
    """A half-open stretch of a book's effective time. open -> closing -> closed, which is final; closing -> open too.

    Once closed it keeps what it was closed with: the trial balance at its end, the chain's head and counts.
    """

    __tablename__ = "ledger_periods"
    __table_args__ = (
        CheckConstraint("state in ('open','closing','closed')", name="state"),
        CheckConstraint("starts_at < ends_at", name="order"),
        CheckConstraint(
            "(state = 'closed') = (closed_at is not null) and num_nulls(closed_at, chain_sequence, chain_sha256,"
            " journals, postings, snapshot, snapshot_sha256) in (0, 7)",
            name="sealed",
        ),
        ExcludeConstraint(
            (text("int8range(book_id, book_id, '[]')"), "&&"),
            (text("tstzrange(starts_at, ends_at)"), "&&"),
            using="gist",
            name="ex_ledger_periods_overlap",
        ),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    book_id: Mapped[int] = mapped_column(ForeignKey("ledger_books.id"))
    starts_at: Mapped[datetime]
    ends_at: Mapped[datetime]
    state: Mapped[str] = mapped_column(server_default="open")
    closed_at: Mapped[datetime | None]
    chain_sequence: Mapped[int | None]
    """Everything that counts before its end stands at or before this link of the chain."""
    chain_sha256: Mapped[bytes | None] = mapped_column(LargeBinary)
    journals: Mapped[int | None]
    """Journals effective within the period."""
    postings: Mapped[int | None]
    snapshot: Mapped[list[Any] | None] = mapped_column(JSONB)
    """The trial balance before ends_at: [code, kind, currency, debit nanos, credit nanos] an account."""
    snapshot_sha256: Mapped[bytes | None] = mapped_column(LargeBinary)


class Unsealed(LedgerBase):
    """A journal that is not in the chain yet. A trigger writes it with the journal, the sealer takes it away."""

    __tablename__ = "ledger_unsealed"

    journal_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    book_id: Mapped[int]
    refused_at: Mapped[datetime | None]
    """Its fingerprint does not fit it: it was not written by this library, and is never sealed."""


class Link(LedgerBase):
    """One link of a book's hash chain: a journal in its place. Append-only, without gaps."""

    __tablename__ = "ledger_chain"

    book_id: Mapped[int] = mapped_column(ForeignKey("ledger_books.id"), primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    journal_id: Mapped[int] = mapped_column(ForeignKey("ledger_journals.id"), unique=True)
    sha256: Mapped[bytes] = mapped_column(LargeBinary)
    """Of the link before and the journal's canonical bytes."""
    sealed_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Checkpoint(LedgerBase):
    """What sealed journals moved on an account within a day or a minute (UTC), by each of the two times.

    Derived: written by the sealer, rebuildable from postings.
    """

    __tablename__ = "ledger_checkpoints"
    __table_args__ = (CheckConstraint("span_s in (60, 86400)", name="span"),)

    account_id: Mapped[int] = mapped_column(ForeignKey("ledger_accounts.id"), primary_key=True)
    span_s: Mapped[int] = mapped_column(primary_key=True)
    starts_at: Mapped[datetime] = mapped_column(primary_key=True)
    effective_debit_nano: Mapped[int]
    effective_credit_nano: Mapped[int]
    recorded_debit_nano: Mapped[int]
    recorded_credit_nano: Mapped[int]


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
