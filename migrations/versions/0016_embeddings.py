"""What a variant is for: chat or embeddings, and which vectors. One file may serve both, as two variants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

EMBEDDING = "num_nonnulls(dimensions, pooling, weights_sha256) = case task when 'embed' then 3 else 0 end"


def upgrade() -> None:
    op.add_column("variants", sa.Column("task", sa.String(), server_default="chat", nullable=False))
    op.add_column("variants", sa.Column("weights_sha256", sa.String(), nullable=True))
    op.add_column("variants", sa.Column("dimensions", sa.BigInteger(), nullable=True))
    op.add_column("variants", sa.Column("pooling", sa.String(), nullable=True))
    op.create_check_constraint(op.f("ck_variants_task"), "variants", "task in ('chat','embed')")
    op.create_check_constraint(op.f("ck_variants_embedding"), "variants", EMBEDDING)


def downgrade() -> None:
    op.drop_constraint(op.f("ck_variants_embedding"), "variants")
    op.drop_constraint(op.f("ck_variants_task"), "variants")
    for name in ("pooling", "dimensions", "weights_sha256", "task"):
        op.drop_column("variants", name)
