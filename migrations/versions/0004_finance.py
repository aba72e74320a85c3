"""What statements need beside receipts: declared cost of nodes, demand that found no room, conversations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "node_costs",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("valid_from", sa.DateTime(timezone=True), nullable=False),
        sa.Column("capital_nano", sa.BigInteger(), nullable=True),
        sa.Column("residual_nano", sa.BigInteger(), nullable=True),
        sa.Column("life_months", sa.BigInteger(), nullable=True),
        sa.Column("depreciation", sa.String(), nullable=True),
        sa.Column("in_service_on", sa.Date(), nullable=True),
        sa.Column("energy_nano_usd_per_kwh", sa.BigInteger(), nullable=True),
        sa.Column("pue_milli", sa.BigInteger(), nullable=True),
        sa.Column("other_nano_usd_per_hour", sa.BigInteger(), nullable=True),
        sa.Column("declared_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "capital_nano > 0 and residual_nano >= 0 and residual_nano <= capital_nano and life_months > 0",
            name=op.f("ck_node_costs_capital"),
        ),
        sa.CheckConstraint(
            "num_nulls(capital_nano, residual_nano, life_months, depreciation, in_service_on) in (0, 5)",
            name=op.f("ck_node_costs_whole"),
        ),
        sa.CheckConstraint("depreciation in ('straight_line','declining')", name=op.f("ck_node_costs_depreciation")),
        sa.CheckConstraint(
            "energy_nano_usd_per_kwh >= 0 and pue_milli >= 1000 and other_nano_usd_per_hour >= 0",
            name=op.f("ck_node_costs_costs"),
        ),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_node_costs_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_node_costs")),
    )
    op.create_index("ix_node_costs_node_id_valid_from", "node_costs", ["node_id", "valid_from"])
    op.execute(
        "create trigger node_costs_append_only before update or delete on node_costs"
        " for each row execute function fallow_refuse('a declaration is kept; declare anew')"
    )
    op.create_index("ix_receipts_at", "receipts", ["at"], postgresql_using="brin")
    op.create_table(
        "refused_minutes",
        sa.Column("minute", sa.DateTime(timezone=True), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("variant_id", sa.Uuid(), nullable=False),
        sa.Column("filter", sa.String(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("highest_bid_nano_usd_per_mtok", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("requests > 0", name=op.f("ck_refused_minutes_requests")),
        sa.ForeignKeyConstraint(["variant_id"], ["variants.id"], name=op.f("fk_refused_minutes_variant_id")),
        sa.PrimaryKeyConstraint("minute", "node_id", "variant_id", "filter", name=op.f("pk_refused_minutes")),
    )
    op.create_table(
        "job_conversations",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("conversation", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_conversations_job_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_job_conversations")),
    )


def downgrade() -> None:
    op.drop_index("ix_receipts_at", "receipts")
    op.drop_table("job_conversations")
    op.drop_table("refused_minutes")
    op.drop_table("node_costs")
