from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

import ledger
from ledger import Capture, JournalDraft, Kind, Money, credit, debit
from marketplace.core.database import SessionFactory
from tests.integration.ledger.conftest import Books, top_up

LATER = datetime(2100, 1, 1, tzinfo=UTC)


def charge(books: Books, nano: int, fee_nano: int, key: str, captures: tuple[Capture, ...] = ()) -> JournalDraft:
    lines = (debit(books.renter, nano), credit(books.owner, nano - fee_nano), credit(books.fees, fee_nano))
    return JournalDraft(key, "settlement", "test", key, lines, captures=captures)


class TestPosting:
    def test_money_arrives_is_spent_and_the_books_balance(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 1_000))
        ledger.post(session, charge(books, 300, 60, "c1"))
        session.commit()
        assert ledger.balance(session, books.renter) == Money(700)
        assert ledger.available(session, books.renter).available_nano == 700
        assert ledger.balance(session, books.owner) == Money(240)
        assert ledger.balance(session, books.fees) == Money(60)
        trial = ledger.trial_balance(session)
        assert trial.balanced
        assert trial.totals == {"USD": (1_300, 1_300)}

    def test_the_same_key_and_body_has_its_effect_once(self, session: Session, books: Books) -> None:
        first = ledger.post(session, top_up(books, 1_000))
        session.commit()
        again = ledger.post(session, top_up(books, 1_000))
        session.commit()
        assert (again.journal_id, again.replayed) == (first.journal_id, True)
        assert ledger.balance(session, books.renter) == Money(1_000)

    def test_the_same_key_with_another_body_names_what_differs(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 1_000))
        session.commit()
        with pytest.raises(ledger.IdempotencyMismatch) as caught:
            ledger.post(session, top_up(books, 1_001))
        assert caught.value.fields == ("lines",)

    def test_a_key_repeated_within_one_call_counts_once(self, session: Session, books: Books) -> None:
        results = ledger.post_many(session, [top_up(books, 5), top_up(books, 5), top_up(books, 7, "other")])
        session.commit()
        assert [result.replayed for result in results] == [False, True, False]
        assert results[0].journal_id == results[1].journal_id
        assert ledger.balance(session, books.renter) == Money(12)

    def test_an_outside_event_has_one_journal_whatever_the_key(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 1_000))
        session.commit()
        with pytest.raises(ledger.OutsideIdTaken):
            ledger.post(session, replace(top_up(books, 1_000), idempotency_key="another"))

    def test_nothing_goes_below_its_floor(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 100))
        session.commit()
        with pytest.raises(ledger.BelowFloor) as caught:
            ledger.post(session, charge(books, 101, 1, "c1"))
        assert (caught.value.available_nano, caught.value.wanted_nano) == (100, 101)

    def test_an_unknown_or_closed_account_takes_nothing(self, session: Session, books: Books) -> None:
        lines = (debit(books.clearing, 5), credit(10**9, 5))
        with pytest.raises(ledger.UnknownAccount):
            ledger.post(session, JournalDraft("k", "x", "test", "k", lines))
        session.rollback()
        session.execute(text("update ledger_accounts set status = 'closed' where id = :id"), {"id": books.renter})
        with pytest.raises(ledger.AccountNotOpen):
            ledger.post(session, top_up(books, 5))

    def test_large_amounts_survive_to_the_nano(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 2**53 + 1))
        session.commit()
        assert ledger.balance(session, books.renter).nano == 2**53 + 1

    def test_a_balance_can_be_asked_for_a_time_and_periods_meet_without_overlap(
        self, session: Session, books: Books
    ) -> None:
        noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
        ledger.post(session, replace(top_up(books, 10, "a"), effective_at=noon))
        session.commit()
        assert ledger.balance(session, books.renter, as_of=noon) == Money(0)
        assert ledger.balance(session, books.renter, as_of=noon + timedelta(microseconds=1)) == Money(10)
        assert ledger.trial_balance(session, as_of=noon).rows == ()


