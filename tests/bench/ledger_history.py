"""Reading a long history: a balance as of any instant on an account with a million postings, and a chain verified.

The history is posted by the ledger's own functions and sealed by its sealer, over 40 days and not in order of time.
"""

from __future__ import annotations

import os
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

import ledger
from ledger.chain import broken_links
from marketplace.core.database import SessionFactory, transaction
from tests.bench.durable import durable_database, seal_all, sessions, timed_s, vacuum

JOURNALS = 200_000
"""Of three lines: what the chain is verified over."""
WIDE_JOURNALS = 100_000
FEE_LINES = 8
"""Of each wide one: they bring the fee account to a million postings."""
POSTINGS = JOURNALS + WIDE_JOURNALS * FEE_LINES
BATCH = 5_000
DAYS = 40
START = datetime(2026, 1, 1, tzinfo=UTC)
ASKED = 200
OWNERS = 50


def figures() -> list[dict[str, Any]]:
    """Both figures, on one database of their own."""
    with durable_database() as url, sessions(url) as factory:
        accounts = _open(factory)
        _post(factory, accounts, JOURNALS, fee_lines=1)
        assert seal_all(factory) == JOURNALS
        vacuum(factory)
        verified = _verified(factory)
        _post(factory, accounts, WIDE_JOURNALS, fee_lines=FEE_LINES)
        assert seal_all(factory) == WIDE_JOURNALS
        vacuum(factory)
        return [_as_of(factory, accounts[ledger.FEES]), verified]


def _open(factory: SessionFactory) -> dict[str, int]:
    with transaction(factory) as session:
        codes = [*(ledger.owner_pending(f"o{n}") for n in range(OWNERS)), ledger.FEES, ledger.CLEARING]
        return ledger.open_accounts(session, [ledger.charted(code) for code in codes])


def _post(factory: SessionFactory, accounts: dict[str, int], count: int, *, fee_lines: int) -> None:
    rng = random.Random(fee_lines)
    for first in range(0, count, BATCH):
        drafts = []
        for number in range(first, first + BATCH):
            fees = [rng.randint(1, 10**6) for _ in range(fee_lines)]
            lines = (
                ledger.debit(accounts[ledger.CLEARING], 5 * sum(fees)),
                ledger.credit(accounts[ledger.owner_pending(f"o{number % OWNERS}")], 4 * sum(fees)),
                *(ledger.credit(accounts[ledger.FEES], fee) for fee in fees),
            )
            key = f"{fee_lines}-{number}"
            at = START + timedelta(seconds=rng.random() * DAYS * 86_400)
            drafts.append(ledger.JournalDraft(key, "charge", "bench", key, lines, at))
        with transaction(factory) as session:
            ledger.post_many(session, drafts)


def _as_of(factory: SessionFactory, account_id: int) -> dict[str, Any]:
    """The slowest of many instants, beside the sum over all postings before it."""
    rng = random.Random(11)
    times_ms, plain_ms = [], []
    with factory() as session:
        count = text("select count(*) from ledger_postings where account_id = :a")
        assert session.scalar(count, {"a": account_id}) == POSTINGS
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
    """Journals whose link was recomputed, for each second of one core: of this process and its server process together,
    which take turns. On a machine of its own that is the same as the clock's."""
    with transaction(factory) as session:
        backend = session.scalar(text("select pg_backend_pid()"))
        spent_s = _cpu_s(backend)
        took_s = timed_s(lambda: _read_chain(session))
        cpu_s = _cpu_s(backend) - spent_s
    with transaction(factory) as session:
        everything_s = timed_s(lambda: _verify(session))
    return {
        "figure": "ledger.chain_verify_per_s",
        "value": round(JOURNALS / (cpu_s or took_s)),
        "unit": "journals/s/core",
        "ratios": {},
        "by_the_clock_per_s": round(JOURNALS / took_s),
        "with_all_other_checks_per_s": round(JOURNALS / everything_s),
    }


def _cpu_s(backend: int | None) -> float:
    """Processor time of this process and of a server process on this machine; 0 where the server is elsewhere."""
    stat = Path(f"/proc/{backend}/stat")
    if not stat.is_file() or not stat.read_text().split()[1].startswith("(postgres"):
        return 0.0
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_chain(session: Session) -> None:
    assert list(broken_links(session, ledger.MAIN_BOOK)) == []


def _verify(session: Session) -> None:
    assert ledger.verify(session).problems == ()


FIGURES = {"ledger.": figures}
