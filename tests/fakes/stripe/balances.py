"""Money at the processor: balance transactions, what of them is available, and double-entry books that check them.

Each movement is one balance transaction on one account and, in the books, three legs that sum to zero: the account's
net, the processor's fee, and the other side that the money came from or went to.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tests.fakes.stripe.clock import Clock
from tests.fakes.stripe.errors import Json
from tests.fakes.stripe.ids import Ids
from tests.fakes.stripe.store import Store


class Side(StrEnum):
    """Where money comes from or goes to, as seen from an account's balance."""

    CARDHOLDERS = "cardholders"
    BANKS = "banks"
    BETWEEN_ACCOUNTS = "between accounts"
    OUTSIDE = "outside"
    """Adjustments that a test makes."""


@dataclass(frozen=True)
class Kind:
    """A type of balance transaction, its reporting category, and the other side of its books."""

    type: str
    category: str
    side: Side


CHARGE = Kind("charge", "charge", Side.CARDHOLDERS)
BANK_DEBIT = Kind("payment", "charge", Side.CARDHOLDERS)
REFUND = Kind("refund", "refund", Side.CARDHOLDERS)
REFUND_FAILURE = Kind("refund_failure", "refund_failure", Side.CARDHOLDERS)
DISPUTE = Kind("adjustment", "dispute", Side.CARDHOLDERS)
DISPUTE_REVERSAL = Kind("adjustment", "dispute_reversal", Side.CARDHOLDERS)
TRANSFER = Kind("transfer", "transfer", Side.BETWEEN_ACCOUNTS)
TRANSFER_REVERSAL = Kind("transfer_refund", "transfer_reversal", Side.BETWEEN_ACCOUNTS)
PAYMENT = Kind("payment", "charge", Side.BETWEEN_ACCOUNTS)
PAYMENT_REFUND = Kind("payment_refund", "refund", Side.BETWEEN_ACCOUNTS)
PAYOUT = Kind("payout", "payout", Side.BANKS)
PAYOUT_FAILURE = Kind("payout_failure", "payout_reversal", Side.BANKS)
PAYOUT_CANCEL = Kind("payout_cancel", "payout_reversal", Side.BANKS)
TOPUP = Kind("topup", "topup", Side.BANKS)
ADJUSTMENT = Kind("adjustment", "other_adjustment", Side.OUTSIDE)


@dataclass(frozen=True)
class Journal:
    """One movement in the books: legs by account name, which sum to zero."""

    transaction: str
    currency: str
    legs: tuple[tuple[str, int], ...]


class Balances:
    """Posts balance transactions and knows each account's available and pending money, in minor units."""

    def __init__(self, store: Store, ids: Ids, clock: Clock, schedule: Callable[[int], None]) -> None:
        self._store = store
        self._schedule = schedule
        self._ids = ids
        self._clock = clock
        self._available: dict[tuple[str, str], int] = defaultdict(int)
        self._pending: list[tuple[int, int, str, Json]] = []
        self.journals: list[Journal] = []

    def post(
        self,
        owner: str,
        kind: Kind,
        amount: int,
        currency: str,
        *,
        source: str | None,
        description: str | None = None,
        fee: int = 0,
        fee_description: str = "Stripe processing fees",
        available_on: int | None = None,
    ) -> Json:
        """Move `amount` (signed, gross) on the owner's balance and take the fee from it."""
        now = self._clock.now()
        due = now if available_on is None else available_on
        fee_detail = {
            "amount": fee,
            "application": None,
            "currency": currency,
            "description": fee_description,
            "type": "stripe_fee",
        }
        transaction = self._store.add(
            owner,
            {
                "id": self._ids.new("txn"),
                "object": "balance_transaction",
                "amount": amount,
                "available_on": due,
                "balance_type": "payments",
                "created": now,
                "currency": currency,
                "description": description,
                "exchange_rate": None,
                "fee": fee,
                "fee_details": [fee_detail] if fee else [],
                "net": amount - fee,
                "reporting_category": kind.category,
                "source": source,
                "status": "available" if due <= now else "pending",
                "type": kind.type,
            },
        )
        self._account_for(owner, kind, transaction)
        if due <= now:
            self._available[owner, currency] += amount - fee
        else:
            heapq.heappush(self._pending, (due, len(self.journals), owner, transaction))
            self._schedule(due)
        return transaction

    def _account_for(self, owner: str, kind: Kind, transaction: Json) -> None:
        legs = ((owner, transaction["net"]), ("fees", transaction["fee"]), (kind.side.value, -transaction["amount"]))
        self.journals.append(Journal(transaction["id"], transaction["currency"], legs))

    def settle(self) -> set[str]:
        """Let pending money become available that is due by now; returns the accounts that gained some."""
        gained = set()
        while self._pending and self._pending[0][0] <= self._clock.now():
            _, _, owner, transaction = heapq.heappop(self._pending)
            transaction["status"] = "available"
            self._available[owner, transaction["currency"]] += transaction["net"]
            gained.add(owner)
        return gained

    def available(self, owner: str, currency: str) -> int:
        """May be negative."""
        return self._available[owner, currency]

    def pending(self, owner: str, currency: str) -> int:
        return sum(
            transaction["net"]
            for _, _, of, transaction in self._pending
            if of == owner and transaction["currency"] == currency
        )

    def currencies(self, owner: str) -> list[str]:
        """Those in which the account ever had money, the default first."""
        seen = {currency for of, currency in self._available if of == owner}
        seen |= {transaction["currency"] for _, _, of, transaction in self._pending if of == owner}
        return sorted(seen)

    def book_totals(self) -> dict[tuple[str, str], int]:
        """Sum of all legs by book account and currency."""
        totals: dict[tuple[str, str], int] = defaultdict(int)
        for journal in self.journals:
            for account, amount in journal.legs:
                totals[account, journal.currency] += amount
        return totals
