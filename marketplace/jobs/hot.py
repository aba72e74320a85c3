"""The four durable statements of the hot path, as records for the group-committing writer.

Each record is one caller's wish; the writer sends what queued meanwhile to PostgreSQL as one set-based call of the
function of the same name (see migrations), in one transaction, and answers each caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from marketplace.matching.types import Rates


@dataclass(frozen=True, slots=True)
class AttemptLease:
    """The attempt that a job starts with, or moves to."""

    attempt_id: UUID
    node_id: UUID
    offer_id: UUID
    price_id: int
    rates: Rates
    gateway_id: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class Admit:
    """Hold the worst case, write the job and, unless it waits in the queue, its first attempt. All or nothing."""

    job_id: UUID
    organisation_id: UUID
    key_id: UUID
    credit_account_id: int
    request_id: str
    kind: str
    """`interactive`, `queued` or `flex`."""
    variant_id: UUID
    body: str | None
    """JSON text, queued jobs only."""
    prompt_tokens: int
    max_output_tokens: int
    ceiling: Rates
    hold_nano: int
    hold_margin_s: float
    gateway_id: str | None
    deadline_s: float
    """From the database's now."""
    attempt: AttemptLease | None
    endpoint: str | None = None
    """Where it came in. None: `/v1/jobs` for a queued job, else `/v1/chat/completions`."""
    price_basis_points: int = 10_000
    """The share of a node's ask at which it runs. The ceiling is in this share already."""
    client_lease_s: float | None = None
    """Flex only: for how long the client counts as waiting, unless its gateway says so again."""
    webhook_url: str | None = None
    """Where its end is told, beside its organisation's endpoints."""
    choice: dict[str, Any] | None = None
    """Where it may run, as `Choice.to_row` says it, of what waits in the queue; None: anywhere."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Answer to Admit. Not ok: nothing was written, and available_nano says what could be held."""

    ok: bool
    available_nano: int
    by_budget: bool = False
    """True if the key's budget, and not the balance, was too small."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Move a job (queued, or running after a failed attempt) to a new attempt."""

    job_id: UUID
    attempt: AttemptLease


@dataclass(frozen=True, slots=True)
class Leased:
    """Answer to Lease. epoch 0: refused, because the job ended, was cancelled, already has a live lease, has used its
    attempts, passed its deadline, or failed on that node before."""

    epoch: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Once a second per stream: tokens accepted so far; renews the lease."""

    attempt_id: UUID
    epoch: int
    accepted_tokens: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """Answer to Checkpoint. alive False: the lease is gone, stop."""

    alive: bool
    cancel_requested: bool


@dataclass(frozen=True, slots=True)
class ReceiptFacts:
    """What goes into a receipt, already priced (see metering)."""

    owner_organisation_id: UUID
    device_id: str
    simulated: bool
    input_uncached_tokens: int
    input_cached_tokens: int
    output_visible_tokens: int
    output_reasoning_tokens: int
    input_uncached_nano: int
    input_cached_nano: int
    output_visible_nano: int
    output_reasoning_nano: int
    charge_nano: int
    fee_nano: int
    owner_nano: int
    loss_nano: int
    node_signature: bytes | None


@dataclass(frozen=True, slots=True)
class Close:
    """End an attempt. What becomes of the job is `job_state`:

    - `delivered`: the receipt is written, the hold shrinks to its charge, the outcome row is written.
    - `voided`: no receipt; the hold is released, the outcome row is written.
    - `queued`: only the attempt ends; a queued job waits again (its hold stays).
    - `running`: only the attempt ends; the caller will lease another one (its hold stays).
    """

    job_id: UUID
    attempt_id: UUID | None
    """None: a queued job that ends without an attempt."""
    epoch: int
    job_state: str
    outcome: str | None
    end_code: str
    fault: str | None
    accepted_tokens: int
    busy_ms: int | None
    first_token: bool
    error_code: str | None = None
    error_message: str | None = None
    result: str | None = None
    """JSON text of the answer, queued jobs only."""
    receipt: ReceiptFacts | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """Answer to Close. ok False: somebody closed it before (a sweeper, another finaliser); nothing was written."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Record the outcome of a request that was never admitted. Fire and forget; answers None."""

    request_id: str
    organisation_id: UUID | None
    endpoint: str
    outcome: str
    code: str
