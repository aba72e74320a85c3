"""What must hold at the processor, recomputed from scratch; each breach is a sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.fakes.stripe.balances import Side
from tests.fakes.stripe.errors import Json
from tests.fakes.stripe.world import World


def breaches(world: World) -> list[str]:
    """Empty when the stand-in's own books are right."""
    return [
        *world.accidents,
        *_transactions(world),
        *_balances(world),
        *_charges(world),
        *_transfers(world),
        *_cardholders(world),
        *_banks(world),
    ]


def _owners(world: World) -> list[str]:
    return [world.platform, *world.connected()]


def _every(world: World, kind: str) -> Iterator[tuple[str, Json]]:
    for owner in _owners(world):
        for each in world.store.every(owner, kind):
            yield owner, each


def _transactions(world: World) -> Iterator[str]:
    for journal in world.balances.journals:
        if sum(amount for _, amount in journal.legs):
            yield f"the journal of {journal.transaction} does not sum to zero"
    for _, line in _every(world, "balance_transaction"):
        fees = sum(detail["amount"] for detail in line["fee_details"])
        if line["net"] != line["amount"] - line["fee"] or line["fee"] != fees:
            yield f"{line['id']}: net, amount and fees disagree"
        if (line["status"] == "available") != (line["available_on"] <= world.clock.now()):
            yield f"{line['id']}: {line['status']} at the wrong time"


def _balances(world: World) -> Iterator[str]:
    """Available + pending + reserved = sum of balance transactions = the books."""
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for owner, line in _every(world, "balance_transaction"):
        sums[owner, line["currency"]] += line["net"]
    totals = world.balances.book_totals()
    for (owner, currency), total in sums.items():
        shown = world.balance(owner)
        parts = [*shown["available"], *shown["pending"], *shown.get("connect_reserved", [])]
        told = sum(part["amount"] for part in parts if part["currency"] == currency)
        booked = totals[owner, currency]
        if not told == total == booked:
            yield f"{owner} {currency}: balance {told}, transactions {total}, books {booked}"


def _charges(world: World) -> Iterator[str]:
    refunded: dict[str, int] = defaultdict(int)
    for _, refund in _every(world, "refund"):
        if refund["status"] in {"pending", "succeeded"}:
            refunded[refund["charge"]] += refund["amount"]
    for _, charge in _every(world, "charge"):
        if charge["amount_refunded"] != refunded[charge["id"]] or charge["amount_refunded"] > charge["amount"]:
            yield f"{charge['id']}: refunded {charge['amount_refunded']}, refunds {refunded[charge['id']]}"
    for owner, intent in _every(world, "payment_intent"):
        paid = [
            charge
            for charge in world.store.every(owner, "charge")
            if charge["payment_intent"] == intent["id"] and charge["status"] == "succeeded"
        ]
        if len(paid) != (intent["status"] == "succeeded"):
            yield f"{intent['id']} is {intent['status']} with {len(paid)} paid charges"


def _transfers(world: World) -> Iterator[str]:
    moved = world.balances.book_totals()
    for (account, currency), total in moved.items():
        if account == Side.BETWEEN_ACCOUNTS.value and total:
            yield f"{total} {currency} left one account and reached no other"
    for _, transfer in _every(world, "transfer"):
        reversed_sum = sum(each["amount"] for each in transfer["reversals"]["data"])
        if transfer["amount_reversed"] != reversed_sum or reversed_sum > transfer["amount"]:
            yield f"{transfer['id']}: reversed {transfer['amount_reversed']}, reversals {reversed_sum}"


def _cardholders(world: World) -> Iterator[str]:
    """What cardholders paid, by the objects, is what the books say left them."""
    sums: dict[str, int] = defaultdict(int)
    for _, charge in _every(world, "charge"):
        if charge["payment_intent"] is not None and charge["balance_transaction"] is not None:
            sums[charge["currency"]] += charge["amount"]
    for _, refund in _every(world, "refund"):
        if refund["payment_intent"] is not None and refund["status"] == "succeeded":
            sums[refund["currency"]] -= refund["amount"]
    for _, dispute in _every(world, "dispute"):
        withdrawn = sum(-line["amount"] for line in dispute["balance_transactions"])
        expected = dispute["amount"] if dispute["status"] in {"needs_response", "under_review", "lost"} else 0
        if withdrawn != expected and not (dispute["status"] == "lost" and not dispute["balance_transactions"]):
            yield f"{dispute['id']} is {dispute['status']} with {withdrawn} withdrawn"
        sums[dispute["currency"]] -= withdrawn
    yield from _compare(world, Side.CARDHOLDERS, sums)


def _banks(world: World) -> Iterator[str]:
    """What banks got, by the payouts, is what the books say they got."""
    sums: dict[str, int] = defaultdict(int)
    for _, payout in _every(world, "payout"):
        if payout["status"] in {"pending", "in_transit", "paid"}:
            sums[payout["currency"]] -= payout["amount"]
    for _, topup in _every(world, "topup"):
        sums[topup["currency"]] += topup["amount"]
    yield from _compare(world, Side.BANKS, sums)


def _compare(world: World, side: Side, sums: dict[str, int]) -> Iterator[str]:
    totals = world.balances.book_totals()
    for currency in {*sums, *(of for account, of in totals if account == side.value)}:
        booked = -totals[side.value, currency]
        if booked != sums[currency]:
            yield f"{side.value} {currency}: objects say {sums[currency]}, the books {booked}"
