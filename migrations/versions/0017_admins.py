"""The role `admin`: keys that manage their own organisation's members and keys."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

TABLES = ("api_keys", "members")
BEFORE = "roles <@ array['renter','owner','finance','operator']::varchar[]"
AFTER = "roles <@ array['renter','owner','finance','operator','admin']::varchar[]"


def upgrade() -> None:
    _check(AFTER)


def downgrade() -> None:
    for table in TABLES:
        op.execute(f"update {table} set roles = array_remove(roles, 'admin') where 'admin' = any(roles)")
    _check(BEFORE)


def _check(rule: str) -> None:
    for table in TABLES:
        op.drop_constraint(op.f(f"ck_{table}_roles"), table, type_="check")
        op.create_check_constraint(op.f(f"ck_{table}_roles"), table, rule)
