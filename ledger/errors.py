"""What the ledger refuses, by name. Nothing was written when one of these is raised by a check of the ledger itself."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID


class LedgerError(Exception):
    """Root of the ledger's errors."""


class InvalidAmount(LedgerError, ValueError):
    """Not an amount of money: not a plain decimal, finer than a nano, or out of range."""


class CurrencyMismatch(LedgerError):
    """Two currencies met where only one may be."""


class UnknownCurrency(LedgerError):
    """The ledger keeps no accounts in this currency."""


class UnknownBook(LedgerError):
    """No book has this id or code."""


class InvalidJournal(LedgerError):
    """A draft that is no journal: fewer than two lines, a zero line, or a currency that does not sum to zero."""


class UnknownAccount(LedgerError):
    """No account has this id or code."""


class AccountMismatch(LedgerError):
    """The account exists, with another kind, currency, reference or check than was asked for."""


class AccountNotOpen(LedgerError):
    """The account is frozen or closed."""


class AccountInUse(LedgerError):
    """The account cannot be closed: it has a balance or an open hold."""


class UnknownJournal(LedgerError):
    """No journal has this id."""


class IdempotencyMismatch(LedgerError):
    """The key was used before, for another body. `fields` names what differs."""

    def __init__(self, key: str, fields: Sequence[str]) -> None:
        super().__init__(f"The idempotency key {key!r} was used before with other contents ({', '.join(fields)}).")
        self.key = key
        self.fields = tuple(fields)


class OutsideIdTaken(LedgerError):
    """Another journal, with another key, already stands for this outside event."""


class AlreadyReversed(LedgerError):
    """The journal was taken back before, in full or by so much that this would exceed it."""


class PeriodError(LedgerError):
    """Root of what is wrong about a period."""


class UnknownPeriod(PeriodError):
    """No period has this id, or none lies there."""


class InvalidPeriod(PeriodError):
    """Not a period: without time zones, empty, overlapping another or leaving a gap after it."""


class PeriodClosed(PeriodError):
    """The effective time lies in a period that is closed or closing: a correction goes into an open one."""


class PeriodNotReady(PeriodError):
    """The period cannot take this step yet (or no more): the message says what is in the way."""


class BelowFloor(LedgerError):
    """The account does not have what was asked for. Amounts are nanos in the account's normal direction."""

    def __init__(self, account_id: int, *, available_nano: int, wanted_nano: int) -> None:
        super().__init__(
            f"Account {account_id} has {available_nano} nano available above its floor, {wanted_nano} were asked for."
        )
        self.account_id = account_id
        self.available_nano = available_nano
        self.wanted_nano = wanted_nano


class AboveLimit(LedgerError):
    """The account may not hold that much. Amounts are nanos in the account's normal direction."""

    def __init__(self, account_id: int, *, limit_nano: int, after_nano: int) -> None:
        super().__init__(f"Account {account_id} may reach {limit_nano} nano at most, this would make it {after_nano}.")
        self.account_id = account_id
        self.limit_nano = limit_nano
        self.after_nano = after_nano


class HoldMismatch(LedgerError):
    """A hold with this id exists on another account or over another amount."""


class HoldNotOpen(LedgerError):
    """The hold is unknown, already resolved, past its expiry, or smaller than what was to be taken from it."""

    def __init__(self, hold_id: UUID, story: str) -> None:
        super().__init__(f"Hold {hold_id.hex} {story}.")
        self.hold_id = hold_id


class UnmatchedCapture(LedgerError):
    """A journal takes another amount from an account than the holds that it captures there."""
