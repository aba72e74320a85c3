"""What billing's endpoints, commands and tasks share: one processor, the books, and the whole of a step at a time.

A step writes its wish in one transaction and then drives it, so that whoever asked sees what became of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from marketplace.billing import driving, onboarding, outgoing, payouts, refunds, runs, topups
from marketplace.billing.models import OutgoingCall, OwnerAccount, Payment, Refund
from marketplace.billing.payments import port
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import Conflict
from marketplace.core.settings import Settings

T = TypeVar("T")


class NotReady(Conflict):
    """The processor has not answered yet; ask again."""

    code = "not_ready"
    retryable = True


@dataclass(frozen=True, slots=True)
class Desk:
    """Blocking: on an event loop, its methods belong into threads."""

    settings: Settings
    factory: SessionFactory
    payments: port.Payments
    clock: Callable[[], datetime] = utcnow

    @property
    def sandbox(self) -> bool:
        """No money moves here."""
        return self.payments.name == "sandbox"

    def write(self, step: Callable[[Session], T]) -> T:
        """One transaction."""
        with transaction(self.factory) as session:
            return step(session)

    def checkout(self, organisation_id: UUID, amount_minor: int, *, save_card: bool) -> Payment:
        """A page to pay on. Raises InvalidTopUp, NotReady."""
        now = self.clock()
        payment = self.write(
            lambda session: topups.start_checkout(
                session, organisation_id, amount_minor, save_card=save_card, now=now, settings=self.settings
            )
        )
        self._drive(payment.id)
        return self.write(lambda session: topups.get_payment(session, organisation_id, payment.id))

    def charge(self, organisation_id: UUID, amount_minor: int) -> Payment:
        """Take it from the saved card. Raises InvalidTopUp, NoCard."""
        now = self.clock()
        payment = self.write(
            lambda session: topups.charge_saved_card(
                session, organisation_id, amount_minor, now=now, settings=self.settings
            )
        )
        self._drive(payment.id)
        return self.write(lambda session: topups.get_payment(session, organisation_id, payment.id))

    def refund(self, organisation_id: UUID, amount_minor: int | None, key: str) -> list[Refund]:
        """Give unused credit back. Raises InvalidRefund, NotRefundable."""
        now = self.clock()
        asked = self.write(
            lambda session: list(refunds.request_refund(session, organisation_id, amount_minor, key, now))
        )
        for each in asked:
            self._drive(each.id)
        return self.write(lambda session: [session.get_one(Refund, each.id) for each in asked])

    def onboard(self, organisation_id: UUID, country: str, email: str | None) -> tuple[OwnerAccount, str]:
        """An owner's account, and the page on which the owner goes on. Raises InvalidOnboarding, NotReady."""
        now = self.clock()
        self.write(lambda session: onboarding.open_account(session, organisation_id, country, email, now))
        self._drive(organisation_id)
        account = self.write(lambda session: onboarding.find(session, organisation_id))
        if account is None or account.account_id is None:
            because = account.disabled_reason if account is not None else None
            raise NotReady(because or "The payment processor has not answered yet; ask again.")
        back = f"{self.settings.browser_url}/v1/billing/return"
        return account, self.payments.onboarding_link(account.account_id, back, back)

    def run_payouts(self, key: str, person: str) -> list[payouts.Plan]:
        """A run, and its wishes sent. Raises PayoutsStopped, PaymentError."""
        now = self.clock()
        plans = runs.run_payouts(self.factory, self.payments, self.settings, key=key, started_by=person, now=now)
        driving.drive_due(self.factory, self.payments, now)
        return plans

    def _drive(self, subject_id: UUID) -> None:
        """Send what waits about this row."""
        query = select(OutgoingCall.id).where(
            OutgoingCall.subject_id == subject_id, OutgoingCall.state.in_(outgoing.OPEN)
        )
        for call_id in self.write(lambda session: list(session.scalars(query))):
            driving.drive(self.factory, self.payments, call_id, self.clock())
