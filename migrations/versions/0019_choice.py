"""Queued work keeps to its renter's choice of providers: a job's own, and a batch's key's default."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

ADMIT = "admit_batch(hot_admit[])"
CHANGES = (
    (ADMIT, "client_until, webhook_url)", "client_until, webhook_url, choice)"),
    (ADMIT, "           a.webhook_url\n", "           a.webhook_url,\n           a.choice\n"),
)
"""(function, what it says, what it says from now on), applied to the function as it is, whatever else changed it."""
_EXCHANGE = """
do $exchange$
declare
  said constant text := pg_get_functiondef('{function}'::regprocedure);
begin
  if position($old${old}$old$ in said) = 0 then
    raise exception 'the function {function} does not say what this migration expects';
  end if;
  execute replace(said, $old${old}$old$, $new${new}$new$);
end $exchange$;
"""


def upgrade() -> None:
    op.add_column("jobs", sa.Column("choice", postgresql.JSONB(), nullable=True))
    op.add_column("batches", sa.Column("routing", postgresql.JSONB(), nullable=True))
    op.execute("alter type hot_admit add attribute choice jsonb")
    for function, old, new in CHANGES:
        _exchange(function, old, new)


def downgrade() -> None:
    for function, old, new in reversed(CHANGES):
        _exchange(function, new, old)
    op.execute("alter type hot_admit drop attribute choice")
    op.drop_column("batches", "routing")
    op.drop_column("jobs", "choice")


def _exchange(function: str, old: str, new: str) -> None:
    script = _EXCHANGE.format(function=function, old=old, new=new)
    op.get_bind().exec_driver_sql(script, execution_options={"no_parameters": True})
