from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

import ledger
from ledger import Capture, JournalDraft, Kind, credit, debit
from marketplace.core.database import SessionFactory, transaction
from tests.integration.ledger.conftest import Books, top_up

LATER = datetime(2100, 1, 1, tzinfo=UTC)
PAST = datetime(2020, 1, 1, tzinfo=UTC)


def spend(books: Books, nano: int, key: str, captures: tuple[Capture, ...] = ()) -> JournalDraft:
    lines = (debit(books.renter, nano), credit(books.owner, nano))
    return JournalDraft(key, "charge", "test", key, lines, captures=captures)


class TestFrozen:
    def test_it_gives_what_is_held_and_nothing_else(self, session: Session, books: Books) -> None:
        hold = uuid4()
        first = ledger.post(session, top_up(books, 1_000)).journal_id
        ledger.reserve(session, hold, books.renter, 300, LATER)
        ledger.freeze(session, books.renter)
        session.commit()
        with pytest.raises(ledger.AccountNotOpen):
            ledger.reserve(session, uuid4(), books.renter, 1, LATER)
        session.rollback()
        with pytest.raises(ledger.AccountNotOpen, match="frozen"):
            ledger.post(session, spend(books, 1, "new"))
        session.rollback()
        ledger.post(session, spend(books, 200, "held", (Capture(hold, 200),)))
        ledger.post(session, top_up(books, 5, "more"))
        ledger.reverse(session, first, idempotency_key="u", source="test", outside_id="u", amount_nano=400)
        ledger.unfreeze(session, books.renter)
        ledger.post(session, spend(books, 1, "new"))
        session.commit()
        assert ledger.balance(session, books.renter).nano == 1_000 - 200 + 5 - 400 - 1

    def test_an_account_that_keeps_no_row_can_be_frozen_too(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 1_000))
        ledger.post(session, spend(books, 100, "c"))
        ledger.freeze(session, books.owner)
        with pytest.raises(ledger.AccountNotOpen):
            ledger.post(
                session, JournalDraft("k", "x", "test", "k", (debit(books.owner, 1), credit(books.clearing, 1)))
            )


class TestClosed:
    def test_only_an_empty_account_is_closed_and_for_ever(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 10))
        with pytest.raises(ledger.AccountInUse, match="10 nano"):
            ledger.close_account(session, books.renter)
        ledger.post(session, spend(books, 10, "all"))
        ledger.close_account(session, books.renter)
        session.commit()
        with pytest.raises(ledger.AccountNotOpen):
            ledger.post(session, top_up(books, 1, "late"))
        session.rollback()
        for change in (ledger.freeze, ledger.unfreeze):
            with pytest.raises(ledger.AccountNotOpen, match="stays so"):
                change(session, books.renter)
        with pytest.raises(DBAPIError, match="closed is final"):
            session.execute(text("update ledger_accounts set status = 'open' where status = 'closed'"))

    def test_what_an_account_is_never_changes(self, session: Session, books: Books) -> None:
        session.commit()
        for change in ("code = 'x'", "kind = 'asset'", "checked = not checked", "reference = 'z'"):
            with pytest.raises(DBAPIError, match="refused"):
                session.execute(text(f"update ledger_accounts set {change} where id = {books.renter}"))
            session.rollback()
        with pytest.raises(DBAPIError, match="refused"):
            session.execute(text("delete from ledger_accounts"))

    def test_an_unknown_account_is_named(self, session: Session) -> None:
        for command in (ledger.freeze, ledger.unfreeze, ledger.close_account, ledger.set_bounds, ledger.balance):
            with pytest.raises(ledger.UnknownAccount):
                command(session, 10**9)


class TestBounds:
    def test_an_account_stays_below_its_limit(self, session: Session, books: Books) -> None:
        ledger.set_bounds(session, books.renter, floor_nano=0, limit_nano=100)
        ledger.post(session, top_up(books, 100))
        session.commit()
        with pytest.raises(ledger.AboveLimit) as caught:
            ledger.post(session, top_up(books, 1, "more"))
        assert (caught.value.limit_nano, caught.value.after_nano) == (100, 101)
        session.rollback()
        with pytest.raises(IntegrityError, match="limit"):
            session.execute(text("update ledger_balances set posted_nano = 101 where limit_nano = 100"))

    def test_a_floor_may_lie_below_or_above_zero(self, session: Session, books: Books) -> None:
        ledger.set_bounds(session, books.renter, floor_nano=-50)
        ledger.post(session, spend(books, 50, "overdrawn"))
        session.commit()
        with pytest.raises(ledger.BelowFloor):
            ledger.post(session, spend(books, 1, "beyond"))
        session.rollback()
        with pytest.raises(ledger.BelowFloor):
            ledger.set_bounds(session, books.renter, floor_nano=0)
        with pytest.raises(ledger.InvalidAmount):
            ledger.set_bounds(session, books.renter, floor_nano=0.5)  # type: ignore[arg-type]


