"""A stand-in for Stripe, for tests and local work: a real HTTP server that the official client talks to unmodified.

It keeps one platform with its connected accounts, moves money by Stripe's rules on a clock that tests move, signs
webhooks, honours idempotency keys, and fails on demand. Currencies are never converted: each settles as itself.
"""

from tests.fakes.stripe.cards import CARDS, Authentication, Card
from tests.fakes.stripe.clock import Clock
from tests.fakes.stripe.currencies import FeeRule
from tests.fakes.stripe.errors import StripeError
from tests.fakes.stripe.faults import Fault, FaultKind
from tests.fakes.stripe.standin import StandInStripe
from tests.fakes.stripe.webhooks import Answer, Endpoint
from tests.fakes.stripe.world import Terms

__all__ = [
    "CARDS",
    "Answer",
    "Authentication",
    "Card",
    "Clock",
    "Endpoint",
    "Fault",
    "FaultKind",
    "FeeRule",
    "StandInStripe",
    "StripeError",
    "Terms",
]
