"""Transfers from the platform to connected accounts, and their reversals."""

from __future__ import annotations

from tests.fakes.stripe.balances import PAYMENT, PAYMENT_REFUND, TRANSFER, TRANSFER_REVERSAL
from tests.fakes.stripe.currencies import check_currency
from tests.fakes.stripe.errors import Json, StripeError, missing, refused
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World


def insufficient() -> StripeError:
    """Too little available; remembered under the key, so that a retry needs another intent."""
    return refused(
        "You have insufficient available funds in your Stripe account. Try adding funds directly to your available "
        "balance by creating Charges using the 4000000000000077 test card. See: https://stripe.com/docs/testing",
        code="balance_insufficient",
    )


@route(
    "POST",
    "/v1/transfers",
    "TransferCreateParams",
    "amount currency destination description metadata source_transaction transfer_group",
)
def create(world: World, call: Call) -> Json:
    params = call.params
    amount = params.required_integer("amount")
    currency = check_currency(params.required_text("currency"))
    metadata = params.metadata()
    destination = _destination(world, params.required_text("destination"))
    source = params.text("source_transaction")
    charge = None if source is None else _source(world, call.owner, source, amount, currency)
    if call.balance_declined or (charge is None and world.spendable(call.owner, currency) < amount):
        raise insufficient()
    transfer = world.new(
        "tr",
        "transfer",
        call.owner,
        amount=amount,
        amount_reversed=0,
        currency=currency,
        description=params.text("description"),
        destination=destination["id"],
        metadata=metadata,
        reversed=False,
        source_transaction=source,
        source_type="card",
        transfer_group=params.text("transfer_group") or (charge and charge["transfer_group"]),
    )
    transfer["reversals"] = {
        "object": "list",
        "data": [],
        "has_more": False,
        "total_count": 0,
        "url": f"/v1/transfers/{transfer['id']}/reversals",
    }
    _move(world, call.owner, transfer, charge)
    world.emit("transfer.created", transfer, call.owner)
    return transfer


def _destination(world: World, account_id: str) -> Json:
    record = world.store.find(account_id)
    if record is None or record.data["object"] != "account":
        raise missing("destination", account_id, param="destination")
    if record.data["capabilities"].get("transfers") != "active":
        raise refused(
            "Your destination account needs to have at least one of the following capabilities enabled: transfers, "
            "crypto_transfers, legacy_payments",
            code="insufficient_capabilities_for_transfer",
        )
    return record.data


def _source(world: World, owner: str, charge_id: str, amount: int, currency: str) -> Json:
    """A charge that pays for a transfer: its money may still be pending, but no more than it may leave."""
    charge = world.store.get(owner, "charge", charge_id, param="source_transaction")
    if charge["status"] != "succeeded" or charge["balance_transaction"] is None:
        raise refused("The source_transaction has no settled funds.", param="source_transaction")
    if charge["currency"] != currency:
        raise refused(
            "The currency of source_transaction's balance transaction must match the transfer's.", param="currency"
        )
    used = sum(
        each["amount"] for each in world.store.every(owner, "transfer") if each["source_transaction"] == charge_id
    )
    if used + amount > charge["amount"]:
        raise refused("Transfers using this transaction as a source must not exceed the source amount.", param="amount")
    return charge


def _move(world: World, owner: str, transfer: Json, charge: Json | None) -> None:
    available_on = None
    if charge is not None:
        booked = world.store.get(owner, "balance_transaction", charge["balance_transaction"])
        available_on = max(booked["available_on"], world.clock.now())
    payment = _payment(world, transfer)
    amount, currency = transfer["amount"], transfer["currency"]
    taken = world.balances.post(owner, TRANSFER, -amount, currency, source=transfer["id"], available_on=available_on)
    given = world.balances.post(
        transfer["destination"], PAYMENT, amount, currency, source=payment["id"], available_on=available_on
    )
    payment["balance_transaction"] = given["id"]
    transfer["balance_transaction"] = taken["id"]
    transfer["destination_payment"] = payment["id"]
    world.emit("payment.created", payment, transfer["destination"])


def _payment(world: World, transfer: Json) -> Json:
    """What the connected account sees of a transfer."""
    return world.new(
        "py",
        "charge",
        transfer["destination"],
        amount=transfer["amount"],
        amount_captured=transfer["amount"],
        amount_refunded=0,
        balance_transaction=None,
        captured=True,
        currency=transfer["currency"],
        customer=None,
        description=transfer["description"],
        disputed=False,
        metadata={},
        paid=True,
        payment_intent=None,
        payment_method=None,
        refunded=False,
        source_transfer=transfer["id"],
        status="succeeded",
        transfer_group=transfer["transfer_group"],
    )


