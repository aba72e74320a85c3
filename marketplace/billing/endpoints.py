"""Billing over HTTP: renters add credit and take it back, owners are paid, finance runs and reconciles, the processor
tells. Amounts are decimal strings of USD. `sandbox` is true wherever no money moves.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any, Final, Literal, Protocol
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sqlalchemy.orm import Session

import ledger
from marketplace.accounts.auth import Authenticator, Principal
from marketplace.accounts.service import find_organisation
from marketplace.billing import (
    clawback,
    disputes,
    inbox,
    notices,
    onboarding,
    owners,
    payouts,
    reconciliation,
    refunds,
    service,
    topups,
)
from marketplace.billing.desk import Desk
from marketplace.billing.models import InboxEvent, OwnerAccount, Payment, Payout, Reconciliation, Refund, TopUpPlan
from marketplace.billing.payments import minor, port
from marketplace.core.database import SessionFactory
from marketplace.core.errors import BadRequest
from marketplace.core.settings import Settings

router = APIRouter(tags=["billing"])
MAX_RUN_KEY: Final = 100

Amount = Annotated[str, Field(max_length=24, description="USD, a plain decimal such as 25.00.")]
OrganisationName = Annotated[str, Field(min_length=1, max_length=200)]
Reason = Annotated[str, Field(min_length=1, max_length=500)]
RowNumber = Annotated[int, Path(ge=1, le=2**63 - 1)]
Key = Annotated[str, Field(min_length=1, max_length=100, description="Idempotency key: the same one acts once.")]


class Parts(Protocol):
    """What the application gives to its endpoints."""

    settings: Settings
    session_factory: SessionFactory
    authenticator: Authenticator


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @field_validator("*")
    @classmethod
    def refuse_nul(cls, value: Any) -> Any:
        """The database takes no NUL in a text."""
        if isinstance(value, str) and "\0" in value:
            raise ValueError("it holds a NUL")
        return value


class InvalidAmount(BadRequest):
    code = "invalid_amount"


def desk(request: Request) -> Desk:
    """The desk of this gateway."""
    parts: Parts = request.app.state.services
    return Desk(parts.settings, parts.session_factory, request.app.state.payments)


async def caller(request: Request) -> Principal:
    """Whoever holds the key. Raises Unauthenticated."""
    parts: Parts = request.app.state.services
    return await parts.authenticator.authenticate(request.headers.get("authorization"))


def _role(*roles: str) -> Any:
    async def required(principal: Annotated[Principal, Depends(caller)]) -> Principal:
        principal.require(*roles)
        return principal

    return Depends(required)


AtDesk = Annotated[Desk, Depends(desk)]
Renter = Annotated[Principal, _role("renter")]
Owner = Annotated[Principal, _role("owner")]
Finance = Annotated[Principal, _role("finance")]


def _nano(text: str) -> int:
    try:
        return ledger.parse_nano(text)
    except ledger.InvalidAmount as error:
        raise InvalidAmount(str(error), param="amount") from None


def _minor(text: str) -> int:
    return minor.to_minor(_nano(text), port.CURRENCY)


def _usd(amount_minor: int) -> str:
    return ledger.format_nano(minor.from_minor(amount_minor, port.CURRENCY))


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _person(principal: Principal) -> str:
    """A key stands for a person: two people have two keys."""
    return f"key:{principal.key_id.hex}"


# --- renters ----------------------------------------------------------------------------------------------------------


class TopUpBody(Body):
    amount: Amount
    save_card: bool = False


class ChargeBody(Body):
    amount: Amount


class PlanBody(Body):
    enabled: bool
    threshold: Amount = "0"
    amount: Amount = "20"
    monthly_cap: Amount = "100"
    low_balance: Amount = "0"


class RefundBody(Body):
    amount: Amount | None = None
    key: Key


@router.get("/v1/billing/balance")
async def show_balance(at: AtDesk, principal: Renter) -> dict[str, Any]:
    """Paid and promotional credit, what is held, and what can be refunded."""

    def read(session: Session) -> dict[str, Any]:
        credit = service.balance(session, principal.organisation_id)
        unused = 0
        if principal.credit_account_id is not None:
            unused = refunds.unused_nano(session, principal.organisation_id, principal.credit_account_id)
        return {
            "object": "balance",
            "sandbox": at.sandbox,
            "available": ledger.format_nano(credit.available_nano),
            "paid": ledger.format_nano(credit.posted_nano),
            "promotional": ledger.format_nano(credit.promotional_nano),
            "held": ledger.format_nano(credit.held_nano),
            "unused_paid": ledger.format_nano(unused),
            "frozen": refunds.under_dispute(session, principal.organisation_id),
        }

    return await asyncio.to_thread(at.write, read)


@router.post("/v1/billing/top-ups")
async def start_top_up(at: AtDesk, principal: Renter, body: TopUpBody) -> dict[str, Any]:
    """A page on which to pay. `url` is empty until the processor has answered: read the top-up again."""
    cents = _minor(body.amount)
    payment = await asyncio.to_thread(at.checkout, principal.organisation_id, cents, save_card=body.save_card)
    return _payment(payment, sandbox=at.sandbox)


@router.post("/v1/billing/top-ups/saved-card")
async def charge_card(at: AtDesk, principal: Renter, body: ChargeBody) -> dict[str, Any]:
    """Take it from the saved card."""
    payment = await asyncio.to_thread(at.charge, principal.organisation_id, _minor(body.amount))
    return _payment(payment, sandbox=at.sandbox)


@router.get("/v1/billing/top-ups")
async def list_top_ups(at: AtDesk, principal: Renter) -> dict[str, Any]:
    """Top-ups and their receipts, newest first."""
    found = await asyncio.to_thread(at.write, lambda session: topups.read_payments(session, principal.organisation_id))
    return {"object": "list", "data": [_payment(each, sandbox=at.sandbox) for each in found]}


@router.get("/v1/billing/top-ups/{payment_id}")
async def show_top_up(at: AtDesk, principal: Renter, payment_id: UUID) -> dict[str, Any]:
    """One top-up."""
    found = await asyncio.to_thread(
        at.write, lambda session: topups.get_payment(session, principal.organisation_id, payment_id)
    )
    return _payment(found, sandbox=at.sandbox)


@router.get("/v1/billing/plan")
async def show_plan(at: AtDesk, principal: Renter) -> dict[str, Any]:
    """How this organisation tops up by itself."""
    plan = await asyncio.to_thread(at.write, lambda session: topups.find_plan(session, principal.organisation_id))
    return _plan(plan)


@router.put("/v1/billing/plan")
async def set_plan(at: AtDesk, principal: Renter, body: PlanBody) -> dict[str, Any]:
    """Top up by itself below `threshold`, at most `monthly_cap` a month; tell below `low_balance`."""
    plan = await asyncio.to_thread(
        at.write,
        lambda session: topups.set_plan(
            session,
            principal.organisation_id,
            enabled=body.enabled,
            threshold_nano=_nano(body.threshold),
            amount_minor=_minor(body.amount),
            monthly_cap_minor=_minor(body.monthly_cap),
            low_balance_nano=_nano(body.low_balance),
            settings=at.settings,
        ),
    )
    return _plan(plan)


@router.post("/v1/billing/refunds")
async def ask_refund(at: AtDesk, principal: Renter, body: RefundBody) -> dict[str, Any]:
    """Give unused paid credit back to the cards that it came from."""
    amount = None if body.amount is None else _minor(body.amount)
    asked = await asyncio.to_thread(at.refund, principal.organisation_id, amount, body.key)
    return {"object": "list", "sandbox": at.sandbox, "data": [_refund(each) for each in asked]}


@router.get("/v1/billing/refunds")
async def list_refunds(at: AtDesk, principal: Renter) -> dict[str, Any]:
    """Refunds, newest first."""
    found = await asyncio.to_thread(at.write, lambda session: refunds.read_refunds(session, principal.organisation_id))
    return {"object": "list", "sandbox": at.sandbox, "data": [_refund(each) for each in found]}


@router.get("/v1/billing/notices")
async def list_notices(at: AtDesk, principal: Annotated[Principal, _role("renter", "owner")]) -> dict[str, Any]:
    """What this organisation should know about its money, newest first."""
    found = await asyncio.to_thread(at.write, lambda session: notices.read(session, principal.organisation_id))
    data = [{"kind": each.kind, "message": each.message, "at": _time(each.created_at)} for each in found]
    return {"object": "list", "data": data}


@router.get("/v1/billing/return")
async def come_back(paid: Literal["1"] | None = None) -> PlainTextResponse:
    """Where the processor's pages send people back to. It proves nothing: the credit comes with the payment."""
    done = "Thank you. Your credit appears as soon as the payment is confirmed."
    return PlainTextResponse(done if paid else "You can close this page.")


