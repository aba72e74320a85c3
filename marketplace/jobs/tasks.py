"""The queue's tasks. Each is a nudge without content: it looks at the rows, does what is due, and returns.

Two workers may run the same task at the same moment: assignment skips rows that another has locked, and whatever ends
an attempt is fenced by its epoch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import psycopg
import redis
from sqlalchemy.orm import Session

from marketplace.billing import service as billing
from marketplace.core import process
from marketplace.core.celery import BROKER_ERRORS, make_celery, sender, task
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.logs import get_logger
from marketplace.core.outbox import TaskSender
from marketplace.core.pump import empty_outbox
from marketplace.core.settings import Settings, get_settings
from marketplace.core.tracing import Tracing
from marketplace.core.valkey import ValkeyDownError
from marketplace.fleet.reservations import SyncReservations
from marketplace.fleet.snapshot import SILENT_S, read_fleet
from marketplace.jobs import dispatch, idempotency, standing, sweeping
from marketplace.jobs.assignment import Assignment, Matcher, assign
from marketplace.jobs.erasure import erase_texts
from marketplace.jobs.hot import Close, Closed
from marketplace.jobs.placed import show_placed
from marketplace.jobs.plan_round import plan_once
from marketplace.jobs.writer import run_in_session
from marketplace.matching.rank import Rules
from marketplace.matching.retries import RetryBudget
from marketplace.metering import traces

log = get_logger(__name__)

ASSIGN: Final = "jobs.assign"
REVIEW: Final = "jobs.review_standing"
SWEEP: Final = "jobs.sweep"
OUTBOX: Final = "jobs.outbox"
FORGET: Final = "jobs.forget"
ERASE: Final = "jobs.erase"
PLAN: Final = "jobs.plan"

MAX_ROUNDS: Final = 8
"""Rounds of one assignment task; the next tick goes on."""
SWEEP_BATCH: Final = 200
MAX_SWEEP_BATCHES: Final = 25

Finder = Callable[[Session], list[Close]]


@task(ASSIGN)
def assign_jobs() -> None:
    """Give queued jobs to idle capacity."""
    assign_until_done(process.session_factory(), process.valkey_client(), _matcher())


@task(SWEEP)
def sweep_jobs() -> None:
    """End what ran out: leases, deadlines, jobs that nobody wants or that fit nowhere."""
    sweep(process.session_factory(), process.valkey_client(), get_settings())


@task(REVIEW)
def review_standing() -> None:
    """Judge nodes by what they did: promote, demote, note outages of ours."""
    with transaction(process.session_factory()) as session:
        changed = standing.review(session)
    if changed:
        log.info("standing_reviewed", changed=changed)


@task(OUTBOX)
def send_outbox() -> None:
    """Send nudges that were committed and not sent."""
    try:
        empty_outbox(process.session_factory(), _send())
    except BROKER_ERRORS as error:
        log.warning("outbox_waits", error=str(error))


@task(ERASE)
def erase_old_texts() -> None:
    """Erase what jobs asked and were answered, and which traces they were in, once that is old enough."""
    erase_old(process.session_factory(), get_settings().text_life_s)
    with transaction(process.session_factory()) as session:
        traces.forget(session, limit=SWEEP_BATCH * MAX_SWEEP_BATCHES)


@task(FORGET)
def forget_idempotency_keys() -> None:
    """Erase idempotency keys a day after their request's end, and the answers kept for them."""
    for _ in range(MAX_SWEEP_BATCHES):
        with transaction(process.session_factory()) as session:
            erased = idempotency.erase(session, limit=SWEEP_BATCH)
        if erased < SWEEP_BATCH:
            return


@task(PLAN)
def plan_loads() -> None:
    """Advise nodes which of their models to load, by what is asked for."""
    plan_once(process.session_factory(), process.valkey_client())


@lru_cache
def _send() -> TaskSender:
    return sender(make_celery(get_settings()))


@lru_cache
def _matcher() -> Matcher:
    return make_matcher(process.valkey_client(), get_settings(), process.tracing())


def make_matcher(client: redis.Redis, settings: Settings, tracing: Tracing | None = None) -> Matcher:
    """What assignment needs beside the database; the retry budget lives as long as this."""
    rules = Rules.of(allow_simulated=settings.allow_simulated)
    return Matcher(
        slots=SyncReservations(client, rules),
        budget=RetryBudget(),
        rng=random.Random(),  # noqa: S311  # it breaks ties
        rules=rules,
        lease_s=settings.lease_s,
        now_s=time.monotonic,
        tracing=tracing,
    )


def assign_until_done(factory: SessionFactory, client: redis.Redis, matcher: Matcher) -> int:
    """Rounds of assignment until one places nothing. Returns how many jobs were placed.

    Without Valkey nothing is known to be idle: the queue waits.
    """
    placed = 0
    try:
        for _ in range(MAX_ROUNDS):
            done = assign_once(factory, client, matcher)
            placed += len(done.placed)
            if not done.placed:
                break
    except ValkeyDownError as error:
        log.warning("queue_waits_for_valkey", error=str(error))
    return placed


