from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import ledger
from ledger import JournalDraft, credit, debit
from marketplace.core.database import SessionFactory, transaction
from tests.integration.ledger.conftest import Books, top_up


@pytest.fixture
def charge(session_factory: SessionFactory, books: Books) -> int:
    """100 nano, of which 20 are a fee and 7 of them odd."""
    with transaction(session_factory) as session:
        ledger.post(session, top_up(books, 1_000))
        lines = (debit(books.renter, 100), credit(books.owner, 73), credit(books.fees, 27))
        return ledger.post(session, JournalDraft("charge", "charge", "test", "charge", lines)).journal_id


def undo(session: Session, journal: int, key: str, amount_nano: int | None = None, **changes: object) -> int:
    result = ledger.reverse(
        session,
        journal,
        idempotency_key=key,
        source="test",
        outside_id=key,
        amount_nano=amount_nano,
        **changes,  # type: ignore[arg-type]
    )
    return result.journal_id


class TestParts:
    def test_parts_add_up_and_the_fee_follows_them(
        self, session_factory: SessionFactory, books: Books, charge: int
    ) -> None:
        fees = []
        for key, nano in (("a", 30), ("b", 20)):
            with transaction(session_factory) as session:
                undo(session, charge, key, nano)
                fees.append(ledger.balance(session, books.fees).nano)
        # 27 % of 30 and of 50 are 8.1 and 13.5.
        assert fees == [27 - 8, 27 - 13]
        with transaction(session_factory) as session:
            assert ledger.balance(session, books.renter).nano == 950
            undo(session, charge, "rest")
            for account in (books.fees, books.owner):
                assert ledger.balance(session, account).nano == 0
            assert ledger.left_of(session, charge) == ()
            assert ledger.check(session) == []

    def test_more_than_is_left_is_refused(self, session_factory: SessionFactory, charge: int) -> None:
        with transaction(session_factory) as session:
            undo(session, charge, "a", 60)
            with pytest.raises(ledger.AlreadyReversed, match="40 nano"):
                undo(session, charge, "b", 41)
            with pytest.raises(ledger.InvalidAmount):
                undo(session, charge, "c", 0)
            undo(session, charge, "d", 40)
            with pytest.raises(ledger.AlreadyReversed):
                undo(session, charge, "e", 1)

    def test_chosen_lines_stay_within_the_original(
        self, session_factory: SessionFactory, books: Books, charge: int
    ) -> None:
        with transaction(session_factory) as session:
            fee_only = (debit(books.fees, 27), credit(books.renter, 27))
            undo(session, charge, "fee", lines=fee_only)
            with pytest.raises(ledger.AlreadyReversed):
                undo(session, charge, "again", lines=fee_only)
            with pytest.raises(ledger.AlreadyReversed):
                undo(session, charge, "other", lines=(debit(books.clearing, 1), credit(books.renter, 1)))
            with pytest.raises(ledger.AlreadyReversed):
                undo(session, charge, "wrong way", lines=(credit(books.owner, 1), debit(books.renter, 1)))

    def test_a_repetition_is_the_same_part_and_another_part_is_named(
        self, session_factory: SessionFactory, charge: int
    ) -> None:
        with transaction(session_factory) as session:
            first = undo(session, charge, "a", 30)
        with transaction(session_factory) as session:
            assert undo(session, charge, "a", 30) == first
            with pytest.raises(ledger.IdempotencyMismatch) as caught:
                undo(session, charge, "a", 31)
            assert caught.value.fields == ("lines",)

    def test_a_reversal_is_not_reversed(self, session_factory: SessionFactory, charge: int) -> None:
        with transaction(session_factory) as session:
            reversal = undo(session, charge, "a", 30)
            with pytest.raises(ledger.InvalidJournal, match="itself a reversal"):
                undo(session, reversal, "b")

    def test_refunds_at_the_same_time_never_exceed_the_original(
        self, session_factory: SessionFactory, books: Books, charge: int
    ) -> None:
        barrier = threading.Barrier(8)

        def refund(number: int) -> bool:
            with session_factory() as session:
                barrier.wait(timeout=30)
                try:
                    undo(session, charge, f"r{number}", 30)
                except ledger.AlreadyReversed:
                    return False
                session.commit()
                return True

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(refund, range(8))) == 3
        with session_factory() as session:
            assert ledger.balance(session, books.renter).nano == 990

    def test_the_database_refuses_what_exceeds_the_original(
        self, session_factory: SessionFactory, books: Books, charge: int
    ) -> None:
        lines = (credit(books.renter, 101), debit(books.owner, 73), debit(books.fees, 28))
        draft = JournalDraft("raw", "reversal", "test", "raw", lines, reverses_id=charge)
        with session_factory() as session:
            ledger.post(session, draft)
            with pytest.raises(IntegrityError, match="more than it moved"):
                session.commit()
        with session_factory() as session:
            assert session.scalar(text("select count(*) from ledger_journals where reverses_id is not null")) == 0
