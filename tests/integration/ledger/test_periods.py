from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session

import ledger
from ledger import JournalDraft, Kind, Money
from marketplace.core.database import SessionFactory, transaction
from tests.integration.ledger.conftest import Books, top_up

JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)
MARCH = datetime(2026, 3, 1, tzinfo=UTC)
MID_JANUARY = datetime(2026, 1, 15, tzinfo=UTC)


def dated(books: Books, nano: int, key: str, at: datetime) -> JournalDraft:
    return replace(top_up(books, nano, key), effective_at=at)


def close(factory: SessionFactory, period_id: int) -> ledger.PeriodView:
    with transaction(factory) as session:
        ledger.begin_close(session, period_id)
    with transaction(factory) as session:
        return ledger.close(session, period_id)


@pytest.fixture
def january(session_factory: SessionFactory, books: Books) -> int:
    """An open period with one journal of 100 nano, and one of 7 after it."""
    with transaction(session_factory) as session:
        ledger.post(session, dated(books, 100, "january", MID_JANUARY))
        ledger.post(session, dated(books, 7, "february", FEBRUARY))
        return ledger.open_period(session, JANUARY, FEBRUARY).period_id


class TestOpening:
    def test_periods_follow_one_another(self, session: Session) -> None:
        first = ledger.open_period(session, JANUARY, FEBRUARY)
        assert ledger.open_period(session, JANUARY, FEBRUARY) == first
        second = ledger.open_period(session, FEBRUARY, MARCH)
        assert ledger.periods(session) == [first, second]
        assert ledger.find_period(session, FEBRUARY) == second
        assert ledger.find_period(session, FEBRUARY - timedelta(microseconds=1)) == first
        assert ledger.find_period(session, MARCH) is None

    @pytest.mark.parametrize(
        ("starts_at", "ends_at", "words"),
        [
            (MID_JANUARY, MARCH, "overlaps"),
            (JANUARY, MARCH, "overlaps"),
            (MARCH, MARCH + timedelta(days=1), "gap"),
            (MARCH, MARCH, "ends after"),
            (datetime(2026, 2, 1), MARCH, "time zone"),  # noqa: DTZ001  # a time without zone is the point
        ],
    )
    def test_what_is_no_next_period_is_refused(
        self, session: Session, starts_at: datetime, ends_at: datetime, words: str
    ) -> None:
        ledger.open_period(session, JANUARY, FEBRUARY)
        with pytest.raises(ledger.InvalidPeriod, match=words):
            ledger.open_period(session, starts_at, ends_at)

    def test_an_unknown_book_or_period_is_named(self, session: Session) -> None:
        with pytest.raises(ledger.UnknownBook):
            ledger.open_period(session, JANUARY, FEBRUARY, book_id=99)
        for command in (ledger.begin_close, ledger.close, ledger.reopen, ledger.get_period):
            with pytest.raises(ledger.UnknownPeriod):
                command(session, 99)

    def test_overlap_is_refused_by_the_database_too(self, session: Session) -> None:
        ledger.open_period(session, JANUARY, FEBRUARY)
        with pytest.raises(IntegrityError, match="overlap"):
            session.execute(
                text("insert into ledger_periods (book_id, starts_at, ends_at) values (1, :a, :b)"),
                {"a": MID_JANUARY, "b": MARCH},
            )


