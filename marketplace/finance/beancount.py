"""The books as Beancount text, which its own checker accepts with no tolerance: every account, every journal, and a
balance assertion for each account at the end.

Dates are those of the period's zone. Amounts have nine decimals throughout, because a checker's tolerance follows the
coarsest amount it sees; it is multiplied by zero besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import ledger
from marketplace.finance.period import Period, zone

_ROOTS: Final[dict[ledger.Kind, str]] = {
    ledger.Kind.ASSET: "Assets",
    ledger.Kind.LIABILITY: "Liabilities",
    ledger.Kind.INCOME: "Income",
    ledger.Kind.EXPENSE: "Expenses",
}
OPENING: Final = "Equity:Opening-Balances"


def lines(
    period: Period,
    opening: ledger.TrialBalance,
    journals: Iterable[ledger.JournalView],
) -> Iterator[str]:
    """The text, line by line. `opening`: before the period; `journals`: of the period, in order of time.

    Every account is opened on the first day: which accounts the journals use is not known before they are read.
    """
    where = zone(period.zone_name)
    first = period.local_start.date()
    balances: dict[str, dict[str, int]] = {}
    opened: set[str] = set()
    yield f"; Fallow, {period}"
    yield 'option "title" "Fallow"'
    for currency in sorted({row.currency for row in opening.rows} | {"USD"}):
        yield f'option "operating_currency" "{currency}"'
    yield 'option "tolerance_multiplier" "0"'
    yield ""
    yield from _opening(opening, first, balances, opened)
    last = first
    for journal in journals:
        for line in journal.lines:
            yield from _open(line.code, line.kind, first, opened)
        last = max(last, journal.effective_at.astimezone(where).date())
        yield from _transaction(journal, where, balances)
    yield from _assertions(balances, max(last, period.local_end.date() - timedelta(days=1)) + timedelta(days=1))


def account_name(code: str, kind: ledger.Kind) -> str:
    """`renter:0a1b:credit` is `Liabilities:Renter:X0a1b:Credit`: each part begins with a capital."""
    return ":".join([_ROOTS[kind], *(_part(part) for part in code.split(":"))])


def _part(part: str) -> str:
    clean = part.replace("_", "-")
    is_reference = any(c.isdigit() for c in clean)
    return f"X{clean}" if is_reference else clean[:1].upper() + clean[1:]


def _opening(
    opening: ledger.TrialBalance, first: date, balances: dict[str, dict[str, int]], opened: set[str]
) -> Iterator[str]:
    rows = [row for row in opening.rows if row.debit_nano != row.credit_nano]
    if not rows:
        return
    for row in rows:
        yield from _open(row.code, row.kind, first, opened)
    yield f"{first} open {OPENING}"
    yield ""
    yield f'{first} * "Opening balances"'
    totals: dict[str, int] = {}
    for row in rows:
        name, nano = account_name(row.code, row.kind), row.debit_nano - row.credit_nano
        yield _posting(name, nano, row.currency)
        _add(balances, name, row.currency, nano)
        totals[row.currency] = totals.get(row.currency, 0) - nano
    for currency, nano in totals.items():
        if nano:
            yield _posting(OPENING, nano, currency)
            _add(balances, OPENING, currency, nano)
    yield ""


def _open(code: str, kind: ledger.Kind, first: date, opened: set[str]) -> Iterator[str]:
    name = account_name(code, kind)
    if name not in opened:
        opened.add(name)
        yield f"{first} open {name}"
        yield f'  code: "{_escaped(code)}"'


def _transaction(journal: ledger.JournalView, where: ZoneInfo, balances: dict[str, dict[str, int]]) -> Iterator[str]:
    at: datetime = journal.effective_at.astimezone(where)
    yield f'{at.date()} * "{_escaped(journal.kind.replace("_", " "))}" #{_tag(journal.kind)}'
    yield f'  journal: "{journal.journal_id}"'
    yield f'  effective_at: "{journal.effective_at.isoformat()}"'
    yield f'  outside: "{_escaped(f"{journal.source} {journal.outside_id}")}"'
    if journal.reverses_id is not None:
        yield f'  reverses: "{journal.reverses_id}"'
    for line in journal.lines:
        name = account_name(line.code, line.kind)
        yield _posting(name, line.nano, line.currency)
        _add(balances, name, line.currency, line.nano)
    yield ""


def _assertions(balances: Mapping[str, Mapping[str, int]], on: date) -> Iterator[str]:
    for name in sorted(balances):
        for currency, nano in sorted(balances[name].items()):
            yield f"{on} balance {name}  {_amount(nano)} {currency}"


def _posting(name: str, nano: int, currency: str) -> str:
    return f"  {name}  {_amount(nano)} {currency}"


def _amount(nano: int) -> str:
    return ledger.format_nano(nano, min_places=9)


def _add(balances: dict[str, dict[str, int]], name: str, currency: str, nano: int) -> None:
    account = balances.setdefault(name, {})
    account[currency] = account.get(currency, 0) + nano


def _tag(kind: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in kind)


def _escaped(text: str) -> str:
    """Inside quotes, on one line."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable.replace("\\", "\\\\").replace('"', '\\"')
