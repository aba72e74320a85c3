"""Idempotency keys: the first request that an organisation sent with each, and its answer where no job's row has it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "idempotent_requests",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("holder", sa.Uuid(), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("content_type", sa.String(), nullable=True),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_idempotent_requests_organisation_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_idempotent_requests")),
        sa.UniqueConstraint("organisation_id", "key", name=op.f("uq_idempotent_requests_organisation_id_key")),
    )
    op.create_index(
        "ix_idempotent_requests_ended_at",
        "idempotent_requests",
        ["ended_at"],
        postgresql_where=sa.text("ended_at is not null"),
    )
    op.create_index(
        "ix_idempotent_requests_lease_expires_at",
        "idempotent_requests",
        ["lease_expires_at"],
        postgresql_where=sa.text("ended_at is null"),
    )


def downgrade() -> None:
    op.drop_table("idempotent_requests")
