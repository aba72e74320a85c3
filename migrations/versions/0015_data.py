"""What owners declare of data that passes through their nodes, and what of it the operator attests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("data_terms", postgresql.JSONB()))
    op.add_column("nodes", sa.Column("attested_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    op.drop_column("nodes", "attested_at")
    op.drop_column("nodes", "data_terms")
