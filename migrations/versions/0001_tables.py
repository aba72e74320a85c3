"""Every table, and the guards that no program gets around: an append-only ledger, final states that are final."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = (
    "offered_intervals",
    "attempts",
    "receipts",
    "offers",
    "prices",
    "jobs",
    "enrolment_tokens",
    "energy_samples",
    "devices",
    "variants",
    "nodes",
    "api_keys",
    "outcomes",
    "outbox",
    "organisations",
    "models",
    "ledger_postings",
    "ledger_holds",
    "ledger_balances",
    "ledger_journals",
    "ledger_accounts",
)
"""In the order in which they can be dropped; their indexes and triggers go with them."""
FUNCTIONS = ("fallow_refuse", "ledger_journal_balanced", "ledger_journal_recorded", "ledger_postings_join")

REFUSE = """
create function fallow_refuse() returns trigger language plpgsql as $$
begin
  raise exception using
    errcode = 'integrity_constraint_violation', constraint = tg_name, table = tg_table_name,
    message = format('%s on %s refused: %s', tg_op, tg_table_name, tg_argv[0]);
end $$
"""

# A journal is judged once, at commit, however many lines it has: a trigger per line would make batches quadratic.
JOURNALS = """
create function ledger_journal_balanced() returns trigger language plpgsql as $$
declare
  lines bigint;
  wrong text;
begin
  select count(*) into lines from ledger_postings where journal_id = new.id;
  select string_agg(format('%s %s', total, currency), ', ') into wrong
    from (select currency, sum(amount_nano) as total from ledger_postings
          where journal_id = new.id group by currency having sum(amount_nano) <> 0) off;
  if lines < 2 or wrong is not null then
    raise exception using
      errcode = 'integrity_constraint_violation', constraint = tg_name, table = tg_table_name,
      message = format('journal %s does not balance: %s lines, off by %s', new.id, lines, coalesce(wrong, 'nothing'));
  end if;
  return null;
end $$;

create constraint trigger ledger_journal_balanced after insert on ledger_journals
  deferrable initially deferred for each row execute function ledger_journal_balanced();

create function ledger_journal_recorded() returns trigger language plpgsql as $$
begin
  new.recorded_at := now();
  return new;
end $$;

create trigger ledger_journal_recorded before insert on ledger_journals
  for each row execute function ledger_journal_recorded();

create trigger ledger_journals_append_only before update or delete on ledger_journals
  for each row execute function fallow_refuse('journals are append-only; post a reversal');
create trigger ledger_journals_no_truncate before truncate on ledger_journals
  for each statement execute function fallow_refuse('journals are append-only; post a reversal');
"""

# Lines join a journal only in the transaction that wrote it (recorded_at is that transaction's start), so that the
# check at commit sees all of them.
POSTINGS = """
create function ledger_postings_join() returns trigger language plpgsql as $$
begin
  if exists (select from added p join ledger_journals j on j.id = p.journal_id where j.recorded_at <> now()) then
    raise exception using
      errcode = 'integrity_constraint_violation', constraint = tg_name, table = tg_table_name,
      message = 'a journal takes no further lines once it is committed';
  end if;
  if exists (select from added p join ledger_accounts a on a.id = p.account_id where a.status = 'closed') then
    raise exception using
      errcode = 'integrity_constraint_violation', constraint = tg_name, table = tg_table_name,
      message = 'a closed account takes no postings';
  end if;
  return null;
end $$;

create trigger ledger_postings_join after insert on ledger_postings
  referencing new table as added for each statement execute function ledger_postings_join();

create trigger ledger_postings_append_only before update or delete on ledger_postings
  for each row execute function fallow_refuse('postings are append-only; post a reversal');
create trigger ledger_postings_no_truncate before truncate on ledger_postings
  for each statement execute function fallow_refuse('postings are append-only; post a reversal');
"""

# The conditions stand in `when`: a permitted update never enters plpgsql.
FINAL = """
create trigger ledger_holds_resolve_once before update on ledger_holds for each row
  when (old.state <> 'held' or new.amount_nano > old.amount_nano or new.account_id <> old.account_id)
  execute function fallow_refuse('a hold is resolved once, and only shrinks until then');

