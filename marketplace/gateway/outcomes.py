"""The published outcome table, pure: how an attempt ended decides who pays, and whether another may follow.

Words: `started` means that at least one token counts as delivered: accepted from the node and, where the answer is
streamed, sent to the client. `exposed` means that the client has read some of the answer, so that no other node may
start it again. An answer that is not streamed, and a queued job, expose nothing until they are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from agent import protocol
from marketplace.jobs.states import JobState, Outcome


class Ending(StrEnum):
    """How the gateway saw an attempt end. The value is the attempt's end code unless the node gave a finer one."""

    FINISHED = "delivered"
    """The engine closed in order, with a finish reason."""
    BLANK = "engine_empty"
    """The engine closed without a finish reason."""
    CANCELLED = "cancelled"
    """The client left, or asked for the end of a queued job."""
    SLOW_READER = "slow_reader"
    """The client took nothing for too long."""
    DEADLINE = "deadline_exceeded"
    NODE = "node_failed"
    OWNER = "owner_preempted"
    GAVE_WAY = "gave_way"
    """A queued job was pushed aside for a client that waits; nobody's fault, and counted as an owner's pre-emption."""
    REQUEST = "request_rejected"
    PLATFORM = "platform_failed"
    RACE = "slot_taken"
    """The slot was gone when the attempt came: nobody's fault."""
    LEASE_LOST = "lease_lost"
    """Somebody else has ended the attempt: there is nothing left to decide."""


class Payer(StrEnum):
    """Who pays for what was accepted."""

    RENTER = "renter"
    NOBODY = "nobody"
    PLATFORM = "platform"
    """The owner is paid from the loss account, the renter pays nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to write for an attempt. `outcome` is None where the job goes on with another attempt."""

    job_state: JobState
    outcome: Outcome | None
    payer: Payer
    fault: str | None


FAULTS: Final[dict[Ending, str]] = {
    Ending.BLANK: "node",
    Ending.NODE: "node",
    Ending.OWNER: "owner",
    Ending.GAVE_WAY: "owner",
    Ending.REQUEST: "request",
    Ending.PLATFORM: "platform",
}
RETRYABLE: Final = frozenset({Ending.BLANK, Ending.NODE, Ending.OWNER, Ending.GAVE_WAY, Ending.PLATFORM, Ending.RACE})
"""Another node may take over while the client has read nothing."""

_BY_CLIENT: Final[dict[Ending, tuple[Outcome, Outcome]]] = {
    # ending: (with a token delivered, before the first token)
    Ending.CANCELLED: (Outcome.CANCELLED, Outcome.CANCELLED_EARLY),
    Ending.SLOW_READER: (Outcome.SLOW_READER, Outcome.CANCELLED_EARLY),
    Ending.DEADLINE: (Outcome.DEADLINE, Outcome.EXPIRED),
}
_BY_FAILURE: Final[dict[Ending, Outcome]] = {
    Ending.BLANK: Outcome.NODE_FAILED,
    Ending.NODE: Outcome.NODE_FAILED,
    Ending.OWNER: Outcome.OWNER_PREEMPTED,
    Ending.GAVE_WAY: Outcome.OWNER_PREEMPTED,
    Ending.REQUEST: Outcome.REQUEST_REJECTED,
    Ending.PLATFORM: Outcome.PLATFORM_FAILED,
    Ending.RACE: Outcome.NO_CAPACITY,
}


def verdict(ending: Ending, *, started: bool, accepted: bool, prefill_due: bool = False) -> Verdict:
    """The row of the table for an attempt after which nothing more is tried.

    `accepted`: at least one token was accepted from the node. `prefill_due`: a cancel before the first token is beyond
    the free ones, so the prefill is paid. Raises ValueError for LEASE_LOST, which leaves nothing to write.
    """
    if ending is Ending.LEASE_LOST:
        raise ValueError("an attempt that somebody else ended has no verdict")
    if ending is Ending.FINISHED:
        return Verdict(JobState.DELIVERED, Outcome.COMPLETE, Payer.RENTER, None)
    if ending in _BY_CLIENT:
        return _by_client(ending, started=started, prefill_due=prefill_due)
    fault = FAULTS.get(ending)
    if ending is Ending.PLATFORM and accepted:
        return Verdict(JobState.DELIVERED, Outcome.PLATFORM_FAILED, Payer.PLATFORM, fault)
    if ending is Ending.BLANK and not accepted:
        return Verdict(JobState.VOIDED, Outcome.EMPTY, Payer.NOBODY, fault)
    return Verdict(JobState.VOIDED, _BY_FAILURE[ending], Payer.NOBODY, fault)


def _by_client(ending: Ending, *, started: bool, prefill_due: bool) -> Verdict:
    with_token, before = _BY_CLIENT[ending]
    if started:
        return Verdict(JobState.DELIVERED, with_token, Payer.RENTER, None)
    if prefill_due and before is Outcome.CANCELLED_EARLY:
        return Verdict(JobState.DELIVERED, before, Payer.RENTER, None)
    return Verdict(JobState.VOIDED, before, Payer.NOBODY, None)


def moves_on(ending: Ending, *, exposed: bool, accepted: bool) -> bool:
    """True if another node may start the answer again.

    Work that the platform itself broke after a token was accepted is paid instead, once, from the loss account.
    """
    if ending not in RETRYABLE or exposed:
        return False
    return not (ending is Ending.PLATFORM and accepted)


def of_failure(code: str) -> Ending:
    """The ending that a node's Failed code means. A code that the protocol does not know is the node's fault."""
    if code == "engine_empty":
        return Ending.BLANK
    return {
        "node": Ending.NODE,
        "owner": Ending.OWNER,
        "request": Ending.REQUEST,
        "platform": Ending.PLATFORM,
    }[protocol.FAILURES.get(code, "node")]


def of_refusal(code: str) -> Ending:
    """The ending that a node's Refused code means: nothing was spent, and no refusal costs reputation."""
    return {
        "owner_active": Ending.OWNER,
        "draining": Ending.OWNER,
        "context_overflow": Ending.REQUEST,
    }.get(code, Ending.RACE)
