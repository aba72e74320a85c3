"""Disputes: opened by the card's bank, contested or accepted, won or lost, with their fee and their money."""

from __future__ import annotations

from tests.fakes.stripe.balances import DISPUTE, DISPUTE_REVERSAL
from tests.fakes.stripe.clock import DAY_S
from tests.fakes.stripe.errors import Json, refused
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World

ANSWER_DAYS = 9
OPEN = frozenset({"needs_response", "under_review", "warning_needs_response", "warning_under_review"})
# Evidence that decides a test dispute, as in Stripe's test mode.
VERDICTS = {"winning_evidence": True, "losing_evidence": False}


def open_dispute(
    world: World,
    owner: str,
    charge: Json,
    *,
    amount: int | None = None,
    reason: str = "fraudulent",
    inquiry: bool = False,
) -> Json:
    """The bank takes the money back and a fee is due; an inquiry only asks."""
    now = world.clock.now()
    dispute = world.new(
        "du",
        "dispute",
        owner,
        amount=charge["amount"] - charge["amount_refunded"] if amount is None else amount,
        balance_transactions=[],
        charge=charge["id"],
        currency=charge["currency"],
        enhanced_eligibility_types=[],
        evidence={},
        evidence_details={
            "due_by": now + ANSWER_DAYS * DAY_S,
            "has_evidence": False,
            "past_due": False,
            "submission_count": 0,
        },
        is_charge_refundable=inquiry,
        metadata={},
        network_reason_code="10.4",
        payment_intent=charge["payment_intent"],
        payment_method_details={"card": {"brand": "visa", "network_reason_code": "10.4"}, "type": "card"},
        reason=reason,
        status="warning_needs_response" if inquiry else "needs_response",
    )
    charge["disputed"] = not inquiry
    if not inquiry:
        _withdraw(world, owner, dispute)
    world.emit("charge.dispute.created", dispute, owner)
    if not inquiry:
        world.emit("charge.dispute.funds_withdrawn", dispute, owner)
    world.schedule(dispute["evidence_details"]["due_by"], lambda: _overdue(world, owner, dispute))
    return dispute


def _withdraw(world: World, owner: str, dispute: Json) -> None:
    transaction = world.balances.post(
        owner,
        DISPUTE,
        -dispute["amount"],
        dispute["currency"],
        source=dispute["id"],
        description=f"Chargeback withdrawal for {dispute['charge']}",
        fee=world.terms.fees.of_dispute(dispute["currency"]),
        fee_description="Dispute fee",
    )
    dispute["balance_transactions"].append(transaction)


def escalate(world: World, owner: str, dispute: Json) -> None:
    """An inquiry becomes a dispute: now the money goes."""
    charge = world.store.get(owner, "charge", dispute["charge"])
    charge["disputed"] = True
    previous = world.change(dispute, status="needs_response", is_charge_refundable=False)
    _withdraw(world, owner, dispute)
    world.emit("charge.dispute.updated", dispute, owner, previous)
    world.emit("charge.dispute.funds_withdrawn", dispute, owner)


def _overdue(world: World, owner: str, dispute: Json) -> None:
    """Nobody answered in time: lost."""
    if dispute["status"] in {"needs_response", "warning_needs_response"}:
        dispute["evidence_details"]["past_due"] = True
        close(world, owner, dispute, won=False)


def close(world: World, owner: str, dispute: Json, *, won: bool, fee_returned: bool = False) -> None:
    """The bank decides. What was won comes back; the fee only where the contract says so."""
    if dispute["status"] not in OPEN:
        raise refused(f"This dispute is already closed: {dispute['status']}.")
    inquiry = dispute["status"].startswith("warning")
    status = "warning_closed" if inquiry else "won" if won else "lost"
    reinstates = won and not inquiry
    if reinstates:
        _reinstate(world, owner, dispute, fee_returned=fee_returned)
    previous = world.change(dispute, status=status)
    world.emit("charge.dispute.updated", dispute, owner, previous)
    world.emit("charge.dispute.closed", dispute, owner)
    if reinstates:
        world.emit("charge.dispute.funds_reinstated", dispute, owner)


def _reinstate(world: World, owner: str, dispute: Json, *, fee_returned: bool) -> None:
    transaction = world.balances.post(
        owner,
        DISPUTE_REVERSAL,
        dispute["amount"],
        dispute["currency"],
        source=dispute["id"],
        description=f"Chargeback reversal for {dispute['charge']}",
        fee=-world.terms.fees.of_dispute(dispute["currency"]) if fee_returned else 0,
        fee_description="Dispute fee refund",
    )
    dispute["balance_transactions"].append(transaction)


@route("GET", "/v1/disputes/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "dispute", call.path_ids[0])


@list_route("/v1/disputes", "DisputeListParams", "charge payment_intent")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "dispute", "charge", "payment_intent")


@route("POST", "/v1/disputes/{id}", "DisputeUpdateParams", "evidence metadata submit")
def update(world: World, call: Call) -> Json:
    dispute = world.store.get(call.owner, "dispute", call.path_ids[0])
    metadata = call.params.metadata(dispute["metadata"])
    evidence = call.params.inner("evidence")
    given = {name: evidence.text(name) for name in evidence.names()}
    submits = call.params.boolean("submit", default=True) and bool(given)
    if given and dispute["status"] not in OPEN:
        raise refused("This dispute is closed and takes no more evidence.", param="evidence")
    changes: Json = {"metadata": metadata, "evidence": {**dispute["evidence"], **given}}
    if submits:
        warning = dispute["status"].startswith("warning")
        changes["status"] = "warning_under_review" if warning else "under_review"
        changes["evidence_details"] = {
            **dispute["evidence_details"],
            "has_evidence": True,
            "submission_count": dispute["evidence_details"]["submission_count"] + 1,
        }
    previous = world.change(dispute, **changes)
    world.emit("charge.dispute.updated", dispute, call.owner, previous)
    verdict = VERDICTS.get(given.get("uncategorized_text") or "")
    if submits and verdict is not None:
        world.schedule(world.clock.now(), lambda: close(world, call.owner, dispute, won=verdict))
    return dispute


@route("POST", "/v1/disputes/{id}/close")
def accept(world: World, call: Call) -> Json:
    dispute = world.store.get(call.owner, "dispute", call.path_ids[0])
    close(world, call.owner, dispute, won=False)
    return dispute
