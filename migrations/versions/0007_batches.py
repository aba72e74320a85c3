"""Files and batches; where a job came in, and at which share of the usual price it runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ADMIT = "admit_batch(hot_admit[])"
CLOSE = "close_batch(hot_close[],boolean)"
_ADMITTED = "at_now + make_interval(secs => a.deadline_s), at_now"
_COLUMNS = "hold_nano, gateway_id, deadline_at, created_at"
_BY_KIND = "case a.kind when 'queued' then '/v1/jobs' else '/v1/chat/completions' end"
CHANGES = (
    (ADMIT, f"{_COLUMNS})", f"{_COLUMNS},\n                    endpoint, price_basis_points)"),
    (
        ADMIT,
        f"{_ADMITTED}\n    from",
        f"{_ADMITTED},\n           coalesce(a.endpoint, {_BY_KIND}), coalesce(a.price_basis_points, 10000)\n    from",
    ),
    # Whoever ends a job need not know where it came in: its own row says it.
    (CLOSE, "j.organisation_id, c.endpoint, c.outcome", "j.organisation_id, j.endpoint, c.outcome"),
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
    op.add_column("jobs", sa.Column("endpoint", sa.String(), server_default="/v1/chat/completions", nullable=False))
    op.execute("update jobs set endpoint = '/v1/jobs' where kind = 'queued'")
    op.add_column("jobs", sa.Column("price_basis_points", sa.BigInteger(), server_default="10000", nullable=False))
    op.create_check_constraint(op.f("ck_jobs_price_basis_points"), "jobs", "price_basis_points between 1 and 10000")
    op.execute("alter type hot_admit add attribute endpoint text, add attribute price_basis_points bigint")
    for function, old, new in CHANGES:
        _exchange(function, old, new)
    _files()
    _batches()


def _files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("erased_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("purpose in ('batch','batch_output')", name=op.f("ck_files_purpose")),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_files_organisation_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index(
        "ix_files_organisation_id_created_at",
        "files",
        ["organisation_id", "created_at"],
        postgresql_where=sa.text("erased_at is null"),
    )
    op.create_index("ix_files_expires_at", "files", ["expires_at"], postgresql_where=sa.text("erased_at is null"))
    op.create_table(
        "file_chunks",
        sa.Column("file_id", sa.Uuid(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name=op.f("fk_file_chunks_file_id")),
        sa.PrimaryKeyConstraint("file_id", "position", name=op.f("pk_file_chunks")),
    )


def _batches() -> None:
    moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    op.create_table(
        "batches",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("organisation_id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.Uuid(), nullable=False),
        sa.Column("input_file_id", sa.Uuid(), nullable=False),
        sa.Column("output_file_id", sa.Uuid(), nullable=True),
        sa.Column("error_file_id", sa.Uuid(), nullable=True),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("completion_window", sa.String(), nullable=False),
        sa.Column("price_basis_points", sa.BigInteger(), nullable=False),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("errors", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("total_lines", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("completed_lines", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("failed_lines", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        *(sa.Column(f"{name}_at", sa.DateTime(timezone=True), nullable=True) for name in moments),
        sa.CheckConstraint(
            "status in ('validating','failed','in_progress','finalizing','completed','expired',"
            "'cancelling','cancelled')",
            name=op.f("ck_batches_status"),
        ),
        sa.ForeignKeyConstraint(["error_file_id"], ["files.id"], name=op.f("fk_batches_error_file_id")),
        sa.ForeignKeyConstraint(["input_file_id"], ["files.id"], name=op.f("fk_batches_input_file_id")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_batches_key_id")),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name=op.f("fk_batches_organisation_id")),
        sa.ForeignKeyConstraint(["output_file_id"], ["files.id"], name=op.f("fk_batches_output_file_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_organisation_id_created_at", "batches", ["organisation_id", "created_at"])
    op.create_index(
        "ix_batches_active",
        "batches",
        ["created_at"],
        postgresql_where=sa.text("status in ('validating','in_progress','finalizing','cancelling')"),
    )
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("custom_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=True),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("job_id", sa.Uuid(), nullable=True),
        sa.Column("status_code", sa.BigInteger(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("error_code", sa.String(), nullable=True),
        sa.Column("error_message", sa.String(), nullable=True),
        sa.CheckConstraint("state in ('waiting','open','completed','failed')", name=op.f("ck_batch_lines_state")),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_batch_lines_batch_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_batch_lines_job_id")),
        sa.PrimaryKeyConstraint("batch_id", "number", name=op.f("pk_batch_lines")),
        sa.UniqueConstraint("job_id", name=op.f("uq_batch_lines_job_id")),
    )
    for state in ("waiting", "open"):
        op.create_index(
            f"ix_batch_lines_{state}",
            "batch_lines",
            ["batch_id", "number"],
            postgresql_where=sa.text(f"state = '{state}'"),
        )


def downgrade() -> None:
    for table in ("batch_lines", "batches", "file_chunks", "files"):
        op.drop_table(table)
    for function, old, new in reversed(CHANGES):
        _exchange(function, new, old)
    op.execute("alter type hot_admit drop attribute price_basis_points, drop attribute endpoint")
    op.drop_constraint(op.f("ck_jobs_price_basis_points"), "jobs", type_="check")
    op.drop_column("jobs", "price_basis_points")
    op.drop_column("jobs", "endpoint")


def _exchange(function: str, old: str, new: str) -> None:
    script = _EXCHANGE.format(function=function, old=old, new=new)
    op.get_bind().exec_driver_sql(script, execution_options={"no_parameters": True})
