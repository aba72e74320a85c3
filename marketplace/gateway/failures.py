"""What a renter reads when a request could not be answered: one error for each way in which an attempt may end."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from marketplace.core.amounts import usd
from marketplace.core.errors import BadRequest, FallowError, PaymentRequired, Unavailable
from marketplace.gateway.outcomes import Ending
from marketplace.jobs.service import Shortfall
from marketplace.jobs.states import Outcome
from marketplace.matching.types import Filter, Refusal

RETRY_SOON_S: Final = 2
"""Where a slot may come free any moment."""
RETRY_LATER_S: Final = 30
"""Where waiting alone cannot help."""


class NoCapacity(Unavailable):
    """No node can run the request now."""

    code = "no_capacity"

    def __init__(self, refusal: Refusal) -> None:
        wait_s = RETRY_LATER_S if refusal.hopeless else RETRY_SOON_S
        cure = ""
        more: dict[str, Any] = {}
        if refusal.late is not None:
            wait_s = refusal.late.retry_after_s
            cure = f" Try again in {wait_s} s, or let it wait for its turn: service_tier flex, or POST /v1/jobs."
            more = {
                "predicted_ttft_s": round(refusal.late.soonest_s, 3),
                "useful_ttft_s": round(refusal.late.useful_s, 3),
            }
        super().__init__(
            f"No capacity for this request now ({refusal.sentence()}). Nothing was charged.{cure}",
            headers={"retry-after": str(wait_s)},
            refused={name.name.lower(): count for name, count in refusal.refused.items() if count},
            **more,
        )


class InsufficientBalance(PaymentRequired):
    """The balance does not cover what was asked."""

    source: ClassVar[str] = "is available"
    cure: ClassVar[str] = "add credit"

    def __init__(self, *, needed_nano: int, available_nano: int, affordable_output_tokens: int) -> None:
        shortfall = usd(max(needed_nano - available_nano, 0))
        hint = (
            f"Set max_tokens to at most {affordable_output_tokens}, or {self.cure}."
            if affordable_output_tokens > 0
            else f"{self.cure[0].upper()}{self.cure[1:]}."
        )
        super().__init__(
            f"This request may cost {usd(needed_nano)} USD and {usd(max(available_nano, 0))} USD {self.source}: "
            f"{shortfall} USD short. {hint}",
            needed=usd(needed_nano),
            available=usd(max(available_nano, 0)),
            shortfall=shortfall,
            affordable_output_tokens=affordable_output_tokens,
        )


class KeyBudgetExceeded(InsufficientBalance):
    """The balance would do, but the key may not spend that much."""

    code = "key_budget_exceeded"
    source = "is left of this key's budget"
    cure = "raise the key's budget, or wait for its next period"


def of_shortfall(shortfall: Shortfall, max_output_tokens: int) -> InsufficientBalance:
    """The error for work that waits, held at its own ceiling, of at most so many tokens of answer."""
    kind = KeyBudgetExceeded if shortfall.by_budget else InsufficientBalance
    return kind(
        needed_nano=shortfall.needed_nano,
        available_nano=shortfall.available_nano,
        affordable_output_tokens=min(shortfall.affordable_output_tokens, max_output_tokens),
    )


class NodeFailed(FallowError):
    """The node broke the answer, and no other could take over."""

    status = 502
    code = "node_failed"
    retryable = True


class OwnerPreempted(Unavailable):
    """The owner took the machine back."""

    code = "owner_preempted"


class PlatformFailed(Unavailable):
    """The platform broke the answer."""

    code = "platform_failed"


class EmptyAnswer(FallowError):
    """The engine ended with nothing."""

    status = 502
    code = "empty_answer"
    retryable = True


class DeadlineExceeded(FallowError):
    """The request's time was up."""

    status = 504
    code = "deadline_exceeded"
    type = "timeout_error"


class RequestRejected(BadRequest):
    """The engine refused the request itself."""

    code = "request_rejected"


class ContextOverflow(BadRequest):
    """The engine counted more tokens than its slot holds."""

    code = "context_length_exceeded"


class Cancelled(FallowError):
    """The client ended it."""

    status = 499
    code = "cancelled"


class SlowReader(FallowError):
    """The client read too slowly and was cut."""

    status = 408
    code = "slow_reader"


_FREE = "Nothing was charged."
_MESSAGES: Final[dict[Outcome, tuple[type[FallowError], str]]] = {
    Outcome.NODE_FAILED: (NodeFailed, f"The node that answered failed. {_FREE}"),
    Outcome.EMPTY: (EmptyAnswer, f"The engine closed without an answer. {_FREE}"),
    Outcome.OWNER_PREEMPTED: (OwnerPreempted, f"The machine's owner took it back. {_FREE}"),
    Outcome.PLATFORM_FAILED: (PlatformFailed, f"The answer broke on our side. {_FREE}"),
    Outcome.EXPIRED: (DeadlineExceeded, f"The time for this request was up before its first token. {_FREE}"),
    Outcome.DEADLINE: (
        DeadlineExceeded,
        "The time for this request was up before its answer ended. What was delivered is charged.",
    ),
    Outcome.CANCELLED: (Cancelled, "The request was cancelled. What was delivered is charged."),
    Outcome.CANCELLED_EARLY: (Cancelled, "The request was cancelled before its first token."),
    Outcome.SLOW_READER: (SlowReader, "The client read too slowly. What was delivered is charged."),
}


def failure(outcome: Outcome, code: str, message: str) -> FallowError:
    """The error for an outcome. `code` and `message` come from the attempt; a node's words are shown for a refused
    request only, where they say what to change."""
    if outcome is Outcome.NO_CAPACITY:
        return NoCapacity(Refusal({Filter.RESERVED: 1}))
    if outcome is Outcome.REQUEST_REJECTED:
        kind = ContextOverflow if code == "context_overflow" else RequestRejected
        return kind(f"The engine refused this request: {message or code}. {_FREE}")
    shape, words = _MESSAGES[outcome]
    return shape(words)


def of_lost_lease() -> FallowError:
    """Somebody else has ended the attempt: the database was away, or its sweeper took the lease."""
    return PlatformFailed(f"The answer broke on our side. {_FREE}")


CANCEL_REASONS: Final[dict[Ending, str]] = {
    Ending.CANCELLED: "client_gone",
    Ending.SLOW_READER: "slow_reader",
    Ending.DEADLINE: "deadline",
}
