"""Money in: Checkout, a saved card, automatic top-ups. One payment at the processor, one credit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

import ledger
from marketplace.accounts.models import Organisation
from marketplace.accounts.service import UnknownOrganisation
from marketplace.billing import outgoing
from marketplace.billing.models import Payment, TopUpPlan
from marketplace.billing.notices import tell
from marketplace.billing.payments import minor, port
from marketplace.billing.service import ensure_credit_account
from marketplace.core.errors import BadRequest, Conflict, FallowError, NotFound
from marketplace.core.ids import new_id
from marketplace.core.settings import Settings

DESCRIPTION: Final = "Fallow credit"
SOURCE: Final = "processor"
"""Who the outside ids of these journals belong to."""
MAX_LISTED: Final = 200
MAX_AUTOMATIC: Final = 1_000
"""Organisations that one tick looks at."""
PAYMENT_KEY: Final = "payment:"

_BELOW = text(
    """
    select p.organisation_id, coalesce(b.posted_nano - b.held_nano - b.floor_nano, 0) as available_nano
    from top_up_plans p join organisations o on o.id = p.organisation_id
    left join ledger_balances b on b.account_id = o.credit_account_id
    where p.enabled and coalesce(b.posted_nano - b.held_nano - b.floor_nano, 0) < p.threshold_nano
       or p.low_balance_nano > 0 and coalesce(b.posted_nano - b.held_nano - b.floor_nano, 0) < p.low_balance_nano
    order by p.organisation_id limit :limit
    """
)


class InvalidTopUp(BadRequest):
    code = "invalid_top_up"


class NoCard(Conflict):
    """There is no saved card."""

    code = "no_saved_card"


class UnknownPayment(NotFound):
    code = "unknown_payment"


class PaymentMismatch(FallowError):
    """The processor's payment is over another amount than ours: a person must look."""

    code = "payment_mismatch"


# --- wishes -----------------------------------------------------------------------------------------------------------


def start_checkout(
    session: Session, organisation_id: UUID, amount_minor: int, *, save_card: bool, now: datetime, settings: Settings
) -> Payment:
    """A page on which this amount can be paid; its address is on the payment once the call was answered.

    Raises InvalidTopUp, UnknownOrganisation.
    """
    _check_amount(amount_minor, settings)
    payment = _payment(session, organisation_id, "checkout", amount_minor, save_card=save_card, now=now)
    plan = session.get(TopUpPlan, organisation_id)
    back = f"{settings.browser_url}/v1/billing/return?payment={payment.id.hex}"
    wish = port.CheckoutWish(
        reference=payment.id.hex,
        amount=amount_minor,
        currency=payment.currency,
        customer=None if plan is None else plan.customer,
        save_card=save_card,
        success_url=f"{back}&paid=1",
        cancel_url=back,
        description=DESCRIPTION,
    )
    outgoing.intend(session, wish, organisation_id=organisation_id, now=now)
    return payment


def charge_saved_card(
    session: Session,
    organisation_id: UUID,
    amount_minor: int,
    *,
    now: datetime,
    settings: Settings,
    kind: Literal["saved_card", "automatic"] = "saved_card",
) -> Payment:
    """Take this amount from the saved card. Raises InvalidTopUp, NoCard."""
    _check_amount(amount_minor, settings)
    plan = session.get(TopUpPlan, organisation_id)
    if plan is None or plan.customer is None or plan.payment_method is None:
        raise NoCard("Pay once with `save_card` first.")
    payment = _payment(session, organisation_id, kind, amount_minor, save_card=False, now=now)
    wish = port.ChargeWish(
        reference=payment.id.hex,
        amount=amount_minor,
        currency=payment.currency,
        customer=plan.customer,
        payment_method=plan.payment_method,
        description=DESCRIPTION,
    )
    outgoing.intend(session, wish, organisation_id=organisation_id, now=now)
    return payment


def _check_amount(amount_minor: int, settings: Settings) -> None:
    if not settings.top_up_minimum_cents <= amount_minor <= settings.top_up_maximum_cents:
        least, most = settings.top_up_minimum_cents, settings.top_up_maximum_cents
        raise InvalidTopUp(f"A top-up is {_usd(least)} to {_usd(most)} USD.", param="amount")


def _payment(
    session: Session, organisation_id: UUID, kind: str, amount_minor: int, *, save_card: bool, now: datetime
) -> Payment:
    if session.get(Organisation, organisation_id) is None:
        raise UnknownOrganisation(f"There is no organisation with the id {organisation_id}.")
    payment = Payment(
        id=new_id(),
        organisation_id=organisation_id,
        kind=kind,
        amount_minor=amount_minor,
        currency=port.CURRENCY,
        state="open",
        save_card=save_card,
        created_at=now,
        refunded_minor=0,
    )
    session.add(payment)
    session.flush()
    return payment


