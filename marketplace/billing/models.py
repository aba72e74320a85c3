"""Money on its way in and out: payments, refunds, disputes, payouts, and what the processor was asked and told."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, LargeBinary, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from marketplace.core.database import Base
from marketplace.core.ids import new_id


class ProcessorIdentity(Base):
    """Which processor these books belong to, in which mode: one row, written at the first use and never changed."""

    __tablename__ = "processor_identity"
    __table_args__ = (CheckConstraint("id = 1", name="one"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    provider: Mapped[str]
    live: Mapped[bool]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Payment(Base):
    """A top-up, from the wish to the money. open -> succeeded | failed | expired; succeeded is final."""

    __tablename__ = "payments"
    __table_args__ = (
        CheckConstraint("kind in ('checkout','automatic','saved_card')", name="kind"),
        CheckConstraint("state in ('open','succeeded','failed','expired')", name="state"),
        CheckConstraint("amount_minor > 0 and refunded_minor between 0 and amount_minor", name="amount"),
        CheckConstraint("(state = 'succeeded') = (journal_id is not null)", name="posted"),
        Index("ix_payments_organisation_id_created_at", "organisation_id", "created_at"),
        Index("ix_payments_open", "created_at", postgresql_where=text("state = 'open'")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    kind: Mapped[str]
    amount_minor: Mapped[int]
    currency: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="open")
    save_card: Mapped[bool]
    session_id: Mapped[str | None] = mapped_column(unique=True)
    url: Mapped[str | None]
    """Where the renter pays."""
    payment_id: Mapped[str | None] = mapped_column(unique=True)
    """The processor's payment: one of them, one credit."""
    charge_id: Mapped[str | None] = mapped_column(index=True)
    receipt_url: Mapped[str | None]
    failure: Mapped[str | None]
    refunded_minor: Mapped[int] = mapped_column(server_default="0")
    """Asked back and not failed."""
    journal_id: Mapped[int | None]
    created_at: Mapped[datetime]
    succeeded_at: Mapped[datetime | None]


class TopUpPlan(Base):
    """How an organisation tops up by itself, and when it wants to be told of a low balance."""

    __tablename__ = "top_up_plans"
    __table_args__ = (
        CheckConstraint("threshold_nano >= 0 and amount_minor > 0 and monthly_cap_minor >= amount_minor", name="plan"),
        CheckConstraint("low_balance_nano >= 0", name="low_balance"),
    )

    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"), primary_key=True)
    enabled: Mapped[bool] = mapped_column(server_default="false")
    threshold_nano: Mapped[int] = mapped_column(server_default="0")
    amount_minor: Mapped[int] = mapped_column(server_default="2000")
    monthly_cap_minor: Mapped[int] = mapped_column(server_default="10000")
    low_balance_nano: Mapped[int] = mapped_column(server_default="0")
    """Zero: no notice."""
    customer: Mapped[str | None]
    payment_method: Mapped[str | None]
    stopped_because: Mapped[str | None]
    """The platform disabled it: the card was declined."""


