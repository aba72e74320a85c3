"""Keys with budgets, token limits, model lists, networks and routing; the members of organisations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008b"
down_revision = "0008"
branch_labels = None
depends_on = None

PERIOD_START = """
-- When the period began that a moment lies in, in UTC. A budget that never resets began before everything.
create function key_period_start(period text, at_moment timestamptz) returns timestamptz language sql immutable as $$
  select case when period = 'total' then '-infinity'::timestamptz else date_trunc(period, at_moment, 'UTC') end
$$
"""

LOCK = "hot_lock(hot_admit[],hot_lease[],hot_checkpoint[],hot_close[])"
ADMIT = "admit_batch(hot_admit[])"
CLOSE = "close_batch(hot_close[],boolean)"
# Budgets are judged and written beside the balance, by the same functions: a row more to lock, between balances and
# attempts, for keys that have one. (function, what it says, what it says from now on), whatever else changed it.
CHANGES = (
    (
        LOCK,
        """  if cardinality(checkpoints) > 0 or cardinality(closes) > 0 then
""",
        """  if cardinality(admits) > 0 or cardinality(closes) > 0 then
    perform 1 from key_budgets k
      where k.key_id in (
        select a.key_id from unnest(admits) a
        union
        select j.key_id from jobs j join unnest(closes) c on c.job_id = j.id
          where c.job_state in ('delivered', 'voided'))
      order by k.key_id for no key update;
  end if;
  if cardinality(checkpoints) > 0 or cardinality(closes) > 0 then
""",
    ),
    (
        ADMIT,
        """  left_nano bigint;
  r record;
""",
        """  left_nano bigint;
  by_budget boolean[] := array_fill(false, array[total]);
  -- What this batch has taken of each key's budget, by key.
  taken jsonb := '{}';
  budget_nano bigint;
  r record;
""",
    ),
    (
        ADMIT,
        """  for r in
    select a.ordinality""",
        """  -- A new period begins with its first admission.
  update key_budgets k set spent_nano = 0, period_started_at = key_period_start(k.period, at_now)
    where k.key_id in (select a.key_id from unnest(admits) a)
      and k.period_started_at < key_period_start(k.period, at_now);

  for r in
    select a.ordinality""",
    ),
    (
        ADMIT,
        """h.id is not null as repeated,
""",
        """h.id is not null as repeated,
           a.key_id, k.limit_nano - k.spent_nano - k.held_nano as budget_nano,
""",
    ),
    (
        ADMIT,
        """    left join ledger_holds h on h.id = a.job_id
    order by""",
        """    left join ledger_holds h on h.id = a.job_id
    left join key_budgets k on k.key_id = a.key_id
    order by""",
    ),
    (
        ADMIT,
        """    if r.repeated then
""",
        """    budget_nano := r.budget_nano - coalesce((taken ->> r.key_id::text)::bigint, 0);
    if r.repeated then
""",
    ),
    (
        ADMIT,
        """    elsif left_nano is not null and r.hold_nano <= left_nano then
      left_nano := left_nano - r.hold_nano;
""",
        """    elsif r.hold_nano > budget_nano then
      by_budget[r.place] := budget_nano < coalesce(left_nano, 0);
    elsif left_nano is not null and r.hold_nano <= left_nano then
      left_nano := left_nano - r.hold_nano;
      if budget_nano is not null then
        taken := taken || jsonb_build_object(r.key_id::text, r.budget_nano - budget_nano + r.hold_nano);
        budget_nano := budget_nano - r.hold_nano;
      end if;
