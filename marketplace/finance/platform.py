"""The platform's own books in a period: income, expense, what is owed to renters and owners, and for how long. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import ledger
from marketplace.finance.period import Period

AGES: Final = ((30, "up to 30 days"), (60, "31 to 60 days"), (90, "61 to 90 days"))
OLDER: Final = "over 90 days"


@dataclass(frozen=True, slots=True)
class Age:
    """Payables of one age."""

    name: str
    accounts: int
    nano: int


@dataclass(frozen=True, slots=True)
class Earned:
    """What one owner was credited on one day before a date: `nano` may be negative."""

    account: str
    on: datetime
    nano: int


@dataclass(frozen=True, slots=True)
class PlatformReport:
    """A period of the whole platform, in nano-USD."""

    period: Period
    trial: ledger.TrialBalance
    """At the period's end."""
    movements: tuple[ledger.Movement, ...]
    """Of income and expense accounts, within the period."""
    ages: tuple[Age, ...]

    @property
    def fees_nano(self) -> int:
        return sum(row.nano for row in self.movements if row.code == ledger.FEES)

    @property
    def losses_nano(self) -> int:
        return sum(row.nano for row in self.movements if row.code == ledger.LOSS)

    @property
    def result_nano(self) -> int:
        """Income less expense of the period."""
        income = {row.code for row in self.trial.rows if row.kind is ledger.Kind.INCOME}
        return sum(row.nano if row.code in income else -row.nano for row in self.movements)

    @property
    def deferred_nano(self) -> int:
        """Credit that renters have not spent at the period's end: revenue that is not earned yet."""
        return sum(row.balance_nano for row in self.trial.rows if _is_credit(row.code))

    @property
    def payable_nano(self) -> int:
        """What owners are owed at the period's end."""
        liability = ledger.Kind.LIABILITY
        return sum(
            row.balance_nano for row in self.trial.rows if row.code.startswith("owner:") and row.kind is liability
        )


def _is_credit(code: str) -> bool:
    return code.startswith("renter:") and code.endswith((":credit", ":promotional"))


def by_age(entries: Iterable[Earned], at: datetime) -> tuple[Age, ...]:
    """What is owed by age: per owner, debits take the oldest credits first."""
    totals = {name: [0, 0] for _, name in AGES} | {OLDER: [0, 0]}
    owed: dict[str, list[Earned]] = {}
    for entry in entries:
        owed.setdefault(entry.account, []).append(entry)
    for credits_ in owed.values():
        taken = -sum(entry.nano for entry in credits_ if entry.nano < 0)
        seen: set[str] = set()
        for entry in sorted(credits_, key=lambda entry: entry.on):
            if entry.nano <= 0:
                continue
            part = min(taken, entry.nano)
            taken -= part
            left = entry.nano - part
            if left:
                name = _age(at - entry.on)
                totals[name][1] += left
                seen.add(name)
        for name in seen:
            totals[name][0] += 1
    return tuple(Age(name, accounts, nano) for name, (accounts, nano) in totals.items())


def _age(passed: timedelta) -> str:
    return next((name for days, name in AGES if passed <= timedelta(days=days)), OLDER)
