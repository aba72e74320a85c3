"""Standing of nodes with its reasons, appeals and amnesties; where a node stands."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("region", sa.String(), nullable=False, server_default=""))
    op.create_table(
        "node_standings",
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("standing", sa.String(), nullable=False, server_default="probation"),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("completed", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("faults", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("forgiven", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("judged_at", sa.DateTime(timezone=True)),
        sa.CheckConstraint("standing in ('probation','proven','barred')", name=op.f("ck_node_standings_standing")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_node_standings_node_id")),
        sa.PrimaryKeyConstraint("node_id", name=op.f("pk_node_standings")),
    )
    op.create_table(
        "standing_changes",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("standing", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_standing_changes_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_standing_changes")),
    )
    op.create_index("ix_standing_changes_node_id_at", "standing_changes", ["node_id", "at"])
    op.create_table(
        "standing_appeals",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("body", sa.String(), nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True)),
        sa.Column("granted", sa.Boolean()),
        sa.Column("answer", sa.String(), nullable=False, server_default=""),
        sa.CheckConstraint("(decided_at is null) = (granted is null)", name=op.f("ck_standing_appeals_decided")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_standing_appeals_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_standing_appeals")),
    )
    op.create_index(
        "ix_standing_appeals_open",
        "standing_appeals",
        ["node_id"],
        unique=True,
        postgresql_where=sa.text("decided_at is null"),
    )
    op.create_table(
        "standing_amnesties",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.CheckConstraint("ended_at > started_at", name=op.f("ck_standing_amnesties_order")),
        sa.UniqueConstraint("started_at", "ended_at", name=op.f("uq_standing_amnesties_started_at_ended_at")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_standing_amnesties")),
    )
    # Whoever worked before there was a standing has proven itself, or would have been found out.
    op.execute("insert into node_standings (node_id, standing, since) select id, 'proven', enrolled_at from nodes")


def downgrade() -> None:
    for table in ("standing_amnesties", "standing_appeals", "standing_changes", "node_standings"):
        op.drop_table(table)
    op.drop_column("nodes", "region")
