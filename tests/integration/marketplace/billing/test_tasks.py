"""The periodic tasks of billing, called as Celery calls them."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy import text

from marketplace.billing import tasks
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.jobs.writer import run_batch
from tests.market import Market, make_market


@pytest.fixture
def market(session_factory: SessionFactory, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Market:
    monkeypatch.setattr(tasks, "session_factory", lambda: session_factory)
    monkeypatch.setattr(tasks, "get_settings", lambda: settings.model_copy(update={"settlement_batch": 4}))
    with transaction(session_factory) as session:
        return make_market(session)


def deliver(database_url: str, market: Market, count: int) -> None:
    jobs = [market.admit() for _ in range(count)]
    with psycopg.connect(database_url, autocommit=True) as connection:
        run_batch(connection, jobs)
        run_batch(connection, [market.delivered(job) for job in jobs])


class TestSettleTask:
    def test_it_settles_batch_after_batch_until_nothing_is_due(
        self, database_url: str, session_factory: SessionFactory, market: Market
    ) -> None:
        deliver(database_url, market, 10)
        assert tasks.settle() == 10
        with session_factory() as session:
            batches = session.scalar(text("select count(*) from ledger_journals where kind = 'settlement'"))
        assert batches == 3
        assert tasks.settle() == 0

    def test_it_stops_when_its_time_is_up_and_the_next_one_goes_on(
        self, database_url: str, market: Market, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deliver(database_url, market, 10)
        monkeypatch.setattr(tasks, "SETTLE_TIME_S", -1.0)
        assert [tasks.settle(), tasks.settle(), tasks.settle()] == [4, 4, 2]


class TestCheckTask:
    def test_it_counts_what_is_broken(self, database_url: str, session_factory: SessionFactory, market: Market) -> None:
        deliver(database_url, market, 2)
        assert tasks.check() == 0
        with transaction(session_factory) as session:
            session.execute(text("delete from outcomes"))
        assert tasks.check() == 2


class TestSealAndVerifyTasks:
    def test_what_was_posted_is_sealed_and_verified(
        self, database_url: str, session_factory: SessionFactory, market: Market
    ) -> None:
        deliver(database_url, market, 10)
        tasks.settle()
        with session_factory() as session:
            journals = session.scalar(text("select count(*) from ledger_journals"))
        assert tasks.seal() == journals
        assert tasks.seal() == 0
        assert tasks.verify() == 0

    def test_every_problem_is_counted(self, session_factory: SessionFactory, market: Market) -> None:
        with transaction(session_factory) as session:
            session.execute(text("alter table ledger_journals disable trigger ledger_journals_append_only"))
            session.execute(text("update ledger_balances set posted_nano = posted_nano + 1"))
        assert tasks.verify() == 2

    def test_it_stops_when_its_time_is_up(self, market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tasks, "SEAL_TIME_S", -1.0)
        assert tasks.seal() == 1