# --- owners -----------------------------------------------------------------------------------------------------------


class AccountBody(Body):
    country: Annotated[str, Field(pattern="^[A-Z]{2}$")]
    email: Annotated[str | None, Field(max_length=254)] = None


@router.post("/v1/billing/account")
async def onboard(at: AtDesk, principal: Owner, body: AccountBody) -> dict[str, Any]:
    """Open an account at the processor, or go on with it: `url` works once, for minutes."""
    account, url = await asyncio.to_thread(at.onboard, principal.organisation_id, body.country, body.email)
    return {**_account(account, sandbox=at.sandbox), "url": url}


@router.get("/v1/billing/account")
async def show_account(at: AtDesk, principal: Owner) -> dict[str, Any]:
    """The account's state, and what the processor still wants to know."""
    found = await asyncio.to_thread(at.write, lambda session: onboarding.find(session, principal.organisation_id))
    return _account(found, sandbox=at.sandbox)


@router.get("/v1/billing/payouts")
async def own_payouts(at: AtDesk, principal: Owner) -> dict[str, Any]:
    """What was paid, each with its statement, and what is still to come."""

    def read(session: Session) -> dict[str, Any]:
        found = payouts.status(session, owner_id=principal.organisation_id)
        held = owners.find_balances(session, principal.organisation_id)
        return {
            "object": "list",
            "sandbox": at.sandbox,
            "pending": ledger.format_nano(held.pending_nano),
            "payable": ledger.format_nano(held.available_nano),
            "reserve": ledger.format_nano(held.reserve_nano),
            "in_transit": ledger.format_nano(held.transit_nano),
            "owed": ledger.format_nano(held.receivable_nano),
            "data": [_payout(each, sandbox=at.sandbox) for each in found],
        }

    return await asyncio.to_thread(at.write, read)


