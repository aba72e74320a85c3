"""Owners' accounts at the processor: Connect Express for Stripe. Without an active one earnings wait, and are kept."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from marketplace.accounts.models import Organisation
from marketplace.accounts.service import UnknownOrganisation
from marketplace.billing import outgoing
from marketplace.billing.models import OwnerAccount
from marketplace.billing.notices import tell
from marketplace.billing.payments import port
from marketplace.core.errors import BadRequest

_COUNTRY: Final = re.compile(r"[A-Z]{2}", re.ASCII)


class InvalidOnboarding(BadRequest):
    code = "invalid_onboarding"


def open_account(
    session: Session, organisation_id: UUID, country: str, email: str | None, now: datetime
) -> OwnerAccount:
    """Ask the processor for an account, unless there is one or that was asked. Raises InvalidOnboarding,
    UnknownOrganisation."""
    if not _COUNTRY.fullmatch(country):
        raise InvalidOnboarding("A country is two capital letters, such as DE.", param="country")
    if session.get(Organisation, organisation_id, with_for_update={"key_share": True}) is None:
        raise UnknownOrganisation(f"There is no organisation with the id {organisation_id}.")
    account = session.get(OwnerAccount, organisation_id, with_for_update=True)
    if account is None:
        account = OwnerAccount(organisation_id=organisation_id, state="asked")
        session.add(account)
        session.flush()
    last = outgoing.of_subject(session, port.AccountWish, organisation_id)
    if account.account_id is None and (last is None or last.state == "refused"):
        wish = port.AccountWish(reference=organisation_id.hex, country=country, email=email)
        outgoing.intend(session, wish, organisation_id=organisation_id, now=now)
    return account


def apply_account(session: Session, view: port.AccountView, now: datetime) -> bool:
    """Take note of an account's state. False: it is none of ours, or not yet."""
    query = select(OwnerAccount).where(OwnerAccount.account_id == view.account_id).with_for_update()
    account = session.scalars(query.execution_options(populate_existing=True)).one_or_none()
    if account is None and view.reference is not None and len(view.reference) == 32:
        account = session.get(OwnerAccount, UUID(hex=view.reference), with_for_update=True, populate_existing=True)
        if account is not None and account.account_id is not None:
            # A second account of one owner: nobody asked for it.
            return False
    if account is None:
        return False
    was_active = account.payouts_enabled
    account.account_id = view.account_id
    account.state = view.state
    account.payouts_enabled = view.payouts_enabled
    account.due = list(view.due)
    account.disabled_reason = view.disabled_reason
    account.checked_at = now
    if was_active and not view.payouts_enabled:
        message = f"The payment processor stopped your payouts ({view.disabled_reason or view.state})."
        tell(session, account.organisation_id, "payouts_stopped", message, key=f"stopped:{now.isoformat()}", now=now)
    session.flush()
    return True


def refused(session: Session, organisation_id: UUID, reason: str, now: datetime) -> None:
    """The processor will not open an account like that."""
    account = session.get(OwnerAccount, organisation_id, with_for_update=True)
    if account is not None and account.account_id is None:
        account.disabled_reason = reason[:200]


def find(session: Session, organisation_id: UUID) -> OwnerAccount | None:
    """The owner's account, as it was last seen."""
    return session.get(OwnerAccount, organisation_id, populate_existing=True)