class TestWhatIsNoAmount:
    @pytest.mark.parametrize("nano", [0, -1, 1.5, 1.0, True, 2**63, "1"])
    def test_lines_and_holds_take_positive_whole_numbers(self, session: Session, books: Books, nano: int) -> None:
        with pytest.raises(ledger.InvalidAmount):
            ledger.debit(books.renter, nano)
        with pytest.raises(ledger.InvalidAmount):
            ledger.credit(books.renter, nano)
        with pytest.raises(ledger.InvalidAmount):
            ledger.reserve(session, uuid4(), books.renter, nano, LATER)

    @pytest.mark.parametrize("nano", [1.5, float("nan"), -1])
    def test_a_hold_shrinks_to_whole_numbers(self, session: Session, books: Books, nano: int) -> None:
        hold = uuid4()
        ledger.post(session, top_up(books, 10))
        ledger.reserve(session, hold, books.renter, 5, LATER)
        with pytest.raises(ledger.InvalidAmount):
            ledger.shrink(session, hold, nano)

    def test_a_memo_keeps_no_floats(self, session: Session, books: Books) -> None:
        for memo in ({"usd": 1.5}, {"a": [{"b": 0.1}]}, {1: "x"}, {"nul": "\0"}, {"half": "\ud800"}):
            with pytest.raises(ledger.InvalidJournal, match="memo"):
                ledger.post(session, replace(top_up(books, 5), memo=memo))
        ledger.post(session, replace(top_up(books, 5), memo={"usd": "1.5", "n": [2**60, None, True], "é": "ü"}))

    def test_a_currency_that_is_not_kept_is_named(self, session: Session) -> None:
        with pytest.raises(ledger.UnknownCurrency, match="EUR"):
            ledger.open_account(session, "x", Kind.ASSET, "EUR")
        with pytest.raises(ledger.InvalidAmount):
            ledger.Money(1, "dollars")

    def test_one_more_currency_is_one_more_row(self, session: Session) -> None:
        session.execute(text("insert into ledger_currencies (code, minor_places) values ('JPY', 0)"))
        a, b = (ledger.open_account(session, code, Kind.ASSET, "JPY") for code in ("a", "b"))
        lines = (debit(a, 7, "JPY"), credit(b, 7, "JPY"))
        ledger.post(session, JournalDraft("k", "x", "test", "k", lines))
        session.commit()
        assert ledger.balance(session, a) == ledger.Money(7, "JPY")
        assert ledger.trial_balance(session).totals == {"JPY": (7, 7)}


class TestLateHolds:
    def test_a_late_capture_is_refused_by_both(self, session: Session, books: Books) -> None:
        hold = uuid4()
        ledger.post(session, top_up(books, 10))
        ledger.reserve(session, hold, books.renter, 5, PAST)
        session.commit()
        with pytest.raises(ledger.HoldNotOpen, match="expired at 2020"):
            ledger.post(session, spend(books, 5, "late", (Capture(hold, 5),)))
        session.rollback()
        with pytest.raises(DBAPIError, match="has expired"):
            session.execute(text("update ledger_holds set state = 'captured', captured_nano = 5"))
        session.rollback()
        assert ledger.expire(session, [hold]) == 1
        session.commit()
        found = ledger.find_hold(session, hold)
        assert found is not None
        assert found.state == "expired"

    def test_a_repeated_reservation_says_what_became_of_it(self, session: Session, books: Books) -> None:
        hold = uuid4()
        ledger.post(session, top_up(books, 10))
        assert ledger.reserve(session, hold, books.renter, 5, LATER).state == "held"
        ledger.post(session, spend(books, 3, "c", (Capture(hold, 3),)))
        session.commit()
        again = ledger.reserve(session, hold, books.renter, 5, LATER)
        assert (again.state, again.captured_nano) == ("captured", 3)
        assert ledger.available(session, books.renter) == ledger.Available(7, 0)


class TestRebuilding:
    def test_balances_and_checkpoints_come_back_from_postings(self, session: Session, books: Books) -> None:
        ledger.post(session, top_up(books, 10))
        ledger.reserve(session, uuid4(), books.renter, 4, LATER)
        session.commit()
        ledger.seal(session)
        session.execute(text("update ledger_balances set posted_nano = 99, held_nano = 1"))
        session.execute(text("update ledger_checkpoints set effective_debit_nano = 3"))
        session.commit()
        assert {problem.rule for problem in ledger.verify(session).problems} == {
            "balance_posted",
            "balance_held",
            "checkpoint",
        }
        session.rollback()
        assert ledger.rebuild(session) == [books.renter, books.other_renter]
        session.commit()
        assert ledger.verify(session).problems == ()
        assert ledger.available(session, books.renter) == ledger.Available(10, 4)
        session.rollback()


def test_nothing_at_the_same_time_gets_above_a_limit(session_factory: SessionFactory, books: Books) -> None:
    with transaction(session_factory) as session:
        ledger.set_bounds(session, books.renter, floor_nano=0, limit_nano=100)
    barrier = threading.Barrier(8)

    def pay_in(number: int) -> bool:
        with session_factory() as session:
            barrier.wait(timeout=30)
            try:
                ledger.post(session, top_up(books, 30, f"k{number}"))
            except ledger.AboveLimit:
                return False
            session.commit()
            return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(pay_in, range(8))) == 3