@route("GET", "/v1/transfers/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "transfer", call.path_ids[0])


@list_route("/v1/transfers", "TransferListParams", "destination transfer_group")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "transfer", "destination", "transfer_group")


@route("POST", "/v1/transfers/{id}", "TransferUpdateParams", "metadata description")
def update(world: World, call: Call) -> Json:
    transfer = world.store.get(call.owner, "transfer", call.path_ids[0])
    changes: Json = {"metadata": call.params.metadata(transfer["metadata"])}
    if "description" in call.params:
        changes["description"] = call.params.text("description")
    world.emit("transfer.updated", transfer, call.owner, world.change(transfer, **changes))
    return transfer


@route("POST", "/v1/transfers/{id}/reversals", "TransferReversalCreateParams", "amount metadata description")
def reverse(world: World, call: Call) -> Json:
    transfer = world.store.get(call.owner, "transfer", call.path_ids[0])
    left = transfer["amount"] - transfer["amount_reversed"]
    amount = call.params.integer("amount") or left
    metadata = call.params.metadata()
    if transfer["reversed"]:
        raise refused(f"Transfer {transfer['id']} is already reversed.", code="transfer_already_reversed")
    if amount > left:
        raise refused(
            f"Reversal amount ({amount}) is greater than unreversed amount on transfer ({left}).", param="amount"
        )
    if call.balance_declined or world.spendable(transfer["destination"], transfer["currency"]) < amount:
        raise refused(
            f"Insufficient funds in the balance of {transfer['destination']} to reverse this transfer.",
            code="balance_insufficient",
        )
    reversal = _reversal(world, call.owner, transfer, amount, metadata)
    world.emit("transfer.reversed", transfer, call.owner)
    return reversal


def _reversal(world: World, owner: str, transfer: Json, amount: int, metadata: Json) -> Json:
    reversal = world.new(
        "trr",
        "transfer_reversal",
        owner,
        amount=amount,
        currency=transfer["currency"],
        metadata=metadata,
        source_refund=None,
        transfer=transfer["id"],
    )
    del reversal["livemode"]
    refund = _payment_refund(world, transfer, amount)
    back = world.balances.post(owner, TRANSFER_REVERSAL, amount, transfer["currency"], source=reversal["id"])
    taken = world.balances.post(
        transfer["destination"], PAYMENT_REFUND, -amount, transfer["currency"], source=refund["id"]
    )
    refund["balance_transaction"] = taken["id"]
    reversal["balance_transaction"] = back["id"]
    reversal["destination_payment_refund"] = refund["id"]
    done = transfer["amount_reversed"] + amount
    transfer.update(amount_reversed=done, reversed=done == transfer["amount"])
    reversals = [reversal, *transfer["reversals"]["data"]]
    transfer["reversals"] = {**transfer["reversals"], "data": reversals, "total_count": len(reversals)}
    return reversal


def _payment_refund(world: World, transfer: Json, amount: int) -> Json:
    """What the connected account sees of a reversal."""
    payment = world.store.get(transfer["destination"], "charge", transfer["destination_payment"])
    refunded = payment["amount_refunded"] + amount
    payment.update(amount_refunded=refunded, refunded=refunded == payment["amount"])
    return world.new(
        "pyr",
        "refund",
        transfer["destination"],
        amount=amount,
        charge=payment["id"],
        currency=transfer["currency"],
        metadata={},
        payment_intent=None,
        status="succeeded",
    )


@route("GET", "/v1/transfers/{id}/reversals/{id}")
def retrieve_reversal(world: World, call: Call) -> Json:
    transfer = world.store.get(call.owner, "transfer", call.path_ids[0])
    reversal = world.store.get(call.owner, "transfer_reversal", call.path_ids[1])
    if reversal["transfer"] != transfer["id"]:
        raise missing("transfer reversal", reversal["id"])
    return reversal


@list_route("/v1/transfers/{id}/reversals", "TransferReversalListParams")
def every_reversal(world: World, call: Call) -> Json:
    transfer = world.store.get(call.owner, "transfer", call.path_ids[0])
    return listing(world, call, "transfer_reversal", source=transfer["reversals"]["data"][::-1])