# --- finance ----------------------------------------------------------------------------------------------------------


class RunBody(Body):
    key: Annotated[
        str | None,
        Field(min_length=1, max_length=MAX_RUN_KEY, description="Default: this week's. A run of a key happens once."),
    ] = None


class WriteOffBody(Body):
    owner: OrganisationName
    amount: Amount
    reason: Reason
    key: Key


class UsageRefundBody(Body):
    amount: Amount | None = None
    reason: Reason
    key: Key


class PromotionBody(Body):
    renter: OrganisationName
    amount: Amount
    reason: Reason
    key: Key


class QuarantineBody(Body):
    reason: Reason


@router.get("/v1/finance/payouts/preview")
async def preview(at: AtDesk, _: Finance) -> dict[str, Any]:
    """What a run would do now, owner by owner."""
    plans = await asyncio.to_thread(at.write, lambda session: payouts.preview(session, at.clock(), at.settings))
    return {"object": "list", "sandbox": at.sandbox, "data": [_planned(plan) for plan in plans]}


@router.post("/v1/finance/payouts/run")
async def run(at: AtDesk, principal: Finance, body: RunBody) -> dict[str, Any]:
    """Run this week's payouts, or those of another key."""
    key = body.key or payouts.week_key(at.clock())
    plans = await asyncio.to_thread(at.run_payouts, key, _person(principal))
    return {"object": "list", "sandbox": at.sandbox, "key": key, "data": [_planned(plan) for plan in plans]}