# --- what the processor says --------------------------------------------------------------------------------------


def apply_checkout(session: Session, view: port.CheckoutView, now: datetime) -> bool:
    """Take note of a session's address, payment or end. False: it is none of ours, or not yet."""
    payment = _find(session, Payment.session_id, view.session_id, view.reference)
    if payment is None:
        return False
    payment.session_id = view.session_id
    payment.url = view.url
    if view.payment_id is not None and payment.payment_id is None:
        payment.payment_id = view.payment_id
    if view.status == "expired" and payment.state == "open":
        payment.state = "expired"
    session.flush()
    return True


def apply_payment(session: Session, view: port.PaymentView, now: datetime) -> bool:
    """Credit what was paid, once. False: it is none of ours, or not yet. Raises PaymentMismatch."""
    payment = _find(session, Payment.payment_id, view.payment_id, view.reference)
    if payment is None:
        return False
    if payment.payment_id not in (None, view.payment_id):
        raise PaymentMismatch(f"Top-up {payment.id.hex} was paid by {payment.payment_id} and by {view.payment_id}.")
    payment.payment_id = view.payment_id
    payment.charge_id = view.charge_id or payment.charge_id
    payment.receipt_url = view.receipt_url or payment.receipt_url
    if view.status == "succeeded" and payment.state != "succeeded":
        _succeed(session, payment, view, now)
    elif view.status in ("failed", "canceled") and payment.state == "open":
        _fail(session, payment, view.failure or view.status, now, final=view.status == "canceled")
    session.flush()
    return True


def refused(session: Session, payment_id: UUID, reason: str, now: datetime) -> None:
    """The processor will not do it."""
    payment = _locked(session, Payment.id == payment_id)
    if payment is not None and payment.state == "open":
        _fail(session, payment, reason, now, final=True)


def _succeed(session: Session, payment: Payment, view: port.PaymentView, now: datetime) -> None:
    if (view.amount, view.currency) != (payment.amount_minor, payment.currency):
        raise PaymentMismatch(
            f"Top-up {payment.id.hex} asked for {payment.amount_minor} {payment.currency}, "
            f"{view.payment_id} paid {view.amount} {view.currency}."
        )
    organisation = session.get_one(Organisation, payment.organisation_id)
    credit = ensure_credit_account(session, organisation)
    clearing = ledger.open_accounts(session, [ledger.charted(ledger.CLEARING)])[ledger.CLEARING]
    nano = minor.from_minor(payment.amount_minor, payment.currency)
    payment.journal_id = ledger.post(
        session,
        ledger.JournalDraft(
            idempotency_key=f"{PAYMENT_KEY}{view.payment_id}",
            kind="top_up",
            source=SOURCE,
            outside_id=view.payment_id,
            lines=(ledger.debit(clearing, nano), ledger.credit(credit, nano)),
        ),
    ).journal_id
    payment.state = "succeeded"
    payment.failure = None
    payment.succeeded_at = now
    if payment.save_card and view.customer is not None and view.payment_method is not None:
        _save_card(session, payment.organisation_id, view.customer, view.payment_method)


def _fail(session: Session, payment: Payment, reason: str, now: datetime, *, final: bool) -> None:
    payment.failure = reason[:200]
    # On a Checkout page the renter may try another card.
    if not final and payment.kind == "checkout":
        return
    payment.state = "failed"
    if payment.kind == "automatic":
        plan = session.get(TopUpPlan, payment.organisation_id, with_for_update=True)
        if plan is not None:
            plan.enabled, plan.stopped_because = False, reason[:200]
    message = f"A top-up of {_usd(payment.amount_minor)} USD failed: {reason[:200]}."
    if payment.kind == "automatic":
        message += " Automatic top-ups are off until you turn them on again."
    tell(session, payment.organisation_id, "top_up_failed", message, key=f"failed:{payment.id.hex}", now=now)


def _save_card(session: Session, organisation_id: UUID, customer: str, payment_method: str) -> None:
    card = {"customer": customer, "payment_method": payment_method}
    statement = insert(TopUpPlan).values(organisation_id=organisation_id, **card)
    session.execute(statement.on_conflict_do_update(index_elements=[TopUpPlan.organisation_id], set_=card))


def _find(session: Session, column: Any, value: str, reference: str | None) -> Payment | None:
    """By the processor's id, or by our reference within it. Locked."""
    found = _locked(session, column == value)
    if found is None and reference is not None and len(reference) == 32:
        found = _locked(session, Payment.id == UUID(hex=reference))
    return found


