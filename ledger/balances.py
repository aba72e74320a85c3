"""Reading balances. They are given in the account's normal direction; times are half-open: before `as_of`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import Session

from ledger.chart import Kind
from ledger.errors import UnknownAccount
from ledger.models import Account, Balance, Journal, Posting
from ledger.money import Money


@dataclass(frozen=True, slots=True)
class Available:
    """A checked account now, in nanos."""

    posted_nano: int
    held_nano: int

    @property
    def available_nano(self) -> int:
        return self.posted_nano - self.held_nano


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One account's movements up to a time, in nanos."""

    code: str
    kind: Kind
    currency: str
    debit_nano: int
    credit_nano: int

    @property
    def balance_nano(self) -> int:
        """In the account's normal direction."""
        return self.kind.sign * (self.debit_nano - self.credit_nano)


@dataclass(frozen=True)
class TrialBalance:
    """Every account that ever moved. The books balance if debits equal credits in each currency."""

    as_of: datetime | None
    rows: tuple[TrialRow, ...]

    @cached_property
    def totals(self) -> dict[str, tuple[int, int]]:
        """Currency -> (debits, credits), in nanos."""
        totals: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for row in self.rows:
            debits, credits_ = totals[row.currency]
            totals[row.currency] = (debits + row.debit_nano, credits_ + row.credit_nano)
        return dict(totals)

    @property
    def sum_nano(self) -> int:
        """How far the books are off, over all currencies: zero, or something is broken."""
        return sum(abs(debits - credits_) for debits, credits_ in self.totals.values())

    @property
    def balanced(self) -> bool:
        return self.sum_nano == 0


def balance(session: Session, account_id: int, as_of: datetime | None = None) -> Money:
    """An account's balance from its postings, of journals effective before `as_of` if given. Raises UnknownAccount."""
    if as_of is None:
        return _total(session, account_id)
    return _total(session, account_id, Posting.journal_id.in_(select(Journal.id).where(Journal.effective_at < as_of)))


def journals_between(start: datetime, end: datetime | None = None) -> Select[int]:
    """A query for the ids of journals effective in [start, end), to be used within another query."""
    query = select(Journal.id).where(Journal.effective_at >= start)
    return query if end is None else query.where(Journal.effective_at < end)


def posted_in(session: Session, account_id: int, journals: Select[int]) -> Money:
    """What these journals did to an account's balance. Raises UnknownAccount."""
    return _total(session, account_id, Posting.journal_id.in_(journals))


def available(session: Session, account_id: int) -> Available:
    """What a checked account has, holds and can spend, from its running row. Raises UnknownAccount."""
    row = session.execute(
        select(Balance.posted_nano, Balance.held_nano).where(Balance.account_id == account_id)
    ).one_or_none()
    if row is None:
        raise UnknownAccount(f"Account {account_id} keeps no running balance.")
    return Available(row.posted_nano, row.held_nano)


def trial_balance(session: Session, as_of: datetime | None = None) -> TrialBalance:
    """Debits and credits of every account that moved, of journals effective before `as_of` if given."""
    amount = Posting.amount_nano
    query = (
        select(
            Account.code,
            Account.kind,
            Account.currency,
            func.coalesce(func.sum(amount).filter(amount > 0), 0).label("debits"),
            func.coalesce(-func.sum(amount).filter(amount < 0), 0).label("credits"),
        )
        .join(Posting, Posting.account_id == Account.id)
        .group_by(Account.id)
        .order_by(Account.code)
    )
    if as_of is not None:
        query = query.join(Journal, Journal.id == Posting.journal_id).where(Journal.effective_at < as_of)
    rows = session.execute(query)
    return TrialBalance(
        as_of,
        tuple(TrialRow(row.code, Kind(row.kind), row.currency, int(row.debits), int(row.credits)) for row in rows),
    )


def _total(session: Session, account_id: int, *conditions: ColumnElement[bool]) -> Money:
    account = session.get(Account, account_id)
    if account is None:
        raise UnknownAccount(f"There is no account with the id {account_id}.")
    total = session.scalar(
        select(func.coalesce(func.sum(Posting.amount_nano), 0)).where(Posting.account_id == account_id, *conditions)
    )
    return Money(Kind(account.kind).sign * int(total or 0), account.currency)
