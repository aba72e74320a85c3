"""Payments in and out: what was asked of the processor, what it told, and how both books compare."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "payout_runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("started_by", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payout_runs")),
        sa.UniqueConstraint("key", name=op.f("uq_payout_runs_key")),
    )
    op.create_table(
        "processor_identity",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("provider", sa.String(), nullable=False),
        sa.Column("live", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_processor_identity_one")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_processor_identity")),
    )
    op.create_table(
        "processor_lines",
        sa.Column("line_id", sa.String(), nullable=False),
        sa.Column("account", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("category", sa.String(), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("fee_minor", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("matched", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("line_id", name=op.f("pk_processor_lines")),
    )
    op.create_index("ix_processor_lines_at", "processor_lines", ["at"], unique=False)
    op.create_index("ix_processor_lines_matched", "processor_lines", ["matched"], unique=False)
    op.create_index(
        "ix_processor_lines_unmatched",
        "processor_lines",
        ["at"],
        unique=False,
        postgresql_where=sa.text("matched is null"),
    )
    op.create_table(
        "reconciliation_breaks",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("story", sa.String(), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("resolved_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reconciliation_breaks")),
    )
    op.create_index(
        "uq_reconciliation_breaks_open",
        "reconciliation_breaks",
        ["kind", "subject"],
        unique=True,
        postgresql_where=sa.text("resolved_at is null"),
    )
    op.create_table(
        "reconciliations",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ledger_platform_nano", sa.BigInteger(), nullable=False),
        sa.Column("processor_platform_nano", sa.BigInteger(), nullable=False),
        sa.Column("ledger_connected_nano", sa.BigInteger(), nullable=False),
        sa.Column("processor_connected_nano", sa.BigInteger(), nullable=False),
        sa.Column("payable_nano", sa.BigInteger(), nullable=False),
        sa.Column("open_breaks", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reconciliations")),
    )
    op.create_table(
        "sandbox_objects",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("account", sa.String(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=True),
        sa.Column("reference", sa.String(), nullable=True),
        sa.Column("data", postgresql.JSONB(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sandbox_objects")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_sandbox_objects_idempotency_key")),
        sa.UniqueConstraint("sequence", name=op.f("uq_sandbox_objects_sequence")),
    )
    op.create_index(op.f("ix_sandbox_objects_kind"), "sandbox_objects", ["kind"], unique=False)
    op.create_index(op.f("ix_sandbox_objects_reference"), "sandbox_objects", ["reference"], unique=False)
    op.create_table(
        "webhook_inbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("event_id", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("account", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=True),
        sa.Column("object_id", sa.String(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(), server_default="received", nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("deliveries", sa.BigInteger(), server_default="1", nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("applied_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("endpoint in ('platform','connect')", name=op.f("ck_webhook_inbox_endpoint")),
        sa.CheckConstraint(
            "state in ('received','waiting','applied','ignored','quarantined')", name=op.f("ck_webhook_inbox_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_inbox")),
        sa.UniqueConstraint("endpoint", "event_id", name=op.f("uq_webhook_inbox_endpoint_event_id")),
    )
    op.create_index(
        "ix_webhook_inbox_due",
        "webhook_inbox",
        ["next_at"],
        unique=False,
        postgresql_where=sa.text("state in ('received','waiting')"),
    )
    op.create_table(
        "billing_notices",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_billing_notices_organisation_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_billing_notices")),
        sa.UniqueConstraint("organisation_id", "key", name=op.f("uq_billing_notices_organisation_id_key")),
    )
    op.create_index(
        "ix_billing_notices_organisation_id_created_at",
        "billing_notices",
        ["organisation_id", "created_at"],
        unique=False,
    )
    op.create_table(
        "outgoing_calls",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("subject_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.BigInteger(), server_default="1", nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False),
        sa.Column("wish", postgresql.JSONB(), nullable=False),
        sa.Column("state", sa.String(), server_default="intended", nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("first_sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state in ('intended','sent','unknown','done','refused','cancelled')", name=op.f("ck_outgoing_calls_state")
        ),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_outgoing_calls_organisation_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outgoing_calls")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_outgoing_calls_idempotency_key")),
        sa.UniqueConstraint("kind", "subject_id", "number", name=op.f("uq_outgoing_calls_kind_subject_id_number")),
    )
    op.create_index(
        "ix_outgoing_calls_due",
        "outgoing_calls",
        ["next_at"],
        unique=False,
        postgresql_where=sa.text("state in ('intended','sent','unknown')"),
    )
    op.create_index(
        "ix_outgoing_calls_organisation_id_unknown",
        "outgoing_calls",
        ["organisation_id"],
        unique=False,
        postgresql_where=sa.text("state in ('sent','unknown')"),
    )
    op.create_table(
        "owner_accounts",
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("account_id", sa.String(), nullable=True),
        sa.Column("state", sa.String(), server_default="asked", nullable=False),
        sa.Column("payouts_enabled", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("due", postgresql.JSONB(), server_default=sa.text("'[]'::jsonb"), nullable=False),
        sa.Column("disabled_reason", sa.String(), nullable=True),
        sa.Column("checked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state in ('asked','onboarding','verifying','active','restricted','rejected')",
            name=op.f("ck_owner_accounts_state"),
        ),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_owner_accounts_organisation_id")
        ),
        sa.PrimaryKeyConstraint("organisation_id", name=op.f("pk_owner_accounts")),
        sa.UniqueConstraint("account_id", name=op.f("uq_owner_accounts_account_id")),
    )
    op.create_table(
        "payments",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.String(), nullable=False),
        sa.Column("state", sa.String(), server_default="open", nullable=False),
        sa.Column("save_card", sa.Boolean(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=True),
        sa.Column("url", sa.String(), nullable=True),
        sa.Column("payment_id", sa.String(), nullable=True),
        sa.Column("charge_id", sa.String(), nullable=True),
        sa.Column("receipt_url", sa.String(), nullable=True),
        sa.Column("failure", sa.String(), nullable=True),
        sa.Column("refunded_minor", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("journal_id", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("succeeded_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'succeeded') = (journal_id is not null)", name=op.f("ck_payments_posted")),
        sa.CheckConstraint("kind in ('checkout','automatic','saved_card')", name=op.f("ck_payments_kind")),
        sa.CheckConstraint("state in ('open','succeeded','failed','expired')", name=op.f("ck_payments_state")),
        sa.CheckConstraint(
            "amount_minor > 0 and refunded_minor between 0 and amount_minor", name=op.f("ck_payments_amount")
        ),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_payments_organisation_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payments")),
        sa.UniqueConstraint("payment_id", name=op.f("uq_payments_payment_id")),
        sa.UniqueConstraint("session_id", name=op.f("uq_payments_session_id")),
    )
    op.create_index(op.f("ix_payments_charge_id"), "payments", ["charge_id"], unique=False)
    op.create_index(
        "ix_payments_open", "payments", ["created_at"], unique=False, postgresql_where=sa.text("state = 'open'")
    )
    op.create_index(
        "ix_payments_organisation_id_created_at", "payments", ["organisation_id", "created_at"], unique=False
    )
    op.create_table(
        "payouts",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("account_id", sa.String(), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("transfer_id", sa.String(), nullable=True),
        sa.Column("payout_id", sa.String(), nullable=True),
        sa.Column("reversal_id", sa.String(), nullable=True),
        sa.Column("arrived", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("failure", sa.String(), nullable=True),
        sa.Column("statement", postgresql.JSONB(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state in ('awaiting_approval','scheduled','paying','paid','returning','returned','cancelled')",
            name=op.f("ck_payouts_state"),
        ),
        sa.CheckConstraint("amount_minor > 0", name=op.f("ck_payouts_amount")),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_payouts_organisation_id")),
        sa.ForeignKeyConstraint(["run_id"], ["payout_runs.id"], name=op.f("fk_payouts_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payouts")),
        sa.UniqueConstraint("payout_id", name=op.f("uq_payouts_payout_id")),
        sa.UniqueConstraint("reversal_id", name=op.f("uq_payouts_reversal_id")),
        sa.UniqueConstraint("run_id", "organisation_id", name=op.f("uq_payouts_run_id_organisation_id")),
        sa.UniqueConstraint("transfer_id", name=op.f("uq_payouts_transfer_id")),
    )
    op.create_index(
        "ix_payouts_open",
        "payouts",
        ["created_at"],
        unique=False,
        postgresql_where=sa.text("state not in ('paid','returned','cancelled')"),
    )
    op.create_index(op.f("ix_payouts_organisation_id"), "payouts", ["organisation_id"], unique=False)
    op.create_table(
        "top_up_plans",
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("enabled", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("threshold_nano", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), server_default="2000", nullable=False),
        sa.Column("monthly_cap_minor", sa.BigInteger(), server_default="10000", nullable=False),
        sa.Column("low_balance_nano", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("customer", sa.String(), nullable=True),
        sa.Column("payment_method", sa.String(), nullable=True),
        sa.Column("stopped_because", sa.String(), nullable=True),
        sa.CheckConstraint("low_balance_nano >= 0", name=op.f("ck_top_up_plans_low_balance")),
        sa.CheckConstraint(
            "threshold_nano >= 0 and amount_minor > 0 and monthly_cap_minor >= amount_minor",
            name=op.f("ck_top_up_plans_plan"),
        ),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_top_up_plans_organisation_id")
        ),
        sa.PrimaryKeyConstraint("organisation_id", name=op.f("pk_top_up_plans")),
    )
    op.create_table(
        "disputes",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("payment_id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state in ('inquiry','open','won','lost','withdrawn')", name=op.f("ck_disputes_state")),
        sa.CheckConstraint("amount_minor >= 0", name=op.f("ck_disputes_amount")),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_disputes_organisation_id")),
        sa.ForeignKeyConstraint(["payment_id"], ["payments.id"], name=op.f("fk_disputes_payment_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_disputes")),
    )
    op.create_index(op.f("ix_disputes_organisation_id"), "disputes", ["organisation_id"], unique=False)
    op.create_index(op.f("ix_disputes_payment_id"), "disputes", ["payment_id"], unique=False)
    op.create_table(
        "payout_approvals",
        sa.Column("payout_id", sa.Uuid(), nullable=False),
        sa.Column("person", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["payout_id"], ["payouts.id"], name=op.f("fk_payout_approvals_payout_id")),
        sa.PrimaryKeyConstraint("payout_id", "person", name=op.f("pk_payout_approvals")),
    )
    op.create_table(
        "refunds",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("payment_id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("request_key", sa.String(), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), server_default="asked", nullable=False),
        sa.Column("refund_id", sa.String(), nullable=True),
        sa.Column("failure", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("state in ('asked','pending','succeeded','failed')", name=op.f("ck_refunds_state")),
        sa.CheckConstraint("amount_minor > 0", name=op.f("ck_refunds_amount")),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_refunds_organisation_id")),
        sa.ForeignKeyConstraint(["payment_id"], ["payments.id"], name=op.f("fk_refunds_payment_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_refunds")),
        sa.UniqueConstraint("refund_id", name=op.f("uq_refunds_refund_id")),
    )
    op.create_index(op.f("ix_refunds_organisation_id"), "refunds", ["organisation_id"], unique=False)
    op.create_index(op.f("ix_refunds_payment_id"), "refunds", ["payment_id"], unique=False)
    op.create_index(op.f("ix_refunds_request_key"), "refunds", ["request_key"], unique=False)
    op.create_table(
        "promotional_uses",
        sa.Column("receipt_id", sa.Uuid(), nullable=False),
        sa.Column("nano", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("nano > 0", name=op.f("ck_promotional_uses_nano")),
        sa.ForeignKeyConstraint(["receipt_id"], ["receipts.id"], name=op.f("fk_promotional_uses_receipt_id")),
        sa.PrimaryKeyConstraint("receipt_id", name=op.f("pk_promotional_uses")),
    )
    op.create_table(
        "take_backs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("receipt_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.Column("owner_nano", sa.BigInteger(), nullable=False),
        sa.Column("fee_nano", sa.BigInteger(), nullable=False),
        sa.Column("promotional_nano", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("journal_id", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("kind in ('refund','dispute')", name=op.f("ck_take_backs_kind")),
        sa.CheckConstraint("amount_nano > 0 and amount_nano = owner_nano + fee_nano", name=op.f("ck_take_backs_split")),
        sa.CheckConstraint("promotional_nano between 0 and amount_nano", name=op.f("ck_take_backs_promotional")),
        sa.ForeignKeyConstraint(["receipt_id"], ["receipts.id"], name=op.f("fk_take_backs_receipt_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_take_backs")),
        sa.UniqueConstraint("receipt_id", "journal_id", name=op.f("uq_take_backs_receipt_id_journal_id")),
    )
    op.execute(
        "create trigger webhook_inbox_kept before update of body, event_id on webhook_inbox"
        " for each row execute function fallow_refuse('a webhook is kept as it came')"
    )


def downgrade() -> None:
    op.drop_table("take_backs")
    op.drop_table("promotional_uses")
    op.drop_table("refunds")
    op.drop_table("payout_approvals")
    op.drop_table("disputes")
    op.drop_table("top_up_plans")
    op.drop_table("payouts")
    op.drop_table("payments")
    op.drop_table("owner_accounts")
    op.drop_table("outgoing_calls")
    op.drop_table("billing_notices")
    op.drop_table("webhook_inbox")
    op.drop_table("sandbox_objects")
    op.drop_table("reconciliations")
    op.drop_table("reconciliation_breaks")
    op.drop_table("processor_lines")
    op.drop_table("processor_identity")
    op.drop_table("payout_runs")
