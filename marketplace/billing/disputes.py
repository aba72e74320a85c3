"""A renter's bank takes a payment back. The renter's balance is frozen until that is decided.

Won: the money is back. Lost: unused credit pays first; then what the credit was spent on is taken back from its owners
and from our fee; what nobody is left to pay is our loss. The renter stays frozen until finance accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

import ledger
from marketplace.accounts.models import Organisation
from marketplace.billing import clawback, refunds
from marketplace.billing.models import Dispute, Payment
from marketplace.billing.notices import tell
from marketplace.billing.payments import minor, port
from marketplace.billing.topups import SOURCE
from marketplace.core.errors import Conflict, NotFound

FINAL: Final = ("won", "lost", "withdrawn")
WITHDRAWN_MONEY: Final = ("open", "won", "lost")
"""In these states the bank has taken the money, or had."""


class UnknownDispute(NotFound):
    code = "unknown_dispute"


class NotLost(Conflict):
    """Only a lost dispute can be accepted."""

    code = "dispute_not_lost"


def apply_dispute(session: Session, view: port.DisputeView, now: datetime) -> bool:
    """Bring a dispute to what the processor says it is, in whatever order that is learnt. False: its payment is none of
    ours, or not yet."""
    query = select(Payment).where(Payment.payment_id == view.payment_id).with_for_update(key_share=True)
    payment = session.scalars(query.execution_options(populate_existing=True)).one_or_none()
    if payment is None or payment.journal_id is None:
        return False
    dispute = session.get(Dispute, view.dispute_id)
    if dispute is None:
        dispute = _new(session, payment, view, now)
    if dispute.state in FINAL:
        return True
    before, dispute.state = dispute.state, view.status
    if view.status in WITHDRAWN_MONEY and before == "inquiry":
        _open(session, dispute, payment, now)
    if view.status == "won":
        _post(session, dispute, "won", _won_lines(session, dispute))
    elif view.status == "lost":
        _lose(session, dispute, payment)
    if view.status in FINAL:
        dispute.closed_at = now
        session.flush()
        _thaw(session, dispute)
    session.flush()
    return True


def _new(session: Session, payment: Payment, view: port.DisputeView, now: datetime) -> Dispute:
    dispute = Dispute(
        id=view.dispute_id,
        payment_id=payment.id,
        organisation_id=payment.organisation_id,
        amount_minor=view.amount,
        state="inquiry",
        reason=view.reason,
        opened_at=now,
    )
    session.add(dispute)
    session.flush()
    return dispute


def _open(session: Session, dispute: Dispute, payment: Payment, now: datetime) -> None:
    ids = _accounts(session, dispute)
    nano = _nano(dispute)
    if nano:
        _post(session, dispute, "opened", [ledger.debit(ids["disputed"], nano), ledger.credit(ids["clearing"], nano)])
    ledger.freeze(session, _credit(session, dispute))
    message = f"Your bank disputes a payment ({dispute.reason}). Your balance is frozen until that is decided."
    tell(session, payment.organisation_id, "balance_frozen", message, key=f"dispute:{dispute.id}", now=now)


def _won_lines(session: Session, dispute: Dispute) -> list[ledger.Line]:
    ids, nano = _accounts(session, dispute), _nano(dispute)
    return [ledger.debit(ids["clearing"], nano), ledger.credit(ids["disputed"], nano)] if nano else []


def _lose(session: Session, dispute: Dispute, payment: Payment) -> None:
    assert payment.journal_id is not None  # checked by the caller
    nano = _nano(dispute)
    if not nano:
        return
    credit = _credit(session, dispute)
    unused_nano = min(nano, refunds.unused_nano(session, dispute.organisation_id, credit))
    parts = clawback.spent_after(session, dispute.organisation_id, payment.journal_id, nano - unused_nano)
    lost_nano = nano - unused_nano - sum(part.amount_nano for part in parts)
    ids = _accounts(session, dispute)
    lines = [ledger.credit(ids["disputed"], nano), *clawback.taken_lines(session, parts)]
    if unused_nano:
        lines.append(ledger.debit(credit, unused_nano))
    if lost_nano:
        lines.append(ledger.debit(ids["loss"], lost_nano))
    # What a frozen account must not do for its renter, it does for the bank.
    ledger.unfreeze(session, credit)
    journal_id = _post(session, dispute, "lost", lines)
    ledger.freeze(session, credit)
    clawback.write(session, parts, journal_id, "dispute", f"dispute {dispute.id} was lost")


def accept(session: Session, dispute_id: str, now: datetime) -> Dispute:
    """A lost dispute was talked through: the renter may spend again. Raises UnknownDispute, NotLost."""
    dispute = session.get(Dispute, dispute_id, with_for_update=True)
    if dispute is None:
        raise UnknownDispute(f"There is no dispute {dispute_id[:80]}.")
    if dispute.state != "lost":
        raise NotLost(f"Dispute {dispute_id} is {dispute.state}.")
    dispute.accepted_at = dispute.accepted_at or now
    session.flush()
    _thaw(session, dispute)
    return dispute


def read_disputes(session: Session, *, open_only: bool = False) -> Sequence[Dispute]:
    """Disputes, newest first."""
    query = select(Dispute).order_by(Dispute.opened_at.desc(), Dispute.id)
    if open_only:
        query = query.where(Dispute.state.in_(("inquiry", "open")))
    return session.scalars(query.limit(500)).all()


def _thaw(session: Session, dispute: Dispute) -> None:
    if not refunds.under_dispute(session, dispute.organisation_id):
        ledger.unfreeze(session, _credit(session, dispute))


def _credit(session: Session, dispute: Dispute) -> int:
    account = session.get_one(Organisation, dispute.organisation_id).credit_account_id
    assert account is not None  # a payment was credited
    return account


def _nano(dispute: Dispute) -> int:
    return minor.from_minor(dispute.amount_minor, port.CURRENCY)


def _accounts(session: Session, dispute: Dispute) -> dict[str, int]:
    codes = {
        "disputed": ledger.renter_disputed(dispute.organisation_id.hex),
        "clearing": ledger.CLEARING,
        "loss": ledger.BAD_DEBT,
    }
    ids = ledger.open_accounts(session, [ledger.charted(code) for code in codes.values()])
    return {name: ids[code] for name, code in codes.items()}


def _post(session: Session, dispute: Dispute, step: str, lines: Sequence[ledger.Line]) -> int:
    if not lines:
        return 0
    draft = ledger.JournalDraft(
        idempotency_key=f"dispute:{dispute.id}:{step}",
        kind=f"dispute_{step}",
        source=SOURCE,
        outside_id=dispute.id,
        lines=tuple(lines),
        memo={"reason": dispute.reason[:200]},
    )
    return ledger.post(session, draft).journal_id
