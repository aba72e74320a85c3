"""The set-based functions of the hot path: admit, lease, checkpoint, close, refuse, many at once."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

FUNCTIONS = (
    "hot_batch",
    "refuse_batch",
    "close_batch",
    "hot_close_refusal",
    "checkpoint_batch",
    "lease_batch",
    "admit_batch",
    "hot_lock",
    "hot_worst_case",
)
TYPES = (
    "hot_refused",
    "hot_close",
    "hot_receipt",
    "hot_checkpoint",
    "hot_lease",
    "hot_admit",
    "hot_attempt",
    "hot_rates",
)
"""Both in the order in which they can be dropped."""


def upgrade() -> None:
    # As a whole and without parameters: the driver must not read `%` and `:=` as its own.
    script = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    op.get_bind().exec_driver_sql(script, execution_options={"no_parameters": True})


def downgrade() -> None:
    for function in FUNCTIONS:
        op.execute(f"drop function {function}")
    for type_ in TYPES:
        op.execute(f"drop type {type_}")
