"""Flex requests: jobs of the queue whose client waits at a gateway, which keeps saying so."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

ADMIT = "admit_batch(hot_admit[])"
REFUSAL = "hot_close_refusal(hot_close,jobs,attempts,boolean,ledger_holds)"
CHANGES = (
    (ADMIT, "is null) <> (a.kind = 'queued')", "is null) <> (a.kind <> 'interactive')"),
    (ADMIT, "written[a.ordinality] and a.kind = 'queued')", "written[a.ordinality] and a.kind <> 'interactive')"),
    (ADMIT, "endpoint, price_basis_points)", "endpoint, price_basis_points, client_until)"),
    (
        ADMIT,
        "coalesce(a.price_basis_points, 10000)\n",
        "coalesce(a.price_basis_points, 10000),\n           at_now + make_interval(secs => a.client_lease_s)\n",
    ),
    (REFUSAL, "j.state = 'running' and j.kind = 'queued')", "j.state = 'running' and j.kind <> 'interactive')"),
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
    op.add_column("jobs", sa.Column("client_until", sa.DateTime(timezone=True), nullable=True))
    _allow_kinds("'interactive','queued','flex'")
    op.create_index(
        "ix_jobs_client_until",
        "jobs",
        ["client_until"],
        postgresql_where=sa.text("state = 'queued' and client_until is not null"),
    )
    op.execute("alter type hot_admit add attribute client_lease_s double precision")
    for function, old, new in CHANGES:
        _exchange(function, old, new)


def downgrade() -> None:
    for function, old, new in reversed(CHANGES):
        _exchange(function, new, old)
    op.execute("alter type hot_admit drop attribute client_lease_s")
    op.drop_index("ix_jobs_client_until", "jobs")
    # What was flex was never stored with its text: to an older program it is a queued job that has ended.
    op.execute("update jobs set kind = 'queued' where kind = 'flex'")
    _allow_kinds("'interactive','queued'")
    op.drop_column("jobs", "client_until")


def _allow_kinds(kinds: str) -> None:
    op.drop_constraint(op.f("ck_jobs_kind"), "jobs", type_="check")
    op.create_check_constraint(op.f("ck_jobs_kind"), "jobs", f"kind in ({kinds})")


def _exchange(function: str, old: str, new: str) -> None:
    script = _EXCHANGE.format(function=function, old=old, new=new)
    op.get_bind().exec_driver_sql(script, execution_options={"no_parameters": True})
