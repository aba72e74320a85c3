"""Closing a period of the books, proving them, and comparing them with the receipts behind them.

What the ledger refuses becomes an error that people can read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

import ledger
from marketplace.accounts.models import Organisation
from marketplace.billing.checks import invariants
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import BadRequest, Conflict, NotFound
from marketplace.finance.books import SETTLEMENT
from marketplace.finance.period import Period
from marketplace.metering.models import Receipt

MAX_FINDINGS: Final = 100
BATCH: Final = 500
"""Journals compared at a time."""


class BooksRefuse(Conflict):
    """The ledger does not do that now."""

    code = "books_refuse"


class NotInTheBooks(NotFound):
    code = "not_in_the_books"


class NoSuchBook(BadRequest):
    code = "invalid_period"


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What a comparison read, and what it found."""

    journals: int
    receipts: int
    findings: tuple[str, ...]


@contextmanager
def told() -> Iterator[None]:
    """Turn what the ledger raises into an error with words and a status."""
    try:
        yield
    except (ledger.UnknownPeriod, ledger.UnknownJournal, ledger.UnknownAccount, ledger.UnknownBook) as error:
        raise NotInTheBooks(str(error)) from error
    except (ledger.InvalidPeriod, ledger.UnknownCurrency, ledger.InvalidAmount) as error:
        raise NoSuchBook(str(error)) from error
    except ledger.LedgerError as error:
        raise BooksRefuse(str(error)) from error


def close_period(
    factory: SessionFactory, period: Period, say: Callable[[str], None] = lambda _: None
) -> ledger.PeriodView:
    """Close a period of the main book; a closed one is given as it is. Raises BooksRefuse, NoSuchBook.

    Each step commits. After a crash between two of them the same call goes on where it stopped.
    """
    with told():
        # In one transaction: a period that may not close yet must not stay behind and stand in the way of others.
        with transaction(factory) as session:
            view = ledger.open_period(session, period.start, period.end)
            if view.state == "open":
                say("waiting for whoever is posting")
                view = ledger.begin_close(session, view.period_id)
        if view.state != "closed":
            say("sealing the chain and keeping the snapshot")
            with transaction(factory) as session:
                view = ledger.close(session, view.period_id)
    return view


def prove(session: Session) -> ledger.Verification:
    """Read the whole ledger: chain, periods, guards, balances."""
    with told():
        return ledger.verify(session)


def reconcile(session: Session, period: Period, say: Callable[[int], None] = lambda _: None) -> Reconciled:
    """Compare each settlement of a period with its receipts, account by account, and jobs with their holds.

    `say` hears how many journals were read so far.
    """
    findings: list[str] = []
    journals = receipts = 0
    codes = {view.account_id: view.code for view in ledger.list_accounts(session)}
    renters = session.execute(select(Organisation.id, Organisation.credit_account_id))
    credit_codes = {renter: codes[account] for renter, account in renters if account in codes}
    batch: list[ledger.JournalView] = []
    for journal in ledger.read_journals(session, period.start, period.end):
        if journal.kind == SETTLEMENT and journal.reverses_id is None:
            batch.append(journal)
        if len(batch) >= BATCH:
            receipts += _compare(session, batch, credit_codes, findings)
            journals, batch = journals + len(batch), []
            say(journals)
    receipts += _compare(session, batch, credit_codes, findings)
    journals += len(batch)
    say(journals)
    findings += _strays(session)
    findings += invariants(session)
    return Reconciled(journals, receipts, tuple(findings[:MAX_FINDINGS]))


def _compare(
    session: Session, journals: list[ledger.JournalView], credit_codes: dict[UUID, str], findings: list[str]
) -> int:
    """Whether the lines of these journals are what their receipts say. Returns how many receipts they have."""
    if not journals:
        return 0
    wanted: dict[int, dict[str, int]] = {journal.journal_id: defaultdict(int) for journal in journals}
    count = 0
    ids = list(wanted)
    rows = session.execute(
        select(
            Receipt.journal_id,
            Receipt.renter_organisation_id,
            Receipt.owner_organisation_id,
            func.count(),
            func.sum(Receipt.charge_nano),
            func.sum(Receipt.owner_nano),
            func.sum(Receipt.fee_nano),
            func.sum(Receipt.loss_nano),
        )
        .where(Receipt.journal_id.in_(ids))
        .group_by(Receipt.journal_id, Receipt.renter_organisation_id, Receipt.owner_organisation_id)
    )
    for journal_id, renter, owner, receipts, charge, owed, fee, loss in rows:
        assert journal_id is not None
        sums = wanted[journal_id]
        sums[credit_codes.get(renter, f"renter {renter}")] += int(charge)
        sums[ledger.owner_pending(owner.hex)] -= int(owed)
        sums[ledger.FEES] -= int(fee)
        sums[ledger.LOSS] += int(loss)
        count += receipts
    for journal in journals:
        posted: dict[str, int] = defaultdict(int)
        for line in journal.lines:
            posted[line.code] += line.nano
        for code in sorted(posted.keys() | wanted[journal.journal_id].keys()):
            said, due = posted.get(code, 0), wanted[journal.journal_id].get(code, 0)
            if said != due and len(findings) < MAX_FINDINGS:
                findings.append(f"Journal {journal.journal_id} posts {said} nano on {code}, its receipts say {due}.")
    return count


def _strays(session: Session) -> list[str]:
    """Receipts that name a journal which does not exist."""
    known = ledger.journals_between(datetime.min.replace(tzinfo=UTC))
    rows = session.scalars(
        select(Receipt.id)
        .where(Receipt.journal_id.is_not(None), Receipt.journal_id != 0, Receipt.journal_id.not_in(known))
        .limit(MAX_FINDINGS)
    )
    return [f"Receipt {receipt_id} names a journal that does not exist." for receipt_id in rows]
