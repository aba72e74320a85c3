"""Which trace a job belongs to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_traces",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("traceparent", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_job_traces")),
    )
    op.create_index("ix_job_traces_at", "job_traces", ["at"])


def downgrade() -> None:
    op.drop_table("job_traces")
