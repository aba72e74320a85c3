"""Celery tasks of billing: settlement in batches, and the checks of the books on a timer."""

from __future__ import annotations

import time
from datetime import timedelta

from celery import shared_task

from marketplace.billing import checks, service
from marketplace.core.clock import utcnow
from marketplace.core.database import transaction
from marketplace.core.logs import get_logger
from marketplace.core.process import session_factory
from marketplace.core.settings import get_settings

log = get_logger(__name__)
SETTLE = "billing.settle"
CHECK = "billing.check"
SETTLE_TIME_S = 15.0
"""One task settles no longer than this: the next tick goes on."""
CHECK_WINDOW = timedelta(hours=24)


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
