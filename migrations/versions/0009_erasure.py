"""Finding the jobs whose texts are due to be erased, without reading the others."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008b"
branch_labels = None
depends_on = None

UNERASED = "ended_at is not null and (body is not null or result is not null)"


def upgrade() -> None:
    op.create_index("ix_jobs_unerased", "jobs", ["ended_at"], postgresql_where=sa.text(UNERASED))


def downgrade() -> None:
    op.drop_index("ix_jobs_unerased", "jobs")
