"""Opening and finding accounts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from ledger import chart
from ledger.chart import Kind
from ledger.errors import AccountMismatch, UnknownAccount
from ledger.models import Account

_INSERT = text(
    """
    with wanted as (
      select * from unnest(
        cast(:codes as text[]), cast(:kinds as text[]), cast(:currencies as text[]), cast(:refs as text[]),
        cast(:checked as boolean[]), cast(:floors as bigint[])) as w (code, kind, currency, reference, checked, floor)
    ), opened as (
      insert into ledger_accounts (code, kind, currency, reference, checked)
      select code, kind, currency, reference, checked from wanted order by code
      on conflict (code) do nothing
      returning id, code, checked
    )
    insert into ledger_balances (account_id, floor_nano)
    select opened.id, wanted.floor from opened join wanted using (code) where opened.checked
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


def charted(code: str, currency: str = "USD") -> AccountSpec:
    """The account that the chart describes under this code. Raises UnknownAccount."""
    found, reference = chart.template(code)
    return AccountSpec(code, found.kind, currency, reference, found.checked, found.floor_nano)


def open_accounts(session: Session, specs: Iterable[AccountSpec]) -> dict[str, int]:
    """Open what is missing; returns code -> id. Safe to repeat, and at the same time from several sessions.

    Raises AccountMismatch if an account exists with another nature than was asked for.
    """
    wanted = {spec.code: spec for spec in specs}
    found = _load(session, wanted)
    missing = [spec for code, spec in wanted.items() if code not in found]
    if missing:
        session.execute(
            _INSERT,
            {
                "codes": [spec.code for spec in missing],
                "kinds": [spec.kind.value for spec in missing],
                "currencies": [spec.currency for spec in missing],
                "refs": [spec.reference for spec in missing],
                "checked": [spec.checked for spec in missing],
                "floors": [spec.floor_nano for spec in missing],
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
) -> int:
    """Open one account, or find it as it is; returns its id. Raises AccountMismatch."""
    spec = AccountSpec(code, kind, currency, reference, checked, floor_nano)
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


def _load(session: Session, codes: Iterable[str]) -> dict[str, Account]:
    rows = session.scalars(select(Account).where(Account.code.in_(list(codes))))
    return {account.code: account for account in rows}


def _agree(spec: AccountSpec, account: Account) -> None:
    stored = (account.kind, account.currency, account.reference, account.checked)
    if stored != (spec.kind.value, spec.currency, spec.reference, spec.checked):
        raise AccountMismatch(f"{spec.code!r} is {stored}, which is not what was asked for: {spec}.")