class Refund(Base):
    """Unused credit on its way back to a card. asked -> pending -> succeeded | failed; a success may still fail."""

    __tablename__ = "refunds"
    __table_args__ = (
        CheckConstraint("state in ('asked','pending','succeeded','failed')", name="state"),
        CheckConstraint("amount_minor > 0", name="amount"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    payment_id: Mapped[UUID] = mapped_column(ForeignKey("payments.id"), index=True)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"), index=True)
    request_key: Mapped[str] = mapped_column(index=True)
    """The caller's: the same key again returns the same refunds."""
    amount_minor: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="asked")
    refund_id: Mapped[str | None] = mapped_column(unique=True)
    failure: Mapped[str | None]
    created_at: Mapped[datetime]


class Dispute(Base):
    """A renter's bank takes a payment back. Its id is the processor's."""

    __tablename__ = "disputes"
    __table_args__ = (
        CheckConstraint("state in ('inquiry','open','won','lost','withdrawn')", name="state"),
        CheckConstraint("amount_minor >= 0", name="amount"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    payment_id: Mapped[UUID] = mapped_column(ForeignKey("payments.id"), index=True)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"), index=True)
    amount_minor: Mapped[int]
    state: Mapped[str]
    reason: Mapped[str]
    accepted_at: Mapped[datetime | None]
    """A lost one was talked through, and the renter may go on."""
    opened_at: Mapped[datetime]
    closed_at: Mapped[datetime | None]


class PromotionalUse(Base):
    """What of a receipt was paid by promotional credit. Receipts without any have no row."""

    __tablename__ = "promotional_uses"
    __table_args__ = (CheckConstraint("nano > 0", name="nano"),)

    receipt_id: Mapped[UUID] = mapped_column(ForeignKey("receipts.id"), primary_key=True)
    nano: Mapped[int]


class TakeBack(Base):
    """A part of a receipt's charge that was given back to the renter, or lost to the renter's bank."""

    __tablename__ = "take_backs"
    __table_args__ = (
        CheckConstraint("kind in ('refund','dispute')", name="kind"),
        CheckConstraint("amount_nano > 0 and amount_nano = owner_nano + fee_nano", name="split"),
        CheckConstraint("promotional_nano between 0 and amount_nano", name="promotional"),
        UniqueConstraint("receipt_id", "journal_id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    receipt_id: Mapped[UUID] = mapped_column(ForeignKey("receipts.id"))
    kind: Mapped[str]
    amount_nano: Mapped[int]
    owner_nano: Mapped[int]
    fee_nano: Mapped[int]
    promotional_nano: Mapped[int] = mapped_column(server_default="0")
    reason: Mapped[str]
    journal_id: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class OwnerAccount(Base):
    """An owner's account at the processor. Without one, earnings wait."""

    __tablename__ = "owner_accounts"
    __table_args__ = (
        CheckConstraint("state in ('asked','onboarding','verifying','active','restricted','rejected')", name="state"),
    )

    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"), primary_key=True)
    account_id: Mapped[str | None] = mapped_column(unique=True)
    state: Mapped[str] = mapped_column(server_default="asked")
    payouts_enabled: Mapped[bool] = mapped_column(server_default="false")
    due: Mapped[list[Any]] = mapped_column(server_default=text("'[]'::jsonb"))
    """What the processor wants to know."""
    disabled_reason: Mapped[str | None]
    checked_at: Mapped[datetime | None]


class PayoutRun(Base):
    """One look over all owners. The key says which: a week's run happens once."""

    __tablename__ = "payout_runs"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    key: Mapped[str] = mapped_column(unique=True)
    started_by: Mapped[str]
    at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    """Every owner was looked at."""


class Payout(Base):
    """Money on its way to one owner's bank; payouts.py has the table of states."""

    __tablename__ = "payouts"
    __table_args__ = (
        CheckConstraint(
            "state in ('awaiting_approval','scheduled','paying','paid','returning','returned','cancelled')",
            name="state",
        ),
        CheckConstraint("amount_minor > 0", name="amount"),
        UniqueConstraint("run_id", "organisation_id"),
        Index(
            "ix_payouts_open",
            "created_at",
            postgresql_where=text("state not in ('paid','returned','cancelled')"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("payout_runs.id"))
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"), index=True)
    account_id: Mapped[str]
    amount_minor: Mapped[int]
    currency: Mapped[str]
    state: Mapped[str]
    transfer_id: Mapped[str | None] = mapped_column(unique=True)
    payout_id: Mapped[str | None] = mapped_column(unique=True)
    reversal_id: Mapped[str | None] = mapped_column(unique=True)
    arrived: Mapped[bool] = mapped_column(server_default="false")
    """The processor said paid; it may say failed afterwards."""
    failure: Mapped[str | None]
    statement: Mapped[dict[str, Any]]
    """What the owner is told with the money: where the amount comes from, and what stays."""
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class PayoutApproval(Base):
    """One person's yes."""

    __tablename__ = "payout_approvals"

    payout_id: Mapped[UUID] = mapped_column(ForeignKey("payouts.id"), primary_key=True)
    person: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())


class OutgoingCall(Base):
    """A wish to the processor, written before it is sent. Its key is its own for ever.

    intended -> sent -> done | refused; sent, without an answer, is unknown. Only a look-up, or the same key again,
    leads out of that. intended -> cancelled.
    """

    __tablename__ = "outgoing_calls"
    __table_args__ = (
        CheckConstraint("state in ('intended','sent','unknown','done','refused','cancelled')", name="state"),
        UniqueConstraint("kind", "subject_id", "number"),
        Index("ix_outgoing_calls_due", "next_at", postgresql_where=text("state in ('intended','sent','unknown')")),
        Index(
            "ix_outgoing_calls_organisation_id_unknown",
            "organisation_id",
            postgresql_where=text("state in ('sent','unknown')"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    kind: Mapped[str]
    """The wish's type."""
    subject_id: Mapped[UUID]
    """Our row that it is about; also its reference."""
    number: Mapped[int] = mapped_column(server_default="1")
    """A second wish of the kind follows a final refusal of the first."""
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    idempotency_key: Mapped[str] = mapped_column(unique=True)
    wish: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(server_default="intended")
    attempts: Mapped[int] = mapped_column(server_default="0")
    first_sent_at: Mapped[datetime | None]
    next_at: Mapped[datetime]
    error: Mapped[str | None]
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class InboxEvent(Base):
    """A webhook as it came. received -> applied | ignored; waiting: its object is unknown yet; quarantined: gave up."""

    __tablename__ = "webhook_inbox"
    __table_args__ = (
        CheckConstraint("endpoint in ('platform','connect')", name="endpoint"),
        CheckConstraint("state in ('received','waiting','applied','ignored','quarantined')", name="state"),
        UniqueConstraint("endpoint", "event_id"),
        Index("ix_webhook_inbox_due", "next_at", postgresql_where=text("state in ('received','waiting')")),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    endpoint: Mapped[str]
    event_id: Mapped[str]
    type: Mapped[str]
    account: Mapped[str]
    kind: Mapped[str | None]
    object_id: Mapped[str]
    body: Mapped[bytes] = mapped_column(LargeBinary)
    """Raw, as it was signed."""
    state: Mapped[str] = mapped_column(server_default="received")
    attempts: Mapped[int] = mapped_column(server_default="0")
    deliveries: Mapped[int] = mapped_column(server_default="1")
    error: Mapped[str | None]
    received_at: Mapped[datetime]
    next_at: Mapped[datetime]
    applied_at: Mapped[datetime | None]


class StatementLine(Base):
    """A line of the processor's own books, and what in ours it belongs to."""

    __tablename__ = "processor_lines"
    __table_args__ = (
        Index("ix_processor_lines_at", "at"),
        Index("ix_processor_lines_unmatched", "at", postgresql_where=text("matched is null")),
        Index("ix_processor_lines_matched", "matched"),
    )

    line_id: Mapped[str] = mapped_column(primary_key=True)
    account: Mapped[str]
    type: Mapped[str]
    category: Mapped[str]
    amount_minor: Mapped[int]
    fee_minor: Mapped[int]
    currency: Mapped[str]
    source: Mapped[str | None]
    at: Mapped[datetime]
    matched: Mapped[str | None]
    """`payment:<id>`, `refund:<id>`, `payout:<id>`, ...; null: nothing of ours."""


class Reconciliation(Base):
    """One comparison of the ledger with the processor."""

    __tablename__ = "reconciliations"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    at: Mapped[datetime]
    ledger_platform_nano: Mapped[int]
    processor_platform_nano: Mapped[int]
    ledger_connected_nano: Mapped[int]
    processor_connected_nano: Mapped[int]
    payable_nano: Mapped[int]
    """What owners are owed and is not in their accounts at the processor."""
    open_breaks: Mapped[int]

    @property
    def covered(self) -> bool:
        """The processor holds at least what the owners are owed."""
        return self.payable_nano <= self.processor_platform_nano


class Break(Base):
    """A difference between the ledger and the processor, from the day when it was first seen until it is gone."""

    __tablename__ = "reconciliation_breaks"
    __table_args__ = (
        Index(
            "uq_reconciliation_breaks_open",
            "kind",
            "subject",
            unique=True,
            postgresql_where=text("resolved_at is null"),
        ),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    kind: Mapped[str]
    subject: Mapped[str]
    story: Mapped[str]
    amount_nano: Mapped[int]
    opened_at: Mapped[datetime]
    resolved_at: Mapped[datetime | None]


class Notice(Base):
    """Something that an organisation should know about its money."""

    __tablename__ = "billing_notices"
    __table_args__ = (
        UniqueConstraint("organisation_id", "key"),
        Index("ix_billing_notices_organisation_id_created_at", "organisation_id", "created_at"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    organisation_id: Mapped[UUID] = mapped_column(ForeignKey("organisations.id"))
    kind: Mapped[str]
    key: Mapped[str]
    """Says once what would otherwise be said again and again."""
    message: Mapped[str]
    created_at: Mapped[datetime]


class SandboxObject(Base):
    """What the sandbox processor remembers. No money is behind it."""

    __tablename__ = "sandbox_objects"

    id: Mapped[str] = mapped_column(primary_key=True)
    sequence: Mapped[int] = mapped_column(Identity(always=True), unique=True)
    kind: Mapped[str] = mapped_column(index=True)
    account: Mapped[str]
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    reference: Mapped[str | None] = mapped_column(index=True)
    data: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
