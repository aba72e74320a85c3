"""The chart of accounts: which codes exist, what each is for, and how its balance reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from ledger.errors import UnknownAccount


class Kind(StrEnum):
    """What an account is, and hence which way it grows."""

    ASSET = "asset"
    """Something that we own or are owed. Grows by debits."""
    LIABILITY = "liability"
    """Something that we owe. Grows by credits."""
    INCOME = "income"
    """What we earned. Grows by credits."""
    EXPENSE = "expense"
    """What we spent or lost. Grows by debits."""

    @property
    def sign(self) -> int:
        """+1 if debits make the balance grow, -1 if credits do: balance = sign * sum of postings."""
        return 1 if self in (Kind.ASSET, Kind.EXPENSE) else -1


@dataclass(frozen=True, slots=True)
class Template:
    """One line of the chart. `{ref}` in the pattern stands for an outside reference (hex digits, `-`, `_`, letters)."""

    pattern: str
    kind: Kind
    meaning: str
    checked: bool = False
    """True: a running balance with a floor is kept. Hot accounts keep none."""
    floor_nano: int | None = None


CHART: tuple[Template, ...] = (
    Template("renter:{ref}:credit", Kind.LIABILITY, "what a renter paid in and has not spent", True, 0),
    Template("renter:{ref}:promotional", Kind.LIABILITY, "credit that we gave away; never paid out", True, 0),
    Template("renter:{ref}:refunding", Kind.LIABILITY, "unused credit on its way back to a renter"),
    Template("renter:{ref}:disputed", Kind.ASSET, "taken back by a renter's bank, not decided yet"),
    Template("owner:{ref}:pending", Kind.LIABILITY, "earned by an owner, not yet payable"),
    Template("owner:{ref}:available", Kind.LIABILITY, "earned by an owner, payable", True, 0),
    Template("owner:{ref}:reserve", Kind.LIABILITY, "kept back from an owner against disputes", True, 0),
    Template("owner:{ref}:transit", Kind.LIABILITY, "on its way to an owner's bank", True, 0),
    Template("owner:{ref}:receivable", Kind.ASSET, "owed to us by an owner", True, None),
    Template("platform:fees", Kind.INCOME, "our share of what renters paid"),
    Template("platform:loss", Kind.EXPENSE, "what owners were paid for work that our own failures kept from renters"),
    Template("platform:promotions", Kind.EXPENSE, "promotional credit given to renters, bonuses to owners"),
    Template("platform:rounding", Kind.EXPENSE, "what rounding outside the ledger left over"),
    Template("platform:bad_debt", Kind.EXPENSE, "disputed payments and owners' debts that nobody will pay"),
    Template("platform:bank", Kind.ASSET, "the platform's money outside the payment processor"),
    Template("platform:tax", Kind.LIABILITY, "tax collected for the state"),
    Template("processor:clearing", Kind.ASSET, "money at or on its way through the payment processor"),
    Template("processor:connected", Kind.ASSET, "money at the processor in owners' accounts, not at their banks yet"),
    Template("processor:fees", Kind.EXPENSE, "what the payment processor keeps"),
)

FEES = "platform:fees"
LOSS = "platform:loss"
PROMOTIONS = "platform:promotions"
ROUNDING = "platform:rounding"
TAX = "platform:tax"
BAD_DEBT = "platform:bad_debt"
BANK = "platform:bank"
CLEARING = "processor:clearing"
CONNECTED = "processor:connected"
PROCESSOR_FEES = "processor:fees"

_REFERENCE = r"(?P<ref>[0-9A-Za-z_-]{1,64})"
_PATTERNS = tuple(
    (re.compile(re.escape(template.pattern).replace(re.escape("{ref}"), _REFERENCE)), template) for template in CHART
)


def renter_credit(ref: str) -> str:
    """Code of a renter's paid credit."""
    return f"renter:{ref}:credit"


def owner_pending(ref: str) -> str:
    """Code of what an owner earned and cannot have yet."""
    return f"owner:{ref}:pending"


def renter_promotional(ref: str) -> str:
    """Code of what a renter was given."""
    return f"renter:{ref}:promotional"


def renter_refunding(ref: str) -> str:
    """Code of what is on its way back to a renter."""
    return f"renter:{ref}:refunding"


def renter_disputed(ref: str) -> str:
    """Code of what a renter's bank took back and has not decided about."""
    return f"renter:{ref}:disputed"


def owner_available(ref: str) -> str:
    """Code of what an owner may be paid."""
    return f"owner:{ref}:available"


def owner_reserve(ref: str) -> str:
    """Code of what is kept back from an owner."""
    return f"owner:{ref}:reserve"


def owner_transit(ref: str) -> str:
    """Code of what is on its way to an owner's bank."""
    return f"owner:{ref}:transit"


def owner_receivable(ref: str) -> str:
    """Code of what an owner owes us."""
    return f"owner:{ref}:receivable"


def template(code: str) -> tuple[Template, str | None]:
    """The chart's line for a code, and the outside reference inside the code. Raises UnknownAccount."""
    for pattern, found in _PATTERNS:
        match = pattern.fullmatch(code)
        if match is not None:
            return found, match.groupdict().get("ref")
    raise UnknownAccount(f"The chart of accounts has no {code!r}.")
