"""Charges: what a payment intent's attempts leave behind, and when their money is booked."""

from __future__ import annotations

from tests.fakes.stripe.balances import BANK_DEBIT, CHARGE
from tests.fakes.stripe.cards import Card
from tests.fakes.stripe.errors import Json
from tests.fakes.stripe.render import includable, listing, whole_list
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World


def new_charge(world: World, owner: str, intent: Json, method: Json, *, status: str) -> Json:
    """A charge of the intent's whole amount; `status` is succeeded, pending or failed."""
    paid = status == "succeeded"
    return world.new(
        "py" if method["type"] != "card" else "ch",
        "charge",
        owner,
        amount=intent["amount"],
        amount_captured=intent["amount"] if paid else 0,
        amount_refunded=0,
        application=None,
        application_fee=None,
        application_fee_amount=None,
        balance_transaction=None,
        billing_details=method["billing_details"],
        calculated_statement_descriptor="STAND-IN",
        captured=paid,
        currency=intent["currency"],
        customer=intent["customer"],
        description=intent["description"],
        disputed=False,
        failure_balance_transaction=None,
        failure_code=None,
        failure_message=None,
        fraud_details={},
        metadata=dict(intent["metadata"]),
        on_behalf_of=None,
        outcome=None if status == "pending" else _outcome(paid=paid),
        paid=paid,
        payment_intent=intent["id"],
        payment_method=method["id"],
        payment_method_details={"type": method["type"], method["type"]: dict(method[method["type"]])},
        receipt_email=intent["receipt_email"],
        receipt_number=None,
        receipt_url=f"{world.pages_url}/receipts/{intent['id']}",
        refunded=False,
        review=None,
        shipping=None,
        source_transfer=None,
        statement_descriptor=None,
        statement_descriptor_suffix=None,
        status=status,
        transfer_data=None,
        transfer_group=intent["transfer_group"],
    )


def _outcome(*, paid: bool) -> Json:
    return {
        "network_status": "approved_by_network" if paid else "declined_by_network",
        "reason": None if paid else "generic_decline",
        "risk_level": "normal",
        "seller_message": "Payment complete." if paid else "The bank did not return any further details.",
        "type": "authorized" if paid else "issuer_declined",
    }


def settle(charge: Json) -> None:
    """The bank paid a pending charge."""
    charge.update(status="succeeded", paid=True, captured=True, amount_captured=charge["amount"])
    charge["outcome"] = _outcome(paid=True)


def book(world: World, owner: str, charge: Json, card: Card) -> None:
    """Put the money on the balance: pending for some days, and less the fee.

    With asynchronous capture this comes after `charge.succeeded`, whose charge then has no balance transaction yet.
    """
    transaction = world.balances.post(
        owner,
        BANK_DEBIT if card.delayed else CHARGE,
        charge["amount"],
        charge["currency"],
        source=charge["id"],
        description=charge["description"],
        fee=world.terms.fees.of_charge(charge["amount"], charge["currency"]),
        available_on=None if card.immediate else world.later(world.terms.settlement_days),
    )
    previous = world.change(charge, balance_transaction=transaction["id"])
    world.emit("charge.updated", charge, owner, previous)


@route("GET", "/v1/charges/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "charge", call.path_ids[0])


@list_route("/v1/charges", "ChargeListParams", "customer payment_intent transfer_group")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "charge", "customer", "payment_intent", "transfer_group")


@route("POST", "/v1/charges/{id}", "ChargeUpdateParams", "description metadata")
def update(world: World, call: Call) -> Json:
    charge = world.store.get(call.owner, "charge", call.path_ids[0])
    changes: Json = {"metadata": call.params.metadata(charge["metadata"])}
    if "description" in call.params:
        changes["description"] = call.params.text("description")
    world.emit("charge.updated", charge, call.owner, world.change(charge, **changes))
    return charge


@includable("charge", "refunds")
def refunds_of(world: World, charge: Json) -> Json:
    record = world.store.find(charge["id"])
    assert record is not None
    refunds = [each for each in world.store.every(record.owner, "refund") if each["charge"] == charge["id"]]
    return whole_list(refunds[::-1], f"/v1/charges/{charge['id']}/refunds")