def assign_once(factory: SessionFactory, client: redis.Redis, matcher: Matcher) -> Assignment:
    """One round: match and lease in one transaction, then tell the gateways. Raises ValkeyDownError."""
    began_ns = time.time_ns()
    offers = read_fleet(client, silent_up_to_s=SILENT_S)
    with transaction(factory) as session:
        done = assign(session, offers, matcher)
    for refused in done.refused:
        matcher.slots.release(refused.offer_id, refused.attempt_id)
    dispatch.push(client, [(item.gateway_id, item.attempt_id) for item in done.placed], lease_s=matcher.lease_s)
    if matcher.tracing is not None and done.placed:
        show_placed(factory, matcher.tracing, done.placed, began_ns)
    ages_s = dispatch.stuck_for_s(client, [job_id for job_id, _ in done.stuck])
    ended = [sweeping.close_waiting(job_id, ending) for job_id, ending in done.over]
    close_all(factory, ended + sweeping.stuck_too_long(done.stuck, ages_s))
    if done.placed:
        log.info("jobs_assigned", placed=len(done.placed), refused=len(done.refused))
    return done


def sweep(factory: SessionFactory, client: redis.Redis, settings: Settings) -> int:
    """Everything that is due to end. Returns how many attempts and jobs were ended."""
    finders: tuple[Finder, ...] = (
        lambda session: sweeping.lost_leases(session, fee_basis_points=settings.fee_basis_points, limit=SWEEP_BATCH),
        lambda session: sweeping.overdue(session, limit=SWEEP_BATCH),
        lambda session: sweeping.clientless(session, limit=SWEEP_BATCH),
        lambda session: sweeping.forsaken(session, grace_s=settings.lease_s, limit=SWEEP_BATCH),
    )
    ended = sum(_sweep_all(factory, find) for find in finders)
    ended += _sweep_stuck(factory, client, settings)
    if ended:
        log.info("swept", ended=ended)
    _expire_holds(factory)
    return ended


def erase_old(factory: SessionFactory, life_s: float) -> int:
    """Erase texts of jobs that ended longer ago than that, a batch a transaction. Returns of how many jobs."""
    erased = 0
    for _ in range(MAX_SWEEP_BATCHES):
        with transaction(factory) as session:
            found = erase_texts(session, older_than_s=life_s, limit=SWEEP_BATCH)
        erased += found
        if found < SWEEP_BATCH:
            break
    if erased:
        log.info("texts_erased", jobs=erased)
    return erased


def _expire_holds(factory: SessionFactory) -> None:
    with transaction(factory) as session:
        expired = billing.expire_holds(session, SWEEP_BATCH)
    if expired:
        # Each job ends, and frees its hold, long before: somebody must look.
        log.error("holds_expired", holds=expired)


def _sweep_all(factory: SessionFactory, find: Finder) -> int:
    ended = 0
    for _ in range(MAX_SWEEP_BATCHES):
        with factory() as session:
            closes = find(session)
        written = close_all(factory, closes)
        ended += written
        if len(closes) < SWEEP_BATCH or not written:
            break
    return ended


def _sweep_stuck(factory: SessionFactory, client: redis.Redis, settings: Settings) -> int:
    try:
        offers = read_fleet(client)
        rules = Rules(allow_simulated=settings.allow_simulated)
        with factory() as session:
            closes, stuck = sweeping.unwanted_or_stuck(session, offers, rules=rules, limit=SWEEP_BATCH)
        ages_s = dispatch.stuck_for_s(client, [job_id for job_id, _ in stuck])
    except ValkeyDownError as error:
        log.warning("sweep_without_fleet", error=str(error))
        return 0
    return close_all(factory, closes + sweeping.stuck_too_long(stuck, ages_s))


def close_all(factory: SessionFactory, closes: Sequence[Close]) -> int:
    """Write closes in one transaction; should the database reject one of them, each in its own, so that one defect does
    not keep the others open. Returns how many were written: the others somebody closed first."""
    if not closes:
        return 0
    try:
        return _close_together(factory, closes)
    except psycopg.Error:
        if len(closes) == 1:
            log.exception("close_rejected", job_id=closes[0].job_id.hex)
            return 0
    return sum(close_all(factory, [close]) for close in closes)


def _close_together(factory: SessionFactory, closes: Sequence[Close]) -> int:
    with transaction(factory) as session:
        answers = run_in_session(session, closes)
    written = 0
    for close, answer in zip(closes, answers, strict=True):
        assert isinstance(answer, Closed)
        written += answer.ok
        if not answer.ok and answer.reason != "already_closed":
            log.warning("close_refused", job_id=close.job_id.hex, reason=answer.reason)
    return written
