"""The API's resources; importing this package registers their routes."""

from tests.fakes.stripe.resources import (
    accounts,
    balance,
    charges,
    checkout,
    customers,
    disputes,
    events,
    payment_intents,
    payment_methods,
    payouts,
    refunds,
    setup_intents,
    transfers,
    webhook_endpoints,
)

__all__ = [
    "accounts",
    "balance",
    "charges",
    "checkout",
    "customers",
    "disputes",
    "events",
    "payment_intents",
    "payment_methods",
    "payouts",
    "refunds",
    "setup_intents",
    "transfers",
    "webhook_endpoints",
]