class TestClosing:
    def test_the_snapshot_says_what_the_books_were_at_the_end(
        self, session_factory: SessionFactory, books: Books, january: int
    ) -> None:
        snapshot = close(session_factory, january).snapshot
        assert snapshot is not None
        assert {row.code: row.balance_nano for row in snapshot.trial_balance.rows} == {
            "processor:clearing": 100,
            "renter:r1:credit": 100,
        }
        assert (snapshot.journals, snapshot.postings) == (1, 2)
        # What is sealed by then is covered, whenever it counts.
        assert snapshot.head.sequence == 2

    def test_a_closed_period_takes_nothing_more(
        self, session_factory: SessionFactory, books: Books, january: int
    ) -> None:
        close(session_factory, january)
        for at in (MID_JANUARY, JANUARY - timedelta(days=300), FEBRUARY - timedelta(microseconds=1)):
            with session_factory() as session, pytest.raises(ledger.PeriodClosed, match="closed"):
                ledger.post(session, dated(books, 1, "late", at))
        with transaction(session_factory) as session:
            assert not ledger.post(session, dated(books, 1, "in time", FEBRUARY)).replayed
            assert ledger.post(session, dated(books, 100, "january", MID_JANUARY)).replayed

    def test_a_closing_period_takes_closing_entries_alone(
        self, session_factory: SessionFactory, books: Books, january: int
    ) -> None:
        with transaction(session_factory) as session:
            ledger.begin_close(session, january)
        with session_factory() as session, pytest.raises(ledger.PeriodClosed, match="closing"):
            ledger.post(session, dated(books, 1, "late", MID_JANUARY))
        with transaction(session_factory) as session:
            ledger.post(session, replace(dated(books, 1, "accrued", MID_JANUARY), closing_entry=True))
        with transaction(session_factory) as session:
            view = ledger.close(session, january)
        assert view.snapshot is not None
        assert view.snapshot.journals == 2
        with session_factory() as session, pytest.raises(ledger.PeriodClosed):
            ledger.post(session, replace(dated(books, 1, "accrued 2", MID_JANUARY), closing_entry=True))

    def test_the_states_have_one_order(self, session_factory: SessionFactory, january: int) -> None:
        with transaction(session_factory) as session:
            february = ledger.open_period(session, FEBRUARY, MARCH).period_id
            with pytest.raises(ledger.PeriodNotReady, match="not closing"):
                ledger.close(session, january)
            with pytest.raises(ledger.PeriodNotReady, match="earlier"):
                ledger.begin_close(session, february)
        closed = close(session_factory, january)
        with transaction(session_factory) as session:
            assert ledger.close(session, january) == closed
            for step in (ledger.begin_close, ledger.reopen):
                with pytest.raises(ledger.PeriodNotReady):
                    step(session, january)

    def test_a_period_that_goes_on_cannot_be_closed(self, session: Session) -> None:
        now = session.scalar(text("select now()"))
        assert now is not None
        period = ledger.open_period(session, now, now + timedelta(hours=1))
        with pytest.raises(ledger.PeriodNotReady, match="has not ended"):
            ledger.begin_close(session, period.period_id)

    def test_a_close_that_was_begun_can_be_called_off(
        self, session_factory: SessionFactory, books: Books, january: int
    ) -> None:
        with transaction(session_factory) as session:
            ledger.begin_close(session, january)
        with transaction(session_factory) as session:
            assert ledger.reopen(session, january).state == "open"
            ledger.post(session, dated(books, 1, "late", MID_JANUARY))

    def test_a_crash_between_the_steps_leaves_a_period_that_is_closing(
        self, session_factory: SessionFactory, books: Books, january: int
    ) -> None:
        with transaction(session_factory) as session:
            ledger.begin_close(session, january)
        with session_factory() as session:
            ledger.close(session, january)
            session.rollback()
        with transaction(session_factory) as session:
            assert ledger.get_period(session, january).state == "closing"
            assert ledger.close(session, january).state == "closed"
            assert ledger.verify(session).problems == ()

    def test_a_journal_that_cannot_be_sealed_stands_in_the_way(
        self, session_factory: SessionFactory, books: Books, january: int
    ) -> None:
        with transaction(session_factory) as session:
            session.execute(
                text(
                    "with j as (insert into ledger_journals"
                    " (idempotency_key, kind, source, outside_id, body_sha256, effective_at)"
                    " values ('forged', 'x', 'x', 'x', '', :at) returning id)"
                    " insert into ledger_postings (journal_id, account_id, currency, amount_nano, effective_at)"
                    " select j.id, l.account, 'USD', l.nano, :at from j, (values (:a, 1), (:b, -1)) l (account, nano)"
                ),
                {"at": MID_JANUARY, "a": books.clearing, "b": books.fees},
            )
            ledger.begin_close(session, january)
        with session_factory() as session, pytest.raises(ledger.PeriodNotReady, match="cannot be sealed"):
            ledger.close(session, january)

    def test_who_is_posting_is_waited_for(self, session_factory: SessionFactory, books: Books, january: int) -> None:
        posted, closing = threading.Event(), threading.Event()

        def post() -> None:
            with transaction(session_factory) as session:
                ledger.post(session, dated(books, 5, "half-way", MID_JANUARY))
                posted.set()
                assert not closing.wait(timeout=0.3)

        def begin() -> None:
            posted.wait(timeout=10)
            with transaction(session_factory) as session:
                ledger.begin_close(session, january)
                closing.set()

        with ThreadPoolExecutor(2) as threads:
            for done in (threads.submit(post), threads.submit(begin)):
                done.result(timeout=20)
        with transaction(session_factory) as session:
            snapshot = ledger.close(session, january).snapshot
        assert snapshot is not None
        assert snapshot.journals == 2

    def test_a_writer_on_an_old_snapshot_is_refused(
        self, session_factory: SessionFactory, books: Books, january: int
    ) -> None:
        with session_factory() as session:
            session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            with pytest.raises((OperationalError, DBAPIError), match="read committed"):
                ledger.post(session, top_up(books, 1))