""",
    ),
    (
        ADMIT,
        "available[r.place] := coalesce(left_nano, 0);",
        "available[r.place] := least(coalesce(left_nano, 0), budget_nano);",
    ),
    (
        ADMIT,
        "  insert into jobs (id,",
        """  update key_budgets k set held_nano = k.held_nano + s.total_nano
    from (select a.key_id, sum(a.hold_nano)::bigint as total_nano
          from unnest(admits) with ordinality a where written[a.ordinality] group by a.key_id) s
    where k.key_id = s.key_id and s.total_nano <> 0;
  insert into jobs (id,""",
    ),
    (ADMIT, "json_build_array(t.ok, t.available)", "json_build_array(t.ok, t.available, t.by_budget)"),
    (
        ADMIT,
        "from unnest(ok, available) with ordinality as t (ok, available, place)",
        "from unnest(ok, available, by_budget) with ordinality as t (ok, available, by_budget, place)",
    ),
    (
        CLOSE,
        "  -- A charge stays held until",
        """  -- A charge counts in the period in which it is known; what was held ends, whatever became of the hold.
  update key_budgets k
    set held_nano = greatest(k.held_nano - s.hold_nano, 0),
        spent_nano = case when k.period_started_at < key_period_start(k.period, at_now) then 0 else k.spent_nano end
                     + s.charge_nano,
        period_started_at = greatest(k.period_started_at, key_period_start(k.period, at_now))
    from (select j.key_id, sum(j.hold_nano)::bigint as hold_nano,
                 sum(case c.job_state when 'delivered' then (c.receipt).charge_nano else 0 end)::bigint as charge_nano
          from unnest(closes) with ordinality c
          join jobs j on j.id = c.job_id
          where written[c.ordinality] and c.job_state in ('delivered', 'voided')
          group by j.key_id) s
    where k.key_id = s.key_id;
  -- A charge stays held until""",
    ),
)
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
    op.create_table(
        "members",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("email", sa.String(), nullable=False),
        sa.Column("roles", postgresql.ARRAY(sa.String()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "roles <@ array['renter','owner','finance','operator']::varchar[]", name=op.f("ck_members_roles")
        ),
        sa.CheckConstraint("email = lower(email)", name=op.f("ck_members_email")),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_members_organisation_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_members")),
        sa.UniqueConstraint("organisation_id", "email", name=op.f("uq_members_organisation_id_email")),
    )
    op.create_table(
        "key_budgets",
        sa.Column("key_id", sa.Uuid(), nullable=False),
        sa.Column("limit_nano", sa.BigInteger(), nullable=False),
        sa.Column("period", sa.String(), nullable=False),
        sa.Column("period_started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("spent_nano", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("held_nano", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("period in ('total','day','week','month')", name=op.f("ck_key_budgets_period")),
        sa.CheckConstraint(
            "limit_nano >= 0 and spent_nano >= 0 and held_nano >= 0", name=op.f("ck_key_budgets_not_negative")
        ),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_key_budgets_key_id")),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_key_budgets")),
    )
    op.add_column("api_keys", sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True))
    op.add_column("api_keys", sa.Column("models", postgresql.ARRAY(sa.String()), nullable=True))
    op.add_column("api_keys", sa.Column("networks", postgresql.ARRAY(sa.String()), nullable=True))
    op.add_column("api_keys", sa.Column("routing", postgresql.JSONB(), nullable=True))
    op.add_column("api_keys", sa.Column("member_id", sa.Uuid(), nullable=True))
    op.create_foreign_key(
        op.f("fk_api_keys_member_id"), "api_keys", "members", ["member_id"], ["id"], ondelete="SET NULL"
    )
    op.create_index("ix_api_keys_member_id", "api_keys", ["member_id"])
    op.execute(PERIOD_START)
    for function, old, new in CHANGES:
        _exchange(function, old, new)


def downgrade() -> None:
    for function, old, new in reversed(CHANGES):
        _exchange(function, new, old)
    op.execute("drop function key_period_start")
    for column in ("member_id", "routing", "networks", "models", "tokens_per_minute"):
        op.drop_column("api_keys", column)
    op.drop_table("key_budgets")
    op.drop_table("members")


def _exchange(function: str, old: str, new: str) -> None:
    op.execute(sa.text(_EXCHANGE.format(function=function, old=old, new=new).replace(":", "\\:")))
