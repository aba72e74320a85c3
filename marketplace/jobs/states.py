"""The states of a job as a table, and the outcomes that a request can have."""

from __future__ import annotations

from enum import StrEnum
from uuid import UUID

from marketplace.core.errors import Conflict


class JobState(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    """Admitted, its worst case held, waiting for idle capacity."""
    RUNNING = "running"
    """A node holds a lease on it."""
    DELIVERED = "delivered"
    """The receipt is written and the hold equals the charge; settlement is due."""
    SETTLED = "settled"
    """Posted in the ledger. Final."""
    VOIDED = "voided"
    """Ended without anything to pay. Final."""


class Outcome(StrEnum):
    """How a request ended: one member a row of the published table."""

    COMPLETE = "complete"
    """Answered to its end: the renter pays input and output."""
    CANCELLED = "cancelled"
    """The client left after at least one token: pays input and what was delivered."""
    CANCELLED_EARLY = "cancelled_early"
    """The client left before the first token: free, up to a number an hour and key."""
    SLOW_READER = "slow_reader"
    """The client stopped reading and was cut: as a cancel."""
    DEADLINE = "deadline"
    """The deadline passed mid-stream: pays input and what was delivered."""
    EXPIRED = "expired"
    """The deadline passed before the first token: free."""
    NODE_FAILED = "node_failed"
    """The node broke it and no other could take over: free, and the node earns nothing."""
    PLATFORM_FAILED = "platform_failed"
    """We broke it: free; the owner is paid from our loss account for what was accepted."""
    OWNER_PREEMPTED = "owner_preempted"
    """The owner took the GPU back mid-stream: free, no penalty."""
    EMPTY = "empty"
    """The engine ended with an error or a blank finish and no token: free."""
    REQUEST_REJECTED = "request_rejected"
    """The request itself was at fault: free, never held against a node."""
    NO_CAPACITY = "no_capacity"
    """Refused at the door: nothing can run it now."""
    NO_BALANCE = "no_balance"
    """Refused at the door: the balance does not cover the smallest answer."""
    RATE_LIMITED = "rate_limited"
    """Refused at the door: over a limit of its key."""


TRANSITIONS: frozenset[tuple[JobState, JobState]] = frozenset(
    {
        (JobState.QUEUED, JobState.RUNNING),
        (JobState.QUEUED, JobState.VOIDED),
        (JobState.RUNNING, JobState.QUEUED),
        (JobState.RUNNING, JobState.DELIVERED),
        (JobState.RUNNING, JobState.VOIDED),
        (JobState.DELIVERED, JobState.SETTLED),
    }
)
FINAL: frozenset[JobState] = frozenset({JobState.SETTLED, JobState.VOIDED})


class ImpossibleTransition(Conflict):
    """A job was asked to do what its state does not allow."""

    code = "impossible_transition"

    def __init__(self, job_id: UUID, state: JobState, wanted: JobState) -> None:
        super().__init__(
            f"Job {job_id.hex} is {state.value} and cannot become {wanted.value}."
            + (" That state is final." if state in FINAL else "")
        )


def check(job_id: UUID, state: JobState, wanted: JobState) -> None:
    """Raise ImpossibleTransition unless the table allows it."""
    if (state, wanted) not in TRANSITIONS:
        raise ImpossibleTransition(job_id, state, wanted)
