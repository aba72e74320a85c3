"""Promotional credit: apart from cash, spent first, never refunded and never paid out.

Requests are held on the one account of paid credit. Its floor is the promotional balance, below zero: what may be held
is both together, with one lock and one row on the hot path. Settlement then moves the promotional part over first, so
that paid credit never really falls below zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row, insert
from sqlalchemy.orm import Session

import ledger
from marketplace.billing.models import PromotionalUse

SOURCE = "fallow"


def grant(
    session: Session, organisation_id: UUID, credit_account_id: int, amount_nano: int, *, key: str, reason: str
) -> int:
    """Give promotional credit; returns the journal's id. The same key again changes nothing."""
    codes = (ledger.renter_promotional(organisation_id.hex), ledger.PROMOTIONS)
    promotional, expense = (
        ledger.open_accounts(session, [ledger.charted(code) for code in codes])[code] for code in codes
    )
    ledger.lock_balances(session, (promotional, credit_account_id))
    posted = ledger.post(
        session,
        ledger.JournalDraft(
            idempotency_key=f"promotion:{key}",
            kind="promotion",
            source=SOURCE,
            outside_id=key,
            lines=(ledger.debit(expense, amount_nano), ledger.credit(promotional, amount_nano)),
            memo={"reason": reason},
        ),
    )
    lower_floor(session, credit_account_id, promotional)
    return posted.journal_id


def lower_floor(session: Session, credit_account_id: int, promotional_account_id: int) -> None:
    """Let paid credit be held down to what promotional credit covers."""
    left_nano = ledger.available(session, promotional_account_id).posted_nano
    ledger.set_bounds(session, credit_account_id, floor_nano=-left_nano)


def balance_nano(session: Session, organisation_id: UUID) -> int:
    """Promotional credit that is left."""
    account = ledger.find_account(session, ledger.renter_promotional(organisation_id.hex))
    return 0 if account is None else ledger.available(session, account).posted_nano


def spend_first(session: Session, receipts: Sequence[Row[Any]], key: str) -> None:
    """Before these receipts are settled: let promotional credit pay for them, as far as it goes.

    Locks the batch's renters in the order of accounts, promotional ones among them, before anything is posted.
    """
    renters = {row.renter_organisation_id: row.credit_account_id for row in receipts if row.charge_nano}
    codes = {ledger.renter_promotional(renter.hex): renter for renter in renters}
    found = {codes[code]: account for code, account in ledger.find_accounts(session, codes).items()}
    if not found:
        return
    locked = ledger.lock_balances(session, [*found.values(), *renters.values()])
    left = {renter: int(locked[account].posted_nano) for renter, account in found.items()}
    spent: dict[UUID, int] = defaultdict(int)
    uses = []
    for row in receipts:
        nano = min(left.get(row.renter_organisation_id, 0), row.charge_nano)
        if nano > 0:
            left[row.renter_organisation_id] -= nano
            spent[row.renter_organisation_id] += nano
            uses.append({"receipt_id": row.id, "nano": nano})
    if not uses:
        return
    _move(session, {found[renter]: (renters[renter], nano) for renter, nano in spent.items()}, key)
    session.execute(insert(PromotionalUse), uses)


def _move(session: Session, moves: dict[int, tuple[int, int]], key: str) -> None:
    """From promotional accounts to those of paid credit: promotional -> (credit account, nano)."""
    lines = [ledger.debit(promotional, nano) for promotional, (_, nano) in moves.items()]
    lines += [ledger.credit(account, nano) for account, nano in moves.values()]
    draft = ledger.JournalDraft(
        idempotency_key=f"promotion-spent:{key}",
        kind="promotion_spent",
        source=SOURCE,
        outside_id=key,
        lines=tuple(lines),
    )
    ledger.post(session, draft)
    for promotional, (account, _) in moves.items():
        lower_floor(session, account, promotional)
