"""Unused paid credit goes back to the cards that it came from, newest payment first. Promotional credit never does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

import ledger
from marketplace.accounts.models import Organisation
from marketplace.billing import outgoing
from marketplace.billing.models import Dispute, Payment, Refund
from marketplace.billing.notices import tell
from marketplace.billing.payments import minor, port
from marketplace.billing.topups import SOURCE
from marketplace.core.errors import BadRequest, Conflict
from marketplace.core.ids import new_id

MAX_KEY_CHARACTERS: Final = 100


class InvalidRefund(BadRequest):
    code = "invalid_refund"


class NotRefundable(Conflict):
    """There is less unused credit than that, or it may not leave."""

    code = "not_refundable"


def cumulative_share(part: int, whole: int, before: int, after: int) -> int:
    """What of `part` belongs to the step from `before` to `after` out of `whole`: the share of the total after it, less
    the share of the total before it. However many steps, their shares sum to that of the whole, to the unit."""
    if not 0 <= before <= after <= whole or whole <= 0:
        raise ValueError(f"{before} to {after} are no steps within {whole}")
    return ledger.divide_half_even(part * after, whole) - ledger.divide_half_even(part * before, whole)


def unused_nano(session: Session, organisation_id: UUID, credit_account_id: int) -> int:
    """Paid credit that nothing holds and nothing promotional hides, in nano-USD. Locks the renter's balances."""
    promotional = ledger.find_account(session, ledger.renter_promotional(organisation_id.hex))
    accounts = [credit_account_id] if promotional is None else [credit_account_id, promotional]
    locked = ledger.lock_balances(session, accounts)
    credit = locked[credit_account_id]
    given_nano = 0 if promotional is None else int(locked[promotional].posted_nano)
    # Open holds are spent from promotional credit first.
    return max(0, int(credit.posted_nano) - max(0, int(credit.held_nano) - given_nano))


def request_refund(
    session: Session, organisation_id: UUID, amount_minor: int | None, key: str, now: datetime
) -> Sequence[Refund]:
    """Give back this much of the unused credit, or all of it; one refund a payment. The same key again returns the
    first answer. Raises InvalidRefund, NotRefundable."""
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidRefund(f"A key has 1 to {MAX_KEY_CHARACTERS} characters.", param="key")
    organisation = session.get(Organisation, organisation_id, with_for_update={"key_share": True})
    if organisation is None or organisation.credit_account_id is None:
        raise NotRefundable("There is no credit.")
    known = _of_key(session, organisation_id, key)
    if known:
        if amount_minor is not None and sum(refund.amount_minor for refund in known) != amount_minor:
            raise InvalidRefund("This key stands for another amount.", param="key")
        return known
    if under_dispute(session, organisation_id):
        raise NotRefundable("A payment is disputed: nothing leaves until that is decided.")
    unused = unused_nano(session, organisation_id, organisation.credit_account_id)
    wanted = minor.payout_split(unused, port.CURRENCY).minor if amount_minor is None else amount_minor
    if wanted <= 0 or minor.from_minor(wanted, port.CURRENCY) > unused:
        raise NotRefundable(f"Unused paid credit is {ledger.format_nano(unused)} USD.", param="amount")
    account = organisation.credit_account_id
    refunds = []
    for payment, part in _parts(session, organisation_id, wanted):
        refunds.append(_ask(session, payment, part, key=key, credit_account_id=account, now=now))
    return refunds


def _parts(session: Session, organisation_id: UUID, wanted: int) -> list[tuple[Payment, int]]:
    query = select(Payment).where(Payment.organisation_id == organisation_id, Payment.state == "succeeded")
    query = query.where(
        Payment.refunded_minor < Payment.amount_minor, ~exists().where(Dispute.payment_id == Payment.id)
    )
    newest = query.order_by(Payment.created_at.desc(), Payment.id.desc()).with_for_update(key_share=True)
    parts, left = [], wanted
    for payment in session.scalars(newest.execution_options(populate_existing=True)):
        part = min(left, payment.amount_minor - payment.refunded_minor)
        parts.append((payment, part))
        left -= part
        if not left:
            return parts
    raise NotRefundable("The payments of this credit were refunded already, or did not come through the processor.")


