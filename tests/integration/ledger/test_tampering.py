"""What somebody with every right in the database does to the books, and how a verification finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest

import ledger
from ledger import credit, debit
from marketplace.core.database import SessionFactory, transaction
from tests.integration.ledger.conftest import Books, top_up

JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)
LATER = datetime(2100, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Scene:
    """Sealed books with a closed January, and a connection of a superuser whose triggers and foreign keys are off."""

    factory: SessionFactory
    books: Books
    journals: list[int]
    sql: psycopg.Connection

    def found(self, anchors: tuple[ledger.Head, ...] = ()) -> dict[str, list[str]]:
        with transaction(self.factory) as session:
            problems = ledger.verify(session, anchors).problems
        rules: dict[str, list[str]] = {}
        for problem in problems:
            rules.setdefault(problem.rule, []).append(problem.story)
        return rules


@pytest.fixture
def scene(session_factory: SessionFactory, books: Books, database_url: str) -> Iterator[Scene]:
    with transaction(session_factory) as session:
        drafts = [replace(top_up(books, 100 + n, f"k{n}"), effective_at=JANUARY.replace(day=5 + n)) for n in range(4)]
        drafts += [top_up(books, 200 + n, f"later{n}") for n in range(4)]
        journals = [result.journal_id for result in ledger.post_many(session, drafts)]
        ledger.reserve(session, uuid4(), books.renter, 10, LATER)
        period = ledger.open_period(session, JANUARY, FEBRUARY)
    with transaction(session_factory) as session:
        ledger.begin_close(session, period.period_id)
    with transaction(session_factory) as session:
        ledger.close(session, period.period_id)
    with transaction(session_factory) as session:
        ledger.seal(session)
        assert ledger.verify(session).problems == ()
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")
        yield Scene(session_factory, books, journals, connection)


def edit_both_lines_alike(scene: Scene) -> None:
    scene.sql.execute(
        "update ledger_postings set amount_nano = amount_nano * 2 where journal_id = %s", [scene.journals[5]]
    )


def move_a_line_to_another_account(scene: Scene) -> None:
    scene.sql.execute(
        "update ledger_postings set account_id = %s where journal_id = %s and account_id = %s",
        [scene.books.other_renter, scene.journals[1], scene.books.renter],
    )


def change_the_time_of_a_journal(scene: Scene) -> None:
    for table, column in (("ledger_journals", "id"), ("ledger_postings", "journal_id")):
        scene.sql.execute(
            f"update {table} set effective_at = effective_at - interval '3 months' where {column} = %s",
            [scene.journals[6]],
        )


def change_a_memo(scene: Scene) -> None:
    scene.sql.execute("update ledger_journals set memo = '{\"note\": 1}' where id = %s", [scene.journals[2]])


def delete_a_whole_journal(scene: Scene) -> None:
    scene.sql.execute("delete from ledger_postings where journal_id = %s", [scene.journals[6]])
    scene.sql.execute("delete from ledger_journals where id = %s", [scene.journals[6]])


def delete_a_journal_and_its_link(scene: Scene) -> None:
    delete_a_whole_journal(scene)
    scene.sql.execute("delete from ledger_chain where journal_id = %s", [scene.journals[6]])


def insert_a_journal(scene: Scene) -> None:
    journal = scene.sql.execute(
        "insert into ledger_journals (idempotency_key, kind, source, outside_id, body_sha256, effective_at)"
        " values ('forged', 'x', 'x', 'x', '\\x00', now()) returning id"
    ).fetchone()
    assert journal is not None
    for account, nano in ((scene.books.clearing, 5), (scene.books.owner, -5)):
        scene.sql.execute(
            "insert into ledger_postings (journal_id, account_id, currency, amount_nano, effective_at)"
            " values (%s, %s, 'USD', %s, now())",
            [journal[0], account, nano],
        )


def insert_a_journal_by_the_front_door(scene: Scene) -> None:
    scene.sql.execute("set session_replication_role = origin")
    with scene.sql.transaction():
        insert_a_journal(scene)


def insert_lines_into_a_journal(scene: Scene) -> None:
    for nano in (5, -5):
        scene.sql.execute(
            "insert into ledger_postings (journal_id, account_id, currency, amount_nano, effective_at, recorded_at)"
            " select id, %s, 'USD', %s, effective_at, recorded_at from ledger_journals where id = %s",
            [scene.books.owner, nano, scene.journals[0]],
        )


def swap_the_codes_of_two_accounts(scene: Scene) -> None:
    scene.sql.execute("update ledger_accounts a set code = 'renter:swapped:credit' where id = %s", [scene.books.renter])


def cut_the_end_of_the_chain(scene: Scene) -> None:
    for table, column in (
        ("ledger_chain", "journal_id"),
        ("ledger_postings", "journal_id"),
        ("ledger_journals", "id"),
    ):
        scene.sql.execute(f"delete from {table} where {column} = %s", [scene.journals[7]])


def change_a_link(scene: Scene) -> None:
    scene.sql.execute("update ledger_chain set sha256 = sha256(sha256) where sequence = 3")


def swap_two_links(scene: Scene) -> None:
    for before, after in ((5, 99), (6, 5), (99, 6)):
        scene.sql.execute("update ledger_chain set sequence = %s where sequence = %s", [after, before])


def rewrite_a_snapshot(scene: Scene) -> None:
    scene.sql.execute("update ledger_periods set snapshot = jsonb_set(snapshot, '{0,3}', '7')")


def slip_a_journal_into_a_closed_period(scene: Scene) -> None:
    insert_a_journal_by_the_front_door(scene)
    scene.sql.execute("set session_replication_role = replica")
    for table in ("ledger_journals", "ledger_postings"):
        scene.sql.execute(f"update {table} set effective_at = '2026-01-20 00:00+00' where effective_at > '2026-06-01'")


def reopen_a_closed_period(scene: Scene) -> None:
    scene.sql.execute("update ledger_books set closed_through = null, closing_through = null")


def raise_a_balance(scene: Scene) -> None:
    scene.sql.execute("update ledger_balances set posted_nano = posted_nano + 1")


def delete_a_hold(scene: Scene) -> None:
    scene.sql.execute("delete from ledger_holds")


def falsify_a_checkpoint(scene: Scene) -> None:
    scene.sql.execute("update ledger_checkpoints set effective_credit_nano = effective_credit_nano + 1")


def switch_a_guard_off(scene: Scene) -> None:
    scene.sql.execute("alter table ledger_postings disable trigger ledger_postings_append_only")


def take_a_journal_off_the_list(scene: Scene) -> None:
    with transaction(scene.factory) as session:
        ledger.post(session, top_up(scene.books, 5, "unsealed"))
    scene.sql.execute("delete from ledger_unsealed")


@pytest.mark.parametrize(
    ("tamper", "rule", "words"),
    [
        (edit_both_lines_alike, "chain", "were changed"),
        (move_a_line_to_another_account, "chain", "were changed"),
        (change_the_time_of_a_journal, "chain", "were changed"),
        (change_a_memo, "chain", "were changed"),
        (delete_a_whole_journal, "chain", "is gone"),
        (delete_a_journal_and_its_link, "chain", "are missing"),
        (insert_a_journal, "chain", "neither in the chain nor waiting"),
        (insert_a_journal_by_the_front_door, "waiting", "does not have the fingerprint"),
        (insert_lines_into_a_journal, "chain", "were changed"),
        (swap_the_codes_of_two_accounts, "chain", "were changed"),
        (cut_the_end_of_the_chain, "chain", "once reached"),
        (change_a_link, "chain", "link 3 does not fit"),
        (swap_two_links, "chain", "does not fit"),
        (rewrite_a_snapshot, "period", "snapshot of period"),
        (slip_a_journal_into_a_closed_period, "period", "written after it was closed"),
        (reopen_a_closed_period, "period", "closed through"),
        (raise_a_balance, "balance_posted", "its postings say"),
        (delete_a_hold, "balance_held", "its open holds say"),
        (falsify_a_checkpoint, "checkpoint", "than its postings say"),
        (switch_a_guard_off, "guard", "ledger_postings_append_only"),
        (take_a_journal_off_the_list, "chain", "neither in the chain nor waiting"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_tampering_is_found(scene: Scene, tamper: Callable[[Scene], None], rule: str, words: str) -> None:
    tamper(scene)
    stories = scene.found().get(rule, [])
    assert any(words in story for story in stories), scene.found()


def test_an_edit_is_told_where_it_is_and_nowhere_else(scene: Scene) -> None:
    change_a_memo(scene)
    assert scene.found() == {
        "chain": [f"link 3 does not fit journal {scene.journals[2]}: the journal, its lines or the chain were changed"]
    }


def rewrite_the_whole_chain(scene: Scene) -> None:
    """Forge the end of a history and every hash that depends on it, as the sealer itself would."""
    scene.sql.execute("update ledger_journals set memo = '{\"note\": 1}' where id = %s", [scene.journals[7]])
    scene.sql.execute("delete from ledger_chain where sequence > 4")
    scene.sql.execute("delete from ledger_unsealed")
    scene.sql.execute("insert into ledger_unsealed (journal_id, book_id) select unnest(%s), 1", [scene.journals[4:]])
    scene.sql.execute(
        "update ledger_books set fingerprints_after_id = 1000, sealed_sequence = 4,"
        " sealed_sha256 = (select sha256 from ledger_chain where sequence = 4)"
    )
    scene.sql.execute("delete from ledger_checkpoints")
    with transaction(scene.factory) as session:
        ledger.seal(session)
        ledger.rebuild(session)


def test_a_head_that_was_written_down_finds_a_chain_that_was_rewritten_whole(scene: Scene) -> None:
    with transaction(scene.factory) as session:
        written_down = str(ledger.head(session))
    rewrite_the_whole_chain(scene)
    assert "written down" in scene.found((ledger.Head.parse(written_down),))["chain"][0]


def test_a_forged_journal_is_never_sealed_and_stays_in_sight(scene: Scene) -> None:
    insert_a_journal_by_the_front_door(scene)
    with transaction(scene.factory) as session:
        before = ledger.head(session)
        ledger.post(session, ledger.JournalDraft("good", "x", "test", "good", _lines(scene.books)))
    with transaction(scene.factory) as session:
        sealed = ledger.seal(session)
    assert len(sealed.refused) == 1
    assert sealed.head.sequence == before.sequence + 1
    assert list(scene.found()) == ["waiting"]


def _lines(books: Books) -> tuple[ledger.Line, ...]:
    return (debit(books.clearing, 5), credit(books.owner, 5))
