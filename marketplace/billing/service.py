"""Renters' credit and settlement: what turns receipts into journals. Services flush, edges commit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.orm import Session

import ledger
from marketplace.accounts.models import Organisation
from marketplace.accounts.service import UnknownOrganisation
from marketplace.billing import promotions
from marketplace.core.errors import BadRequest, Conflict, FallowError

SOURCE = "fallow"
"""Who the journals' outside ids belong to."""
NOTHING_POSTED = 0
"""Journal id of receipts over nothing: a free model's. A journal has no line of zero."""
MAX_TOP_UP_NANO = 100_000_000 * 1_000_000_000
"""A hundred million USD: more is a slip of the keyboard, not a payment."""
MAX_KEY_CHARACTERS = 200


class InvalidAmount(BadRequest):
    code = "invalid_amount"


class TopUpMismatch(Conflict):
    """The key stands for another top-up already."""

    code = "idempotency_mismatch"


class SettlementBroken(FallowError):
    """A receipt whose job is not `delivered`: the two are written together, so something else wrote here."""

    code = "settlement_broken"


@dataclass(frozen=True, slots=True)
class Credit:
    """A renter's account, in nano-USD. What is available may be held by the next request: paid and promotional
    credit together."""

    posted_nano: int
    """Paid credit."""
    held_nano: int
    available_nano: int
    promotional_nano: int = 0
    """Given; spent before the paid part, never refunded."""


@dataclass(frozen=True, slots=True)
class SettledBatch:
    """Receipts that one call settled. `journal_id` is None when there was nothing to post."""

    count: int
    journal_id: int | None
    renter_nano: int = 0
    owner_nano: int = 0
    fee_nano: int = 0
    loss_nano: int = 0


def ensure_credit_account(session: Session, organisation: Organisation) -> int:
    """Open the account that this organisation spends from, if it has none; returns its id. Safe to repeat."""
    if organisation.credit_account_id is None:
        code = ledger.renter_credit(organisation.id.hex)
        organisation.credit_account_id = ledger.open_accounts(session, [ledger.charted(code)])[code]
        session.flush()
    return organisation.credit_account_id


def top_up(session: Session, organisation_id: UUID, amount_nano: int, key: str) -> int:
    """Add paid credit that came in outside the payment processor; returns the journal's id. The same key again
    changes nothing. What comes through the processor is `topups`' to book.

    Raises InvalidAmount, UnknownOrganisation, TopUpMismatch if the key was used for another amount or organisation.
    """
    _check(amount_nano, key)
    credit_account = ensure_credit_account(session, _organisation(session, organisation_id))
    bank = ledger.open_accounts(session, [ledger.charted(ledger.BANK)])[ledger.BANK]
    draft = ledger.JournalDraft(
        idempotency_key=f"top-up:{key}",
        kind="top_up",
        source=SOURCE,
        outside_id=key,
        lines=(ledger.debit(bank, amount_nano), ledger.credit(credit_account, amount_nano)),
    )
    try:
        return ledger.post(session, draft).journal_id
    except ledger.IdempotencyMismatch as error:
        raise TopUpMismatch(str(error), param="key") from error


def _check(amount_nano: int, key: str) -> None:
    if not 0 < amount_nano <= MAX_TOP_UP_NANO:
        raise InvalidAmount("A top-up is more than nothing and at most 100,000,000 USD.", param="amount")
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidAmount(f"An idempotency key has 1 to {MAX_KEY_CHARACTERS} characters.", param="key")


def balance(session: Session, organisation_id: UUID) -> Credit:
    """What a renter paid in and has not spent, and how much of it is held. Raises UnknownOrganisation."""
    account_id = _organisation(session, organisation_id).credit_account_id
    if account_id is None:
        return Credit(0, 0, 0)
    now = ledger.available(session, account_id)
    given_nano = promotions.balance_nano(session, organisation_id)
    return Credit(now.posted_nano, now.held_nano, now.available_nano + given_nano, given_nano)


def grant_promotion(session: Session, organisation_id: UUID, amount_nano: int, key: str, reason: str) -> int:
    """Give promotional credit; returns the journal's id. The same key again changes nothing.

    Raises InvalidAmount, UnknownOrganisation, TopUpMismatch if the key was used for another amount or organisation.
    """
    _check(amount_nano, key)
    account = ensure_credit_account(session, _organisation(session, organisation_id))
    try:
        return promotions.grant(session, organisation_id, account, amount_nano, key=key, reason=reason)
    except ledger.IdempotencyMismatch as error:
        raise TopUpMismatch(str(error), param="key") from error


def expire_holds(session: Session, limit: int) -> int:
    """Free what is held for jobs that are still open long after their deadline: everything else failed. A charge that
    waits for settlement is never among them. Returns how many."""
    return ledger.expire(session, ledger.overdue(session, limit))


