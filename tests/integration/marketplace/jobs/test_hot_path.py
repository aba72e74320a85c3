"""The hot path's functions: any sequence of records keeps the rules, and no statement reads a whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from marketplace.billing.checks import invariants
from marketplace.billing.service import settle
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.settings import Settings
from marketplace.jobs.hot import Admit, Admitted, Checkpoint, Close, Closed, Lease, Leased
from marketplace.jobs.writer import run_batch
from tests.market import Market, make_market, make_node, make_renter

CREDIT_NANO = 400_000
"""Covers a handful of worst cases, so that refusals happen too."""


@dataclass
class Life:
    """What we know of one admitted job."""

    admit: Admit
    attempt: Any
    epoch: int
    state: str = "running"
    held_nano: int = 0
    charge_nano: int = 0
    accepted: int = 0


@dataclass
class World:
    """The database under test and, beside it, the books as they must be."""

    factory: SessionFactory
    connection: psycopg.Connection[Any]
    market: Market
    posted_nano: int = CREDIT_NANO
    jobs: list[Life] = field(default_factory=list)

    @property
    def held_nano(self) -> int:
        return sum(job.held_nano for job in self.jobs)

    def pick(self, place: int) -> Life | None:
        return self.jobs[place % len(self.jobs)] if self.jobs else None

    # --- steps: each does one thing and checks the answer -----------------------------------------------------------

    def admit(self, place: int) -> None:
        record = self.market.admit(queued=place % 3 == 0)
        fits = record.hold_nano <= self.posted_nano - self.held_nano
        [answer] = run_batch(self.connection, [record])
        assert isinstance(answer, Admitted)
        assert answer.ok == fits
        if fits:
            queued = record.attempt is None
            state, epoch = ("queued", 0) if queued else ("running", 1)
            self.jobs.append(Life(record, record.attempt, epoch, state, held_nano=record.hold_nano))

    def lease(self, place: int) -> None:
        job = self.pick(place)
        if job is None:
            return
        with transaction(self.factory) as session:
            node = make_node(session, self.market.variant_id)
        record = Lease(job.admit.job_id, self.market.lease(node))
        [answer] = run_batch(self.connection, [record])
        assert isinstance(answer, Leased)
        waits = job.state == "queued" or (job.state == "running" and job.attempt is None)
        assert (answer.epoch > 0) == (waits and job.epoch < 3), answer
        if answer.epoch:
            job.attempt, job.epoch, job.state, job.accepted = record.attempt, answer.epoch, "running", 0

    def checkpoint(self, place: int) -> None:
        job = self.pick(place)
        if job is None or job.attempt is None:
            return
        tokens = place % 50
        beat = Checkpoint(job.attempt.attempt_id, job.epoch, tokens, 15.0)
        old = replace(beat, epoch=job.epoch - 1)
        alive, dead = run_batch(self.connection, [beat, old])
        assert (alive.alive, dead.alive) == (job.state == "running", False)  # type: ignore[union-attr]
        job.accepted = max(job.accepted, tokens)

    def deliver(self, place: int) -> None:
        job = self.pick(place)
        if job is None or job.attempt is None:
            return
        output = place % 200
        receipt = self.market.receipt(output)
        close = (
            self.market.delivered(
                job.admit, attempt_id=job.attempt.attempt_id, epoch=job.epoch, output=output, receipt=receipt
            )
            if job.admit.attempt
            else self._queued_end(job, output)
        )
        assert close.receipt is not None
        [answer] = run_batch(self.connection, [close])
        assert isinstance(answer, Closed)
        assert answer.ok == (job.state == "running")
        if answer.ok:
            job.state, job.held_nano, job.charge_nano = (
                "delivered",
                close.receipt.charge_nano,
                close.receipt.charge_nano,
            )

    def _queued_end(self, job: Life, output: int) -> Close:
        return Close(
            job_id=job.admit.job_id,
            attempt_id=job.attempt.attempt_id,
            epoch=job.epoch,
            job_state="delivered",
            outcome="complete",
            end_code="delivered",
            fault=None,
            accepted_tokens=output,
            busy_ms=1,
            first_token=output > 0,
            result='{"choices":[]}',
            receipt=self.market.receipt(output),
        )

    def fail(self, place: int) -> None:
        """The attempt ends; the job waits for another one, or is over."""
        job = self.pick(place)
        if job is None:
            return
        over = place % 2 == 0 or job.attempt is None
        close = self.market.voided(
            job.admit,
            attempt_id=job.attempt.attempt_id if job.attempt else None,
            epoch=job.epoch,
            fault="node" if job.attempt else None,
            **({} if over else {"job_state": "running", "outcome": None}),
        )
        [answer] = run_batch(self.connection, [close])
        assert isinstance(answer, Closed)
        assert answer.ok == (job.state in ("queued", "running"))
        if answer.ok:
            job.attempt = None
            job.state, job.held_nano = ("voided", 0) if over else ("running", job.held_nano)

    def settle(self, place: int) -> None:
        due = [job for job in self.jobs if job.state == "delivered"]
        with transaction(self.factory) as session:
            batch = settle(session, 1_000)
        assert batch.count == len(due)
        for job in due:
            job.state, job.held_nano = "settled", 0
            self.posted_nano -= job.charge_nano

    def check(self) -> None:
        with self.factory() as session:
            assert invariants(session) == []
            row = session.execute(
                text("select posted_nano, held_nano from ledger_balances where account_id = :id"),
                {"id": self.market.renter.credit_account_id},
            ).one()
            states = dict(
                session.execute(
                    text("select id, state from jobs where organisation_id = :id"),
                    {"id": self.market.renter.organisation_id},
                ).all()
            )
        assert (row.posted_nano, row.held_nano) == (self.posted_nano, self.held_nano)
        assert states == {job.admit.job_id: job.state for job in self.jobs}


STEPS: dict[str, Callable[[World, int], None]] = {
    "admit": World.admit,
    "lease": World.lease,
    "checkpoint": World.checkpoint,
    "deliver": World.deliver,
    "fail": World.fail,
    "settle": World.settle,
}


@pytest.fixture
def base(database_url: str) -> Iterator[tuple[SessionFactory, psycopg.Connection[Any], Market]]:
    engine = make_engine(Settings(database_url=database_url), application_name="tests")
    factory = make_session_factory(engine)
    with transaction(factory) as session:
        market = make_market(session)
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield factory, connection, market
    engine.dispose()


class TestAnySequence:
    @given(steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 199)), min_size=5, max_size=20))
    @settings(
        max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    def test_the_rules_and_the_balance_hold_after_each_step(
        self,
        base: tuple[SessionFactory, psycopg.Connection[Any], Market],
        steps: list[tuple[str, int]],
    ) -> None:
        factory, connection, market = base
        with transaction(factory) as session:
            settle(session, 1_000)  # what the example before left
            renter = make_renter(session, credit_nano=CREDIT_NANO)
        world = World(factory, connection, replace(market, renter=renter))
        for name, place in steps:
            STEPS[name](world, place)
            world.check()


class TestPlans:
    def test_a_session_that_started_on_empty_tables_never_reads_a_whole_one_later(
        self, base: tuple[SessionFactory, psycopg.Connection[Any], Market]
    ) -> None:
        factory, connection, market = base

        def lives(count: int) -> None:
            jobs = [market.admit() for _ in range(count)]
            run_batch(connection, jobs)
            beats = [Checkpoint(job.attempt.attempt_id, 1, 1, 15.0) for job in jobs if job.attempt]
            run_batch(connection, beats)
            half = count // 2
            ends = [market.delivered(job) for job in jobs[:half]] + [market.voided(job) for job in jobs[half:]]
            assert all(answer.ok for answer in run_batch(connection, ends))  # type: ignore[union-attr]
            queued = [market.admit(queued=True) for _ in range(3)]
            run_batch(connection, queued)
            run_batch(connection, [market.move(job) for job in queued])

        def reads() -> dict[str, int]:
            connection.execute("select pg_stat_force_next_flush()")
            rows = connection.execute(
                "select relname, seq_scan from pg_stat_user_tables "
                "where relname in ('jobs', 'attempts', 'receipts', 'ledger_holds') "
                "union all select indexrelname, idx_scan from pg_stat_user_indexes where indexrelname in "
                "('ix_attempts_lease', 'ix_ledger_holds_expires_at_held', 'ix_jobs_open_deadline', "
                "'ix_jobs_queue_age', 'ix_jobs_queue_deadline')"
            ).fetchall()
            assert len(rows) == 9
            return {name: scans or 0 for name, scans in rows}

        for _ in range(3):
            lives(4)
        before = reads()
        for _ in range(3):
            lives(100)
        after = reads()
        assert after == before
        with factory() as session:
            assert invariants(session) == []
