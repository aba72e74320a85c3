"""Reading balances. They are given in the account's normal direction; times are half-open: before `as_of`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from sqlalchemy import ColumnElement, Select, func, select, text
from sqlalchemy.orm import Session

from ledger.chart import Kind
from ledger.errors import UnknownAccount
from ledger.journal import MAIN_BOOK
from ledger.models import Account, Balance, Journal, Posting
from ledger.money import Money

# What moved, as (account_id, debit, credit) rows. A journal is either in the checkpoints or in ledger_unsealed, and one
# statement sees one of both.
_LINE = "p.account_id, greatest(p.amount_nano, 0) as debit, greatest(-p.amount_nano, 0) as credit"
_CHECKPOINT = "c.account_id, c.{axis}_debit_nano as debit, c.{axis}_credit_nano as credit"
_ALL = f"""
    select {_CHECKPOINT} from ledger_checkpoints c where {{of_checkpoint}} and c.span_s = 86400
    union all
    select {_LINE} from ledger_unsealed u join ledger_postings p on p.journal_id = u.journal_id where {{of_posting}}
"""  # noqa: S608  # constants of this module
_BEFORE = f"""
    select {_CHECKPOINT} from ledger_checkpoints c
      where {{of_checkpoint}} and c.span_s = 86400 and c.starts_at < date_trunc('day', cast(:at as timestamptz), 'UTC')
    union all
    select {_CHECKPOINT} from ledger_checkpoints c
      where {{of_checkpoint}} and c.span_s = 60 and c.starts_at >= date_trunc('day', cast(:at as timestamptz), 'UTC')
        and c.starts_at < date_trunc('minute', cast(:at as timestamptz), 'UTC')
    union all
    {{last_minute}}
    union all
    select {_LINE} from ledger_unsealed u join ledger_postings p on p.journal_id = u.journal_id
      where {{of_posting}} and p.{{axis}}_at < date_trunc('minute', cast(:at as timestamptz), 'UTC')
"""  # noqa: S608
_LAST_MINUTE = f"""
    select {_LINE} from ledger_postings p
      where p.account_id = :account and p.{{axis}}_at < :at
        and p.{{axis}}_at >= date_trunc('minute', cast(:at as timestamptz), 'UTC')
"""  # noqa: S608
# Of all accounts the journals have the index.
_LAST_MINUTE_OF_ALL = f"""
    select {_LINE} from ledger_journals j join ledger_postings p on p.journal_id = j.id
      where j.{{axis}}_at < :at and j.{{axis}}_at >= date_trunc('minute', cast(:at as timestamptz), 'UTC')
"""  # noqa: S608
_BOTH = f"""
    select {_LINE} from ledger_postings p
      where {{of_posting}} and p.effective_at < :effective and p.recorded_at < :recorded
"""  # noqa: S608
_SUM = "select coalesce(sum(debit), 0) as debits, coalesce(sum(credit), 0) as credits from ({moves}) m"
_TRIAL = """
    select a.code, a.kind, a.currency, m.debits, m.credits
    from (select account_id, sum(debit) as debits, sum(credit) as credits from ({moves}) moved group by account_id) m
    join ledger_accounts a on a.id = m.account_id
    where a.book_id = :book and (m.debits <> 0 or m.credits <> 0) order by a.code
"""


@dataclass(frozen=True, slots=True)
class Available:
    """A checked account now, in nanos: what is posted, what pends in open holds, and what can still be spent."""

    posted_nano: int
    held_nano: int

    @property
    def pending_nano(self) -> int:
        """What open holds set aside: it will go when they are captured, or come free."""
        return self.held_nano

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


def balance(
    session: Session, account_id: int, as_of: datetime | None = None, *, recorded_before: datetime | None = None
) -> Money:
    """An account's balance from its postings: of journals effective before `as_of`, if given, and recorded before
    `recorded_before`, if given.

    By either time it reads checkpoints, the last minute's postings, and what is not sealed yet; by both at once all
    postings of the account. A recorded time is that of the transaction's beginning: an answer by it is final once the
    transactions of that moment have ended. Raises UnknownAccount.
    """
    account = _account(session, account_id)
    debit_nano, credit_nano = _moved(session, account_id, as_of, recorded_before)
    return Money(Kind(account.kind).sign * (debit_nano - credit_nano), account.currency)


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


def trial_balance(
    session: Session,
    as_of: datetime | None = None,
    *,
    recorded_before: datetime | None = None,
    book_id: int = MAIN_BOOK,
) -> TrialBalance:
    """Debits and credits of every account of a book that moved: of journals effective before `as_of`, if given, and
    recorded before `recorded_before`, if given."""
    query = text(_TRIAL.format(moves=_moves(as_of, recorded_before, of_one=False)))
    rows = session.execute(
        query, {"effective": as_of, "recorded": recorded_before, "at": as_of or recorded_before, "book": book_id}
    )
    return TrialBalance(
        as_of,
        tuple(TrialRow(row.code, Kind(row.kind), row.currency, int(row.debits), int(row.credits)) for row in rows),
    )


def _moves(as_of: datetime | None, recorded_before: datetime | None, *, of_one: bool) -> str:
    """The query for what moved, on the account `:account` or on all."""
    of_posting = "p.account_id = :account" if of_one else "true"
    axis, at = ("effective", as_of) if recorded_before is None else ("recorded", recorded_before)
    if as_of is not None and recorded_before is not None:
        return _BOTH.format(of_posting=of_posting)
    return (_ALL if at is None else _BEFORE).format(
        axis=axis,
        of_checkpoint="c.account_id = :account" if of_one else "true",
        of_posting=of_posting,
        last_minute=(_LAST_MINUTE if of_one else _LAST_MINUTE_OF_ALL).format(axis=axis),
    )


def _moved(
    session: Session, account_id: int, as_of: datetime | None, recorded_before: datetime | None
) -> tuple[int, int]:
    """An account's debits and credits, in nanos."""
    moves = _moves(as_of, recorded_before, of_one=True)
    row = session.execute(
        text(_SUM.format(moves=moves)),
        {
            "account": account_id,
            "effective": as_of,
            "recorded": recorded_before,
            "at": as_of or recorded_before,
        },
    ).one()
    return int(row.debits), int(row.credits)


def _account(session: Session, account_id: int) -> Account:
    account = session.get(Account, account_id)
    if account is None:
        raise UnknownAccount(f"There is no account with the id {account_id}.")
    return account


def _total(session: Session, account_id: int, *conditions: ColumnElement[bool]) -> Money:
    account = _account(session, account_id)
    total = session.scalar(
        select(func.coalesce(func.sum(Posting.amount_nano), 0)).where(Posting.account_id == account_id, *conditions)
    )
    return Money(Kind(account.kind).sign * int(total or 0), account.currency)