class TestReversal:
    def test_a_correction_is_a_new_journal_that_names_the_original(self, session: Session, books: Books) -> None:
        original = ledger.post(session, top_up(books, 1_000))
        reversal = ledger.reverse(
            session, original.journal_id, idempotency_key="undo", source="test", outside_id="undo"
        )
        session.commit()
        assert ledger.balance(session, books.renter) == Money(0)
        named = session.scalar(
            text("select reverses_id from ledger_journals where id = :id"), {"id": reversal.journal_id}
        )
        assert named == original.journal_id

    def test_a_journal_is_taken_back_once(self, session: Session, books: Books) -> None:
        original = ledger.post(session, top_up(books, 1_000)).journal_id
        ledger.post(session, top_up(books, 5_000, "more"))
        first = ledger.reverse(session, original, idempotency_key="u1", source="test", outside_id="u1")
        again = ledger.reverse(session, original, idempotency_key="u1", source="test", outside_id="u1")
        assert again.replayed
        assert again.journal_id == first.journal_id
        session.commit()
        with pytest.raises(ledger.AlreadyReversed):
            ledger.reverse(session, original, idempotency_key="u2", source="test", outside_id="u2")

    def test_money_that_was_spent_cannot_be_taken_back(self, session: Session, books: Books) -> None:
        original = ledger.post(session, top_up(books, 1_000)).journal_id
        ledger.post(session, charge(books, 900, 100, "c1"))
        session.commit()
        with pytest.raises(ledger.BelowFloor):
            ledger.reverse(session, original, idempotency_key="u", source="test", outside_id="u")

    def test_there_is_nothing_to_take_back_of_an_unknown_journal(self, session: Session, books: Books) -> None:
        with pytest.raises(ledger.UnknownJournal):
            ledger.reverse(session, 10**9, idempotency_key="u", source="test", outside_id="u")


class TestHolds:
    def test_a_hold_is_captured_by_the_journal_that_takes_its_money(self, session: Session, books: Books) -> None:
        hold = uuid4()
        ledger.post(session, top_up(books, 1_000))
        ledger.reserve(session, hold, books.renter, 800, LATER)
        assert ledger.available(session, books.renter).available_nano == 200
        ledger.post(session, charge(books, 300, 60, "c1", (Capture(hold, 300),)))
        session.commit()
        after = ledger.available(session, books.renter)
        assert (after.posted_nano, after.held_nano) == (700, 0)

    def test_what_is_held_cannot_be_held_again_or_spent(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 1_000))
        ledger.reserve(session, uuid4(), books.renter, 800, LATER)
        session.commit()
        with pytest.raises(ledger.BelowFloor) as caught:
            ledger.reserve(session, uuid4(), books.renter, 201, LATER)
        assert caught.value.available_nano == 200
        with pytest.raises(ledger.BelowFloor):
            ledger.post(session, charge(books, 201, 1, "c1"))

    def test_the_same_hold_twice_is_one_hold(self, session: Session, books: Books) -> None:
        hold = uuid4()
        ledger.post(session, top_up(books, 1_000))
        ledger.reserve(session, hold, books.renter, 800, LATER)
        ledger.reserve(session, hold, books.renter, 800, LATER)
        session.commit()
        assert ledger.available(session, books.renter).held_nano == 800
        with pytest.raises(ledger.HoldMismatch):
            ledger.reserve(session, hold, books.renter, 801, LATER)

    def test_a_hold_shrinks_and_never_grows(self, session: Session, books: Books) -> None:
        hold = uuid4()
        ledger.post(session, top_up(books, 1_000))
        ledger.reserve(session, hold, books.renter, 800, LATER)
        ledger.shrink(session, hold, 100)
        session.commit()
        assert ledger.available(session, books.renter).held_nano == 100
        with pytest.raises(ledger.HoldNotOpen):
            ledger.shrink(session, hold, 101)
        with pytest.raises(ledger.HoldNotOpen):
            ledger.post(session, charge(books, 101, 1, "c1", (Capture(hold, 101),)))

    def test_a_hold_is_resolved_once(self, session: Session, books: Books) -> None:
        hold, captured = uuid4(), uuid4()
        ledger.post(session, top_up(books, 1_000))
        ledger.reserve(session, hold, books.renter, 100, LATER)
        ledger.reserve(session, captured, books.renter, 100, LATER)
        assert ledger.release(session, hold)
        assert not ledger.release(session, hold)
        ledger.post(session, charge(books, 100, 1, "c1", (Capture(captured, 100),)))
        session.commit()
        for gone in (hold, captured, uuid4()):
            with pytest.raises(ledger.HoldNotOpen):
                ledger.post(session, charge(books, 10, 1, "c2", (Capture(gone, 10),)))
            session.rollback()
        with pytest.raises(ledger.HoldNotOpen):
            ledger.release(session, captured)

    def test_a_journal_takes_what_its_holds_give_and_nothing_else(self, session: Session, books: Books) -> None:
        hold = uuid4()
        ledger.post(session, top_up(books, 1_000))
        ledger.reserve(session, hold, books.renter, 500, LATER)
        session.commit()
        with pytest.raises(ledger.UnmatchedCapture):
            ledger.post(session, charge(books, 300, 60, "c1", (Capture(hold, 200),)))

    def test_only_overdue_holds_expire(self, session: Session, books: Books) -> None:
        old, young = uuid4(), uuid4()
        ledger.post(session, top_up(books, 1_000))
        ledger.reserve(session, old, books.renter, 100, datetime(2020, 1, 1, tzinfo=UTC))
        ledger.reserve(session, young, books.renter, 100, LATER)
        session.commit()
        assert ledger.overdue(session, limit=10) == [old]
        assert ledger.expire(session, [old, young]) == 1
        assert ledger.expire(session, [old, young]) == 0
        session.commit()
        assert ledger.available(session, books.renter).held_nano == 100

    def test_a_frozen_account_holds_nothing_new(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 1_000))
        session.execute(text("update ledger_accounts set status = 'frozen' where id = :id"), {"id": books.renter})
        with pytest.raises(ledger.AccountNotOpen):
            ledger.reserve(session, uuid4(), books.renter, 1, LATER)

    def test_an_account_without_a_running_balance_cannot_be_held_on(self, session: Session, books: Books) -> None:
        with pytest.raises(ledger.UnknownAccount):
            ledger.reserve(session, uuid4(), books.fees, 1, LATER)


