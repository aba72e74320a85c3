"""One round of matching queued jobs to idle capacity. Short: it reads, reserves, leases, and waits for no inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol
from uuid import UUID, uuid5

from sqlalchemy.orm import Session

from marketplace.catalog.prices import set_price
from marketplace.core.ids import new_id
from marketplace.core.tracing import Tracing
from marketplace.jobs import endings, repository
from marketplace.jobs.endings import UNTRIED, Ending, Tried
from marketplace.jobs.hot import AttemptLease, Lease, Leased
from marketplace.jobs.repository import Waiting
from marketplace.jobs.writer import run_in_session
from marketplace.matching import line as line_
from marketplace.matching.choice import ANY, rank_within
from marketplace.matching.line import OUTPUT_WEIGHT, Line
from marketplace.matching.live import UNKNOWN_DECODE_TOKENS_PER_S, UNKNOWN_PREFILL_TOKENS_PER_S
from marketplace.matching.rank import Rules, could_run, rank, with_pick
from marketplace.matching.retries import RetryBudget
from marketplace.matching.types import Demand, OfferView, Ranked, Rates, Service
from marketplace.metering.pricing import BASIS_POINTS

MAX_ROUND: Final = 256
"""Jobs of one variant in one round."""
SPARE: Final = 16
"""Jobs looked at beyond the free slots, since some may not fit the slot that is left."""


class Slots(Protocol):
    """Reservations at offers, as fleet keeps them. Raises ValkeyDownError."""

    def reserve_first(self, ranked: Ranked, attempt_id: UUID, ttl_s: float) -> OfferView | None: ...

    def release(self, offer_id: UUID, attempt_id: UUID) -> None: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """A leased attempt, and the gateway that must hear of it."""

    job_id: UUID
    attempt_id: UUID
    offer_id: UUID
    gateway_id: str


@dataclass(slots=True)
class Assignment:
    """What a round did, and what it found on the way."""

    placed: list[Placed] = field(default_factory=list)
    refused: list[Placed] = field(default_factory=list)
    """Reserved, but the lease was refused: their slots are free again."""
    over: list[tuple[UUID, Ending]] = field(default_factory=list)
    """Jobs that may not have another attempt."""
    stuck: list[tuple[UUID, Ending]] = field(default_factory=list)
    """Jobs that every fitting node has failed already."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """What a round needs beside the database. One per process; `now_s` is monotonic seconds."""

    slots: Slots
    budget: RetryBudget
    rng: Random
    rules: Rules
    lease_s: float
    now_s: Callable[[], float]
    tracing: Tracing | None = None
    """Shows placed jobs in their traces."""
    lines: dict[UUID, Line] = field(default_factory=dict)
    """By variant: whose turn it is, by what each renter was served in this process."""


def assign(session: Session, offers: Sequence[OfferView], matcher: Matcher) -> Assignment:
    """Give queued jobs to offers that have room now, and lease them; the caller commits, then dispatches.

    Holds row locks on the jobs of this round until the commit. Raises ValkeyDownError: roll back then, the slots that
    were reserved come free with their time.
    """
    done = Assignment()
    wanted: list[tuple[Lease, Placed]] = []
    variants = repository.queued_variants(session)
    matcher.rng.shuffle(variants)
    for variant_id in variants:
        known = [offer for offer in offers if offer.variant_id == variant_id]
        wanted += _match(session, variant_id, known, matcher, done)
    answers = run_in_session(session, [lease for lease, _ in wanted])
    for (_, placed), answer in zip(wanted, answers, strict=True):
        assert isinstance(answer, Leased)
        (done.placed if answer.epoch else done.refused).append(placed)
    return done


def _match(
    session: Session, variant_id: UUID, known: list[OfferView], matcher: Matcher, done: Assignment
) -> list[tuple[Lease, Placed]]:
    anything = Demand(variant_id, 0, 0, None, variant_id, service=Service.FLEX)
    free = rank(known, anything, matcher.rng, rules=matcher.rules).offers
    room = sum(offer.slots - offer.slots_busy for offer in free)
    jobs = repository.next_in_line(session, variant_id, free, limit=min(room + SPARE, MAX_ROUND)) if room else []
    history = repository.tried(session, [job.job_id for job in jobs]) if jobs else {}
    by_id = {job.job_id: job for job in jobs}
    line = matcher.lines.setdefault(variant_id, Line())
    line.retain(by_id.keys())
    line.running(
        {
            organisation_id: prompt_tokens + OUTPUT_WEIGHT * output_tokens
            for organisation_id, prompt_tokens, output_tokens in repository.working(session, variant_id)
        }
        if jobs
        else {}
    )
    now_s = matcher.now_s()
    for job in jobs:
        line.join(_waiting(job, free, now_s))

    def give(waiting: line_.Waiting, kept: Sequence[line_.Waiting]) -> tuple[Lease, Placed] | None:
        nonlocal known
        job = by_id[waiting.job_id]
        keep = [by_id[other.job_id] for other in kept]
        offers = [offer for offer in known if not any(_waits_for(one, offer, matcher.rules) for one in keep)]
        found = _place(session, job, history.get(job.job_id, UNTRIED), offers, matcher, done)
        if found is not None:
            known = with_pick(known, found[1].offer_id)
        return found

    return [turn.given for turn in line.serve(give, now_s, most=MAX_ROUND)]


def _waits_for(job: Waiting, offer: OfferView, rules: Rules) -> bool:
    """True if the offer would run the job once it has room."""
    return job.choice.admits(offer) and could_run(offer, demand_of(job), rules)


def _waiting(job: Waiting, free: Sequence[OfferView], now_s: float) -> line_.Waiting:
    """The job as the line sees it; how long it runs is a guess by the offers that are free."""
    usual = free[0]
    reads_s = job.prompt_tokens / (usual.prefill_tokens_per_s or UNKNOWN_PREFILL_TOKENS_PER_S)
    writes_s = job.max_output_tokens * job.choices / (usual.decode_tokens_per_s or UNKNOWN_DECODE_TOKENS_PER_S)
    return line_.Waiting(
        job_id=job.job_id,
        renter_id=job.organisation_id,
        variant_id=job.variant_id,
        prompt_tokens=job.prompt_tokens,
        max_output_tokens=job.max_output_tokens * job.choices,
        arrived_s=now_s - job.waited_s,
        deadline_s=now_s + job.deadline_left_s,
        runs_s=reads_s + writes_s,
    )


def _place(  # noqa: PLR0917 - one round's whole state
    session: Session, job: Waiting, tried: Tried, known: Sequence[OfferView], matcher: Matcher, done: Assignment
) -> tuple[Lease, Placed] | None:
    if tried.history.exhausted:
        done.over.append((job.job_id, endings.used_up(tried.history)))
        return None
    choice = job.choice.after(tried.last_node)
    demand = demand_of(job, tried.failed_nodes | tried.resting_nodes)
    ranked = rank_within(known, demand, choice, matcher.rng, rules=matcher.rules)
    if not ranked.offers:
        if tried.failed_nodes and not tried.resting_nodes and ranked.refusal.hopeless:
            done.stuck.append((job.job_id, endings.failed_everywhere(ranked.refusal.sentence())))
        return None
    if not _within_budget(job, tried, matcher):
        return None
    attempt_id = new_id()
    offer = matcher.slots.reserve_first(ranked, attempt_id, matcher.lease_s)
    if offer is None:
        return None
    price_id, rates = _pinned(session, job, offer)
    lease = AttemptLease(
        attempt_id=attempt_id,
        node_id=offer.node_id,
        offer_id=offer.offer_id,
        price_id=price_id,
        rates=rates,
        gateway_id=job.gateway_id or offer.gateway_id,
        lease_s=matcher.lease_s,
    )
    return Lease(job.job_id, lease), Placed(job.job_id, attempt_id, offer.offer_id, lease.gateway_id)


def _pinned(session: Session, job: Waiting, offer: OfferView) -> tuple[int, Rates]:
    """The price that the attempt pins. A reduced one gets a row of its own, so that bills and statements that multiply
    tokens by a price's row are right for it too."""
    if job.price_basis_points == BASIS_POINTS:
        return offer.price_id, offer.rates
    rates = offer.rates.at_share(job.price_basis_points)
    seller = uuid5(offer.node_id, f"share:{job.price_basis_points}")
    return set_price(session, offer.variant_id, seller, rates), rates


def _within_budget(job: Waiting, tried: Tried, matcher: Matcher) -> bool:
    if tried.history.attempts:
        return matcher.budget.try_retry(job.variant_id, matcher.now_s())
    matcher.budget.request(job.variant_id, matcher.now_s())
    return True


def demand_of(job: Waiting, excluded_nodes: frozenset[UUID] = frozenset()) -> Demand:
    """The matcher's view of a queued job, within its choice but for the lists."""
    demand = Demand(
        variant_id=job.variant_id,
        prompt_tokens=job.prompt_tokens,
        max_output_tokens=job.max_output_tokens,
        longest_input_tokens=job.longest_input_tokens,
        ceiling=job.ceiling.before_share(job.price_basis_points),
        organisation_id=job.organisation_id,
        excluded_nodes=excluded_nodes,
        service=Service.FLEX,
        choices=job.choices,
    )
    return demand if job.choice is ANY else job.choice.narrow(demand)