create trigger jobs_final_states before update of state on jobs for each row
  when (old.state in ('settled', 'voided') and new.state <> old.state)
  execute function fallow_refuse('settled and voided are final');

create trigger receipts_settle_once before update on receipts for each row
  when (old.journal_id is not null
        or (to_jsonb(old) - 'journal_id') is distinct from (to_jsonb(new) - 'journal_id'))
  execute function fallow_refuse('a receipt never changes; its settlement is written once');
create trigger receipts_kept before delete on receipts
  for each row execute function fallow_refuse('receipts are kept');

create trigger prices_append_only before update or delete on prices
  for each row execute function fallow_refuse('a price is a version; write a new one');
"""


def upgrade() -> None:
    op.create_table(
        "ledger_accounts",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("code", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("reference", sa.String(), nullable=True),
        sa.Column("checked", sa.Boolean(), nullable=False),
        sa.Column("status", sa.String(), server_default="open", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("kind in ('asset','liability','income','expense')", name=op.f("ck_ledger_accounts_kind")),
        sa.CheckConstraint("status in ('open','frozen','closed')", name=op.f("ck_ledger_accounts_status")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_accounts")),
        sa.UniqueConstraint("code", name=op.f("uq_ledger_accounts_code")),
        sa.UniqueConstraint("id", "currency", name=op.f("uq_ledger_accounts_id_currency")),
    )
    op.create_index(op.f("ix_ledger_accounts_reference"), "ledger_accounts", ["reference"])
    op.create_table(
        "ledger_journals",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("outside_id", sa.String(), nullable=False),
        sa.Column("body_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("effective_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("reverses_id", sa.BigInteger(), nullable=True),
        sa.Column("memo", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.ForeignKeyConstraint(["reverses_id"], ["ledger_journals.id"], name=op.f("fk_ledger_journals_reverses_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_journals")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_ledger_journals_idempotency_key")),
        sa.UniqueConstraint("reverses_id", name=op.f("uq_ledger_journals_reverses_id")),
        sa.UniqueConstraint("source", "kind", "outside_id", name=op.f("uq_ledger_journals_source_kind_outside_id")),
    )
    op.create_index("ix_ledger_journals_effective_at", "ledger_journals", ["effective_at"])
    op.create_table(
        "ledger_balances",
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column("posted_nano", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("held_nano", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("floor_nano", sa.BigInteger(), server_default="0", nullable=True),
        sa.CheckConstraint(
            "floor_nano is null or posted_nano - held_nano >= floor_nano", name=op.f("ck_ledger_balances_floor")
        ),
        sa.CheckConstraint("held_nano >= 0", name=op.f("ck_ledger_balances_held")),
        sa.ForeignKeyConstraint(["account_id"], ["ledger_accounts.id"], name=op.f("fk_ledger_balances_account_id")),
        sa.PrimaryKeyConstraint("account_id", name=op.f("pk_ledger_balances")),
    )
    op.create_table(
        "ledger_holds",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.Column("captured_nano", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.String(), server_default="held", nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("resolved_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'captured') = (captured_nano is not null)", name=op.f("ck_ledger_holds_captured")),
        sa.CheckConstraint("state in ('held','captured','released','expired')", name=op.f("ck_ledger_holds_state")),
        sa.CheckConstraint("amount_nano >= 0", name=op.f("ck_ledger_holds_amount")),
        sa.CheckConstraint("captured_nano between 0 and amount_nano", name=op.f("ck_ledger_holds_capture_within")),
        sa.ForeignKeyConstraint(["account_id"], ["ledger_accounts.id"], name=op.f("fk_ledger_holds_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_holds")),
    )
    op.create_index(op.f("ix_ledger_holds_account_id"), "ledger_holds", ["account_id"])
    op.create_index(
        "ix_ledger_holds_expires_at_held", "ledger_holds", ["expires_at"], postgresql_where=sa.text("state = 'held'")
    )
    op.create_table(
        "ledger_postings",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("journal_id", sa.BigInteger(), nullable=False),
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("amount_nano <> 0", name=op.f("ck_ledger_postings_amount")),
        sa.ForeignKeyConstraint(
            ["account_id", "currency"],
            ["ledger_accounts.id", "ledger_accounts.currency"],
            name=op.f("fk_ledger_postings_account_id_currency"),
        ),
        sa.ForeignKeyConstraint(["journal_id"], ["ledger_journals.id"], name=op.f("fk_ledger_postings_journal_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_postings")),
    )
    op.create_index("ix_ledger_postings_account_id_id", "ledger_postings", ["account_id", "id"])
    op.create_index(op.f("ix_ledger_postings_journal_id"), "ledger_postings", ["journal_id"])
    op.create_table(
        "models",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("display_name", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
    )
    op.create_table(
        "organisations",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("credit_account_id", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_organisations")),
        sa.UniqueConstraint("name", name=op.f("uq_organisations_name")),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("args", postgresql.JSONB(), server_default=sa.text("'[]'::jsonb"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.create_index("ix_outbox_created_at", "outbox", ["created_at"])
    op.create_table(
        "outcomes",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=True),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("code", sa.String(), nullable=True),
        sa.Column("job_id", sa.Uuid(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_outcomes")),
    )
    op.create_index("ix_outcomes_organisation_id_at", "outcomes", ["organisation_id", "at"])
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("shown_prefix", sa.String(), nullable=False),
        sa.Column("sha256", sa.LargeBinary(), nullable=False),
        sa.Column("roles", sa.ARRAY(sa.String()), nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=False),
        sa.Column("parallel_requests", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "roles <@ array['renter','owner','finance','operator']::varchar[]", name=op.f("ck_api_keys_roles")
        ),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_api_keys_organisation_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_keys_sha256")),
    )
    op.create_index(op.f("ix_api_keys_organisation_id"), "api_keys", ["organisation_id"])
    op.create_table(
        "nodes",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("public_key", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(), server_default="active", nullable=False),
        sa.Column("agent_version", sa.String(), nullable=False),
        sa.Column("declared_idle_mw", sa.BigInteger(), nullable=True),
        sa.Column("declared_load_mw", sa.BigInteger(), nullable=True),
        sa.Column("faults", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("enrolled_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state in ('active','suspended','retired')", name=op.f("ck_nodes_state")),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_nodes_organisation_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("public_key", name=op.f("uq_nodes_public_key")),
    )
    op.create_index(op.f("ix_nodes_organisation_id"), "nodes", ["organisation_id"])
    op.create_table(
        "variants",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("quantisation", sa.String(), nullable=False),
        sa.Column("training_context", sa.BigInteger(), nullable=False),
        sa.Column("default_max_output", sa.BigInteger(), nullable=False),
        sa.Column("shape", postgresql.JSONB(), nullable=False),
        sa.Column("tokenizer_kind", sa.String(), nullable=False),
        sa.Column("tokenizer", sa.LargeBinary(), nullable=False),
        sa.Column("chat_template", sa.String(), nullable=False),
        sa.Column("special_tokens", postgresql.JSONB(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_variants_model_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_variants")),
        sa.UniqueConstraint("sha256", name=op.f("uq_variants_sha256")),
    )
    op.create_index(op.f("ix_variants_model_id"), "variants", ["model_id"])
    op.create_table(
        "devices",
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("device_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("memory_total_bytes", sa.BigInteger(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_devices_node_id")),
        sa.PrimaryKeyConstraint("node_id", "device_id", name=op.f("pk_devices")),
    )
    op.create_table(
        "energy_samples",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("device_id", sa.String(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("energy_mj", sa.BigInteger(), nullable=True),
        sa.Column("source", sa.String(), nullable=False),
        sa.CheckConstraint("(source = 'unknown') = (energy_mj is null)", name=op.f("ck_energy_samples_unknown")),
        sa.CheckConstraint(
            "source in ('nvml_counter','nvml_integrated','declared','unknown')", name=op.f("ck_energy_samples_source")
        ),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_energy_samples_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_energy_samples")),
    )
    op.create_index(op.f("ix_energy_samples_node_id"), "energy_samples", ["node_id"])
    op.create_table(
        "enrolment_tokens",
        sa.Column("sha256", sa.LargeBinary(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("node_id", sa.Uuid(), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_enrolment_tokens_node_id")),
        sa.ForeignKeyConstraint(
            ["organisation_id"], ["organisations.id"], name=op.f("fk_enrolment_tokens_organisation_id")
        ),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_enrolment_tokens")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.Uuid(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("variant_id", sa.Uuid(), nullable=False),
        sa.Column("body", postgresql.JSONB(), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_input_nano_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("max_cached_input_nano_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("max_output_nano_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("hold_nano", sa.BigInteger(), nullable=False),
        sa.Column("gateway_id", sa.String(), nullable=True),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("preemptions", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("error_code", sa.String(), nullable=True),
        sa.Column("error_message", sa.String(), nullable=True),
        sa.Column("result", postgresql.JSONB(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("kind in ('interactive','queued')", name=op.f("ck_jobs_kind")),
        sa.CheckConstraint(
            "state in ('queued', 'running', 'delivered', 'settled', 'voided')", name=op.f("ck_jobs_state")
        ),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_jobs_key_id")),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_jobs_organisation_id")),
        sa.ForeignKeyConstraint(["variant_id"], ["variants.id"], name=op.f("fk_jobs_variant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("request_id", name=op.f("uq_jobs_request_id")),
    )
    op.create_index(
        "ix_jobs_open_deadline", "jobs", ["deadline_at"], postgresql_where=sa.text("state in ('queued','running')")
    )
    op.create_index("ix_jobs_organisation_id_created_at", "jobs", ["organisation_id", "created_at"])
    op.create_index(
        "ix_jobs_queue_age",
        "jobs",
        ["variant_id", "organisation_id", "created_at"],
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_jobs_queue_deadline",
        "jobs",
        ["variant_id", "organisation_id", "deadline_at"],
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_table(
        "prices",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("variant_id", sa.Uuid(), nullable=False),
        sa.Column("seller_ref", sa.Uuid(), nullable=False),
        sa.Column("input_nano_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_nano_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("output_nano_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "input_nano_usd_per_mtok >= 0 and cached_input_nano_usd_per_mtok >= 0 and output_nano_usd_per_mtok >= 0",
            name=op.f("ck_prices_rates"),
        ),
        sa.ForeignKeyConstraint(["variant_id"], ["variants.id"], name=op.f("fk_prices_variant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prices")),
    )
    op.create_index(op.f("ix_prices_variant_id"), "prices", ["variant_id"])
    op.create_table(
        "offers",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("variant_id", sa.Uuid(), nullable=False),
        sa.Column("device_id", sa.String(), nullable=False),
        sa.Column("price_id", sa.BigInteger(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("context_per_slot", sa.BigInteger(), nullable=False),
        sa.Column("engine", sa.String(), nullable=False),
        sa.Column("engine_version", sa.String(), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.Column("decode_tokens_per_s", sa.Double(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_offers_node_id")),
        sa.ForeignKeyConstraint(["price_id"], ["prices.id"], name=op.f("fk_offers_price_id")),
        sa.ForeignKeyConstraint(["variant_id"], ["variants.id"], name=op.f("fk_offers_variant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_offers")),
        sa.UniqueConstraint("node_id", "variant_id", "device_id", name=op.f("uq_offers_node_id_variant_id_device_id")),
    )
    op.create_index(op.f("ix_offers_node_id"), "offers", ["node_id"])
    op.create_index(op.f("ix_offers_variant_id"), "offers", ["variant_id"])
    op.create_table(
        "receipts",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("renter_organisation_id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.Uuid(), nullable=False),
        sa.Column("owner_organisation_id", sa.Uuid(), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("device_id", sa.String(), nullable=False),
        sa.Column("variant_id", sa.Uuid(), nullable=False),
        sa.Column("price_id", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("input_uncached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("input_cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_visible_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_reasoning_tokens", sa.BigInteger(), nullable=False),
        sa.Column("input_uncached_nano", sa.BigInteger(), nullable=False),
        sa.Column("input_cached_nano", sa.BigInteger(), nullable=False),
        sa.Column("output_visible_nano", sa.BigInteger(), nullable=False),
        sa.Column("output_reasoning_nano", sa.BigInteger(), nullable=False),
        sa.Column("charge_nano", sa.BigInteger(), nullable=False),
        sa.Column("fee_nano", sa.BigInteger(), nullable=False),
        sa.Column("owner_nano", sa.BigInteger(), nullable=False),
        sa.Column("loss_nano", sa.BigInteger(), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.Column("node_signature", sa.LargeBinary(), nullable=True),
        sa.Column("journal_id", sa.BigInteger(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "charge_nano + loss_nano = input_uncached_nano + input_cached_nano"
            " + output_visible_nano + output_reasoning_nano",
            name=op.f("ck_receipts_classes"),
        ),
        sa.CheckConstraint("charge_nano + loss_nano = owner_nano + fee_nano", name=op.f("ck_receipts_split")),
        sa.CheckConstraint("charge_nano = 0 or loss_nano = 0", name=op.f("ck_receipts_one_payer")),
        sa.CheckConstraint(
            "input_uncached_tokens >= 0 and input_cached_tokens >= 0"
            " and output_visible_tokens >= 0 and output_reasoning_tokens >= 0",
            name=op.f("ck_receipts_tokens"),
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_receipts_job_id")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_receipts_key_id")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_receipts_node_id")),
        sa.ForeignKeyConstraint(
            ["owner_organisation_id"], ["organisations.id"], name=op.f("fk_receipts_owner_organisation_id")
        ),
        sa.ForeignKeyConstraint(["price_id"], ["prices.id"], name=op.f("fk_receipts_price_id")),
        sa.ForeignKeyConstraint(
            ["renter_organisation_id"], ["organisations.id"], name=op.f("fk_receipts_renter_organisation_id")
        ),
        sa.ForeignKeyConstraint(["variant_id"], ["variants.id"], name=op.f("fk_receipts_variant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_receipts")),
        sa.UniqueConstraint("job_id", name=op.f("uq_receipts_job_id")),
    )
    op.create_index(op.f("ix_receipts_journal_id"), "receipts", ["journal_id"])
    op.create_index("ix_receipts_owner_organisation_id_at", "receipts", ["owner_organisation_id", "at"])
    op.create_index("ix_receipts_renter_organisation_id_at", "receipts", ["renter_organisation_id", "at"])
    op.create_index("ix_receipts_unsettled", "receipts", ["id"], postgresql_where=sa.text("journal_id is null"))
    op.create_table(
        "attempts",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("offer_id", sa.Uuid(), nullable=False),
        sa.Column("gateway_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), server_default="leased", nullable=False),
        sa.Column("price_id", sa.BigInteger(), nullable=False),
        sa.Column("input_nano_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_nano_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("output_nano_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("accepted_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("leased_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("first_token_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("busy_ms", sa.BigInteger(), nullable=True),
        sa.Column("end_code", sa.String(), nullable=True),
        sa.Column("fault", sa.String(), nullable=True),
        sa.CheckConstraint("state in ('leased','ended')", name=op.f("ck_attempts_state")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_attempts_node_id")),
        sa.ForeignKeyConstraint(["offer_id"], ["offers.id"], name=op.f("fk_attempts_offer_id")),
        sa.ForeignKeyConstraint(["price_id"], ["prices.id"], name=op.f("fk_attempts_price_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("job_id", "epoch", name=op.f("uq_attempts_job_id_epoch")),
    )
    op.create_index(op.f("ix_attempts_job_id"), "attempts", ["job_id"])
    op.create_index("ix_attempts_lease", "attempts", ["lease_expires_at"], postgresql_where=sa.text("state = 'leased'"))
    op.create_index("ix_attempts_node_id_leased_at", "attempts", ["node_id", "leased_at"])
    op.create_table(
        "offered_intervals",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("offer_id", sa.Uuid(), nullable=False),
        sa.Column("node_id", sa.Uuid(), nullable=False),
        sa.Column("device_id", sa.String(), nullable=False),
        sa.Column("gateway_id", sa.String(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_offered_intervals_node_id")),
        sa.ForeignKeyConstraint(["offer_id"], ["offers.id"], name=op.f("fk_offered_intervals_offer_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_offered_intervals")),
    )
    op.create_index(op.f("ix_offered_intervals_node_id"), "offered_intervals", ["node_id"])
    op.create_index(
        "ix_offered_intervals_open", "offered_intervals", ["node_id"], postgresql_where=sa.text("ended_at is null")
    )
    for statements in (REFUSE, JOURNALS, POSTINGS, FINAL):
        op.execute(statements)


def downgrade() -> None:
    for table in TABLES:
        op.drop_table(table)
    for function in FUNCTIONS:
        op.execute(f"drop function {function}()")
