"""What the processor tells, whoever asked: an answer, a webhook or a look-up all end here, and may end here often."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from marketplace.billing import disputes, onboarding, payouts, refunds, topups
from marketplace.billing.models import OutgoingCall
from marketplace.billing.payments import port


def apply(session: Session, view: port.View, now: datetime) -> bool:  # noqa: PLR0911  # one a kind
    """Bring our rows to what an object says. False: it belongs to none of them, or not yet."""
    match view:
        case port.CheckoutView():
            return topups.apply_checkout(session, view, now)
        case port.PaymentView():
            return topups.apply_payment(session, view, now)
        case port.RefundView():
            return refunds.apply_refund(session, view, now)
        case port.DisputeView():
            return disputes.apply_dispute(session, view, now)
        case port.AccountView():
            return onboarding.apply_account(session, view, now)
        case port.TransferView():
            return payouts.apply_transfer(session, view, now)
        case port.ReversalView():
            return payouts.apply_reversal(session, view, now)
        case port.PayoutView():
            return payouts.apply_payout(session, view, now)


_REFUSED: Final = {
    port.CheckoutWish.__name__: topups.refused,
    port.ChargeWish.__name__: topups.refused,
    port.RefundWish.__name__: refunds.refused,
    port.AccountWish.__name__: onboarding.refused,
    port.TransferWish.__name__: payouts.transfer_refused,
    port.PayoutWish.__name__: payouts.payout_refused,
    port.ReversalWish.__name__: payouts.reversal_refused,
}


def refuse(session: Session, call: OutgoingCall, reason: str, now: datetime) -> None:
    """The processor's final no to a wish."""
    _REFUSED[call.kind](session, call.subject_id, reason, now)


def look(payments: port.Payments, kind: port.ObjectKind, object_id: str, account: str = "") -> list[port.View]:
    """An object as it is now, and what it leads to: a paid session's payment. Blocking; raises PaymentError."""
    return followed(payments, payments.fetch(kind, object_id, account))


def followed(payments: port.Payments, view: port.View) -> list[port.View]:
    """A view, and what it leads to."""
    if isinstance(view, port.CheckoutView) and view.payment_id is not None:
        return [view, payments.fetch("payment", view.payment_id)]
    return [view]