class TestManyAtOnce:
    def test_twenty_holds_behind_a_barrier_never_overspend(self, session_factory: SessionFactory, books: Books) -> None:
        with session_factory() as session, session.begin():
            ledger.post(session, top_up(books, 100))
        barrier = threading.Barrier(20)

        def hold(_: int) -> bool:
            with session_factory() as session:
                barrier.wait(timeout=30)
                try:
                    ledger.reserve(session, uuid4(), books.renter, 30, LATER)
                except ledger.BelowFloor:
                    return False
                session.commit()
                return True

        # The pool gives 16 connections; a session takes one only after the barrier.
        with ThreadPoolExecutor(20) as threads:
            admitted = sum(threads.map(hold, range(20)))
        assert admitted == 3
        with session_factory() as session:
            assert ledger.available(session, books.renter).available_nano == 10
            assert ledger.check(session) == []

    def test_two_finalisers_post_one_charge(self, session_factory: SessionFactory, books: Books) -> None:
        with session_factory() as session, session.begin():
            ledger.post(session, top_up(books, 1_000))
        barrier = threading.Barrier(4)

        def settle(_: int) -> ledger.PostResult:
            with session_factory() as session, session.begin():
                barrier.wait(timeout=30)
                return ledger.post(session, charge(books, 300, 60, "c1"))

        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(settle, range(4)))
        assert sorted(result.replayed for result in results) == [False, True, True, True]
        assert len({result.journal_id for result in results}) == 1
        with session_factory() as session:
            assert ledger.balance(session, books.renter) == Money(700)

    def test_writers_of_two_accounts_in_opposite_order_do_not_deadlock(
        self, session_factory: SessionFactory, books: Books
    ) -> None:
        def move(number: int) -> None:
            pair = (books.renter, books.other_renter) if number % 2 else (books.other_renter, books.renter)
            lines = (debit(books.clearing, 3), credit(pair[0], 1), credit(pair[1], 2))
            with session_factory() as session, session.begin():
                ledger.post(session, JournalDraft(f"m{number}", "move", "test", f"m{number}", lines))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(move, range(60)))
        with session_factory() as session:
            assert ledger.balance(session, books.clearing) == Money(180)
            assert ledger.check(session) == []


