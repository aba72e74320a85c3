"""Charges settled a second, beside one ORM commit a charge in the same database. `make bench FIGURES=settlement`.

The database runs as in production: every commit is durable (fsync on). Receipts are made through the hot path before
the clock starts; both ways post the same lines and leave the same states.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import func, select

import ledger
from ledger.models import Balance, Hold, Journal, Posting
from marketplace.accounts.models import Organisation
from marketplace.billing.checks import invariants
from marketplace.billing.service import settle
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.migrate import upgrade
from marketplace.core.settings import Settings
from marketplace.embedded import EmbeddedStores
from marketplace.jobs.hot import Admit
from marketplace.jobs.models import Job
from marketplace.jobs.writer import run_batch
from marketplace.metering.models import Receipt
from tests.market import Market, make_market, make_node, make_renter

CHARGES = 20_000
REFERENCE_CHARGES = 400
RENTERS = 50
OWNERS = 20
BATCH = 5_000
HOT_BATCH = 1_000
CREDIT_NANO = 10**15


def measure(database_url: str) -> dict[str, Any]:
    """One figure on an empty, migrated database. Raises AssertionError if the books are not in order afterwards."""
    engine = make_engine(Settings(database_url=database_url), application_name="bench")
    factory = make_session_factory(engine)
    markets = _markets(factory)
    try:
        _deliver(database_url, markets, REFERENCE_CHARGES)
        reference = REFERENCE_CHARGES / _timed(lambda: _commit_each(factory))
        _deliver(database_url, markets, CHARGES)
        ours = CHARGES / _timed(lambda: _settle_all(factory))
        with factory() as session:
            findings = invariants(session)
        assert not findings, findings
    finally:
        engine.dispose()
    return {
        "figure": "settlement.charges_per_s",
        "value": round(ours),
        "unit": "charges/s",
        "ratios": {"commit_each": round(ours / reference, 1)},
    }


def _timed(work: Any) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _markets(factory: SessionFactory) -> list[Market]:
    """The same variant, sold by many owners to many renters."""
    with transaction(factory) as session:
        first = make_market(session, credit_nano=CREDIT_NANO)
        renters = [first.renter, *(make_renter(session, credit_nano=CREDIT_NANO) for _ in range(RENTERS - 1))]
        nodes = [first.node, *(make_node(session, first.variant_id) for _ in range(OWNERS - 1))]
    return [replace(first, renter=renter, node=nodes[i % OWNERS]) for i, renter in enumerate(renters)]


def _deliver(database_url: str, markets: Sequence[Market], count: int) -> None:
    """Answered jobs that wait for settlement."""
    turns = itertools.cycle(markets)
    with psycopg.connect(database_url, autocommit=True) as connection:
        for size in _sizes(count):
            pairs: list[tuple[Market, Admit]] = [(market, market.admit()) for market in itertools.islice(turns, size)]
            run_batch(connection, [job for _, job in pairs])
            run_batch(connection, [market.delivered(job) for market, job in pairs])


def _sizes(count: int) -> Iterable[int]:
    full, rest = divmod(count, HOT_BATCH)
    return [HOT_BATCH] * full + [rest] * bool(rest)


def _settle_all(factory: SessionFactory) -> None:
    while True:
        with transaction(factory) as session:
            if not settle(session, BATCH).count:
                return


def _commit_each(factory: SessionFactory) -> None:
    """How it is done at first: load the rows of one charge, change them, commit, next."""
    with factory() as session:
        receipt_ids = list(session.scalars(select(Receipt.id).where(Receipt.journal_id.is_(None))))
    for receipt_id in receipt_ids:
        with transaction(factory) as session:
            receipt = session.get_one(Receipt, receipt_id)
            renter = session.get_one(Organisation, receipt.renter_organisation_id)
            owner = ledger.owner_pending(receipt.owner_organisation_id.hex)
            accounts = ledger.open_accounts(session, [ledger.charted(owner), ledger.charted(ledger.FEES)])
            balance = session.get_one(Balance, renter.credit_account_id, with_for_update=True)
            balance.posted_nano -= receipt.charge_nano
            balance.held_nano -= receipt.charge_nano
            journal = Journal(
                idempotency_key=f"bench:{receipt_id.hex}",
                kind="settlement",
                source="bench",
                outside_id=receipt_id.hex,
                body_sha256=b"",
                effective_at=func.now(),
            )
            session.add(journal)
            session.flush()
            for account_id, nano in (
                (renter.credit_account_id, receipt.charge_nano),
                (accounts[owner], -receipt.owner_nano),
                (accounts[ledger.FEES], -receipt.fee_nano),
            ):
                session.add(Posting(journal_id=journal.id, account_id=account_id, currency="USD", amount_nano=nano))
            hold = session.get_one(Hold, receipt.job_id)
            hold.state, hold.captured_nano, hold.resolved_at = "captured", receipt.charge_nano, func.now()
            session.get_one(Job, receipt.job_id).state = "settled"
            receipt.journal_id = journal.id


@contextmanager
def durable_database() -> Iterator[str]:
    """A migrated database of its own: DATABASE_URL if set (it must be empty), else an embedded one."""
    given = os.environ.get("DATABASE_URL")
    if given:
        upgrade(given)
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="fallow-bench-"))
    folder.chmod(0o755)
    stores = EmbeddedStores(folder)
    try:
        url = stores.start().database_url
        upgrade(url)
        yield url
    finally:
        stores.stop()
        shutil.rmtree(folder, ignore_errors=True)


def figures() -> list[dict[str, Any]]:
    """The figure, on a database of its own."""
    with durable_database() as url:
        return [measure(url)]


FIGURES = {"settlement.": figures}
