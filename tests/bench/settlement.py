"""Charges settled a second, beside one ORM commit a charge in the same database. `make bench FIGURES=settlement`.

The workload is fixed: 200 renters, 50 owners, every hold resolved, every receipt traceable to its journal, all checks
and triggers on; afterwards the books are verified whole. Receipts are made through the hot path before the clock
starts; both ways post the same lines and leave the same states. Ratio `uncontended`: the rate of 100 writers on one fee
account, to that of the same writers with a fee account each.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import func, select

import ledger
from ledger.journal import fingerprint, make_body
from ledger.models import Balance, Hold, Journal, Posting
from marketplace.accounts.models import Organisation
from marketplace.billing.checks import invariants
from marketplace.billing.service import settle
from marketplace.core.database import SessionFactory, transaction
from marketplace.jobs.hot import Admit
from marketplace.jobs.models import Job
from marketplace.jobs.writer import run_batch
from marketplace.metering.models import Receipt
from tests.bench.durable import durable_database, seal_all, sessions, timed_s
from tests.market import Market, make_market, make_node, make_renter

CHARGES = 20_000
REFERENCE_CHARGES = 400
RENTERS = 200
OWNERS = 50
BATCH = 5_000
HOT_BATCH = 1_000
CREDIT_NANO = 10**15
WRITERS = 100
JOURNALS_A_WRITER = 10
CONTENTION_ROUNDS = 3


def measure(database_url: str) -> dict[str, Any]:
    """One figure on an empty, migrated database. Raises AssertionError if the books are not in order afterwards."""
    with sessions(database_url, WRITERS + 4) as factory:
        markets = _markets(factory)
        _deliver(database_url, markets, REFERENCE_CHARGES)
        reference = REFERENCE_CHARGES / timed_s(lambda: _commit_each(factory))
        _deliver(database_url, markets, CHARGES)
        ours = CHARGES / timed_s(lambda: _settle_all(factory))
        uncontended = _contention(factory)
        seal_all(factory)
        with transaction(factory) as session:
            findings = invariants(session)
            problems = ledger.verify(session).problems
        assert not findings, findings
        assert not problems, problems
    return {
        "figure": "settlement.charges_per_s",
        "value": round(ours),
        "unit": "charges/s",
        "ratios": {"commit_each": round(ours / reference, 1), "uncontended": round(uncontended, 2)},
    }


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
            assert renter.credit_account_id is not None
            lines = (
                (renter.credit_account_id, receipt.charge_nano),
                (accounts[owner], -receipt.owner_nano),
                (accounts[ledger.FEES], -receipt.fee_nano),
            )
            journal = _journal(receipt_id, lines)
            session.add(journal)
            session.flush()
            for account_id, nano in lines:
                session.add(Posting(journal_id=journal.id, account_id=account_id, currency="USD", amount_nano=nano))
            hold = session.get_one(Hold, receipt.job_id)
            hold.state, hold.captured_nano, hold.resolved_at = "captured", receipt.charge_nano, func.now()
            session.get_one(Job, receipt.job_id).state = "settled"
            receipt.journal_id = journal.id


def _journal(receipt_id: UUID, lines: Sequence[tuple[int, int]]) -> Journal:
    body = make_body(
        kind="settlement",
        source="bench",
        outside_id=receipt_id.hex,
        lines=[(account_id, "USD", nano) for account_id, nano in lines],
        effective_at=None,
        captures_sha256=None,
        reverses_id=None,
        memo={},
        book_id=ledger.MAIN_BOOK,
        corrects_period_id=None,
        closing_entry=False,
    )
    return Journal(
        idempotency_key=f"bench:{receipt_id.hex}",
        kind="settlement",
        source="bench",
        outside_id=receipt_id.hex,
        body_sha256=fingerprint(body),
        effective_at=func.now(),
    )


def _contention(factory: SessionFactory) -> float:
    """How fast 100 writers are that share one fee account, beside the same 100 with a fee account each."""
    shared, apart = [], []
    for _ in range(CONTENTION_ROUNDS):
        apart.append(_write_at_once(factory, shared_fees=False))
        shared.append(_write_at_once(factory, shared_fees=True))
    return min(apart) / min(shared)


def _write_at_once(factory: SessionFactory, *, shared_fees: bool) -> float:
    """Seconds that WRITERS threads take, each posting its journals of one renter, one owner and the fee."""
    ref = secrets.token_hex(4)
    fee_codes = [f"fees-{ref}-{0 if shared_fees else n}" for n in range(WRITERS)]
    with transaction(factory) as session:
        specs = [ledger.charted(ledger.renter_credit(f"{ref}-{n}")) for n in range(WRITERS)]
        specs += [ledger.charted(ledger.owner_pending(f"{ref}-{n}")) for n in range(WRITERS)]
        specs += [ledger.AccountSpec(code, ledger.Kind.INCOME) for code in fee_codes]
        ids = ledger.open_accounts(session, [*specs, ledger.charted(ledger.CLEARING)])
        for n in range(WRITERS):
            renter = ids[ledger.renter_credit(f"{ref}-{n}")]
            lines = (ledger.debit(ids[ledger.CLEARING], CREDIT_NANO), ledger.credit(renter, CREDIT_NANO))
            ledger.post(session, ledger.JournalDraft(f"{ref}-{n}", "top_up", "bench", f"{ref}-{n}", lines))
    barrier = threading.Barrier(WRITERS + 1)

    def write(number: int) -> None:
        lines = (
            ledger.debit(ids[ledger.renter_credit(f"{ref}-{number}")], 1_000),
            ledger.credit(ids[ledger.owner_pending(f"{ref}-{number}")], 800),
            ledger.credit(ids[fee_codes[number]], 200),
        )
        with factory() as session:
            session.connection()
            session.rollback()
            barrier.wait(timeout=60)
            for turn in range(JOURNALS_A_WRITER):
                key = f"{ref}-{number}-{turn}"
                ledger.post(session, ledger.JournalDraft(key, "charge", "bench", key, lines))
                session.commit()

    with ThreadPoolExecutor(WRITERS) as threads:
        done = [threads.submit(write, number) for number in range(WRITERS)]
        barrier.wait(timeout=60)
        return timed_s(lambda: [future.result() for future in done])


def figures() -> list[dict[str, Any]]:
    """The figure, on a database of its own."""
    with durable_database() as url:
        return [measure(url)]


FIGURES = {"settlement.": figures}
