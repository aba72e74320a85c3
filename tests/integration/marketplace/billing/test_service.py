"""Credit and settlement on a real PostgreSQL: what turns receipts into journals."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

import ledger
from marketplace.billing.checks import invariants
from marketplace.billing.service import (
    MAX_TOP_UP_NANO,
    NOTHING_POSTED,
    InvalidAmount,
    SettledBatch,
    SettlementBroken,
    TopUpMismatch,
    UnknownOrganisation,
    balance,
    settle,
    top_up,
)
from marketplace.core.database import SessionFactory, transaction
from marketplace.jobs.hot import Admit, Closed
from marketplace.jobs.writer import run_batch
from marketplace.matching.types import Rates
from tests.market import Market, make_market, make_node, make_renter


@pytest.fixture
def market(session_factory: SessionFactory) -> Market:
    with transaction(session_factory) as session:
        return make_market(session)


def deliver(database_url: str, market: Market, count: int, *, output: int = 50, **changes: Any) -> list[Admit]:
    """Jobs that were answered and wait for settlement."""
    jobs = [market.admit() for _ in range(count)]
    with psycopg.connect(database_url, autocommit=True) as connection:
        run_batch(connection, jobs)
        answers = run_batch(connection, [market.delivered(job, output=output, **changes) for job in jobs])
    assert answers == [Closed(True)] * count
    return jobs


def pending(session: Session, market: Market) -> int:
    """What the ledger owes the owner, in nanos."""
    code = ledger.owner_pending(market.node.owner_organisation_id.hex)
    return ledger.balance(session, ledger.account_id(session, code)).nano


def total(session: Session, code: str) -> int:
    return ledger.balance(session, ledger.account_id(session, code)).nano


def in_order(session_factory: SessionFactory) -> None:
    with session_factory() as session:
        assert invariants(session) == []


class TestTopUps:
    def test_credit_is_added_once_however_often_it_is_asked_for(
        self, session_factory: SessionFactory, market: Market
    ) -> None:
        with transaction(session_factory) as session:
            renter = make_renter(session, credit_nano=0)
        journals = set()
        for _ in range(3):
            with transaction(session_factory) as session:
                journals.add(top_up(session, renter.organisation_id, 2**53 + 1, "payment-1"))
        assert len(journals) == 1
        with session_factory() as session:
            credit = balance(session, renter.organisation_id)
        assert (credit.posted_nano, credit.held_nano, credit.available_nano) == (2**53 + 1, 0, 2**53 + 1)
        in_order(session_factory)

    def test_the_same_key_for_another_amount_is_refused_and_says_what_differs(
        self, session_factory: SessionFactory, market: Market
    ) -> None:
        with transaction(session_factory) as session:
            top_up(session, market.renter.organisation_id, 10, "payment-2")
        with session_factory() as session, pytest.raises(TopUpMismatch, match="lines"):
            top_up(session, market.renter.organisation_id, 11, "payment-2")

    @pytest.mark.parametrize("amount", [0, -1, MAX_TOP_UP_NANO + 1])
    def test_an_amount_that_is_no_payment_is_refused(
        self, session_factory: SessionFactory, market: Market, amount: int
    ) -> None:
        with session_factory() as session, pytest.raises(InvalidAmount):
            top_up(session, market.renter.organisation_id, amount, "payment-3")

    def test_an_unknown_organisation_has_no_credit(self, session_factory: SessionFactory) -> None:
        with session_factory() as session, pytest.raises(UnknownOrganisation):
            balance(session, uuid.uuid4())

    def test_simultaneous_top_ups_and_holds_all_count(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        jobs = [market.admit() for _ in range(8)]
        barrier = threading.Barrier(8)

        def both(place: int) -> None:
            barrier.wait()
            with transaction(session_factory) as session:
                top_up(session, market.renter.organisation_id, 1_000, f"simultaneous-{place}")
            with psycopg.connect(database_url, autocommit=True) as connection:
                run_batch(connection, [jobs[place]])

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(both, place) for place in range(8)]:
                done.result()
        with session_factory() as session:
            credit = balance(session, market.renter.organisation_id)
        assert credit.posted_nano == 1_000_000_000 + 8 * 1_000
        assert credit.held_nano == sum(job.hold_nano for job in jobs)
        in_order(session_factory)


class TestSettlement:
    def test_renters_debits_equal_owners_credits_plus_fee_to_the_nano(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        deliver(database_url, market, 7, output=33)
        receipt = market.receipt(33)
        with transaction(session_factory) as session:
            batch = settle(session, 100)
        assert (batch.count, batch.renter_nano) == (7, 7 * receipt.charge_nano)
        assert batch.renter_nano == batch.owner_nano + batch.fee_nano
        with session_factory() as session:
            credit = balance(session, market.renter.organisation_id)
            assert (credit.posted_nano, credit.held_nano) == (1_000_000_000 - 7 * receipt.charge_nano, 0)
            assert pending(session, market) == 7 * receipt.owner_nano
            assert total(session, ledger.FEES) == 7 * receipt.fee_nano
            assert ledger.trial_balance(session).balanced
            states = session.execute(text("select distinct state from jobs")).scalars().all()
            holds = session.execute(text("select distinct state from ledger_holds")).scalars().all()
        assert (states, holds) == (["settled"], ["captured"])
        in_order(session_factory)

    def test_a_batch_is_one_journal_and_nothing_is_settled_twice(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        deliver(database_url, market, 5)
        counts = []
        for _ in range(4):
            with transaction(session_factory) as session:
                counts.append(settle(session, 2).count)
        assert counts == [2, 2, 1, 0]
        with session_factory() as session:
            kinds = session.execute(text("select kind, count(*) from ledger_journals group by kind")).all()
        assert dict(kinds)["settlement"] == 3
        in_order(session_factory)

    def test_two_settlers_at_once_settle_everything_once(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        deliver(database_url, market, 120)
        barrier = threading.Barrier(2)

        def work() -> int:
            done = 0
            barrier.wait()
            while True:
                with transaction(session_factory) as session:
                    batch = settle(session, 10)
                if not batch.count:
                    return done
                done += batch.count

        with ThreadPoolExecutor(2) as pool:
            done = [future.result() for future in [pool.submit(work), pool.submit(work)]]
        assert sum(done) == 120
        with session_factory() as session:
            assert pending(session, market) == 120 * market.receipt(50).owner_nano
        in_order(session_factory)

    def test_our_failure_is_paid_from_our_loss_account(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        receipt = market.receipt(20, by_platform=True)
        deliver(database_url, market, 1, output=20, outcome="platform_failed", receipt=receipt, fault="platform")
        with transaction(session_factory) as session:
            batch = settle(session, 100)
        assert (batch.renter_nano, batch.loss_nano) == (0, receipt.loss_nano)
        with session_factory() as session:
            assert balance(session, market.renter.organisation_id).available_nano == 1_000_000_000
            assert pending(session, market) == receipt.owner_nano
            assert total(session, ledger.LOSS) == receipt.loss_nano == receipt.owner_nano + receipt.fee_nano
        in_order(session_factory)

    def test_a_free_model_settles_without_a_journal(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        free = replace(market, rates=Rates(0, 0, 0))
        deliver(database_url, free, 2)
        with transaction(session_factory) as session:
            assert settle(session, 100) == SettledBatch(2, None)
        with session_factory() as session:
            assert session.execute(text("select distinct journal_id from receipts")).scalars().all() == [NOTHING_POSTED]
            assert session.execute(text("select distinct state from jobs")).scalars().all() == ["settled"]
        in_order(session_factory)

    def test_several_renters_and_owners_share_one_journal(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        with transaction(session_factory) as session:
            other = replace(market, renter=make_renter(session), node=make_node(session, market.variant_id))
        deliver(database_url, market, 3)
        deliver(database_url, other, 2, output=80)
        with transaction(session_factory) as session:
            batch = settle(session, 100)
        assert batch.count == 5
        with session_factory() as session:
            assert pending(session, market) == 3 * market.receipt(50).owner_nano
            assert pending(session, other) == 2 * other.receipt(80).owner_nano
        in_order(session_factory)

    def test_the_price_of_admission_counts_though_the_ask_changed_since(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        deliver(database_url, market, 1)
        with transaction(session_factory) as session:
            session.execute(
                text(
                    "insert into prices (variant_id, seller_ref, input_nano_usd_per_mtok, "
                    "cached_input_nano_usd_per_mtok, output_nano_usd_per_mtok) "
                    "select variant_id, seller_ref, 9, 9, 9 from prices"
                )
            )
            batch = settle(session, 100)
        assert batch.renter_nano == market.receipt(50).charge_nano
        in_order(session_factory)

    def test_a_rolled_back_settlement_leaves_everything_delivered(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        deliver(database_url, market, 3)
        with session_factory() as session:
            settle(session, 100)
            session.rollback()
        in_order(session_factory)
        with transaction(session_factory) as session:
            assert settle(session, 100).count == 3
        in_order(session_factory)

    def test_a_charge_that_waits_for_settlement_does_not_expire(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        deliver(database_url, market, 1)
        with session_factory() as session:
            left = session.scalar(text("select min(expires_at) > now() + interval '50 years' from ledger_holds"))
        assert left

    def test_a_receipt_of_a_job_that_is_not_delivered_stops_the_batch(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        deliver(database_url, market, 2)
        with transaction(session_factory) as session:
            session.execute(text("update jobs set state = 'running' where id = (select min(id::text)::uuid from jobs)"))
        with session_factory() as session, pytest.raises(SettlementBroken, match="not delivered"):
            settle(session, 100)

    def test_settling_while_gateways_admit_and_close_loses_nothing(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        stop = threading.Event()
        settled: list[int] = []

        def settler() -> None:
            while not stop.is_set():
                with transaction(session_factory) as session:
                    settled.append(settle(session, 20).count)

        def gateway() -> None:
            for _ in range(6):
                deliver(database_url, market, 5)

        with ThreadPoolExecutor(4) as pool:
            settlers = [pool.submit(settler), pool.submit(settler)]
            gateways = [pool.submit(gateway), pool.submit(gateway)]
            try:
                for done in gateways:
                    done.result()
            finally:
                stop.set()
            for done in settlers:
                done.result()
        with transaction(session_factory) as session:
            settled.append(settle(session, 1_000).count)
        assert sum(settled) == 60
        in_order(session_factory)


BREAK: Sequence[tuple[str, str]] = [
    ("update jobs set state = 'settled'", "a settled job has one settled receipt"),
    ("delete from receipts", "a delivered job has one receipt, unsettled"),
    ("update jobs set state = 'running'", "no other job has a receipt"),
    ("update attempts set accepted_tokens = 1", "paid tokens were accepted"),
    (
        (
            "update receipts set charge_nano = charge_nano + 1, owner_nano = owner_nano + 1, "
            "output_visible_nano = output_visible_nano + 1"
        ),
        "a receipt costs what its tokens cost at the pinned rates",
    ),
    ("update ledger_holds set amount_nano = amount_nano + 1", "a delivered job holds exactly its charge"),
    ("update jobs set state = 'voided'", "no hold remains on an ended job"),
    ("update attempts set state = 'leased'", "one lease at a time, on the newest attempt"),
    ("update attempts set epoch = 7", "one lease at a time, on the newest attempt"),
    ("delete from outcomes", "an ended job has its outcome"),
    ("update jobs set state = 'queued'", "an open job has no outcome yet"),
    ("update jobs set state = 'running'", "an open job holds its worst case"),
    ("update ledger_balances set held_nano = held_nano + 1", "balance_held"),
    (
        (
            "insert into attempts (id, job_id, epoch, node_id, offer_id, gateway_id, price_id, "
            "input_nano_usd_per_mtok, cached_input_nano_usd_per_mtok, output_nano_usd_per_mtok, "
            "lease_expires_at, state) "
            "select gen_random_uuid(), job_id, n, node_id, offer_id, gateway_id, price_id, 1, 1, 1, now(), 'ended' "
            "from attempts, generate_series(2, 4) n"
        ),
        "attempts are bounded",
    ),
    (
        (
            "with failed as (update attempts set fault = 'node' returning *) "
            "insert into attempts (id, job_id, epoch, node_id, offer_id, gateway_id, price_id, "
            "input_nano_usd_per_mtok, cached_input_nano_usd_per_mtok, output_nano_usd_per_mtok, "
            "lease_expires_at, state) "
            "select gen_random_uuid(), job_id, 2, node_id, offer_id, gateway_id, price_id, 1, 1, 1, now(), 'ended' "
            "from failed"
        ),
        "never again on a node that failed it",
    ),
]


class TestInvariantsFindWhatIsBroken:
    @pytest.mark.parametrize(("damage", "rule"), BREAK)
    def test_damage_is_found_by_its_rule(
        self, session_factory: SessionFactory, database_url: str, market: Market, damage: str, rule: str
    ) -> None:
        deliver(database_url, market, 1)
        in_order(session_factory)
        with transaction(session_factory) as session:
            session.execute(text("set local session_replication_role = replica"))
            session.execute(text(damage))
        with session_factory() as session:
            findings = invariants(session)
        assert any(finding.startswith(rule) for finding in findings), findings

    def test_a_settlement_that_moves_another_sum_than_its_receipts_is_found(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        deliver(database_url, market, 2)
        with transaction(session_factory) as session:
            settle(session, 10)
            session.execute(text("set local session_replication_role = replica"))
            session.execute(text("delete from receipts where id = (select max(id::text)::uuid from receipts)"))
        with session_factory() as session:
            assert any(found.startswith("a settlement moves what its receipts say") for found in invariants(session))

    def test_a_job_that_outlives_its_deadline_is_found_when_asked_for(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        with psycopg.connect(database_url) as connection:
            run_batch(connection, [market.admit(queued=True, deadline_s=-60.0)])
        with session_factory() as session:
            assert invariants(session, grace_s=600.0) == []
            assert any("ends in time" in finding for finding in invariants(session, grace_s=30.0))
