"""How a job goes on when nobody speaks for its attempt any more, and when it may not go on: pure decisions.

The gateway that runs an attempt ends it by the published table. What is decided here is what the sweeper finds: leases
that ran out because their gateway is gone, and jobs that wait although nothing more can be tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from marketplace.jobs.states import JobState, Outcome

MAX_ATTEMPTS: Final = 3
"""Attempts of one job; the owner's pre-emptions are none."""
MAX_PREEMPTIONS: Final = 10


@dataclass(frozen=True, slots=True)
class History:
    """What has been tried for one job."""

    attempts: int
    """Attempts that ended, without those that an owner's pre-emption ended."""
    preemptions: int
    last_fault: str | None = None

    @property
    def exhausted(self) -> bool:
        """True if the job may not have another attempt."""
        return self.attempts >= MAX_ATTEMPTS or self.preemptions >= MAX_PREEMPTIONS

    def with_lost_lease(self) -> History:
        """The history once an attempt that is still open has been lost by us."""
        return replace(self, attempts=self.attempts + 1, last_fault="platform")


@dataclass(frozen=True, slots=True)
class Tried:
    """What has been tried for one job, and where."""

    history: History
    failed_nodes: frozenset[UUID] = frozenset()
    """Nodes that may not see the job again."""
    resting_nodes: frozenset[UUID] = frozenset()
    """Nodes that turned the job away without fault a moment ago: before their telemetry tells why, they would again."""
    last_node: UUID | None = None
    """Where its latest attempt was; None: it had none."""


UNTRIED: Final = Tried(History(attempts=0, preemptions=0))


@dataclass(frozen=True, slots=True)
class Ending:
    """What becomes of a job. `outcome` is None while it goes on."""

    job_state: JobState
    outcome: Outcome | None = None
    error_code: str | None = None
    error_message: str | None = None


_BY_LAST_FAULT: Final[dict[str | None, Outcome]] = {
    "platform": Outcome.PLATFORM_FAILED,
    None: Outcome.NO_CAPACITY,  # races for a last slot are nobody's fault
}
WAIT_AGAIN: Final = Ending(JobState.QUEUED)


def after_lost_lease(
    *, queued: bool, accepted_tokens: int, history: History, cancel_requested: bool, deadline_passed: bool
) -> Ending:
    """What becomes of a job whose lease ran out. `history` counts the lost attempt.

    The failure is ours: the renter pays nothing, and work that was accepted is paid from our loss account, which is
    what `delivered` with PLATFORM_FAILED means. Only a queued job with time and attempts left is tried again: the
    client of an interactive one is gone with its gateway.
    """
    if queued and not (cancel_requested or deadline_passed or history.exhausted):
        return WAIT_AGAIN
    if accepted_tokens > 0:
        return Ending(
            JobState.DELIVERED,
            Outcome.PLATFORM_FAILED,
            "platform_failed",
            "The gateway that ran this request stopped. Nothing is charged.",
        )
    if cancel_requested:
        return unwanted()
    if queued and deadline_passed:
        return overdue()
    return forsaken()


def overdue() -> Ending:
    """A job that reached its deadline in the queue."""
    return Ending(
        JobState.VOIDED,
        Outcome.EXPIRED,
        "deadline_exceeded",
        "The deadline passed before a node had room for this job. Nothing is charged.",
    )


def used_up(history: History) -> Ending:
    """A waiting job that may not have another attempt."""
    if history.preemptions >= MAX_PREEMPTIONS:
        return Ending(
            JobState.VOIDED,
            Outcome.OWNER_PREEMPTED,
            "owner_preempted",
            f"Owners took their machines back {history.preemptions} times. Nothing is charged.",
        )
    outcome = _BY_LAST_FAULT.get(history.last_fault, Outcome.NODE_FAILED)
    return Ending(JobState.VOIDED, outcome, outcome.value, f"{history.attempts} attempts failed. Nothing is charged.")


def fits_nowhere(sentence: str) -> Ending:
    """A waiting job that no node can run, however long it waits. `sentence` says which filter refused how many."""
    return Ending(
        JobState.VOIDED,
        Outcome.NO_CAPACITY,
        "no_capacity",
        f"No node can run this job: {sentence}. Nothing is charged.",
    )


def failed_everywhere(sentence: str) -> Ending:
    """A waiting job that every node which could run it has failed already."""
    return Ending(
        JobState.VOIDED,
        Outcome.NODE_FAILED,
        "node_failed",
        f"No node is left for this job: {sentence}. Nothing is charged.",
    )


def unwanted() -> Ending:
    """A waiting job that its renter cancelled."""
    return Ending(JobState.VOIDED, Outcome.CANCELLED_EARLY, "cancelled", "Cancelled before the first token.")


def forsaken() -> Ending:
    """A job that counts as running although no attempt of it is left: its gateway died between two attempts."""
    return Ending(
        JobState.VOIDED,
        Outcome.PLATFORM_FAILED,
        "platform_failed",
        "The gateway that ran this request stopped. Nothing is charged.",
    )