class TestAccounts:
    def test_opening_twice_gives_one_account(self, session: Session, books: Books) -> None:
        assert ledger.open_account(session, "platform:fees", Kind.INCOME) == books.fees
        assert ledger.account_id(session, "platform:fees") == books.fees

    def test_an_account_of_another_nature_is_refused(self, session: Session, books: Books) -> None:
        with pytest.raises(ledger.AccountMismatch):
            ledger.open_account(session, "platform:fees", Kind.EXPENSE)

    def test_openers_at_the_same_time_find_the_same_account(self, session_factory: SessionFactory) -> None:
        def open_(_: int) -> int:
            with session_factory() as session, session.begin():
                return ledger.open_accounts(session, [ledger.charted("renter:new:credit")])["renter:new:credit"]

        with ThreadPoolExecutor(6) as threads:
            assert len(set(threads.map(open_, range(12)))) == 1


class TestGuardsOfTheDatabase:
    @pytest.mark.parametrize(
        "statement",
        [
            "update ledger_postings set amount_nano = amount_nano + 1",
            "update ledger_journals set memo = '{}'",
            "delete from ledger_postings",
            "delete from ledger_journals",
            "truncate ledger_postings",
            "truncate ledger_journals cascade",
        ],
    )
    def test_what_was_written_stays(self, session: Session, books: Books, statement: str) -> None:
        ledger.post(session, top_up(books, 5))
        session.commit()
        with pytest.raises(DBAPIError, match="append-only"):
            session.execute(text(statement))

    @pytest.mark.parametrize("amounts", [[5, -4], [5], []])
    def test_an_unbalanced_journal_cannot_be_committed(
        self, session: Session, books: Books, amounts: list[int]
    ) -> None:
        journal = session.scalar(
            text(
                "insert into ledger_journals (idempotency_key, kind, source, outside_id, body_sha256, effective_at)"
                " values ('raw', 'x', 'x', 'x', '', now()) returning id"
            )
        )
        for amount in amounts:
            session.execute(
                text(
                    "insert into ledger_postings (journal_id, account_id, currency, amount_nano)"
                    " values (:journal, :account, 'USD', :amount)"
                ),
                {"journal": journal, "account": books.fees, "amount": amount},
            )
        with pytest.raises(IntegrityError, match="does not balance"):
            session.commit()

    def test_a_committed_journal_takes_no_further_lines(self, session: Session, books: Books) -> None:
        journal = ledger.post(session, top_up(books, 5)).journal_id
        session.commit()
        with pytest.raises(IntegrityError, match="no further lines"):
            session.execute(
                text(
                    "insert into ledger_postings (journal_id, account_id, currency, amount_nano)"
                    " values (:journal, :account, 'USD', 5), (:journal, :account, 'USD', -5)"
                ),
                {"journal": journal, "account": books.fees},
            )

    def test_a_posting_is_in_its_accounts_currency(self, session: Session, books: Books) -> None:
        lines = (debit(books.clearing, 5, "EUR"), credit(books.renter, 5, "EUR"))
        with pytest.raises(ledger.CurrencyMismatch):
            ledger.post(session, JournalDraft("k", "x", "test", "k", lines))
        insert = (
            "insert into ledger_postings (journal_id, account_id, currency, amount_nano)"
            " values (:journal, :account, 'EUR', 5)"
        )
        journal = ledger.post(session, top_up(books, 5)).journal_id
        with pytest.raises(IntegrityError, match="foreign key"):
            session.execute(text(insert), {"journal": journal, "account": books.fees})

    def test_a_resolved_hold_stays_resolved(self, session: Session, books: Books) -> None:
        hold = uuid4()
        ledger.post(session, top_up(books, 100))
        ledger.reserve(session, hold, books.renter, 50, LATER)
        ledger.release(session, hold)
        session.commit()
        with pytest.raises(IntegrityError, match="resolved once"):
            session.execute(text("update ledger_holds set state = 'held' where id = :id"), {"id": hold})


class TestChecks:
    def test_a_forged_balance_is_found_and_told(self, session_factory: SessionFactory, books: Books) -> None:
        with session_factory() as session, session.begin():
            ledger.post(session, top_up(books, 100))
            session.execute(
                text("update ledger_balances set posted_nano = 99, held_nano = 1 where account_id = :id"),
                {"id": books.renter},
            )
        with session_factory() as session:
            found = {problem.rule: problem.story for problem in ledger.check(session)}
        assert found.keys() == {"balance_posted", "balance_held"}
        assert "says 99 nano, its postings say 100" in found["balance_posted"]
