"""What the sweeper ends: leases that ran out, deadlines that passed, jobs that nobody wants or that fit nowhere.

Each function finds, decides by `endings`, and returns records for the hot path's own Close. Nothing is locked between
finding and closing: a Close is fenced by the attempt's epoch and the job's state, so whoever comes first wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Final
from uuid import UUID

from sqlalchemy.orm import Session

from marketplace.jobs import endings, repository
from marketplace.jobs.assignment import demand_of
from marketplace.jobs.endings import UNTRIED, Ending
from marketplace.jobs.hot import Close, ReceiptFacts
from marketplace.jobs.receipts import receipt_facts
from marketplace.jobs.repository import Dispatch
from marketplace.jobs.states import JobState
from marketplace.matching.choice import rank_within
from marketplace.matching.rank import Rules
from marketplace.matching.types import OfferView
from marketplace.metering.pricing import price
from marketplace.metering.tokens import TokenCounts

CHAT_ENDPOINT: Final = "/v1/chat/completions"
TEXT_ENDPOINT: Final = "/v1/completions"
EMBEDDINGS_ENDPOINT: Final = "/v1/embeddings"
JOBS_ENDPOINT: Final = "/v1/jobs"
BATCHES_ENDPOINT: Final = "/v1/batches"
SETTLE_IN_S: Final = 10.0
"""A new job may look stuck while agents connect again; it is judged after this."""


def lost_leases(session: Session, *, fee_basis_points: int, limit: int) -> list[Close]:
    """End attempts whose lease ran out."""
    lost = repository.lost_leases(session, limit=limit)
    tried = repository.tried(session, [attempt.job_id for attempt in lost])
    closes = []
    for attempt in lost:
        ending = endings.after_lost_lease(
            queued=_waits_on(attempt),
            accepted_tokens=attempt.accepted_tokens,
            history=tried.get(attempt.job_id, UNTRIED).history.with_lost_lease(),
            cancel_requested=attempt.cancel_requested,
            deadline_passed=attempt.deadline_left_s <= 0,
        )
        closes.append(_close_attempt(attempt, ending, fee_basis_points))
    return closes


def overdue(session: Session, *, limit: int) -> list[Close]:
    """Void queued jobs whose deadline passed."""
    return [close_waiting(job_id, endings.overdue()) for job_id in repository.overdue_jobs(session, limit=limit)]


def forsaken(session: Session, *, grace_s: float, limit: int) -> list[Close]:
    """Void jobs that count as running without an attempt, `grace_s` after their deadline: a living gateway would have
    ended them before."""
    found = repository.forsaken_jobs(session, grace_s=grace_s, limit=limit)
    return [close_waiting(job_id, endings.forsaken()) for job_id in found]


def clientless(session: Session, *, limit: int) -> list[Close]:
    """Void flex jobs whose client is gone with its gateway."""
    return [close_waiting(job_id, endings.forsaken()) for job_id in repository.clientless_jobs(session, limit=limit)]


def unwanted_or_stuck(
    session: Session, offers: Sequence[OfferView], *, rules: Rules, limit: int
) -> tuple[list[Close], list[tuple[UUID, Ending]]]:
    """Queued jobs that their renter cancelled, to be voided; and those that no connected node could run even if it were
    free, with how they end should that last."""
    closes: list[Close] = []
    stuck: list[tuple[UUID, Ending]] = []
    rng = Random(0)  # noqa: S311  # no order is asked for
    usable = [offer for offer in offers if rules.allow_simulated or not offer.simulated]
    for variant_id in repository.queued_variants(session):
        known = [offer for offer in usable if offer.variant_id == variant_id]
        for job in repository.misfits(session, variant_id, known, older_than_s=SETTLE_IN_S, limit=limit):
            if job.cancel_requested:
                closes.append(close_waiting(job.job_id, endings.unwanted()))
                continue
            refusal = rank_within(known, demand_of(job), job.choice, rng, rules=rules).refusal
            stuck.append((job.job_id, endings.fits_nowhere(refusal.sentence())))
    return closes, stuck


def stuck_too_long(stuck: Iterable[tuple[UUID, Ending]], ages_s: dict[UUID, float]) -> list[Close]:
    """Of the jobs that are stuck, those that have been so for SETTLE_IN_S."""
    return [close_waiting(job_id, ending) for job_id, ending in stuck if ages_s.get(job_id, 0.0) >= SETTLE_IN_S]


def _waits_on(attempt: Dispatch) -> bool:
    """True if the job may wait for another attempt. The gateway that loses a flex job's attempt holds its client too:
    either it never heard of the attempt, and still says that the client waits, or both are gone."""
    if attempt.kind != "flex":
        return attempt.kind == "queued"
    return attempt.accepted_tokens == 0 and (attempt.client_left_s or 0.0) > 0


def close_waiting(job_id: UUID, ending: Ending) -> Close:
    """End a job that has no attempt now."""
    assert ending.outcome is not None
    return Close(
        job_id=job_id,
        attempt_id=None,
        epoch=0,
        job_state=ending.job_state.value,
        outcome=ending.outcome.value,
        end_code=ending.error_code or ending.outcome.value,
        fault=None,
        accepted_tokens=0,
        busy_ms=None,
        first_token=False,
        error_code=ending.error_code,
        error_message=ending.error_message,
    )


def _close_attempt(attempt: Dispatch, ending: Ending, fee_basis_points: int) -> Close:
    delivered = ending.job_state is JobState.DELIVERED
    return Close(
        job_id=attempt.job_id,
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        job_state=ending.job_state.value,
        outcome=ending.outcome.value if ending.outcome is not None else None,
        end_code="lease_expired",
        fault="platform",
        accepted_tokens=attempt.accepted_tokens,
        busy_ms=None,
        first_token=attempt.accepted_tokens > 0,
        error_code=ending.error_code,
        error_message=ending.error_message,
        receipt=paid_by_platform(attempt, fee_basis_points) if delivered else None,
    )


def paid_by_platform(attempt: Dispatch, fee_basis_points: int) -> ReceiptFacts:
    """What the owner gets from our loss account: the prompt, none of it known to be cached, and the tokens of the last
    checkpoint, at the attempt's own price, less the usual fee. The renter pays nothing."""
    tokens = TokenCounts.of(prompt=attempt.prompt_tokens, cached=0, output=attempt.accepted_tokens)
    return receipt_facts(
        tokens,
        price(tokens, attempt.rates, fee_basis_points),
        owner_organisation_id=attempt.owner_organisation_id,
        device_id=attempt.device_id,
        simulated=attempt.simulated,
        node_signature=None,
        paid_by_platform=True,
    )
