"""Opening and finding accounts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from ledger import chart
from ledger.balances import balance
from ledger.chart import Kind
from ledger.errors import (
    AboveLimit,
    AccountInUse,
    AccountMismatch,
    AccountNotOpen,
    BelowFloor,
    UnknownAccount,
    UnknownBook,
    UnknownCurrency,
)
from ledger.journal import MAIN_BOOK
from ledger.models import Account, Balance, Book, Currency
from ledger.money import whole_nano
from ledger.periods import lock_posting
from ledger.posting import lock_balances

_INSERT = text(
    """
    with wanted as (
      select * from unnest(
        cast(:codes as text[]), cast(:kinds as text[]), cast(:currencies as text[]), cast(:refs as text[]),
        cast(:checked as boolean[]), cast(:floors as bigint[]), cast(:limits as bigint[]), cast(:books as bigint[]))
        as w (code, kind, currency, reference, checked, floor_nano, limit_nano, book_id)
    ), opened as (
      insert into ledger_accounts (code, kind, currency, reference, checked, book_id)
      select code, kind, currency, reference, checked, book_id from wanted order by code
      on conflict (code) do nothing
      returning id, code, checked
    )
    insert into ledger_balances (account_id, floor_nano, limit_nano)
    select opened.id, wanted.floor_nano, wanted.limit_nano from opened join wanted using (code) where opened.checked
    """
)


@dataclass(frozen=True, slots=True)
class AccountSpec:
    """An account as its opener wants it."""

    code: str
    kind: Kind
    currency: str = "USD"
    reference: str | None = None
    checked: bool = False
    floor_nano: int | None = None
    """Of a checked account: the least that may be available. None: no floor."""
    limit_nano: int | None = None
    """Of a checked account: the most that may be posted. None: no limit."""
    book_id: int = MAIN_BOOK


def charted(code: str, currency: str = "USD") -> AccountSpec:
    """The account that the chart describes under this code. Raises UnknownAccount."""
    found, reference = chart.template(code)
    return AccountSpec(code, found.kind, currency, reference, found.checked, found.floor_nano)


def open_accounts(session: Session, specs: Iterable[AccountSpec]) -> dict[str, int]:
    """Open what is missing; returns code -> id. Safe to repeat, and at the same time from several sessions.

    Raises AccountMismatch if an account exists with another nature than was asked for, UnknownCurrency, UnknownBook.
    """
    wanted = {spec.code: spec for spec in specs}
    found = _load(session, wanted)
    missing = [spec for code, spec in wanted.items() if code not in found]
    if missing:
        _check_known(session, missing)
        session.execute(
            _INSERT,
            {
                "codes": [spec.code for spec in missing],
                "kinds": [spec.kind.value for spec in missing],
                "currencies": [spec.currency for spec in missing],
                "refs": [spec.reference for spec in missing],
                "checked": [spec.checked for spec in missing],
                "floors": [spec.floor_nano for spec in missing],
                "limits": [spec.limit_nano for spec in missing],
                "books": [spec.book_id for spec in missing],
            },
        )
        found |= _load(session, [spec.code for spec in missing])
    for code, spec in wanted.items():
        _agree(spec, found[code])
    return {code: account.id for code, account in found.items()}


def open_account(
    session: Session,
    code: str,
    kind: Kind,
    currency: str = "USD",
    *,
    reference: str | None = None,
    checked: bool = False,
    floor_nano: int | None = None,
    limit_nano: int | None = None,
    book_id: int = MAIN_BOOK,
) -> int:
    """Open one account, or find it as it is; returns its id. Raises what open_accounts raises."""
    spec = AccountSpec(code, kind, currency, reference, checked, floor_nano, limit_nano, book_id)
    return open_accounts(session, [spec])[code]


def account_id(session: Session, code: str) -> int:
    """The id of an account that exists. Raises UnknownAccount."""
    found = find_account(session, code)
    if found is None:
        raise UnknownAccount(f"There is no account {code!r}.")
    return found


def find_account(session: Session, code: str) -> int | None:
    """The id of an account, or None if it was never opened."""
    return session.scalar(select(Account.id).where(Account.code == code))


def find_accounts(session: Session, codes: Iterable[str]) -> dict[str, int]:
    """Code -> id of those of these accounts that were opened."""
    return {code: account.id for code, account in _load(session, codes).items()}


def freeze(session: Session, account_id: int) -> None:
    """Let nothing new be held or taken from an account. It still receives, gives what is held already, and is
    corrected by reversals. Raises UnknownAccount, AccountNotOpen if it is closed."""
    _set_status(session, account_id, "frozen")


def unfreeze(session: Session, account_id: int) -> None:
    """Take back `freeze`. Raises UnknownAccount, AccountNotOpen if it is closed."""
    _set_status(session, account_id, "open")


def close_account(session: Session, account_id: int) -> None:
    """Close an account for ever. Waits until nobody is posting. Raises UnknownAccount, AccountInUse unless its balance
    is zero and nothing is held."""
    account = session.get(Account, account_id)
    if account is None:
        raise UnknownAccount(f"There is no account with the id {account_id}.")
    lock_posting(session, account.book_id)
    running = lock_balances(session, [account_id]).get(account_id)
    balance_nano = balance(session, account_id).nano
    if balance_nano or (running is not None and running.held_nano):
        held_nano = 0 if running is None else running.held_nano
        raise AccountInUse(f"Account {account.code!r} has {balance_nano} nano, {held_nano} of them held.")
    session.execute(update(Account).where(Account.id == account_id).values(status="closed"))


def set_bounds(
    session: Session, account_id: int, *, floor_nano: int | None = None, limit_nano: int | None = None
) -> None:
    """Give a checked account another floor and limit; None: none. Raises UnknownAccount for one that keeps no balance,
    BelowFloor or AboveLimit if it is outside them already, InvalidAmount."""
    for bound in (floor_nano, limit_nano):
        if bound is not None:
            whole_nano(bound)
    row = lock_balances(session, [account_id]).get(account_id)
    if row is None:
        raise UnknownAccount(f"Account {account_id} keeps no balance to bound.")
    available_nano = row.posted_nano - row.held_nano
    if floor_nano is not None and available_nano < floor_nano:
        raise BelowFloor(account_id, available_nano=available_nano - floor_nano, wanted_nano=0)
    if limit_nano is not None and row.posted_nano > limit_nano:
        raise AboveLimit(account_id, limit_nano=limit_nano, after_nano=row.posted_nano)
    bounds = {"floor_nano": floor_nano, "limit_nano": limit_nano}
    session.execute(update(Balance).where(Balance.account_id == account_id).values(**bounds))


def _set_status(session: Session, account_id: int, status: str) -> None:
    # The balance first, as holds and journals do: whoever read the old status has then finished.
    lock_balances(session, [account_id])
    changed = session.scalar(
        update(Account)
        .where(Account.id == account_id, Account.status != "closed")
        .values(status=status)
        .returning(Account.id)
    )
    if changed is None:
        if session.get(Account, account_id) is None:
            raise UnknownAccount(f"There is no account with the id {account_id}.")
        raise AccountNotOpen(f"Account {account_id} is closed, and stays so.")


def _check_known(session: Session, specs: Iterable[AccountSpec]) -> None:
    currencies, books = {spec.currency for spec in specs}, {spec.book_id for spec in specs}
    known = set(session.scalars(select(Currency.code).where(Currency.code.in_(currencies))))
    if currencies - known:
        raise UnknownCurrency(f"The ledger keeps no accounts in {min(currencies - known)!r}.")
    found = set(session.scalars(select(Book.id).where(Book.id.in_(books))))
    if books - found:
        raise UnknownBook(f"There is no book {min(books - found)}.")


def _load(session: Session, codes: Iterable[str]) -> dict[str, Account]:
    rows = session.scalars(select(Account).where(Account.code.in_(list(codes))))
    return {account.code: account for account in rows}


def _agree(spec: AccountSpec, account: Account) -> None:
    stored = (account.kind, account.currency, account.reference, account.checked, account.book_id)
    if stored != (spec.kind.value, spec.currency, spec.reference, spec.checked, spec.book_id):
        raise AccountMismatch(f"{spec.code!r} is {stored}, which is not what was asked for: {spec}.")
