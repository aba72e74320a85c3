"""The role that the product runs as: everything it does, and nothing that changes history."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import ProgrammingError

import ledger
from marketplace.billing.service import settle
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.settings import Settings
from marketplace.jobs.hot import Closed
from marketplace.jobs.writer import run_batch
from tests.integration.ledger.conftest import Books, top_up
from tests.market import make_market

LATER = datetime(2100, 1, 1, tzinfo=UTC)


def _sessions(settings: Settings, role: str) -> tuple[Engine, SessionFactory]:
    engine = make_engine(settings, application_name="tests")

    @event.listens_for(engine, "connect")
    def become(connection: psycopg.Connection[object], _: object) -> None:
        connection.execute(f"set role {role}")
        connection.commit()

    return engine, make_session_factory(engine)


@pytest.fixture
def app(settings: Settings) -> Iterator[SessionFactory]:
    engine, factory = _sessions(settings, "fallow_app")
    yield factory
    engine.dispose()


@pytest.fixture
def reader(settings: Settings) -> Iterator[SessionFactory]:
    engine, factory = _sessions(settings, "fallow_read")
    yield factory
    engine.dispose()


def test_it_does_all_that_the_ledger_does(app: SessionFactory, books: Books) -> None:
    hold = uuid4()
    with transaction(app) as session:
        first = ledger.post(session, top_up(books, 1_000)).journal_id
        ledger.reserve(session, hold, books.renter, 10, LATER)
        ledger.shrink(session, hold, 5)
        ledger.release(session, hold)
        ledger.set_bounds(session, books.renter, floor_nano=0, limit_nano=10_000)
        ledger.reverse(session, first, idempotency_key="u", source="test", outside_id="u", amount_nano=10)
        ledger.freeze(session, books.renter)
        period = ledger.open_period(session, datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC))
        ledger.open_book(session, "other")
    with transaction(app) as session:
        ledger.begin_close(session, period.period_id)
    with transaction(app) as session:
        ledger.close(session, period.period_id)
        assert ledger.rebuild(session) == []
        assert ledger.verify(session).problems == ()


def test_it_runs_the_hot_path_and_settles(app: SessionFactory, database_url: str) -> None:
    with transaction(app) as session:
        market = make_market(session)
    job = market.admit()
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("set role fallow_app")
        run_batch(connection, [job])
        assert run_batch(connection, [market.delivered(job)]) == [Closed(True)]
    with transaction(app) as session:
        assert settle(session, 10).count == 1


@pytest.mark.parametrize(
    "statement",
    [
        "update ledger_journals set memo = '{}'",
        "delete from ledger_journals",
        "truncate ledger_journals cascade",
        "update ledger_postings set amount_nano = 1",
        "delete from ledger_postings",
        "truncate ledger_postings",
        "update ledger_chain set sha256 = ''",
        "delete from ledger_chain",
        "update ledger_accounts set code = 'x'",
        "delete from ledger_accounts",
        "delete from ledger_balances",
        "delete from ledger_holds",
        "update ledger_holds set account_id = 1",
        "delete from ledger_periods",
        "update ledger_periods set starts_at = now()",
        "update prices set output_nano_usd_per_mtok = 1",
        "update receipts set charge_nano = 1",
        "delete from receipts",
        "alter table ledger_postings disable trigger all",
        "drop trigger ledger_postings_append_only on ledger_postings",
        "set session_replication_role = replica",
    ],
)
def test_it_may_not_touch_what_is_written(app: SessionFactory, statement: str) -> None:
    with app() as session, pytest.raises(ProgrammingError, match=r"permission denied|must be owner"):
        session.execute(text(statement))


def test_a_reader_reads_and_verifies_and_writes_nothing(reader: SessionFactory, books: Books) -> None:
    with reader() as session:
        assert ledger.verify(session).problems == ()
        with pytest.raises(ProgrammingError, match="permission denied"):
            ledger.post(session, top_up(books, 5))
