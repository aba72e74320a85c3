"""Test cards by Stripe's names, and how each behaves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tests.fakes.stripe.errors import StripeError, card_error


class Authentication(StrEnum):
    """When the holder must prove who they are."""

    NEVER = "never"
    ONCE = "unless the card was set up for off-session use"
    ALWAYS = "at each payment"


@dataclass(frozen=True)
class Card:
    """A payment method's behaviour. `declines` names the decline of each charge, `refuses` that of attaching too."""

    brand: str = "visa"
    last4: str = "4242"
    type: str = "card"
    declines: str | None = None
    refuses: bool = False
    authentication: Authentication = Authentication.NEVER
    disputes: bool = False
    """Each charge is disputed at once."""
    refund_fails: bool = False
    refund_pends: bool = False
    immediate: bool = False
    """The money skips the pending balance."""
    delayed: bool = False
    """A bank debit: the payment is processing until the bank answers."""


DECLINES = {
    "generic_decline": ("card_declined", "Your card was declined."),
    "insufficient_funds": ("card_declined", "Your card has insufficient funds."),
    "lost_card": ("card_declined", "Your card was declined."),
    "stolen_card": ("card_declined", "Your card was declined."),
    "fraudulent": ("card_declined", "Your card was declined."),
    "expired_card": ("expired_card", "Your card has expired."),
    "incorrect_cvc": ("incorrect_cvc", "Your card's security code is incorrect."),
    "processing_error": (
        "processing_error",
        "An error occurred while processing your card. Try again in a little bit.",
    ),
    "authentication_required": (
        "authentication_required",
        "Your card was declined. This transaction requires authentication.",
    ),
}

CARDS = {
    "pm_card_visa": Card(),
    "pm_card_mastercard": Card(brand="mastercard", last4="4444"),
    "pm_card_bypassPending": Card(last4="0077", immediate=True),
    "pm_card_visa_chargeDeclined": Card(last4="0002", declines="generic_decline", refuses=True),
    "pm_card_chargeDeclined": Card(last4="0002", declines="generic_decline", refuses=True),
    "pm_card_chargeDeclinedInsufficientFunds": Card(last4="9995", declines="insufficient_funds", refuses=True),
    "pm_card_chargeDeclinedLostCard": Card(last4="9987", declines="lost_card", refuses=True),
    "pm_card_chargeDeclinedStolenCard": Card(last4="9979", declines="stolen_card", refuses=True),
    "pm_card_chargeDeclinedExpiredCard": Card(last4="0069", declines="expired_card", refuses=True),
    "pm_card_chargeDeclinedIncorrectCvc": Card(last4="0127", declines="incorrect_cvc", refuses=True),
    "pm_card_chargeDeclinedProcessingError": Card(last4="0119", declines="processing_error", refuses=True),
    "pm_card_chargeCustomerFail": Card(last4="0341", declines="generic_decline"),
    "pm_card_authenticationRequired": Card(last4="3184", authentication=Authentication.ALWAYS),
    "pm_card_authenticationRequiredOnSetup": Card(last4="3155", authentication=Authentication.ONCE),
    "pm_card_createDispute": Card(last4="0259", disputes=True),
    "pm_card_refundFail": Card(last4="5126", refund_fails=True),
    "pm_card_pendingRefund": Card(last4="7726", refund_pends=True),
    "pm_usBankAccount": Card(type="us_bank_account", last4="6789", delayed=True),
}
NUMBERS = {
    "4242424242424242": "pm_card_visa",
    "5555555555554444": "pm_card_mastercard",
    "4000000000000077": "pm_card_bypassPending",
    "4000000000000002": "pm_card_chargeDeclined",
    "4000000000009995": "pm_card_chargeDeclinedInsufficientFunds",
    "4000000000000069": "pm_card_chargeDeclinedExpiredCard",
    "4000000000000341": "pm_card_chargeCustomerFail",
    "4000002760003184": "pm_card_authenticationRequired",
    "4000002500003155": "pm_card_authenticationRequiredOnSetup",
    "4000000000000259": "pm_card_createDispute",
    "4000000000005126": "pm_card_refundFail",
    "4000000000007726": "pm_card_pendingRefund",
}


def decline(reason: str, **details: object) -> StripeError:
    """The 402 of a decline, e.g. `insufficient_funds`."""
    code, message = DECLINES[reason]
    return card_error(message, code=code, decline_code=reason, **details)
