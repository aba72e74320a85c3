"""What was paid for delivered work and is taken back: a refund of usage, or a dispute that was lost. The owner's part
comes from what the owner is still owed; what was paid out already becomes a debt that future earnings pay off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import Row, insert, text
from sqlalchemy.orm import Session

import ledger
from marketplace.billing import owners, promotions
from marketplace.billing.models import TakeBack
from marketplace.billing.refunds import cumulative_share
from marketplace.core.errors import BadRequest, NotFound
from marketplace.core.ids import new_id

MAX_RECEIPTS: Final = 50_000
"""That one dispute looks at, newest first."""

_RECEIPT = """
    select r.id, r.renter_organisation_id, r.owner_organisation_id, o.credit_account_id, r.charge_nano, r.fee_nano,
           r.journal_id, coalesce(u.nano, 0)::bigint as promotional_nano,
           coalesce(t.taken_nano, 0)::bigint as taken_nano, coalesce(t.given_nano, 0)::bigint as given_nano
    from receipts r join organisations o on o.id = r.renter_organisation_id
    left join promotional_uses u on u.receipt_id = r.id
    left join lateral (select sum(amount_nano) as taken_nano, sum(promotional_nano) as given_nano
                       from take_backs where receipt_id = r.id) t on true
"""
_ONE = text(f"{_RECEIPT} where r.id = :id")
_PAID_AFTER = text(
    f"""
    {_RECEIPT}
    where r.renter_organisation_id = :renter and r.charge_nano > 0 and r.journal_id > :journal
    order by r.at desc, r.id desc limit :limit
    """
)


class UnknownUsage(NotFound):
    """There is no such receipt, or it is not settled yet."""

    code = "unknown_receipt"


class InvalidUsageRefund(BadRequest):
    code = "invalid_refund"


@dataclass(frozen=True, slots=True)
class Part:
    """What is taken back of one receipt, in nano-USD."""

    receipt_id: UUID
    owner_id: UUID
    amount_nano: int
    fee_nano: int
    promotional_nano: int

    @property
    def owner_nano(self) -> int:
        return self.amount_nano - self.fee_nano


def refund_usage(session: Session, receipt_id: UUID, amount_nano: int | None, reason: str, *, key: str, by: str) -> int:
    """Give a renter back what a receipt charged, in part or all that is left; returns the journal's id.

    Fee and promotional share follow the cumulative totals. The same key again changes nothing. Raises UnknownUsage,
    InvalidUsageRefund.
    """
    first = session.execute(_ONE, {"id": receipt_id}).one_or_none()
    if first is None or not first.journal_id:
        raise UnknownUsage(f"There is no settled receipt {receipt_id.hex}.", param="receipt")
    code = ledger.renter_promotional(first.renter_organisation_id.hex)
    promotional = ledger.open_accounts(session, [ledger.charted(code)])[code]
    ledger.lock_balances(session, (first.credit_account_id, promotional))
    known = session.execute(
        text("select id from ledger_journals where idempotency_key = :key"), {"key": f"usage-refund:{key}"}
    ).scalar()
    if known is not None:
        return int(known)
    row = session.execute(_ONE, {"id": receipt_id}).one()
    left_nano = row.charge_nano - row.taken_nano
    wanted_nano = left_nano if amount_nano is None else amount_nano
    if not 0 < wanted_nano <= left_nano:
        raise InvalidUsageRefund(f"{ledger.format_nano(left_nano)} USD are left of this receipt.", param="amount")
    part = _part(row, wanted_nano, paid_only=False)
    given = [(row.credit_account_id, wanted_nano - part.promotional_nano), (promotional, part.promotional_nano)]
    draft = ledger.JournalDraft(
        idempotency_key=f"usage-refund:{key}",
        kind="refund_usage",
        source=owners.SOURCE,
        outside_id=key,
        lines=(*taken_lines(session, [part]), *(ledger.credit(account, nano) for account, nano in given if nano)),
        memo={"receipt": receipt_id.hex, "reason": reason[:500], "by": by[:200]},
    )
    journal_id = ledger.post(session, draft).journal_id
    write(session, [part], journal_id, "refund", reason)
    promotions.lower_floor(session, row.credit_account_id, promotional)
    return journal_id


def spent_after(session: Session, renter_id: UUID, journal_id: int, nano: int) -> list[Part]:
    """Up to so much of what a renter paid for work after a journal, newest first: what that credit was spent on.
    Promotional parts are left out: no card paid for them."""
    parts, left = [], nano
    rows = session.execute(_PAID_AFTER, {"renter": renter_id, "journal": journal_id, "limit": MAX_RECEIPTS})
    for row in rows:
        paid_nano = row.charge_nano - row.promotional_nano - (row.taken_nano - row.given_nano)
        amount_nano = min(left, paid_nano)
        if amount_nano > 0:
            parts.append(_part(row, amount_nano, paid_only=True))
            left -= amount_nano
        if not left:
            break
    return parts


def _part(row: Row[Any], amount_nano: int, *, paid_only: bool) -> Part:
    steps = (row.charge_nano, row.taken_nano, row.taken_nano + amount_nano)
    given = 0 if paid_only else cumulative_share(row.promotional_nano, *steps)
    given = min(given, row.promotional_nano - row.given_nano)
    return Part(row.id, row.owner_organisation_id, amount_nano, cumulative_share(row.fee_nano, *steps), given)


def taken_lines(session: Session, parts: Iterable[Part]) -> list[ledger.Line]:
    """Lines that take these parts from their owners and from our fee. Takes the owners' locks, in order."""
    by_owner: dict[UUID, int] = defaultdict(int)
    fee_nano = 0
    for part in parts:
        by_owner[part.owner_id] += part.owner_nano
        fee_nano += part.fee_nano
    lines = []
    for owner_id, nano in sorted(by_owner.items()):
        lines += owners.taken_from(session, owner_id, nano)
    if fee_nano:
        lines.append(ledger.debit(ledger.open_accounts(session, [ledger.charted(ledger.FEES)])[ledger.FEES], fee_nano))
    return lines


def write(
    session: Session, parts: Iterable[Part], journal_id: int, kind: Literal["refund", "dispute"], reason: str
) -> None:
    """Remember what was taken back, receipt by receipt."""
    rows = [
        {
            "id": new_id(),
            "receipt_id": part.receipt_id,
            "kind": kind,
            "amount_nano": part.amount_nano,
            "owner_nano": part.owner_nano,
            "fee_nano": part.fee_nano,
            "promotional_nano": part.promotional_nano,
            "reason": reason[:500],
            "journal_id": journal_id,
        }
        for part in parts
    ]
    if rows:
        session.execute(insert(TakeBack), rows)