class TestCorrections:
    def test_a_reversal_of_a_closed_journal_counts_now_and_is_flagged(
        self, session_factory: SessionFactory, books: Books, january: int
    ) -> None:
        closed = close(session_factory, january)
        with transaction(session_factory) as session:
            original = session.scalar(text("select id from ledger_journals where idempotency_key = 'january'"))
            assert original is not None
            names = {"idempotency_key": "undo", "source": "test", "outside_id": "undo"}
            undone = ledger.reverse(session, original, **names)
            assert ledger.reverse(session, original, **names).replayed
        with transaction(session_factory) as session:
            flagged = session.scalar(
                text("select corrects_period_id from ledger_journals where id = :id"), {"id": undone.journal_id}
            )
            assert flagged == january
            assert ledger.balance(session, books.renter, as_of=FEBRUARY) == Money(100)
            assert ledger.balance(session, books.renter) == Money(7)
            assert closed.snapshot is not None
            assert ledger.trial_balance(session, FEBRUARY) == closed.snapshot.trial_balance
            ledger.seal(session)
            assert ledger.verify(session).problems == ()

    def test_a_correction_names_a_period_that_is_closed(
        self, session_factory: SessionFactory, books: Books, january: int
    ) -> None:
        correction = replace(top_up(books, 1, "fix"), corrects_period_id=january)
        with session_factory() as session, pytest.raises(ledger.UnknownPeriod, match="not closed"):
            ledger.post(session, correction)
        close(session_factory, january)
        with transaction(session_factory) as session:
            ledger.post(session, correction)
            assert ledger.post(session, correction).replayed
            with pytest.raises(ledger.IdempotencyMismatch) as caught:
                ledger.post(session, top_up(books, 1, "fix"))
            assert caught.value.fields == ("corrects_period_id",)


class TestGuards:
    @pytest.mark.parametrize(
        "statement",
        [
            "update ledger_periods set state = 'open'",
            "update ledger_periods set ends_at = ends_at + interval '1 day'",
            "update ledger_periods set snapshot = '[]'",
            "delete from ledger_periods",
            "update ledger_chain set sha256 = ''",
            "delete from ledger_chain",
            "truncate ledger_chain",
        ],
    )
    def test_what_was_sealed_stays(self, session_factory: SessionFactory, january: int, statement: str) -> None:
        close(session_factory, january)
        with session_factory() as session, pytest.raises(DBAPIError, match="refused"):
            session.execute(text(statement))

    def test_raw_sql_cannot_post_into_a_closed_period(self, session_factory: SessionFactory, january: int) -> None:
        close(session_factory, january)
        with session_factory() as session, pytest.raises(IntegrityError, match="is closed"):
            session.execute(
                text(
                    "insert into ledger_journals (idempotency_key, kind, source, outside_id, body_sha256, effective_at)"
                    " values ('raw', 'x', 'x', 'x', '', :at)"
                ),
                {"at": MID_JANUARY},
            )


class TestBooks:
    @pytest.fixture
    def other(self, session_factory: SessionFactory) -> int:
        with transaction(session_factory) as session:
            return ledger.open_book(session, "other")

    def test_each_book_has_periods_and_a_chain_of_its_own(
        self, session_factory: SessionFactory, books: Books, january: int, other: int
    ) -> None:
        with transaction(session_factory) as session:
            assert ledger.open_book(session, "other") == other
            assert ledger.list_books(session) == [ledger.MAIN_BOOK, other]
            a, b = (ledger.open_account(session, code, Kind.ASSET, book_id=other) for code in ("other:a", "other:b"))
        close(session_factory, january)
        draft = JournalDraft(
            "k", "move", "test", "k", (ledger.debit(a, 5), ledger.credit(b, 5)), MID_JANUARY, book_id=other
        )
        with transaction(session_factory) as session:
            ledger.post(session, draft)
            assert ledger.seal(session, other).head.sequence == 1
            assert ledger.head(session).sequence == 2
            assert {row.code for row in ledger.trial_balance(session, book_id=other).rows} == {"other:a", "other:b"}
            assert ledger.verify(session).problems == ()

    def test_no_journal_spans_two_books(self, session_factory: SessionFactory, books: Books, other: int) -> None:
        with session_factory() as session:
            foreign = ledger.open_account(session, "other:a", Kind.ASSET, book_id=other)
            lines = (ledger.debit(foreign, 5), ledger.credit(books.fees, 5))
            with pytest.raises(ledger.InvalidJournal, match="book"):
                ledger.post(session, JournalDraft("k", "move", "test", "k", lines))
            session.rollback()
            with pytest.raises(ledger.UnknownBook):
                ledger.post(session, replace(top_up(books, 5), book_id=99))
