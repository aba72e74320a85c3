"""Celery tasks of billing: settlement in batches, and the checks of the books on a timer."""

from __future__ import annotations

import time
from datetime import timedelta

from celery import shared_task

import ledger
from marketplace.billing import checks, service
from marketplace.core.clock import utcnow
from marketplace.core.database import transaction
from marketplace.core.logs import get_logger
from marketplace.core.process import session_factory
from marketplace.core.settings import get_settings

log = get_logger(__name__)
SETTLE = "billing.settle"
CHECK = "billing.check"
SEAL = "billing.seal"
VERIFY = "billing.verify"
SETTLE_TIME_S = 15.0
"""One task settles no longer than this: the next tick goes on."""
SEAL_TIME_S = 15.0
CHECK_WINDOW = timedelta(hours=24)
VERIFY_TIME_S = 3_600
"""The whole history is read: at some 100,000 journals a second this is far away."""


@shared_task(name=SETTLE)  # type: ignore[untyped-decorator]
def settle() -> int:
    """Settle what was delivered, a batch a transaction, until nothing is due or the time is up. Returns how many."""
    limit = get_settings().settlement_batch
    stop_at_s = time.monotonic() + SETTLE_TIME_S
    total = 0
    while True:
        with transaction(session_factory()) as session:
            batch = service.settle(session, limit)
        total += batch.count
        if batch.count < limit or time.monotonic() > stop_at_s:
            break
    if total:
        log.info("settled", receipts=total)
    return total


@shared_task(name=CHECK)  # type: ignore[untyped-decorator]
def check() -> int:
    """Look for broken rules among the last day's jobs. Each is an error in the log; returns how many there are."""
    with transaction(session_factory()) as session:
        findings = checks.invariants(session, since=utcnow() - CHECK_WINDOW)
    for finding in findings:
        log.error("invariant_broken", finding=finding)
    return len(findings)


@shared_task(name=SEAL)  # type: ignore[untyped-decorator]
def seal() -> int:
    """Append what was posted to the hash chains, a batch a transaction. Returns how many journals.

    The head goes to the log: outside the database it proves everything before it.
    """
    stop_at_s = time.monotonic() + SEAL_TIME_S
    with transaction(session_factory()) as session:
        books = ledger.list_books(session)
    return sum(_seal_book(book_id, stop_at_s) for book_id in books)


def _seal_book(book_id: int, stop_at_s: float) -> int:
    total = 0
    while True:
        with transaction(session_factory()) as session:
            sealed = ledger.seal(session, book_id)
        total += sealed.count
        for journal_id in sealed.refused:
            log.error("journal_not_sealed", book=book_id, journal=journal_id)
        if not sealed.count or time.monotonic() > stop_at_s:
            break
    if total:
        log.info("sealed", journals=total, head=str(sealed.head))
    return total


@shared_task(name=VERIFY, soft_time_limit=VERIFY_TIME_S, time_limit=VERIFY_TIME_S + 60)  # type: ignore[untyped-decorator]
def verify() -> int:
    """Verify the books whole: chains, snapshots, balances, guards. Each problem is an error in the log; returns how
    many there are."""
    with transaction(session_factory()) as session:
        found = ledger.verify(session)
    for problem in found.problems:
        log.error("books_broken", rule=problem.rule, story=problem.story)
    if not found.problems:
        log.info("books_verified", journals=found.links, heads=[str(head) for head in found.heads])
    return len(found.problems)
