"""Which processor the settings name, and the guard against mixing two in one set of books."""

from __future__ import annotations

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from marketplace.billing.models import ProcessorIdentity
from marketplace.billing.payments.port import ModeMismatch, Payments
from marketplace.billing.payments.sandbox import Sandbox
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.logs import get_logger
from marketplace.core.settings import Settings

log = get_logger(__name__)


def make_payments(settings: Settings, factory: SessionFactory) -> Payments:
    """The processor of this installation. Raises ModeMismatch for keys of the wrong mode."""
    if settings.payment_provider == "sandbox":
        return Sandbox(factory)
    from marketplace.billing.payments.stripe_adapter import StripePayments  # noqa: PLC0415  # 30 MB that few need

    payments = StripePayments(settings)
    for connect, name in ((False, "FALLOW_STRIPE_WEBHOOK_SECRET"), (True, "FALLOW_STRIPE_CONNECT_WEBHOOK_SECRET")):
        if not payments.webhooks_enabled(connect=connect):
            log.warning("webhook_endpoint_disabled", because=f"{name} is empty", connect=connect)
    return payments


def claim_books(factory: SessionFactory, payments: Payments) -> None:
    """Write down whose books these are, once. Raises ModeMismatch if they are another processor's, or the other
    mode's: test and live, sandbox and Stripe never meet in one ledger."""
    with transaction(factory) as session:
        _claim(session, payments)


def _claim(session: Session, payments: Payments) -> None:
    values = {"id": 1, "provider": payments.name, "live": payments.live}
    session.execute(insert(ProcessorIdentity).values(values).on_conflict_do_nothing())
    known = session.get_one(ProcessorIdentity, 1)
    if (known.provider, known.live) != (payments.name, payments.live):
        mode = "live" if known.live else "test"
        raise ModeMismatch(
            f"This database keeps the books of {known.provider} in {mode} mode. Another processor or mode needs "
            f"another database."
        )
