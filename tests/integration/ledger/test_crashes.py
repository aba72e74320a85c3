"""A process that dies between any two statements: nothing is half-done, and the same command then succeeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

import ledger
from ledger import Capture, JournalDraft, credit, debit
from marketplace.core.database import SessionFactory, transaction
from tests.integration.ledger.conftest import Books, top_up

LATER = datetime(2100, 1, 1, tzinfo=UTC)
JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)
HOLD, NEW_HOLD = UUID(int=1), UUID(int=2)
MOST_STATEMENTS = 60


class Died(Exception):
    """The process is gone."""


def charge(session: Session, books: Books) -> None:
    lines = (debit(books.renter, 30), credit(books.owner, 25), credit(books.fees, 5))
    ledger.post(session, JournalDraft("c", "charge", "test", "c", lines, captures=(Capture(HOLD, 30),)))


def hold(session: Session, books: Books) -> None:
    ledger.reserve(session, NEW_HOLD, books.renter, 40, LATER)


def release(session: Session, books: Books) -> None:
    ledger.release(session, HOLD)


def refund(session: Session, books: Books) -> None:
    ledger.reverse(session, 1, idempotency_key="r", source="test", outside_id="r", amount_nano=7)


def seal(session: Session, books: Books) -> None:
    ledger.seal(session)


def close(session: Session, books: Books) -> None:
    period = ledger.open_period(session, JANUARY, FEBRUARY)
    ledger.begin_close(session, period.period_id)
    ledger.close(session, period.period_id)


def rebuild(session: Session, books: Books) -> None:
    ledger.rebuild(session)


def _facts(session: Session, books: Books) -> tuple[object, ...]:
    return (
        ledger.trial_balance(session),
        ledger.available(session, books.renter),
        ledger.find_hold(session, HOLD),
        ledger.find_hold(session, NEW_HOLD),
        ledger.head(session),
        ledger.periods(session),
    )


@pytest.mark.parametrize("command", [charge, hold, release, refund, seal, close, rebuild])
def test_nothing_is_half_done(
    session_factory: SessionFactory, books: Books, command: Callable[[Session, Books], None]
) -> None:
    with transaction(session_factory) as session:
        ledger.post(session, replace(top_up(books, 100), effective_at=JANUARY))
        ledger.reserve(session, HOLD, books.renter, 50, LATER)
    with session_factory() as session:
        before = _facts(session, books)
    deaths = 0
    for last in range(1, MOST_STATEMENTS):
        if _survives(session_factory, books, command, last):
            break
        deaths += 1
        with session_factory() as session:
            assert _facts(session, books) == before
            assert ledger.verify(session).problems == ()
    else:
        raise AssertionError(f"more than {MOST_STATEMENTS} statements")
    assert deaths
    with session_factory() as session:
        assert ledger.verify(session).problems == ()
        if command is not rebuild:
            assert _facts(session, books) != before


def _survives(factory: SessionFactory, books: Books, command: Callable[[Session, Books], None], last: int) -> bool:
    """Run a command whose process dies after its `last` statement; True if it had fewer."""
    with factory() as session:
        connection = session.connection()
        socket = connection.connection.driver_connection
        assert socket is not None
        left = [last]

        def count(*_: object) -> None:
            left[0] -= 1
            if not left[0]:
                raise Died

        event.listen(connection, "after_cursor_execute", count)
        try:
            command(session, books)
            session.commit()
        except Died:
            # As a dead process leaves it: the socket closes, nobody says rollback.
            socket.close()
            session.invalidate()
            return False
        return True
