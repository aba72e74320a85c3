from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

import ledger
from marketplace.core.database import SessionFactory, transaction
from tests.integration.ledger.conftest import Books, top_up

START = datetime(2026, 3, 1, tzinfo=UTC)


def post(factory: SessionFactory, books: Books, count: int, prefix: str = "k") -> None:
    with transaction(factory) as session:
        ledger.post_many(session, [top_up(books, 1, f"{prefix}{n}") for n in range(count)])


class TestSealing:
    def test_several_sealers_make_one_chain_without_gaps(self, session_factory: SessionFactory, books: Books) -> None:
        def work(number: int) -> int:
            if number % 2:
                post(session_factory, books, 5, f"{number}-")
                return 0
            with transaction(session_factory) as session:
                return ledger.seal(session, limit=7).count

        with ThreadPoolExecutor(6) as threads:
            sealed = sum(threads.map(work, range(24)))
        with transaction(session_factory) as session:
            sealed += ledger.seal(session).count
            assert sealed == ledger.head(session).sequence == 60
            numbers = session.scalars(text("select sequence from ledger_chain order by sequence")).all()
            assert numbers == list(range(1, 61))
            assert ledger.verify(session).problems == ()

    def test_posting_does_not_wait_for_a_sealer_nor_a_sealer_for_posting(
        self, session_factory: SessionFactory, books: Books
    ) -> None:
        post(session_factory, books, 3)
        with session_factory() as sealing, session_factory() as posting:
            ledger.post(posting, top_up(books, 1, "open"))
            sealing.execute(text("set local lock_timeout = '2s'"))
            assert ledger.seal(sealing).count == 3
            with transaction(session_factory) as other:
                other.execute(text("set local lock_timeout = '2s'"))
                ledger.post(other, replace(top_up(books, 1, "beside"), lines=_other_lines(books)))
                # Somebody seals already: this one does nothing, and does not wait.
                assert ledger.seal(other).count == 0
            sealing.commit()
            posting.commit()
        with transaction(session_factory) as session:
            assert ledger.seal(session).count == 2
            assert ledger.verify(session).problems == ()

    def test_a_batch_is_bounded(self, session_factory: SessionFactory, books: Books) -> None:
        post(session_factory, books, 5)
        counts = []
        for _ in range(4):
            with transaction(session_factory) as session:
                counts.append(ledger.seal(session, limit=2).count)
        assert counts == [2, 2, 1, 0]

    def test_an_unknown_book_is_named(self, session_factory: SessionFactory) -> None:
        with session_factory() as session:
            for command in (ledger.seal, ledger.head):
                with pytest.raises(ledger.UnknownBook):
                    command(session, 99)


class TestBalancesThroughTime:
    def test_every_moment_is_the_sum_of_what_came_before_it_sealed_or_not(
        self, session_factory: SessionFactory, books: Books
    ) -> None:
        rng = random.Random(3)
        entries = [
            (START + timedelta(seconds=rng.randrange(0, 3 * 86_400 // 7) * 7), rng.randint(1, 1_000))
            for _ in range(120)
        ]
        for number, (at, nano) in enumerate(entries):
            with transaction(session_factory) as session:
                ledger.post(session, replace(top_up(books, nano, f"k{number}"), effective_at=at))
                if number % 50 == 49:
                    ledger.seal(session)
        moments = [START, START + timedelta(days=1), START + timedelta(days=9), *(at for at, _ in entries[:20])]
        moments += [at + timedelta(microseconds=1) for at, _ in entries[:20]]
        with session_factory() as session:
            for moment in moments:
                expected = sum(nano for at, nano in entries if at < moment)
                assert ledger.balance(session, books.renter, as_of=moment).nano == expected
                trial = {row.code: row.balance_nano for row in ledger.trial_balance(session, moment).rows}
                assert trial.get("renter:r1:credit", 0) == expected

    def test_what_was_recorded_when_is_another_question(self, session_factory: SessionFactory, books: Books) -> None:
        with transaction(session_factory) as session:
            ledger.post(session, replace(top_up(books, 5, "early"), effective_at=START))
        with transaction(session_factory) as session:
            between = session.scalar(text("select clock_timestamp()"))
            ledger.seal(session)
        with transaction(session_factory) as session:
            ledger.post(session, replace(top_up(books, 7, "late"), effective_at=START - timedelta(days=1)))
        for seal in (False, True):
            with transaction(session_factory) as session:
                if seal:
                    ledger.seal(session)
                assert ledger.balance(session, books.renter, as_of=START).nano == 7
                assert ledger.balance(session, books.renter, recorded_before=between).nano == 5
                assert ledger.balance(session, books.renter, START, recorded_before=between).nano == 0
                rows = ledger.trial_balance(session, recorded_before=between).rows
                assert {row.balance_nano for row in rows} == {5}


def _other_lines(books: Books) -> tuple[ledger.Line, ...]:
    return (ledger.debit(books.clearing, 1), ledger.credit(books.owner, 1))
