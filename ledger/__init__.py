"""Double-entry accounting: accounts, journals, holds. It knows nothing of jobs, tokens or GPUs.

This is the door; the inside may move. Sessions are the caller's: nothing here commits. Convention of signs: a debit is
positive, a credit negative; balances are given in the account's normal direction.
"""

from ledger.accounts import AccountSpec, account_id, charted, open_account, open_accounts
from ledger.balances import Available, TrialBalance, TrialRow, available, balance, trial_balance
from ledger.chart import (
    CHART,
    CLEARING,
    FEES,
    LOSS,
    PROCESSOR_FEES,
    PROMOTIONS,
    ROUNDING,
    TAX,
    Kind,
    owner_pending,
    renter_credit,
)
from ledger.checks import Problem, check
from ledger.errors import (
    AccountMismatch,
    AccountNotOpen,
    AlreadyReversed,
    BelowFloor,
    CurrencyMismatch,
    HoldMismatch,
    HoldNotOpen,
    IdempotencyMismatch,
    InvalidAmount,
    InvalidJournal,
    LedgerError,
    OutsideIdTaken,
    UnknownAccount,
    UnknownJournal,
    UnmatchedCapture,
)
from ledger.holds import expire, overdue, release, reserve, shrink
from ledger.journal import Capture, JournalDraft, Line, credit, debit
from ledger.money import Money, divide_half_even, format_nano, parse_nano, split_nano
from ledger.posting import PostResult, post, post_many, reverse

__all__ = [
    "CHART",
    "CLEARING",
    "FEES",
    "LOSS",
    "PROCESSOR_FEES",
    "PROMOTIONS",
    "ROUNDING",
    "TAX",
    "AccountMismatch",
    "AccountNotOpen",
    "AccountSpec",
    "AlreadyReversed",
    "Available",
    "BelowFloor",
    "Capture",
    "CurrencyMismatch",
    "HoldMismatch",
    "HoldNotOpen",
    "IdempotencyMismatch",
    "InvalidAmount",
    "InvalidJournal",
    "JournalDraft",
    "Kind",
    "LedgerError",
    "Line",
    "Money",
    "OutsideIdTaken",
    "PostResult",
    "Problem",
    "TrialBalance",
    "TrialRow",
    "UnknownAccount",
    "UnknownJournal",
    "UnmatchedCapture",
    "account_id",
    "available",
    "balance",
    "charted",
    "check",
    "credit",
    "debit",
    "divide_half_even",
    "expire",
    "format_nano",
    "open_account",
    "open_accounts",
    "overdue",
    "owner_pending",
    "parse_nano",
    "post",
    "post_many",
    "release",
    "renter_credit",
    "reserve",
    "reverse",
    "shrink",
    "split_nano",
    "trial_balance",
]