@router.get("/v1/finance/payouts")
async def list_payouts(at: AtDesk, _: Finance, *, open_only: Annotated[bool, Query(alias="open")] = False) -> Any:
    """Payouts of everybody, newest first."""
    found = await asyncio.to_thread(at.write, lambda session: payouts.status(session, open_only=open_only))
    return {"object": "list", "data": [_payout(each, sandbox=at.sandbox) for each in found]}


@router.post("/v1/finance/payouts/{payout_id}/approve")
async def approve(at: AtDesk, principal: Finance, payout_id: UUID) -> dict[str, Any]:
    """One person's yes; above the limit it takes two."""
    found = await asyncio.to_thread(
        at.write, lambda session: payouts.approve(session, payout_id, _person(principal), at.clock())
    )
    return _payout(found, sandbox=at.sandbox)


@router.post("/v1/finance/payouts/{payout_id}/cancel")
async def cancel(at: AtDesk, principal: Finance, payout_id: UUID) -> dict[str, Any]:
    """Stop a payout that was not sent yet."""
    found = await asyncio.to_thread(
        at.write, lambda session: payouts.cancel(session, payout_id, _person(principal), at.clock())
    )
    return _payout(found, sandbox=at.sandbox)


@router.post("/v1/finance/reconcile/processor")
async def reconcile(at: AtDesk, _: Finance) -> dict[str, Any]:
    """Compare the ledger with the processor now."""
    found = await asyncio.to_thread(reconciliation.reconcile, at.factory, at.payments, at.clock())
    return _report(found.totals, found.breaks, at)


@router.get("/v1/finance/reconciliation")
async def show_reconciliation(at: AtDesk, _: Finance) -> dict[str, Any]:
    """The newest comparison, and what is open."""

    def read(session: Session) -> dict[str, Any]:
        return _report(reconciliation.newest(session), reconciliation.open_breaks(session), at)

    return await asyncio.to_thread(at.write, read)


@router.post("/v1/finance/write-offs")
async def write_off(at: AtDesk, principal: Finance, body: WriteOffBody) -> dict[str, Any]:
    """Give up what an owner owes."""

    def act(session: Session) -> int:
        owner_id = find_organisation(session, body.owner).id
        return owners.write_off(session, owner_id, _nano(body.amount), body.reason, key=body.key, by=_person(principal))

    return {"object": "journal", "id": await asyncio.to_thread(at.write, act)}


@router.post("/v1/finance/receipts/{receipt_id}/refund")
async def refund_usage(at: AtDesk, principal: Finance, receipt_id: UUID, body: UsageRefundBody) -> dict[str, Any]:
    """Give a renter back what a receipt charged; its owner's part is taken from its owner."""
    amount = None if body.amount is None else _nano(body.amount)

    def act(session: Session) -> int:
        return clawback.refund_usage(session, receipt_id, amount, body.reason, key=body.key, by=_person(principal))

    return {"object": "journal", "id": await asyncio.to_thread(at.write, act)}


@router.post("/v1/finance/promotions")
async def promote(at: AtDesk, _: Finance, body: PromotionBody) -> dict[str, Any]:
    """Give promotional credit: spent first, never refunded, never paid out."""

    def act(session: Session) -> int:
        renter_id = find_organisation(session, body.renter).id
        return service.grant_promotion(session, renter_id, _nano(body.amount), body.key, body.reason)

    return {"object": "journal", "id": await asyncio.to_thread(at.write, act)}