def _locked(session: Session, condition: Any) -> Payment | None:
    query = select(Payment).where(condition).with_for_update(key_share=True)
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


# --- plans ------------------------------------------------------------------------------------------------------------


def set_plan(
    session: Session,
    organisation_id: UUID,
    *,
    enabled: bool,
    threshold_nano: int,
    amount_minor: int,
    monthly_cap_minor: int,
    low_balance_nano: int,
    settings: Settings,
) -> TopUpPlan:
    """How an organisation tops up by itself. Raises InvalidTopUp, NoCard when enabled without a saved card."""
    _check_amount(amount_minor, settings)
    if threshold_nano < 0 or low_balance_nano < 0 or monthly_cap_minor < amount_minor:
        raise InvalidTopUp("The cap is at least one top-up, and no threshold is below zero.", param="monthly_cap")
    plan = session.get(TopUpPlan, organisation_id, with_for_update=True)
    if plan is None:
        plan = TopUpPlan(organisation_id=organisation_id)
        session.add(plan)
    if enabled and plan.payment_method is None:
        raise NoCard("Pay once with `save_card` first.")
    plan.enabled = enabled
    plan.threshold_nano = threshold_nano
    plan.amount_minor = amount_minor
    plan.monthly_cap_minor = monthly_cap_minor
    plan.low_balance_nano = low_balance_nano
    plan.stopped_because = None
    session.flush()
    return plan


def find_plan(session: Session, organisation_id: UUID) -> TopUpPlan | None:
    """The organisation's plan, if it ever made one or saved a card."""
    return session.get(TopUpPlan, organisation_id)


def low_on_credit(session: Session) -> list[tuple[UUID, int]]:
    """Organisations whose plan asks for something: (id, what is available in nano-USD)."""
    rows = session.execute(_BELOW, {"limit": MAX_AUTOMATIC})
    return [(row.organisation_id, int(row.available_nano)) for row in rows]


def act_on_plan(
    session: Session, organisation_id: UUID, available_nano: int, *, now: datetime, settings: Settings
) -> Payment | None:
    """Tell of a low balance, and begin an automatic top-up if it is due and within the month's cap."""
    plan = session.get_one(TopUpPlan, organisation_id, with_for_update=True)
    if plan.low_balance_nano and available_nano < plan.low_balance_nano:
        message = f"Your balance is {ledger.format_nano(available_nano)} USD."
        tell(session, organisation_id, "low_balance", message, key=f"low:{now:%Y-%m-%d}", now=now)
    if not plan.enabled or available_nano >= plan.threshold_nano:
        return None
    if outgoing.in_doubt(session, organisation_id) or _open_automatic(session, organisation_id):
        return None
    spent_minor = _automatic_since(session, organisation_id, now.replace(day=1, hour=0, minute=0, second=0))
    if spent_minor + plan.amount_minor > plan.monthly_cap_minor:
        message = f"Automatic top-ups reached this month's cap of {_usd(plan.monthly_cap_minor)} USD."
        tell(session, organisation_id, "cap_reached", message, key=f"cap:{now:%Y-%m}", now=now)
        return None
    return charge_saved_card(session, organisation_id, plan.amount_minor, now=now, settings=settings, kind="automatic")


def _open_automatic(session: Session, organisation_id: UUID) -> bool:
    query = select(Payment.id).where(
        Payment.organisation_id == organisation_id, Payment.kind == "automatic", Payment.state == "open"
    )
    return session.scalar(query.limit(1)) is not None


def _automatic_since(session: Session, organisation_id: UUID, since: datetime) -> int:
    query = select(func.coalesce(func.sum(Payment.amount_minor), 0)).where(
        Payment.organisation_id == organisation_id,
        Payment.kind == "automatic",
        Payment.state.in_(("open", "succeeded")),
        Payment.created_at >= since,
    )
    return int(session.scalar(query) or 0)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_payments(session: Session, organisation_id: UUID) -> Sequence[Payment]:
    """Top-ups of an organisation, newest first: what was paid is a receipt."""
    query = select(Payment).where(Payment.organisation_id == organisation_id)
    return session.scalars(query.order_by(Payment.created_at.desc(), Payment.id.desc()).limit(MAX_LISTED)).all()


def get_payment(session: Session, organisation_id: UUID, payment_id: UUID) -> Payment:
    """One of the organisation's top-ups. Raises UnknownPayment."""
    payment = session.get(Payment, payment_id, populate_existing=True)
    if payment is None or payment.organisation_id != organisation_id:
        raise UnknownPayment(f"There is no top-up {payment_id.hex}.")
    return payment


def _usd(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"