def _organisation(session: Session, organisation_id: UUID) -> Organisation:
    organisation = session.get(Organisation, organisation_id)
    if organisation is None:
        raise UnknownOrganisation(f"There is no organisation with the id {organisation_id}.")
    return organisation


# --- settlement ---------------------------------------------------------------------------------------------------

# Billing sits below jobs and imports none of it; the statements name the two columns that settlement moves. Receipts
# that another settler took are skipped. Jobs are locked in the order of the hot path (jobs, then balances), and the
# balances as late as possible: admissions of those renters wait for them.
_PICK = text(
    """
    select r.id, r.job_id, r.renter_organisation_id, o.credit_account_id, r.owner_organisation_id,
           r.charge_nano, r.owner_nano, r.fee_nano, r.loss_nano
    from receipts r join organisations o on o.id = r.renter_organisation_id
    where r.journal_id is null order by r.id limit :limit
    for no key update of r skip locked
    """
)
_LOCK_JOBS = text("select id from jobs where id = any(cast(:ids as uuid[])) order by id for no key update")
_SETTLE_JOBS = text(
    "update jobs set state = 'settled' where id = any(cast(:ids as uuid[])) and state = 'delivered' returning id"
)
_SETTLE_RECEIPTS = text(
    "update receipts set journal_id = :journal_id where id = any(cast(:ids as uuid[])) and journal_id is null"
)


def settle(session: Session, limit: int) -> SettledBatch:
    """Settle up to `limit` receipts by one journal: renters' debits = owners' credits + our fee - our loss.

    Each receipt's hold is captured, its job becomes `settled`. All or nothing, and safe with several settlers at once.
    """
    receipts = session.execute(_PICK, {"limit": limit}).all()
    if not receipts:
        return SettledBatch(0, None)
    _settle_jobs(session, [row.job_id for row in receipts])
    owing = [row for row in receipts if row.charge_nano or row.loss_nano]
    free = [row.id for row in receipts if not (row.charge_nano or row.loss_nano)]
    if free:
        session.execute(_SETTLE_RECEIPTS, {"journal_id": NOTHING_POSTED, "ids": free})
    if not owing:
        return SettledBatch(len(receipts), None)
    promotions.spend_first(session, owing, min(row.id for row in owing).hex)
    journal_id = ledger.post(session, _draft(owing, _accounts(session, owing))).journal_id
    session.execute(_SETTLE_RECEIPTS, {"journal_id": journal_id, "ids": [row.id for row in owing]})
    return SettledBatch(
        len(receipts),
        journal_id,
        renter_nano=sum(row.charge_nano for row in owing),
        owner_nano=sum(row.owner_nano for row in owing),
        fee_nano=sum(row.fee_nano for row in owing),
        loss_nano=sum(row.loss_nano for row in owing),
    )


def _settle_jobs(session: Session, job_ids: Sequence[UUID]) -> None:
    session.execute(_LOCK_JOBS, {"ids": list(job_ids)})
    settled = set(session.scalars(_SETTLE_JOBS, {"ids": list(job_ids)}))
    strays = [job_id for job_id in job_ids if job_id not in settled]
    if strays:
        raise SettlementBroken(
            f"{len(strays)} receipts belong to jobs that are not delivered, such as {strays[0].hex}."
        )


def _accounts(session: Session, receipts: Iterable[Row[Any]]) -> dict[str, int]:
    """The accounts that a settlement credits, opened where they are new: code -> id."""
    codes = {ledger.owner_pending(row.owner_organisation_id.hex) for row in receipts} | {ledger.FEES, ledger.LOSS}
    return ledger.open_accounts(session, [ledger.charted(code) for code in sorted(codes)])


def _draft(receipts: Sequence[Row[Any]], accounts: dict[str, int]) -> ledger.JournalDraft:
    """One journal over these receipts: a line an account, a capture a charge."""
    amounts: dict[int, int] = defaultdict(int)
    for row in receipts:
        amounts[row.credit_account_id] += row.charge_nano
        amounts[accounts[ledger.LOSS]] += row.loss_nano
        amounts[accounts[ledger.FEES]] -= row.fee_nano
        amounts[accounts[ledger.owner_pending(row.owner_organisation_id.hex)]] -= row.owner_nano
    first = min(row.id for row in receipts)
    return ledger.JournalDraft(
        idempotency_key=f"settlement:{first.hex}",
        kind="settlement",
        source=SOURCE,
        outside_id=first.hex,
        lines=tuple(ledger.Line(account, ledger.Money(nano)) for account, nano in sorted(amounts.items()) if nano),
        captures=tuple(ledger.Capture(row.job_id, row.charge_nano) for row in receipts if row.charge_nano),
        memo={"receipts": len(receipts)},
    )