@router.get("/v1/finance/disputes")
async def list_disputes(at: AtDesk, _: Finance, *, open_only: Annotated[bool, Query(alias="open")] = False) -> Any:
    """Disputes, newest first."""
    found = await asyncio.to_thread(at.write, lambda session: disputes.read_disputes(session, open_only=open_only))
    data = [
        {
            "id": each.id,
            "organisation": each.organisation_id.hex,
            "amount": _usd(each.amount_minor),
            "state": each.state,
            "reason": each.reason,
            "opened_at": _time(each.opened_at),
            "closed_at": _time(each.closed_at),
            "accepted_at": _time(each.accepted_at),
        }
        for each in found
    ]
    return {"object": "list", "data": data}


@router.post("/v1/finance/disputes/{dispute_id}/accept")
async def accept_dispute(at: AtDesk, _: Finance, dispute_id: str) -> dict[str, Any]:
    """Let the renter of a lost dispute spend again."""
    found = await asyncio.to_thread(at.write, lambda session: disputes.accept(session, dispute_id, at.clock()))
    return {"id": found.id, "state": found.state, "accepted_at": _time(found.accepted_at)}


@router.get("/v1/finance/webhooks")
async def list_webhooks(
    at: AtDesk,
    _: Finance,
    state: Literal["received", "waiting", "applied", "ignored", "quarantined"] | None = None,
) -> dict[str, Any]:
    """Events that came, newest first."""
    found = await asyncio.to_thread(at.write, lambda session: inbox.read_events(session, state))
    return {"object": "list", "data": [_event(each) for each in found]}


@router.post("/v1/finance/webhooks/{row}/replay")
async def replay(at: AtDesk, _: Finance, row: RowNumber) -> dict[str, Any]:
    """Apply an event again; its effect happens once all the same."""

    def act() -> InboxEvent:
        now = at.clock()
        at.write(lambda session: inbox.replay(session, row, now))
        inbox.process(at.factory, at.payments, row, now)
        return at.write(lambda session: session.get_one(InboxEvent, row))

    return _event(await asyncio.to_thread(act))


@router.post("/v1/finance/webhooks/{row}/quarantine")
async def quarantine(at: AtDesk, _: Finance, row: RowNumber, body: QuarantineBody) -> dict[str, Any]:
    """Take an event out that can never be applied."""
    return _event(await asyncio.to_thread(at.write, lambda session: inbox.quarantine(session, row, body.reason)))


# --- the processor ----------------------------------------------------------------------------------------------------


@router.post("/v1/webhooks/stripe", include_in_schema=False)
async def webhook(at: AtDesk, request: Request) -> dict[str, Any]:
    """Events of the platform's account."""
    return await _receive(at, request, connect=False)


@router.post("/v1/webhooks/stripe/connect", include_in_schema=False)
async def connect_webhook(at: AtDesk, request: Request) -> dict[str, Any]:
    """Events of owners' accounts."""
    return await _receive(at, request, connect=True)


async def _receive(at: Desk, request: Request, *, connect: bool) -> dict[str, Any]:
    body = await request.body()
    signature = request.headers.get("stripe-signature", "")
    await asyncio.to_thread(
        at.write,
        lambda session: inbox.receive(session, at.payments, body, signature, connect=connect, now=at.clock()),
    )
    return {"received": True}


# --- shapes -----------------------------------------------------------------------------------------------------------


def _payment(payment: Payment, *, sandbox: bool) -> dict[str, Any]:
    return {
        "object": "top_up",
        "id": payment.id.hex,
        "sandbox": sandbox,
        "kind": payment.kind,
        "amount": _usd(payment.amount_minor),
        "state": payment.state,
        "url": payment.url if payment.state == "open" else None,
        "refunded": _usd(payment.refunded_minor),
        "receipt_url": payment.receipt_url,
        "failure": payment.failure,
        "created_at": _time(payment.created_at),
        "succeeded_at": _time(payment.succeeded_at),
    }


