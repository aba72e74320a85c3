"""The hot path on a real PostgreSQL: holds, leases, checkpoints, ends, and the writer that groups them."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

import ledger
from marketplace.billing.checks import invariants
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import FallowError, Unavailable
from marketplace.jobs.hot import Admit, Admitted, Checkpoint, Closed, Leased, Refused
from marketplace.jobs.writer import HotWriter, RecordRejected, run_batch, run_in_session
from marketplace.matching.types import Rates
from marketplace.metering.pricing import worst_case
from tests.market import (
    MAX_OUTPUT_TOKENS,
    PROMPT_TOKENS,
    RATES,
    Market,
    Renter,
    make_market,
    make_node,
    make_renter,
)

HOLD_NANO = worst_case(RATES, PROMPT_TOKENS, MAX_OUTPUT_TOKENS)


@pytest.fixture
def market(session_factory: SessionFactory) -> Market:
    with transaction(session_factory) as session:
        return make_market(session)


@pytest.fixture
def writer(database_url: str) -> Iterator[HotWriter]:
    writer = HotWriter(database_url)
    writer.start()
    yield writer
    writer.stop()


@pytest.fixture
def one(session_factory: SessionFactory) -> Callable[..., Any]:
    """The first row of a query, as a dictionary."""

    def query(statement: str, **parameters: Any) -> dict[str, Any]:
        with session_factory() as session:
            return dict(session.execute(text(statement), parameters).mappings().one())

    return query


@pytest.fixture
def _in_order(session_factory: SessionFactory) -> Iterator[None]:
    """Whatever a test did, the books and the rules hold afterwards."""
    yield
    with session_factory() as session:
        assert invariants(session) == []


pytestmark = pytest.mark.usefixtures("_in_order")


def balance(one: Callable[..., Any], renter: Renter) -> tuple[int, int]:
    row = one("select posted_nano, held_nano from ledger_balances where account_id = :a", a=renter.credit_account_id)
    return row["posted_nano"], row["held_nano"]


class TestAdmission:
    def test_the_worst_case_is_held_and_the_attempt_is_leased(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit()
        assert writer.submit_sync(job) == Admitted(True, 1_000_000_000 - HOLD_NANO)
        assert balance(one, market.renter) == (1_000_000_000, HOLD_NANO)
        stored = one("select state, kind, body, hold_nano from jobs where id = :id", id=job.job_id)
        assert stored == {"state": "running", "kind": "interactive", "body": None, "hold_nano": HOLD_NANO}
        assert job.attempt is not None
        attempt = one("select epoch, state from attempts where id = :id", id=job.attempt.attempt_id)
        assert attempt == {"epoch": 1, "state": "leased"}

    def test_a_queued_job_has_no_attempt_and_leaves_a_nudge(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit(queued=True)
        assert writer.submit_sync(job).ok
        stored = one("select state, body->'messages'->0->>'content' as said from jobs where id = :id", id=job.job_id)
        assert stored == {"state": "queued", "said": "hi"}
        assert one("select task from outbox") == {"task": "jobs.assign"}
        assert one("select count(*) as n from attempts") == {"n": 0}

    def test_what_the_balance_does_not_cover_is_refused_with_what_it_has(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        with transaction(session_factory) as session:
            poor = make_renter(session, credit_nano=HOLD_NANO - 1)
        assert writer.submit_sync(market.admit(renter=poor)) == Admitted(False, HOLD_NANO - 1)
        assert balance(one, poor) == (HOLD_NANO - 1, 0)
        assert one("select count(*) as n from jobs") == {"n": 0}

    def test_a_free_model_is_served_on_an_empty_balance(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter
    ) -> None:
        with transaction(session_factory) as session:
            broke = make_renter(session, credit_nano=0)
        free = replace(market, rates=Rates(0, 0, 0))
        job = free.admit(renter=broke)
        assert writer.submit_sync(job) == Admitted(True, 0)
        assert writer.submit_sync(free.delivered(job, receipt=free.receipt(50))) == Closed(True)

    def test_an_account_that_does_not_exist_or_is_frozen_admits_nothing(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter
    ) -> None:
        assert writer.submit_sync(market.admit(credit_account_id=987_654_321)) == Admitted(False, 0)
        with transaction(session_factory) as session:
            session.execute(text("update ledger_accounts set status = 'frozen' where reference is not null"))
        assert writer.submit_sync(market.admit()) == Admitted(False, 0)

    def test_the_same_job_twice_is_held_once(self, market: Market, writer: HotWriter, one: Callable[..., Any]) -> None:
        job = market.admit()
        assert writer.submit_sync(job).ok
        assert writer.submit_sync(job).ok
        assert balance(one, market.renter)[1] == HOLD_NANO

    def test_the_same_job_twice_in_one_batch_is_held_once(
        self, database_url: str, market: Market, one: Callable[..., Any]
    ) -> None:
        job = market.admit()
        with psycopg.connect(database_url) as connection:
            answers = run_batch(connection, [job, job])
        assert [answer.ok for answer in answers if isinstance(answer, Admitted)] == [True, True]
        assert balance(one, market.renter)[1] == HOLD_NANO

    def test_within_a_batch_the_first_come_is_first_served_and_a_smaller_one_still_fits(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        with transaction(session_factory) as session:
            poor = make_renter(session, credit_nano=HOLD_NANO + HOLD_NANO // 2)
        small = {"max_output_tokens": 10, "hold_nano": worst_case(RATES, PROMPT_TOKENS, 10)}
        batch = [
            market.admit(renter=poor),
            market.admit(renter=poor),
            market.admit(),
            market.admit(renter=poor, **small),
        ]
        with psycopg.connect(database_url) as connection:
            answers = run_batch(connection, batch)
        assert answers == [
            Admitted(True, HOLD_NANO // 2),
            Admitted(False, HOLD_NANO // 2),
            Admitted(True, 1_000_000_000 - HOLD_NANO),
            Admitted(True, HOLD_NANO // 2 - small["hold_nano"]),
        ]

    @pytest.mark.parametrize(
        "changes",
        [
            {"hold_nano": HOLD_NANO - 1},
            {"ceiling": Rates(1, 1, 1)},
            {"kind": "queued"},
        ],
        ids=["less than the worst case", "dearer than its ceiling", "queued with an attempt"],
    )
    def test_an_admission_that_breaks_a_rule_of_money_is_rejected(
        self, market: Market, writer: HotWriter, changes: dict[str, Any]
    ) -> None:
        with pytest.raises(RecordRejected):
            writer.submit_sync(market.admit(**changes))


class TestManyAtOnce:
    def test_twenty_simultaneous_holds_on_a_small_balance_through_two_gateways_admit_three(
        self, session_factory: SessionFactory, database_url: str, market: Market, one: Callable[..., Any]
    ) -> None:
        with transaction(session_factory) as session:
            renter = make_renter(session, credit_nano=1_000_000_000)
        held = 300_000_000
        rates = Rates(input=0, cached_input=0, output=1_500_000_000_000)
        dear = replace(market, rates=rates)
        jobs = [dear.admit(renter=renter, hold_nano=held) for _ in range(20)]
        assert worst_case(rates, PROMPT_TOKENS, MAX_OUTPUT_TOKENS) == held
        writers = [HotWriter(database_url), HotWriter(database_url)]
        for writer in writers:
            writer.start()
        barrier = threading.Barrier(20)

        def admit(place: int) -> bool:
            barrier.wait()
            return writers[place % 2].submit_sync(jobs[place]).ok

        with ThreadPoolExecutor(20) as pool:
            admitted = list(pool.map(admit, range(20)))
        for writer in writers:
            writer.stop()
        assert sum(admitted) == 3
        assert balance(one, renter) == (1_000_000_000, 3 * held)

    def test_the_first_eight_requests_of_a_new_account_are_all_admitted(
        self, session_factory: SessionFactory, writer: HotWriter, market: Market, one: Callable[..., Any]
    ) -> None:
        with transaction(session_factory) as session:
            fresh = make_renter(session, credit_nano=8 * HOLD_NANO)

        async def burst() -> list[Admitted]:
            return await asyncio.gather(*(writer.submit(market.admit(renter=fresh)) for _ in range(8)))

        assert [answer.ok for answer in asyncio.run(burst())] == [True] * 8
        assert balance(one, fresh) == (8 * HOLD_NANO, 8 * HOLD_NANO)

    def test_what_queues_while_a_batch_commits_goes_together(self, writer: HotWriter, market: Market) -> None:
        async def burst() -> None:
            answers = await asyncio.gather(*(writer.submit(market.admit()) for _ in range(200)))
            assert all(answer.ok for answer in answers)

        asyncio.run(burst())
        assert writer.records == 200
        assert writer.batches < 20

    def test_two_finalisers_of_one_request_write_one_receipt(
        self, database_url: str, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit()
        writer.submit_sync(job)
        other = HotWriter(database_url)
        other.start()
        barrier = threading.Barrier(2)
        ends = [market.delivered(job, output=50), market.voided(job)]

        def close(place: int) -> Closed:
            barrier.wait()
            return (writer, other)[place].submit_sync(ends[place])

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(close, range(2)))
        other.stop()
        assert sorted(answer.ok for answer in answers) == [False, True]
        assert {answer.reason for answer in answers} == {"", "already_closed"}

    def test_writers_that_share_renters_jobs_and_nodes_never_deadlock(
        self, session_factory: SessionFactory, database_url: str, market: Market
    ) -> None:
        with transaction(session_factory) as session:
            renters = [make_renter(session, credit_nano=10**12) for _ in range(6)]

        def work(seed: int) -> None:
            with psycopg.connect(database_url, autocommit=True) as connection:
                for turn in range(8):
                    order = renters[(seed + turn) % 6 :] + renters[: (seed + turn) % 6]
                    if seed % 2:
                        order.reverse()
                    jobs = [market.admit(renter=renter) for renter in order]
                    run_batch(connection, jobs)
                    beats = [Checkpoint(job.attempt.attempt_id, 1, 1, 15.0) for job in jobs if job.attempt]
                    run_batch(connection, [*beats, *(market.admit(renter=renter) for renter in reversed(order))])
                    run_batch(connection, [market.voided(job) for job in reversed(jobs)])

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, seed) for seed in range(4)]:
                done.result()


class TestPoison:
    def test_a_poisoned_record_fails_alone(self, market: Market, writer: HotWriter, one: Callable[..., Any]) -> None:
        good = [market.admit() for _ in range(10)]
        poison = market.admit(organisation_id=uuid.uuid4())

        async def burst() -> list[Any]:
            records = [*good[:5], poison, *good[5:]]
            return await asyncio.gather(*(writer.submit(record) for record in records), return_exceptions=True)

        answers = asyncio.run(burst())
        rejected = answers.pop(5)
        assert isinstance(rejected, RecordRejected)
        assert isinstance(rejected, FallowError)
        assert [answer.ok for answer in answers] == [True] * 10
        assert balance(one, market.renter)[1] == 10 * HOLD_NANO

    def test_what_is_logged_of_a_rejected_record_quotes_none_of_its_content(
        self, market: Market, writer: HotWriter, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(RecordRejected):
            writer.submit_sync(market.admit(queued=True, body='{"secret prompt": 1}', kind="wrong"))
        logged = capsys.readouterr()
        assert "hot_record_rejected" in logged.out + logged.err
        assert "secret" not in logged.out + logged.err

    def test_a_result_with_a_nul_is_stored_without_it(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit()
        writer.submit_sync(job)
        close = market.delivered(job, result='{"text":"a\\u0000b","\\u0000":["\\\\u0000"]}', error_message="a\0b")
        assert writer.submit_sync(close) == Closed(True)
        stored = one("select result, error_message from jobs where id = :id", id=job.job_id)
        assert stored == {"result": {"text": "a\ufffdb", "\ufffd": ["\\u0000"]}, "error_message": "a\ufffdb"}


class TestEnds:
    def test_a_delivered_job_holds_exactly_its_charge(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit()
        writer.submit_sync(job)
        close = market.delivered(job, output=50)
        assert close.receipt is not None
        assert writer.submit_sync(close) == Closed(True)
        assert balance(one, market.renter) == (1_000_000_000, close.receipt.charge_nano)
        assert one("select state, outcome from jobs") == {"state": "delivered", "outcome": "complete"}
        receipt = one("select renter_organisation_id, node_id, node_signature, journal_id from receipts")
        assert receipt == {
            "renter_organisation_id": market.renter.organisation_id,
            "node_id": market.node.node_id,
            "node_signature": b"signed",
            "journal_id": None,
        }
        assert one("select outcome, job_id from outcomes") == {"outcome": "complete", "job_id": job.job_id}

    def test_a_voided_job_holds_nothing_and_counts_against_the_node_at_fault(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit()
        writer.submit_sync(job)
        assert writer.submit_sync(market.voided(job)) == Closed(True)
        assert balance(one, market.renter) == (1_000_000_000, 0)
        assert one("select faults from nodes") == {"faults": 1}
        assert one("select state, end_code, fault from attempts") == {
            "state": "ended",
            "end_code": "engine_died",
            "fault": "node",
        }

    def test_a_hold_that_expired_pays_nothing_but_keeps_nobody_from_ending_the_job(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit(deadline_s=-10.0, hold_margin_s=0.0)
        writer.submit_sync(job)
        with transaction(session_factory) as session:
            assert ledger.expire(session, ledger.overdue(session, 10)) == 1
        assert balance(one, market.renter) == (1_000_000_000, 0)
        assert writer.submit_sync(market.delivered(job)) == Closed(False, "hold_gone")
        receipt = market.receipt(50, by_platform=True)
        close = market.delivered(job, outcome="platform_failed", receipt=receipt, fault="platform")
        assert writer.submit_sync(close) == Closed(True)

    def test_a_failure_of_ours_is_paid_by_us_and_holds_nothing(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit()
        writer.submit_sync(job)
        receipt = market.receipt(30, by_platform=True)
        close = market.delivered(job, output=30, outcome="platform_failed", receipt=receipt, fault="platform")
        assert writer.submit_sync(close) == Closed(True)
        assert balance(one, market.renter) == (1_000_000_000, 0)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"epoch": 2}, "old_epoch"),
            ({"attempt_id": uuid.uuid4()}, "unknown_attempt"),
            ({"job_id": uuid.uuid4()}, "unknown_job"),
            ({"attempt_id": None}, "impossible"),
            ({"job_state": "queued", "outcome": None}, "impossible"),
            ({"job_state": "settled"}, "impossible"),
            ({"outcome": None}, "impossible"),
            ({"receipt": None}, "impossible"),
            ({"accepted_tokens": 49}, "paid_exceeds_accepted"),
        ],
    )
    def test_an_end_that_the_rules_forbid_changes_nothing(
        self, market: Market, writer: HotWriter, one: Callable[..., Any], changes: dict[str, Any], reason: str
    ) -> None:
        job = market.admit()
        writer.submit_sync(job)
        answer = writer.submit_sync(market.delivered(job, output=50, **changes))
        assert not answer.ok
        # Without an attempt the leased one stands in the way before anything else is looked at.
        assert answer.reason == ("leased" if changes == {"attempt_id": None} else reason)
        assert one("select state from jobs") == {"state": "running"}
        assert balance(one, market.renter)[1] == HOLD_NANO

    def test_a_receipt_must_cost_what_its_tokens_cost_at_the_pinned_rates(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit()
        writer.submit_sync(job)
        receipt = market.receipt(50)
        dearer = replace(
            receipt,
            output_visible_nano=receipt.output_visible_nano + 1,
            charge_nano=receipt.charge_nano + 1,
            owner_nano=receipt.owner_nano + 1,
        )
        answer = writer.submit_sync(market.delivered(job, receipt=dearer))
        assert answer == Closed(False, "price_mismatch")
        assert balance(one, market.renter)[1] == HOLD_NANO

    def test_a_charge_above_the_hold_is_refused(self, market: Market, writer: HotWriter) -> None:
        job = market.admit()
        writer.submit_sync(job)
        close = market.delivered(job, output=5_000)
        assert writer.submit_sync(close) == Closed(False, "charge_exceeds_hold")

    def test_an_end_repeated_after_a_lost_answer_is_a_success_and_another_end_is_not(
        self, database_url: str, market: Market, writer: HotWriter
    ) -> None:
        job = market.admit()
        writer.submit_sync(job)
        close = market.delivered(job)
        with psycopg.connect(database_url, autocommit=True) as connection:
            assert run_batch(connection, [close]) == [Closed(True)]
            assert run_batch(connection, [close]) == [Closed(False, "already_closed")]
            assert run_batch(connection, [close], replay=True) == [Closed(True)]
            assert run_batch(connection, [market.voided(job)], replay=True) == [Closed(False, "already_closed")]


class TestLeases:
    def test_a_job_moves_on_after_a_failed_attempt_but_never_back_to_that_node(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        with transaction(session_factory) as session:
            second = make_node(session, market.variant_id)
        job = market.admit()
        writer.submit_sync(job)
        assert writer.submit_sync(market.move(job)) == Leased(0, "leased")
        failed = market.voided(job, job_state="running", outcome=None)
        assert writer.submit_sync(failed) == Closed(True)
        assert balance(one, market.renter)[1] == HOLD_NANO
        assert writer.submit_sync(market.move(job)) == Leased(0, "failed_there")
        move = market.move(job, second)
        assert writer.submit_sync(move) == Leased(2)
        assert writer.submit_sync(move) == Leased(2)
        # The first attempt's messages are void now.
        assert job.attempt is not None
        late = Checkpoint(job.attempt.attempt_id, 1, 10, 15.0)
        assert not writer.submit_sync(late).alive
        assert writer.submit_sync(market.delivered(job)) == Closed(False, "already_closed")
        close = market.delivered(
            job, attempt_id=move.attempt.attempt_id, epoch=2, receipt=market.receipt(50, node=second)
        )
        assert writer.submit_sync(close) == Closed(True)

    def test_three_attempts_are_the_most_and_a_pre_emption_is_none(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter
    ) -> None:
        job = market.admit(queued=True)
        writer.submit_sync(job)
        for epoch, fault in enumerate(["owner", "node", None, "owner", "node"], start=1):
            with transaction(session_factory) as session:
                node = make_node(session, market.variant_id)
            move = market.move(job, node)
            assert writer.submit_sync(move) == Leased(epoch)
            close = market.voided(
                job,
                attempt_id=move.attempt.attempt_id,
                epoch=epoch,
                job_state="queued",
                outcome=None,
                fault=fault,
            )
            assert writer.submit_sync(close) == Closed(True)
        with transaction(session_factory) as session:
            node = make_node(session, market.variant_id)
        assert writer.submit_sync(market.move(job, node)) == Leased(0, "attempts")
        assert writer.submit_sync(market.voided(job, fault=None)) == Closed(True)

    def test_an_owner_may_take_the_machine_back_ten_times(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter
    ) -> None:
        job = market.admit(queued=True)
        writer.submit_sync(job)
        for epoch in range(1, 11):
            move = market.move(job)
            assert writer.submit_sync(move) == Leased(epoch)
            preempted = market.voided(
                job, attempt_id=move.attempt.attempt_id, epoch=epoch, job_state="queued", outcome=None, fault="owner"
            )
            assert writer.submit_sync(preempted).ok
        assert writer.submit_sync(market.move(job)) == Leased(0, "attempts")
        assert writer.submit_sync(market.voided(job, fault=None)) == Closed(True)

    def test_an_unknown_ended_cancelled_or_late_job_gets_no_lease(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter
    ) -> None:
        job = market.admit(queued=True)
        assert writer.submit_sync(market.move(job)) == Leased(0, "unknown")
        writer.submit_sync(job)
        with transaction(session_factory) as session:
            session.execute(text("update jobs set cancel_requested_at = now()"))
        assert writer.submit_sync(market.move(job)) == Leased(0, "cancelled")
        assert writer.submit_sync(market.voided(job, fault=None)) == Closed(True)
        assert writer.submit_sync(market.move(job)) == Leased(0, "ended")
        late = market.admit(queued=True, deadline_s=-1.0)
        writer.submit_sync(late)
        assert writer.submit_sync(market.move(late)) == Leased(0, "deadline")
        assert writer.submit_sync(market.voided(late, fault=None)) == Closed(True)

    def test_a_dearer_node_than_the_pinned_ceiling_gets_no_lease(self, market: Market, writer: HotWriter) -> None:
        job = market.admit(queued=True)
        writer.submit_sync(job)
        move = market.move(job)
        dearer = replace(move, attempt=replace(move.attempt, rates=replace(RATES, output=RATES.output + 1)))
        assert writer.submit_sync(dearer) == Leased(0, "price")


class TestCheckpoints:
    def test_a_checkpoint_renews_the_lease_and_never_goes_back(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit(attempt=market.lease(lease_s=1.0))
        writer.submit_sync(job)
        assert job.attempt is not None
        beat = Checkpoint(job.attempt.attempt_id, 1, 12, 60.0)
        answer = writer.submit_sync(beat)
        assert (answer.alive, answer.cancel_requested) == (True, False)
        writer.submit_sync(replace(beat, accepted_tokens=7))
        stored = one(
            "select accepted_tokens, first_token_at is not null as begun, "
            "lease_expires_at > now() + interval '50 seconds' as renewed from attempts"
        )
        assert stored == {"accepted_tokens": 12, "begun": True, "renewed": True}

    def test_a_wish_to_cancel_is_told_and_a_wrong_epoch_is_dead(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter
    ) -> None:
        job = market.admit()
        writer.submit_sync(job)
        assert job.attempt is not None
        with transaction(session_factory) as session:
            session.execute(text("update jobs set cancel_requested_at = now()"))
        assert writer.submit_sync(Checkpoint(job.attempt.attempt_id, 1, 1, 15.0)).cancel_requested
        assert not writer.submit_sync(Checkpoint(job.attempt.attempt_id, 2, 99, 15.0)).alive
        assert not writer.submit_sync(Checkpoint(uuid.uuid4(), 1, 99, 15.0)).alive

    def test_a_lease_does_not_outlast_the_deadline_by_more_than_one_lease(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit(deadline_s=5.0)
        writer.submit_sync(job)
        assert job.attempt is not None
        writer.submit_sync(Checkpoint(job.attempt.attempt_id, 1, 1, 1_000.0))
        left = one(
            "select lease_expires_at <= deadline_at + interval '1000 seconds' as bounded "
            "from attempts join jobs on jobs.id = job_id"
        )
        assert left == {"bounded": True}


class TestRefusals:
    def test_a_refused_request_leaves_one_outcome(
        self, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        refusal = Refused("req_1", market.renter.organisation_id, "chat", "no_capacity", "no_capacity")
        assert writer.submit_sync(refusal) is None
        assert writer.submit_sync(refusal) is None
        assert one("select outcome, job_id from outcomes") == {"outcome": "no_capacity", "job_id": None}


class TestSessions:
    def test_a_task_writes_records_in_its_own_transaction(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        job = market.admit()
        with session_factory() as session:
            assert run_in_session(session, [job]) == [Admitted(True, 1_000_000_000 - HOLD_NANO)]
            session.rollback()
        assert balance(one, market.renter)[1] == 0
        with transaction(session_factory) as session:
            run_in_session(session, [job])
        assert balance(one, market.renter)[1] == HOLD_NANO


class TestFaults:
    def test_a_connection_that_is_cut_is_made_again(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter
    ) -> None:
        assert writer.submit_sync(market.admit()).ok
        with transaction(session_factory) as session:
            session.execute(
                text(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where application_name = 'fallow-hot-writer' and datname = current_database()"
                )
            )
        assert writer.submit_sync(market.admit()).ok

    def test_cuts_under_load_lose_no_answer_and_hold_nothing_twice(
        self, session_factory: SessionFactory, market: Market, writer: HotWriter, one: Callable[..., Any]
    ) -> None:
        jobs: list[Admit] = [market.admit() for _ in range(60)]

        def cut() -> None:
            for _ in range(4):
                with transaction(session_factory) as session:
                    session.execute(
                        text(
                            "select pg_terminate_backend(pid) from pg_stat_activity "
                            "where application_name = 'fallow-hot-writer' and datname = current_database()"
                        )
                    )
                threading.Event().wait(0.02)

        async def live(job: Admit) -> bool:
            admitted = await writer.submit(job)
            await asyncio.sleep(0.01)
            return admitted.ok and (await writer.submit(market.delivered(job))).ok

        async def load() -> list[bool]:
            return await asyncio.gather(*(live(job) for job in jobs))

        cutter = threading.Thread(target=cut)
        cutter.start()
        assert asyncio.run(load()) == [True] * 60
        cutter.join()
        charge = market.receipt(50).charge_nano
        assert balance(one, market.renter)[1] == 60 * charge

    def test_a_database_that_is_away_is_unavailable(self, market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("marketplace.jobs.writer.PATIENCE_S", 0.2)
        writer = HotWriter("postgresql://nobody@127.0.0.1:1/nothing")
        writer.start()
        with pytest.raises(Unavailable, match="does not answer"):
            writer.submit_sync(market.admit())
        writer.stop()

    def test_a_full_queue_refuses_at_once(self, market: Market) -> None:
        writer = HotWriter("postgresql://nobody@127.0.0.1:1/nothing", max_waiting=0)
        writer.start()
        with pytest.raises(Unavailable, match="Too many"):
            writer.submit_sync(market.admit())
        writer.stop()

    def test_stopping_writes_what_waits_and_takes_no_more(
        self, database_url: str, market: Market, one: Callable[..., Any]
    ) -> None:
        writer = HotWriter(database_url)
        writer.start()

        async def burst() -> list[Admitted]:
            waiting = [asyncio.ensure_future(writer.submit(market.admit())) for _ in range(50)]
            await asyncio.sleep(0)
            await asyncio.to_thread(writer.stop)
            return await asyncio.gather(*waiting)

        assert all(answer.ok for answer in asyncio.run(burst()))
        assert balance(one, market.renter)[1] == 50 * HOLD_NANO
        with pytest.raises(Unavailable, match="shutting down"):
            writer.submit_sync(market.admit())

    def test_a_locked_row_delays_its_own_record_only(
        self, database_url: str, session_factory: SessionFactory, market: Market, writer: HotWriter
    ) -> None:
        with transaction(session_factory) as session:
            blocked = make_renter(session)
        with psycopg.connect(database_url) as blocker:
            blocker.execute(
                "select 1 from ledger_balances where account_id = %s for update", (blocked.credit_account_id,)
            )

            async def burst() -> list[Any]:
                waits = asyncio.ensure_future(writer.submit(market.admit(renter=blocked)))
                others = await asyncio.gather(*(writer.submit(market.admit()) for _ in range(3)))
                await asyncio.to_thread(blocker.rollback)
                return [*others, await waits]

            assert [answer.ok for answer in asyncio.run(burst())] == [True] * 4
