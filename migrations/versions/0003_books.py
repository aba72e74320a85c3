"""Books: periods, the hash chain, checkpoints of balances, bounds of accounts, and roles that may only append."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES = (
    "ledger_checkpoints",
    "ledger_chain",
    "ledger_unsealed",
    "ledger_periods",
    "ledger_books",
    "ledger_currencies",
)
"""In the order in which they can be dropped."""
TRIGGERS = {
    "ledger_journals": ("ledger_journal_admitted", "ledger_reversal_within", "ledger_journals_queued"),
    "ledger_postings": ("ledger_posting_dated", "ledger_postings_match"),
    "ledger_accounts": ("ledger_accounts_fixed", "ledger_accounts_kept"),
    "ledger_balances": ("ledger_balances_kept",),
    "ledger_holds": ("ledger_holds_kept", "ledger_holds_in_time"),
}
"""On tables that stay."""
FUNCTIONS = (
    "ledger_journal_admitted",
    "ledger_reversal_within",
    "ledger_journals_queued",
    "ledger_posting_dated",
    "ledger_postings_match",
)
GENESIS = "'\\x" + "00" * 32 + "'::bytea"


def upgrade() -> None:
    _create_tables()
    _extend_tables()
    # As a whole and without parameters: the driver must not read `%` and `:=` as its own.
    script = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    op.get_bind().exec_driver_sql(script, execution_options={"no_parameters": True})


def _create_tables() -> None:
    op.create_table(
        "ledger_currencies",
        sa.Column("code", sa.String(length=3), nullable=False),
        sa.Column("minor_places", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("minor_places between 0 and 9", name=op.f("ck_ledger_currencies_minor_places")),
        sa.PrimaryKeyConstraint("code", name=op.f("pk_ledger_currencies")),
    )
    op.create_table(
        "ledger_books",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("code", sa.String(), nullable=False),
        sa.Column("closed_through", sa.DateTime(timezone=True), nullable=True),
        sa.Column("closing_through", sa.DateTime(timezone=True), nullable=True),
        sa.Column("sealed_sequence", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("sealed_sha256", sa.LargeBinary(), server_default=sa.text(GENESIS), nullable=False),
        sa.Column("fingerprints_after_id", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("id between 1 and 2147483647", name=op.f("ck_ledger_books_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_books")),
        sa.UniqueConstraint("code", name=op.f("uq_ledger_books_code")),
    )
    op.create_table(
        "ledger_periods",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("book_id", sa.BigInteger(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(), server_default="open", nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("chain_sequence", sa.BigInteger(), nullable=True),
        sa.Column("chain_sha256", sa.LargeBinary(), nullable=True),
        sa.Column("journals", sa.BigInteger(), nullable=True),
        sa.Column("postings", sa.BigInteger(), nullable=True),
        sa.Column("snapshot", postgresql.JSONB(), nullable=True),
        sa.Column("snapshot_sha256", sa.LargeBinary(), nullable=True),
        sa.CheckConstraint("state in ('open','closing','closed')", name=op.f("ck_ledger_periods_state")),
        sa.CheckConstraint("starts_at < ends_at", name=op.f("ck_ledger_periods_order")),
        sa.CheckConstraint(
            "(state = 'closed') = (closed_at is not null) and num_nulls(closed_at, chain_sequence, chain_sha256,"
            " journals, postings, snapshot, snapshot_sha256) in (0, 7)",
            name=op.f("ck_ledger_periods_sealed"),
        ),
        postgresql.ExcludeConstraint(
            (sa.text("int8range(book_id, book_id, '[]')"), "&&"),
            (sa.text("tstzrange(starts_at, ends_at)"), "&&"),
            using="gist",
            name=op.f("ex_ledger_periods_overlap"),
        ),
        sa.ForeignKeyConstraint(["book_id"], ["ledger_books.id"], name=op.f("fk_ledger_periods_book_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_periods")),
    )
    op.create_table(
        "ledger_unsealed",
        sa.Column("journal_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("book_id", sa.BigInteger(), nullable=False),
        sa.Column("refused_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("journal_id", name=op.f("pk_ledger_unsealed")),
    )
    op.create_table(
        "ledger_chain",
        sa.Column("book_id", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("journal_id", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.LargeBinary(), nullable=False),
        sa.Column("sealed_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["book_id"], ["ledger_books.id"], name=op.f("fk_ledger_chain_book_id")),
        sa.ForeignKeyConstraint(["journal_id"], ["ledger_journals.id"], name=op.f("fk_ledger_chain_journal_id")),
        sa.PrimaryKeyConstraint("book_id", "sequence", name=op.f("pk_ledger_chain")),
        sa.UniqueConstraint("journal_id", name=op.f("uq_ledger_chain_journal_id")),
    )
    op.create_table(
        "ledger_checkpoints",
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column("span_s", sa.BigInteger(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("effective_debit_nano", sa.BigInteger(), nullable=False),
        sa.Column("effective_credit_nano", sa.BigInteger(), nullable=False),
        sa.Column("recorded_debit_nano", sa.BigInteger(), nullable=False),
        sa.Column("recorded_credit_nano", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("span_s in (60, 86400)", name=op.f("ck_ledger_checkpoints_span")),
        sa.ForeignKeyConstraint(["account_id"], ["ledger_accounts.id"], name=op.f("fk_ledger_checkpoints_account_id")),
        sa.PrimaryKeyConstraint("account_id", "span_s", "starts_at", name=op.f("pk_ledger_checkpoints")),
    )


def _extend_tables() -> None:
    # Constants as defaults: none of these rewrites a table.
    op.add_column("ledger_accounts", sa.Column("book_id", sa.BigInteger(), server_default="1", nullable=False))
    op.add_column("ledger_balances", sa.Column("limit_nano", sa.BigInteger(), nullable=True))
    op.create_check_constraint(
        op.f("ck_ledger_balances_limit"), "ledger_balances", "limit_nano is null or posted_nano <= limit_nano"
    )
    op.add_column("ledger_journals", sa.Column("book_id", sa.BigInteger(), server_default="1", nullable=False))
    op.add_column("ledger_journals", sa.Column("dated", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("ledger_journals", sa.Column("captures_sha256", sa.LargeBinary(), nullable=True))
    op.add_column("ledger_journals", sa.Column("corrects_period_id", sa.BigInteger(), nullable=True))
    op.add_column(
        "ledger_journals", sa.Column("closing_entry", sa.Boolean(), server_default=sa.false(), nullable=False)
    )
    op.create_foreign_key(
        op.f("fk_ledger_journals_corrects_period_id"),
        "ledger_journals",
        "ledger_periods",
        ["corrects_period_id"],
        ["id"],
    )
    op.drop_constraint(op.f("uq_ledger_journals_reverses_id"), "ledger_journals")
    op.create_index(
        "ix_ledger_journals_reverses_id",
        "ledger_journals",
        ["reverses_id"],
        postgresql_where=sa.text("reverses_id is not null"),
    )
    op.add_column("ledger_postings", sa.Column("effective_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("ledger_postings", sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=True))
    op.drop_index("ix_ledger_postings_account_id_id", "ledger_postings")
    op.create_index(
        "ix_ledger_postings_account_id_effective_at",
        "ledger_postings",
        ["account_id", "effective_at"],
        postgresql_include=["amount_nano"],
    )
    op.create_index(
        "ix_ledger_postings_account_id_recorded_at",
        "ledger_postings",
        ["account_id", "recorded_at"],
        postgresql_include=["amount_nano"],
    )


def downgrade() -> None:
    for table, triggers in TRIGGERS.items():
        for trigger in triggers:
            op.execute(f"drop trigger {trigger} on {table}")
    for function in FUNCTIONS:
        op.execute(f"drop function {function}()")
    op.drop_index("ix_ledger_postings_account_id_recorded_at", "ledger_postings")
    op.drop_index("ix_ledger_postings_account_id_effective_at", "ledger_postings")
    op.create_index("ix_ledger_postings_account_id_id", "ledger_postings", ["account_id", "id"])
    op.drop_column("ledger_postings", "recorded_at")
    op.drop_column("ledger_postings", "effective_at")
    op.drop_index("ix_ledger_journals_reverses_id", "ledger_journals")
    op.create_unique_constraint(op.f("uq_ledger_journals_reverses_id"), "ledger_journals", ["reverses_id"])
    op.drop_constraint(op.f("fk_ledger_journals_corrects_period_id"), "ledger_journals")
    for column in ("closing_entry", "corrects_period_id", "captures_sha256", "dated", "book_id"):
        op.drop_column("ledger_journals", column)
    op.drop_column("ledger_balances", "limit_nano")
    op.drop_constraint(op.f("fk_ledger_accounts_currency"), "ledger_accounts")
    op.drop_column("ledger_accounts", "book_id")
    for table in TABLES:
        op.drop_table(table)