def _ask(
    session: Session, payment: Payment, amount_minor: int, *, key: str, credit_account_id: int, now: datetime
) -> Refund:
    assert payment.payment_id is not None  # it succeeded
    payment.refunded_minor += amount_minor
    refund = Refund(
        id=new_id(),
        payment_id=payment.id,
        organisation_id=payment.organisation_id,
        request_key=key,
        amount_minor=amount_minor,
        state="asked",
        created_at=now,
    )
    session.add(refund)
    session.flush()
    _post(session, refund, "asked", (credit_account_id, _refunding(session, refund)))
    wish = port.RefundWish(reference=refund.id.hex, payment=payment.payment_id, amount=amount_minor)
    outgoing.intend(session, wish, organisation_id=payment.organisation_id, now=now)
    return refund


def apply_refund(session: Session, view: port.RefundView, now: datetime) -> bool:
    """Take note of what became of a refund. False: it is none of ours, or not yet."""
    refund = _locked(session, view)
    if refund is None:
        return False
    refund.refund_id = view.refund_id
    if view.status == "succeeded" and refund.state in ("asked", "pending"):
        refund.state = "succeeded"
        _post(session, refund, "sent", (_refunding(session, refund), _clearing(session)))
    elif view.status == "pending" and refund.state == "asked":
        refund.state = "pending"
    elif view.status == "failed":
        _fail(session, refund, "failed", now)
    session.flush()
    return True


def refused(session: Session, refund_id: UUID, reason: str, now: datetime) -> None:
    """The processor will not do it: the credit is the renter's again."""
    refund = session.get_one(Refund, refund_id, with_for_update=True, populate_existing=True)
    _fail(session, refund, reason, now)


def _fail(session: Session, refund: Refund, reason: str, now: datetime) -> None:
    if refund.state == "failed":
        return
    credit = session.get_one(Organisation, refund.organisation_id).credit_account_id
    assert credit is not None  # it was refunded from there
    if refund.state == "succeeded":
        # The bank sent it back: the processor has the money again.
        _post(session, refund, "returned", (_clearing(session), credit))
    else:
        _post(session, refund, "failed", (_refunding(session, refund), credit))
    refund.state, refund.failure = "failed", reason[:200]
    payment = session.get_one(Payment, refund.payment_id, with_for_update={"key_share": True}, populate_existing=True)
    payment.refunded_minor -= refund.amount_minor
    message = "A refund did not reach the card; the credit is yours again."
    tell(session, refund.organisation_id, "refund_failed", message, key=f"refund:{refund.id.hex}", now=now)


def under_dispute(session: Session, organisation_id: UUID) -> bool:
    """Whether a payment of theirs is disputed, or was lost and not talked through."""
    query = select(
        exists().where(
            Dispute.organisation_id == organisation_id,
            (Dispute.state == "open") | ((Dispute.state == "lost") & Dispute.accepted_at.is_(None)),
        )
    )
    return bool(session.scalar(query))


def read_refunds(session: Session, organisation_id: UUID) -> Sequence[Refund]:
    """Refunds of an organisation, newest first."""
    query = select(Refund).where(Refund.organisation_id == organisation_id).order_by(Refund.created_at.desc())
    return session.scalars(query.limit(200)).all()


def _of_key(session: Session, organisation_id: UUID, key: str) -> Sequence[Refund]:
    query = select(Refund).where(Refund.organisation_id == organisation_id, Refund.request_key == key)
    return session.scalars(query.order_by(Refund.id)).all()


def _locked(session: Session, view: port.RefundView) -> Refund | None:
    condition = Refund.refund_id == view.refund_id
    if view.reference is not None and len(view.reference) == 32:
        condition = condition | (Refund.id == UUID(hex=view.reference))
    query = select(Refund).where(condition).with_for_update().execution_options(populate_existing=True)
    return session.scalars(query).one_or_none()


def _refunding(session: Session, refund: Refund) -> int:
    code = ledger.renter_refunding(refund.organisation_id.hex)
    return ledger.open_accounts(session, [ledger.charted(code)])[code]


def _clearing(session: Session) -> int:
    return ledger.open_accounts(session, [ledger.charted(ledger.CLEARING)])[ledger.CLEARING]


def _post(session: Session, refund: Refund, step: str, accounts: tuple[int, int]) -> None:
    """Move the refund's amount: debit the first account, credit the second."""
    nano = minor.from_minor(refund.amount_minor, port.CURRENCY)
    ledger.post(
        session,
        ledger.JournalDraft(
            idempotency_key=f"refund:{refund.id.hex}:{step}",
            kind=f"refund_{step}",
            source=SOURCE,
            outside_id=refund.id.hex,
            lines=(ledger.debit(accounts[0], nano), ledger.credit(accounts[1], nano)),
        ),
    )
