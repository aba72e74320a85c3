"""Reading a long history: a balance as of any instant on an account with a million postings, and a chain verified.

The history is posted by the ledger's own functions and sealed by its sealer, over 40 days and not in order of time.
"""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import text

import ledger
from marketplace.core.database import SessionFactory, transaction
from tests.bench.durable import durable_database, seal_all, sessions, timed_s, vacuum

JOURNALS = 1_000_000
"""Each with a line on the fee account."""
BATCH = 5_000
DAYS = 40
START = datetime(2026, 1, 1, tzinfo=UTC)
ASKED = 200
OWNERS = 50


def figures() -> list[dict[str, Any]]:
    """Both figures, on one database of their own."""
    with durable_database() as url, sessions(url) as factory:
        fees = _post(factory)
        sealed = seal_all(factory)
        assert sealed == JOURNALS
        vacuum(factory)
        return [_as_of(factory, fees), _verified(factory)]


def _post(factory: SessionFactory) -> int:
    """The history; returns the account that each journal has a line on."""
    rng = random.Random(7)
    span_s = DAYS * 86_400
    with transaction(factory) as session:
        owners = [ledger.owner_pending(f"o{n}") for n in range(OWNERS)]
        codes = [*owners, ledger.FEES, ledger.CLEARING]
        ids = ledger.open_accounts(session, [ledger.charted(code) for code in codes])
    for first in range(0, JOURNALS, BATCH):
        drafts = []
        for number in range(first, first + BATCH):
            fee_nano = rng.randint(1, 10**6)
            lines = (
                ledger.debit(ids[ledger.CLEARING], 5 * fee_nano),
                ledger.credit(ids[owners[number % OWNERS]], 4 * fee_nano),
                ledger.credit(ids[ledger.FEES], fee_nano),
            )
            at = START + timedelta(seconds=rng.random() * span_s)
            drafts.append(ledger.JournalDraft(f"b{number}", "charge", "bench", f"b{number}", lines, at))
        with transaction(factory) as session:
            ledger.post_many(session, drafts)
    return ids[ledger.FEES]


def _as_of(factory: SessionFactory, account_id: int) -> dict[str, Any]:
    """The slowest of many instants, beside the sum over all postings before it."""
    rng = random.Random(11)
    times_ms, plain_ms = [], []
    with factory() as session:
        for number in range(ASKED):
            at = START + timedelta(seconds=rng.random() * DAYS * 86_400)
            started_s = time.perf_counter()
            found = ledger.balance(session, account_id, as_of=at)
            times_ms.append((time.perf_counter() - started_s) * 1_000)
            if number % 20 == 0:
                started_s = time.perf_counter()
                plain = session.scalar(
                    text("select -sum(amount_nano) from ledger_postings where account_id = :a and effective_at < :at"),
                    {"a": account_id, "at": at},
                )
                plain_ms.append((time.perf_counter() - started_s) * 1_000)
                assert found.nano == plain
    worst = max(times_ms)
    return {
        "figure": "ledger.balance_as_of_ms",
        "value": round(worst, 2),
        "unit": "ms",
        "ratios": {"sum_of_postings": round(worst / max(plain_ms), 4)},
        "median_ms": round(sorted(times_ms)[ASKED // 2], 2),
    }


def _verified(factory: SessionFactory) -> dict[str, Any]:
    """Journals whose link was recomputed, a second, by one process and its one connection."""
    with transaction(factory) as session:
        session.execute(text("set local work_mem = '64MB'"))
        took_s = timed_s(lambda: _read_chain(session))
    with transaction(factory) as session:
        everything_s = timed_s(lambda: _verify(session))
    return {
        "figure": "ledger.chain_verify_per_s",
        "value": round(JOURNALS / took_s),
        "unit": "journals/s",
        "ratios": {},
        "all_checks_per_s": round(JOURNALS / everything_s),
    }


def _read_chain(session: Any) -> None:
    from ledger.chain import broken_links

    assert list(broken_links(session, ledger.MAIN_BOOK)) == []


def _verify(session: Any) -> None:
    assert ledger.verify(session).problems == ()


FIGURES = {"ledger.": figures}
