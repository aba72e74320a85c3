"""When nodes were their owners' alone, and how busy and how capped devices were: what explains an idle hour."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "held_intervals",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_held_intervals_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_held_intervals")),
    )
    op.create_index(
        "ix_held_intervals_open",
        "held_intervals",
        ["node_id"],
        unique=True,
        postgresql_where=sa.text("ended_at is null"),
    )
    op.create_index("ix_held_intervals_node_id_started_at", "held_intervals", ["node_id", "started_at"])
    op.add_column("energy_samples", sa.Column("utilisation_pct", sa.Double()))
    op.add_column("energy_samples", sa.Column("capped_ms", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("energy_samples", "capped_ms")
    op.drop_column("energy_samples", "utilisation_pct")
    op.drop_table("held_intervals")
