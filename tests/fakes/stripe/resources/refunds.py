"""Refunds: partial and cumulative, pending when the balance does not suffice, failing after they succeeded."""

from __future__ import annotations

from tests.fakes.stripe.balances import REFUND, REFUND_FAILURE
from tests.fakes.stripe.errors import Json, StripeError, invalid, refused
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World

REASONS = ("duplicate", "fraudulent", "requested_by_customer")
RETRY_S = 3_600


@route("POST", "/v1/refunds", "RefundCreateParams", "charge payment_intent amount reason metadata")
def create(world: World, call: Call) -> Json:
    params = call.params
    charge = _charge(world, call)
    asked = params.integer("amount")
    reason = params.choice("reason", REASONS)
    metadata = params.metadata()
    amount = charge["amount"] - charge["amount_refunded"] if asked is None else asked
    _check(world, call.owner, charge, amount)
    return give_back(world, call.owner, charge, amount, reason=reason, metadata=metadata)


def give_back(
    world: World, owner: str, charge: Json, amount: int, *, reason: str | None = None, metadata: Json | None = None
) -> Json:
    """Give money back, or wait until the balance suffices."""
    refund = _new_refund(world, owner, charge, amount, reason, metadata or {})
    card = world.cards[charge["payment_method"]]
    if card.refund_pends:
        refund.update(status="pending", pending_reason="processing")
    elif world.spendable(owner, charge["currency"]) < amount:
        refund.update(status="pending", pending_reason="insufficient_funds")
        world.schedule(world.clock.now() + RETRY_S, lambda: _retry(world, owner, refund))
    else:
        _take(world, owner, refund)
    refunded = charge["amount_refunded"] + amount
    previous = world.change(charge, amount_refunded=refunded, refunded=refunded == charge["amount"])
    world.emit("refund.created", refund, owner)
    world.emit("charge.refunded", charge, owner, previous)
    if card.refund_fails:
        world.schedule(world.clock.now(), lambda: fail(world, owner, refund))
    return refund


def _charge(world: World, call: Call) -> Json:
    params = call.params
    charge, intent = params.text("charge"), params.text("payment_intent")
    if (charge is None) == (intent is None):
        raise invalid("You must pass exactly one of `charge` and `payment_intent`.", param="payment_intent")
    if intent is None:
        assert charge is not None
        return world.store.get(call.owner, "charge", charge, param="charge")
    found = world.store.get(call.owner, "payment_intent", intent, param="payment_intent")
    if found["status"] not in {"succeeded", "processing"}:
        raise refused(
            f"This PaymentIntent ({intent}) does not have a successful charge to refund.", param="payment_intent"
        )
    return world.store.get(call.owner, "charge", found["latest_charge"], param="payment_intent")


def _check(world: World, owner: str, charge: Json, amount: int) -> None:
    left = charge["amount"] - charge["amount_refunded"]
    if charge["status"] != "succeeded":
        raise refused(f"Charge {charge['id']} has not succeeded and cannot be refunded.", param="charge")
    disputes = (each for each in world.store.every(owner, "dispute") if each["charge"] == charge["id"])
    if any(not each["is_charge_refundable"] and each["status"] != "won" for each in disputes):
        raise _disputed(charge)
    if left == 0:
        raise refused(
            f"Charge {charge['id']} has already been refunded.", code="charge_already_refunded", param="charge"
        )
    if amount > left:
        raise refused(f"Refund amount ({amount}) is greater than unrefunded amount on charge ({left}).", param="amount")


def _disputed(charge: Json) -> StripeError:
    return refused(
        f"Charge {charge['id']} has been charged back; cannot issue a refund.", code="charge_disputed", param="charge"
    )


def _new_refund(world: World, owner: str, charge: Json, amount: int, reason: str | None, metadata: Json) -> Json:
    return world.new(
        "re",
        "refund",
        owner,
        amount=amount,
        balance_transaction=None,
        charge=charge["id"],
        currency=charge["currency"],
        destination_details={"type": "card", "card": {"type": "refund", "reference_status": "pending"}},
        metadata=metadata,
        payment_intent=charge["payment_intent"],
        reason=reason,
        receipt_number=None,
        source_transfer_reversal=None,
        status="succeeded",
        transfer_reversal=None,
    )


def _take(world: World, owner: str, refund: Json) -> None:
    transaction = world.balances.post(
        owner,
        REFUND,
        -refund["amount"],
        refund["currency"],
        source=refund["id"],
        description="REFUND FOR CHARGE",
    )
    refund["balance_transaction"] = transaction["id"]


def _retry(world: World, owner: str, refund: Json) -> None:
    """A refund that waits for money is tried again each hour."""
    if refund["status"] != "pending":
        return
    if world.spendable(owner, refund["currency"]) < refund["amount"]:
        world.schedule(world.clock.now() + RETRY_S, lambda: _retry(world, owner, refund))
        return
    succeed(world, owner, refund)


def succeed(world: World, owner: str, refund: Json) -> None:
    """A pending refund goes through."""
    if refund["status"] != "pending":
        raise refused(f"This refund is not pending: {refund['status']}.")
    _take(world, owner, refund)
    previous = world.change(refund, status="succeeded")
    refund.pop("pending_reason", None)
    world.emit("refund.updated", refund, owner, previous)
    world.emit("charge.refund.updated", refund, owner, previous)


def fail(world: World, owner: str, refund: Json, reason: str = "lost_or_stolen_card") -> None:
    """The bank sent a refund back: its money returns, and the charge counts as less refunded."""
    if refund["status"] not in {"pending", "succeeded"}:
        raise refused(f"This refund cannot fail: {refund['status']}.")
    changes: Json = {"status": "failed", "failure_reason": reason}
    if refund["balance_transaction"] is not None:
        returned = world.balances.post(
            owner,
            REFUND_FAILURE,
            refund["amount"],
            refund["currency"],
            source=refund["id"],
            description="REFUND FAILURE",
        )
        changes["failure_balance_transaction"] = returned["id"]
    refund.pop("pending_reason", None)
    previous = world.change(refund, **changes)
    charge = world.store.get(owner, "charge", refund["charge"])
    world.change(charge, amount_refunded=charge["amount_refunded"] - refund["amount"], refunded=False)
    world.emit("refund.updated", refund, owner, previous)
    world.emit("refund.failed", refund, owner, previous)
    world.emit("charge.refund.updated", refund, owner, previous)


@route("GET", "/v1/refunds/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "refund", call.path_ids[0])


@list_route("/v1/refunds", "RefundListParams", "charge payment_intent")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "refund", "charge", "payment_intent")


@route("POST", "/v1/refunds/{id}", "RefundUpdateParams", "metadata")
def update(world: World, call: Call) -> Json:
    refund = world.store.get(call.owner, "refund", call.path_ids[0])
    previous = world.change(refund, metadata=call.params.metadata(refund["metadata"]))
    world.emit("refund.updated", refund, call.owner, previous)
    return refund


@route("POST", "/v1/refunds/{id}/cancel")
def cancel(world: World, call: Call) -> Json:
    refund = world.store.get(call.owner, "refund", call.path_ids[0])
    raise refused(f"You cannot cancel a refund with a status of {refund['status']}.")
