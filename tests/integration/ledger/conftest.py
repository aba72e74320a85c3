"""A small set of books: one renter, one owner, the platform."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from sqlalchemy.orm import Session

import ledger
from marketplace.core.database import SessionFactory


@dataclass(frozen=True)
class Books:
    """Ids of the accounts that the tests move money between."""

    renter: int
    other_renter: int
    owner: int
    fees: int
    clearing: int


@pytest.fixture
def books(session_factory: SessionFactory) -> Books:
    with session_factory() as session, session.begin():
        codes = [
            ledger.renter_credit("r1"),
            ledger.renter_credit("r2"),
            ledger.owner_pending("o1"),
            ledger.FEES,
            ledger.CLEARING,
        ]
        ids = ledger.open_accounts(session, [ledger.charted(code) for code in codes])
    return Books(*(ids[code] for code in codes))


@pytest.fixture
def session(session_factory: SessionFactory) -> Iterator[Session]:
    """A session that checks the books whenever a test left them committed."""
    with session_factory() as session:
        yield session
        session.rollback()
        assert ledger.check(session) == []


def top_up(books: Books, nano: int, key: str = "top-up") -> ledger.JournalDraft:
    lines = (ledger.debit(books.clearing, nano), ledger.credit(books.renter, nano))
    return ledger.JournalDraft(key, "top_up", "test", key, lines)
