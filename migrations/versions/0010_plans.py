"""What could run on nodes, and the planner's advice to them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "node_abilities",
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("heard_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("body", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_node_abilities_node_id")),
        sa.PrimaryKeyConstraint("node_id", name=op.f("pk_node_abilities")),
    )
    op.create_table(
        "plan_steps",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("plan_id", sa.Uuid(), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("device_id", sa.String(), nullable=False),
        sa.Column("variant_id", sa.Uuid(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False, server_default="planned"),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("gain_nano", sa.BigInteger()),
        sa.Column("needed_bytes", sa.BigInteger()),
        sa.Column("code", sa.String(), nullable=False, server_default=""),
        sa.Column("message", sa.String(), nullable=False, server_default=""),
        sa.Column("planned_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("sent_at", sa.DateTime(timezone=True)),
        sa.Column("answered_at", sa.DateTime(timezone=True)),
        sa.CheckConstraint("action in ('load','evict')", name=op.f("ck_plan_steps_action")),
        sa.CheckConstraint(
            "state in ('planned','sent','accepted','refused','expired')", name=op.f("ck_plan_steps_state")
        ),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_plan_steps_node_id")),
        sa.ForeignKeyConstraint(["variant_id"], ["variants.id"], name=op.f("fk_plan_steps_variant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plan_steps")),
    )
    op.create_index(
        "ix_plan_steps_open", "plan_steps", ["node_id"], postgresql_where=sa.text("state in ('planned','sent')")
    )
    op.create_index("ix_plan_steps_planned_at", "plan_steps", ["planned_at"])


def downgrade() -> None:
    op.drop_table("plan_steps")
    op.drop_table("node_abilities")