def _plan(plan: TopUpPlan | None) -> dict[str, Any]:
    if plan is None:
        return {"object": "top_up_plan", "enabled": False, "card_saved": False}
    return {
        "object": "top_up_plan",
        "enabled": plan.enabled,
        "card_saved": plan.payment_method is not None,
        "threshold": ledger.format_nano(plan.threshold_nano),
        "amount": _usd(plan.amount_minor),
        "monthly_cap": _usd(plan.monthly_cap_minor),
        "low_balance": ledger.format_nano(plan.low_balance_nano),
        "stopped_because": plan.stopped_because,
    }


def _refund(refund: Refund) -> dict[str, Any]:
    return {
        "object": "refund",
        "id": refund.id.hex,
        "top_up": refund.payment_id.hex,
        "amount": _usd(refund.amount_minor),
        "state": refund.state,
        "failure": refund.failure,
        "created_at": _time(refund.created_at),
    }


def _account(account: OwnerAccount | None, *, sandbox: bool) -> dict[str, Any]:
    if account is None:
        return {"object": "owner_account", "sandbox": sandbox, "state": "none", "payouts_enabled": False}
    return {
        "object": "owner_account",
        "sandbox": sandbox,
        "state": account.state,
        "payouts_enabled": account.payouts_enabled,
        "due": account.due,
        "disabled_reason": account.disabled_reason,
    }


def _payout(payout: Payout, *, sandbox: bool) -> dict[str, Any]:
    return {
        "object": "payout",
        "id": payout.id.hex,
        "sandbox": sandbox,
        "organisation": payout.organisation_id.hex,
        "amount": _usd(payout.amount_minor),
        "state": payout.state,
        "failure": payout.failure,
        "statement": payout.statement,
        "created_at": _time(payout.created_at),
        "ended_at": _time(payout.ended_at),
    }


def _planned(plan: payouts.Plan) -> dict[str, Any]:
    due = plan.due
    return {
        "object": "planned_payout",
        "owner": plan.owner_name,
        "amount": _usd(plan.amount_minor),
        "carried_over": ledger.format_nano(plan.left_nano),
        "released": ledger.format_nano(due.released_nano),
        "kept_in_reserve": ledger.format_nano(due.reserved_nano),
        "released_from_reserve": ledger.format_nano(due.reserve_released_nano),
        "set_off": ledger.format_nano(due.netted_nano),
        "new_owner": due.new_owner,
        "blocked": plan.blocked,
        "needs_approval": plan.needs_approval,
    }


def _event(event: InboxEvent) -> dict[str, Any]:
    return {
        "object": "webhook",
        "id": event.id,
        "event": event.event_id,
        "endpoint": event.endpoint,
        "type": event.type,
        "state": event.state,
        "attempts": event.attempts,
        "deliveries": event.deliveries,
        "error": event.error,
        "received_at": _time(event.received_at),
        "applied_at": _time(event.applied_at),
    }


def _report(totals: Reconciliation | None, breaks: Any, at: Desk) -> dict[str, Any]:
    now = at.clock()
    shown: dict[str, Any] = {"object": "reconciliation", "sandbox": at.sandbox, "at": None, "covered": None}
    if totals is not None:
        shown |= {
            "at": _time(totals.at),
            "covered": totals.covered,
            "payable": ledger.format_nano(totals.payable_nano),
            "platform": {
                "ledger": ledger.format_nano(totals.ledger_platform_nano),
                "processor": ledger.format_nano(totals.processor_platform_nano),
            },
            "connected": {
                "ledger": ledger.format_nano(totals.ledger_connected_nano),
                "processor": ledger.format_nano(totals.processor_connected_nano),
            },
        }
    shown["breaks"] = [
        {
            "kind": each.kind,
            "subject": each.subject,
            "story": each.story,
            "amount": ledger.format_nano(each.amount_nano),
            "opened_at": _time(each.opened_at),
            "age_hours": max(0, int((now - each.opened_at).total_seconds() // 3_600)),
        }
        for each in breaks
    ]
    return shown
