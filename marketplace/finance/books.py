"""What the ledger says of one owner: balances by state, and movements by kind. States that no account of the owner has
yet are zero, because there is nothing in them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy.orm import Session

import ledger
from marketplace.finance.period import Period
from marketplace.finance.statement import AccountLine, State, StateBalance

SETTLEMENT: Final = "settlement"
_STATES: Final[dict[str, State]] = {
    "pending": State.PENDING,
    "available": State.AVAILABLE,
    "reserve": State.RESERVED,
    "transit": State.IN_TRANSIT,
    "in_transit": State.IN_TRANSIT,
    "receivable": State.OWED,
}
"""Last part of an owner's account code -> the state of what is in it."""
_FAMILIES: Final = (
    (SETTLEMENT, "earnings settled"),
    ("refund", "refunds"),
    ("dispute", "disputes"),
    ("chargeback", "disputes"),
    ("reserve", "reserve"),
    ("payout", "payouts"),
    ("transfer", "payouts"),
)
"""Beginning of a journal's kind -> the line that it belongs to. What is none of these shows under its own kind."""
ALWAYS_SHOWN: Final = ("earnings settled", "refunds", "disputes", "reserve", "payouts")
PAYOUTS: Final = "payouts"


@dataclass(frozen=True, slots=True)
class OwnerBooks:
    """An owner's accounts in a period, in nano-USD."""

    opening_nano: int
    closing_nano: int
    settled_nano: int
    """Posted by settlement."""
    states: tuple[StateBalance, ...]
    lines: tuple[AccountLine, ...]


def owner_books(session: Session, owner_id: UUID, period: Period) -> OwnerBooks:
    """Read an owner's accounts. Closing balances are the next period's opening ones: both end before one instant."""
    accounts = [view for view in ledger.list_accounts(session, owner_id.hex) if view.code.startswith("owner:")]
    ids = [view.account_id for view in accounts]
    before = ledger.movements(session, ids, None, period.start) if ids else []
    inside = ledger.movements(session, ids, period.start, period.end) if ids else []
    states = _states(before, inside)
    owed = [row for row in states if row.state is not State.PAID]
    return OwnerBooks(
        opening_nano=sum(_signed(row.state, row.opening_nano) for row in owed),
        closing_nano=sum(_signed(row.state, row.closing_nano) for row in owed),
        settled_nano=sum(_owed(move) for move in inside if move.journal_kind == SETTLEMENT and not move.reversal),
        states=states,
        lines=_lines(inside),
    )


def _states(before: list[ledger.Movement], inside: list[ledger.Movement]) -> tuple[StateBalance, ...]:
    opening: dict[State, int] = defaultdict(int)
    change: dict[State, int] = defaultdict(int)
    for moves, totals in ((before, opening), (inside, change)):
        for move in moves:
            totals[state_of(move.code)] += move.nano
            if line_of(move) == PAYOUTS:
                # What payouts took from all that the owner is owed has arrived.
                totals[State.PAID] -= _owed(move)
    return tuple(StateBalance(state, opening[state], opening[state] + change[state]) for state in State)


def _lines(moves: list[ledger.Movement]) -> tuple[AccountLine, ...]:
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for move in moves:
        key = (line_of(move), move.journal_kind)
        nano, journals = totals.get(key, (0, 0))
        # A journal that moves money between two states touches two accounts; it is one journal.
        totals[key] = (nano + _owed(move), max(journals, move.journals))
    shown = {name for name, _ in totals}
    empty = [AccountLine(name, "", 0, 0) for name in ALWAYS_SHOWN if name not in shown]
    # What only moved from one state to another shows among the states.
    lines = [
        AccountLine(name, kind, nano, journals)
        for (name, kind), (nano, journals) in totals.items()
        if nano or name in ALWAYS_SHOWN
    ]
    order = {name: place for place, name in enumerate(ALWAYS_SHOWN)}
    return tuple(sorted([*lines, *empty], key=lambda line: (order.get(line.name, len(order)), line.name, line.kind)))


def state_of(code: str) -> State:
    """The state of what is in an owner's account. Raises KeyError for an account that this module does not know."""
    return _STATES[code.rpartition(":")[2]]


def line_of(move: ledger.Movement) -> str:
    """The statement's line that a movement belongs to."""
    kind = move.journal_kind
    for prefix, name in _FAMILIES:
        if kind.startswith(prefix):
            return name
    return f"corrections ({kind})" if move.reversal else kind.replace("_", " ")


def _owed(move: ledger.Movement) -> int:
    return _signed(state_of(move.code), move.nano)


def _signed(state: State, nano: int) -> int:
    return -nano if state is State.OWED else nano
