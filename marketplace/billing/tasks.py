"""Celery tasks of billing: settlement in batches, and the checks of the books on a timer."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import lru_cache

from celery import shared_task

import ledger
from marketplace.billing import checks, driving, inbox, payouts, reconciliation, runs, service, topups
from marketplace.billing.payments.factory import claim_books, make_payments
from marketplace.billing.payments.port import PaymentError, Payments
from marketplace.billing.traces import show_settled
from marketplace.core import process
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
WEBHOOK = inbox.TASK
PAYMENTS = "billing.payments"
TOP_UPS = "billing.top_ups"
PAYOUTS = "billing.payouts"
RECONCILE = "billing.reconcile"
RECONCILED_EVERY = timedelta(hours=23)
"""Daily, whatever restarts in between."""
RECONCILE_TIME_S = 1_800
CALLS_TIME_S = 120
"""A slow processor may take so long; what is broken off is looked up afterwards."""
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
        tracing = process.tracing()
        if tracing is not None and batch.journal_id is not None:
            show_settled(session_factory(), tracing, batch.journal_id, batch.count)
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


# --- the payment processor ------------------------------------------------------------------------------------------


@lru_cache
def _payments() -> Payments:
    """This process's way to the processor. Raises ModeMismatch if the books are another one's."""
    payments = make_payments(get_settings(), session_factory())
    claim_books(session_factory(), payments)
    return payments


@shared_task(name=WEBHOOK, soft_time_limit=CALLS_TIME_S, time_limit=CALLS_TIME_S + 30)  # type: ignore[untyped-decorator]
def webhook(event_row: int) -> str:
    """Apply one event that came."""
    return inbox.process(session_factory(), _payments(), event_row, utcnow())


@shared_task(name=PAYMENTS, soft_time_limit=CALLS_TIME_S, time_limit=CALLS_TIME_S + 30)  # type: ignore[untyped-decorator]
def drive_payments() -> int:
    """Send what was written down and is due, and apply events whose nudge was lost. Returns how many."""
    factory, payments, now = session_factory(), _payments(), utcnow()
    return driving.drive_due(factory, payments, now) + inbox.process_due(factory, payments, now)


@shared_task(name=TOP_UPS)  # type: ignore[untyped-decorator]
def top_up_automatically() -> int:
    """Begin automatic top-ups, and tell of low balances. Returns how many began."""
    with transaction(session_factory()) as session:
        low = topups.low_on_credit(session)
    begun = 0
    for organisation_id, available_nano in low:
        with transaction(session_factory()) as session:
            payment = topups.act_on_plan(
                session, organisation_id, available_nano, now=utcnow(), settings=get_settings()
            )
        begun += payment is not None
    return begun


@shared_task(name=PAYOUTS, soft_time_limit=RECONCILE_TIME_S, time_limit=RECONCILE_TIME_S + 60)  # type: ignore[untyped-decorator]
def pay_out() -> int:
    """This week's run, once its day has come: again within the week it pays nobody twice. Returns how many owners."""
    key = runs.due_week(utcnow(), get_settings())
    if key is None:
        return 0
    with transaction(session_factory()) as session:
        if runs.finished(session, key):
            return 0
    try:
        plans = runs.run_payouts(
            session_factory(), _payments(), get_settings(), key=key, started_by="clock", now=utcnow()
        )
    except (payouts.PayoutsStopped, PaymentError) as error:
        log.error("payout_run_stopped", key=key, error=error.message)
        return 0
    return len(plans)


@shared_task(name=RECONCILE, soft_time_limit=RECONCILE_TIME_S, time_limit=RECONCILE_TIME_S + 60)  # type: ignore[untyped-decorator]
def reconcile() -> int:
    """The daily comparison with the processor. Returns how many differences are open."""
    now = utcnow()
    with transaction(session_factory()) as session:
        last = reconciliation.newest(session)
    if last is not None and now - last.at < RECONCILED_EVERY:
        return last.open_breaks
    try:
        report = reconciliation.reconcile(session_factory(), _payments(), now)
    except PaymentError as error:
        log.warning("reconciliation_failed", error=error.message)
        return 0
    for each in report.breaks:
        log.error("reconciliation_break", kind=each.kind, subject=each.subject, story=each.story)
    return len(report.breaks)
