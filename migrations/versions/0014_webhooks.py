"""Webhooks: endpoints, and what is to be told to them, written by the database when a job or a batch ends."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

ADMIT = "admit_batch(hot_admit[])"
CHANGES = (
    (ADMIT, "price_basis_points, client_until)", "price_basis_points, client_until, webhook_url)"),
    (
        ADMIT,
        "make_interval(secs => a.client_lease_s)\n",
        "make_interval(secs => a.client_lease_s),\n           a.webhook_url\n",
    ),
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

# The conditions stand in `when`: the end of a chat never enters plpgsql.
TELL = """
create function webhook_tell(organisation uuid, happened text, subject uuid, own_url text) returns void
language plpgsql as $$
begin
  insert into webhook_deliveries (endpoint_id, organisation_id, event, subject_id, url)
    select e.id, organisation, happened, subject, case when e.url is null then own_url end
    from webhook_endpoints e
    where e.organisation_id = organisation and e.disabled_at is null
      and case when e.url is null then own_url is not null else happened = any (e.events) end
    on conflict do nothing;
  if found then
    insert into outbox (task) values ('webhooks.send');
  end if;
end $$;

create function webhook_job_ended() returns trigger language plpgsql as $$
begin
  perform webhook_tell(new.organisation_id, 'job.' || case
      when new.outcome = 'complete' then 'completed'
      when new.outcome in ('cancelled', 'cancelled_early') then 'cancelled'
      when new.outcome in ('deadline', 'expired') then 'expired'
      else 'failed' end, new.id, new.webhook_url);
  return null;
end $$;

create trigger jobs_webhook after update of outcome on jobs for each row
  when (new.endpoint = '/v1/jobs' and old.outcome is null and new.outcome is not null)
  execute function webhook_job_ended();

create function webhook_batch_ended() returns trigger language plpgsql as $$
begin
  perform webhook_tell(new.organisation_id, 'batch.' || new.status, new.id, null);
  return null;
end $$;

create trigger batches_webhook after update of status on batches for each row
  when (new.status <> old.status and new.status in ('completed', 'failed', 'expired', 'cancelled'))
  execute function webhook_batch_ended();
"""


def upgrade() -> None:
    op.add_column("jobs", sa.Column("webhook_url", sa.String(), nullable=True))
    op.execute("alter type hot_admit add attribute webhook_url text")
    for function, old, new in CHANGES:
        _exchange(function, old, new)
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("url", sa.String(), nullable=True),
        sa.Column("events", postgresql.ARRAY(sa.String()), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("previous_secret", sa.LargeBinary(), nullable=True),
        sa.Column("previous_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failing_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("disabled_reason", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_webhook_endpoints_organisation_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index("ix_webhook_endpoints_organisation_id", "webhook_endpoints", ["organisation_id"])
    op.create_index(
        "uq_webhook_endpoints_for_jobs",
        "webhook_endpoints",
        ["organisation_id"],
        unique=True,
        postgresql_where=sa.text("url is null"),
    )
    _deliveries()
    op.execute(TELL)


def _deliveries() -> None:
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("endpoint_id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("subject_id", sa.Uuid(), nullable=False),
        sa.Column("url", sa.String(), nullable=True),
        sa.Column("state", sa.String(), server_default="pending", nullable=False),
        sa.Column("tries", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("next_try_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("last_status", sa.BigInteger(), nullable=True),
        sa.Column("last_error", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state in ('pending','delivered','failed')", name=op.f("ck_webhook_deliveries_state")),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoints.id"],
            name=op.f("fk_webhook_deliveries_endpoint_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
        sa.UniqueConstraint(
            "endpoint_id", "event", "subject_id", name=op.f("uq_webhook_deliveries_endpoint_id_event_subject_id")
        ),
    )
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["next_try_at"],
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index("ix_webhook_deliveries_endpoint_id_created_at", "webhook_deliveries", ["endpoint_id", "created_at"])
    op.create_index(
        "ix_webhook_deliveries_ended_at",
        "webhook_deliveries",
        ["ended_at"],
        postgresql_where=sa.text("ended_at is not null"),
    )


def downgrade() -> None:
    op.execute("drop trigger batches_webhook on batches; drop trigger jobs_webhook on jobs")
    for function in ("webhook_batch_ended()", "webhook_job_ended()", "webhook_tell(uuid,text,uuid,text)"):
        op.execute(f"drop function {function}")
    op.drop_table("webhook_deliveries")
    op.drop_table("webhook_endpoints")
    for function, old, new in reversed(CHANGES):
        _exchange(function, new, old)
    op.execute("alter type hot_admit drop attribute webhook_url")
    op.drop_column("jobs", "webhook_url")


def _exchange(function: str, old: str, new: str) -> None:
    script = _EXCHANGE.format(function=function, old=old, new=new)
    op.get_bind().exec_driver_sql(script, execution_options={"no_parameters": True})
