"""Random use with random faults: the processor's own books stay right, and a key's effect happens at most once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import stripe

from tests.fakes.stripe import FaultKind, StandInStripe
from tests.fakes.stripe.errors import StripeError

STEPS = 80
RATES = {
    FaultKind.RATE_LIMITED: 0.05,
    FaultKind.REFUSED: 0.05,
    FaultKind.ERROR_BEFORE: 0.05,
    FaultKind.ERROR_AFTER: 0.05,
    FaultKind.LOST: 0.05,
}
CARDS = (
    "pm_card_visa",
    "pm_card_bypassPending",
    "pm_card_chargeDeclined",
    "pm_card_createDispute",
    "pm_card_refundFail",
)


class Use:
    """One seeded user of the stand-in."""

    def __init__(self, standin: StandInStripe, seed: int) -> None:
        self.standin = standin
        self.client = standin.client()
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.owners = [self._owner() for _ in range(2)]
        standin.top_up(300_000)
        standin.faults.at_random(seed, RATES)

    def _owner(self) -> str:
        account = self.client.v1.accounts.create(
            {"type": "express", "capabilities": {"transfers": {"requested": True}}}
        )
        self.standin.onboard(account.id)
        return account.id

    def step(self) -> None:
        acts = (self.charge, self.refund, self.transfer, self.reverse, self.pay_out, self.bank, self.dispute, self.wait)
        try:
            self.random.choice(acts)()
        except (stripe.StripeError, StripeError):
            return

    def one_of(self, kind: str, account: str | None = None) -> dict[str, Any] | None:
        objects = self.standin.every(kind, account)
        return self.random.choice(objects) if objects else None

    def amount(self) -> int:
        return self.random.randint(50, 20_000)

    def keyed(self, kind: str) -> str:
        """A fresh idempotency key."""
        return f"{kind} {next(self.numbers)}"

    def charge(self) -> None:
        card = self.random.choice(CARDS)
        key, amount = self.keyed("charge"), self.amount()
        params: Any = {
            "amount": amount,
            "currency": "usd",
            "payment_method": card,
            "confirm": True,
            "off_session": True,
            "metadata": {"key": key},
        }
        self.insist(lambda: self.client.v1.payment_intents.create(params, {"idempotency_key": key}))

    def insist(self, call: Callable[[], object]) -> None:
        """Repeat with the same key what may or may not have happened."""
        for _ in range(3):
            try:
                call()
            except (stripe.APIConnectionError, stripe.RateLimitError):
                continue
            return

    def refund(self) -> None:
        intent = self.one_of("payment_intent")
        if intent is not None:
            params: Any = {"payment_intent": intent["id"], "amount": self.amount() // 4 + 1}
            key = self.keyed("refund")
            self.insist(lambda: self.client.v1.refunds.create(params, {"idempotency_key": key}))

    def transfer(self) -> None:
        key, destination = self.keyed("transfer"), self.random.choice(self.owners)
        params: Any = {
            "amount": self.amount(),
            "currency": "usd",
            "destination": destination,
            "metadata": {"key": key},
        }
        self.insist(lambda: self.client.v1.transfers.create(params, {"idempotency_key": key}))

    def reverse(self) -> None:
        transfer = self.one_of("transfer")
        if transfer is not None:
            self.client.v1.transfers.reversals.create(transfer["id"], {"amount": self.amount() // 8 + 1})

    def pay_out(self) -> None:
        owner = self.random.choice(self.owners)
        self.client.v1.payouts.create({"amount": self.amount() // 8 + 1, "currency": "usd"}, {"stripe_account": owner})

    def bank(self) -> None:
        owner = self.random.choice(self.owners)
        payout = self.one_of("payout", owner)
        if payout is not None:
            self.standin.fail_payout(payout["id"])
            self.standin.add_bank(owner)

    def dispute(self) -> None:
        opened = self.one_of("dispute")
        if opened is not None:
            self.standin.close_dispute(opened["id"], won=self.random.random() < 0.5)

    def wait(self) -> None:
        self.standin.clock.advance(self.random.randint(0, 2 * 86_400))


@pytest.mark.parametrize("seed", range(6))
def test_the_books_stay_right_whatever_happens(seed: int) -> None:
    with StandInStripe(seed=seed) as standin:
        use = Use(standin, seed)
        for step in range(STEPS):
            use.step()
            assert standin.invariants() == [], f"seed {seed}, step {step}"
        for kind in ("transfer", "payment_intent"):
            keys = [each["metadata"]["key"] for each in standin.every(kind)]
            assert keys, f"seed {seed} did nothing"
            assert len(keys) == len(set(keys)), f"seed {seed}"


def test_the_same_seed_is_the_same_story() -> None:
    def told() -> list[tuple[str, str]]:
        with StandInStripe(seed=3) as standin:
            use = Use(standin, 3)
            for _ in range(STEPS):
                use.step()
            return [(event["id"], event["type"]) for event in standin.events()]

    assert told() == told()
