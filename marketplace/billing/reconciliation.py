"""The ledger beside the processor's own books: line by line, row by row, and in total. Differences are kept with the
day when they were first seen. What events failed to tell is learnt here as well, since each line names its object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import String, cast, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import ledger
from marketplace.billing import effects, owners
from marketplace.billing.models import (
    Break,
    Dispute,
    OwnerAccount,
    Payment,
    Payout,
    Reconciliation,
    Refund,
    StatementLine,
)
from marketplace.billing.payments import minor, port
from marketplace.billing.topups import SOURCE
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import FallowError
from marketplace.core.logs import get_logger

log = get_logger(__name__)
OVERLAP: Final = timedelta(days=2)
"""Lines are read again from this long before the newest known one."""
GRACE: Final = timedelta(hours=1)
"""A charge's line may come a while after the charge."""
ACCOUNT_DAYS: Final = timedelta(days=45)
"""Owners' accounts are read for this long after a payout; banks send money back within weeks."""
MAX_REFRESHED: Final = 2_000
MAX_BREAKS: Final = 5_000
FEE_TYPES: Final = frozenset({"stripe_fee", "stripe_fx_fee", "tax_fee", "network_cost"})
BANK_TYPES: Final = frozenset({"payout", "payout_failure", "payout_cancel", "topup", "topup_reversal"})
MIRRORED: Final = frozenset({"payment", "payment_refund"})
"""On an owner's account these are the other side of our transfers."""
Place = tuple[port.ObjectKind, str, str]
"""An object: its kind, its id, and the account that it is on (empty: the platform's)."""
_HEALING: Final[dict[str, port.ObjectKind]] = {
    "charge": "payment",
    "payment": "payment",
    "refund": "refund",
    "refund_failure": "refund",
    "adjustment": "dispute",
    "payout": "payout",
    "payout_failure": "payout",
    "payout_cancel": "payout",
}
"""Type of a line -> the object worth a look."""

_DIFFERENCES = text(
    """
    with expected as (
      select 'payment:' || replace(id::text, '-', '') as row, amount_minor as minor from payments
        where state = 'succeeded' and succeeded_at <= :before
      union all
      select 'refund:' || replace(id::text, '-', ''), case when state = 'succeeded' then -amount_minor else 0 end
        from refunds where refund_id is not null
      union all
      select 'dispute:' || id, case when state in ('open', 'lost') then -amount_minor else 0 end from disputes
      union all
      select 'transfer:' || replace(id::text, '-', ''), -amount_minor from payouts where transfer_id is not null
      union all
      select 'reversal:' || replace(id::text, '-', ''), amount_minor from payouts where reversal_id is not null
      union all
      select 'payout:' || replace(id::text, '-', ''),
             case when state in ('paying', 'paid') then -amount_minor else 0 end
        from payouts where payout_id is not null
    ), actual as (
      select matched as row, sum(amount_minor) as minor from processor_lines
      where matched is not null group by matched
    )
    select e.row, e.minor as expected, coalesce(a.minor, 0)::bigint as actual
    from expected e left join actual a on a.row = e.row
    where e.minor <> coalesce(a.minor, 0) order by e.row limit :limit
    """
)
_IN_DOUBT = text(
    """
    select id, kind, error from outgoing_calls
    where state in ('sent', 'unknown') and first_sent_at <= :before order by id limit :limit
    """
)
_QUARANTINED = text("select id, type, error from webhook_inbox where state = 'quarantined' order by id limit :limit")


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that the two books do not agree on."""

    kind: str
    subject: str
    story: str
    amount_nano: int


@dataclass(frozen=True)
class Report:
    """One reconciliation, and what is open after it."""

    totals: Reconciliation
    breaks: Sequence[Break]
    lines_read: int

    @property
    def clean(self) -> bool:
        return not self.breaks


def reconcile(factory: SessionFactory, payments: port.Payments, now: datetime) -> Report:
    """Read the processor's books, heal what events failed to tell, and compare. Blocking; raises PaymentError when the
    processor does not answer."""
    refresh(factory, payments, now)
    accounts = _accounts(factory, now)
    lines_read = _read_lines(factory, payments, ["", *accounts], now)
    if _heal(factory, payments, now):
        # What healed may have moved money on.
        lines_read += _read_lines(factory, payments, ["", *accounts], now)
    platform = payments.funds()
    connected_minor = sum(payments.funds(account).total for account in accounts)
    with transaction(factory) as session:
        _match_lines(session)
        totals = _totals(session, platform.total, connected_minor, now)
        found = [*_differences(session, now), *_total_differences(totals)]
        breaks = _keep(session, found, now)
        totals.open_breaks = len(breaks)
        session.add(totals)
        session.flush()
    if not totals.covered:
        log.error("payouts_stopped", payable_nano=totals.payable_nano, held_nano=totals.processor_platform_nano)
    return Report(totals, breaks, lines_read)


# --- looking at what is open --------------------------------------------------------------------------------------


def refresh(factory: SessionFactory, payments: port.Payments, now: datetime) -> int:
    """Look at each object that is still under way; returns how many. Events that were lost are made up for."""
    with factory() as session:
        objects = _open_objects(session)
    for each in objects:
        _look(factory, payments, each, now)
    return len(objects)


def _open_objects(session: Session) -> list[Place]:
    found: list[Place] = []
    topups = select(Payment.state, Payment.payment_id, Payment.session_id).where(
        (Payment.state == "open") | (Payment.state == "succeeded") & Payment.charge_id.is_(None)
    )
    for state, payment_id, session_id in session.execute(topups.order_by(Payment.created_at).limit(MAX_REFRESHED)):
        # A session leads to its payment, and alone knows that nobody will pay any more.
        if session_id is not None and state == "open":
            found.append(("checkout", session_id, ""))
        elif payment_id is not None:
            found.append(("payment", payment_id, ""))
    refunds = select(Refund.refund_id).where(Refund.state == "pending", Refund.refund_id.is_not(None))
    found += [("refund", str(each), "") for each in session.scalars(refunds.limit(MAX_REFRESHED))]
    disputes = select(Dispute.id).where(Dispute.state.in_(("inquiry", "open")))
    found += [("dispute", each, "") for each in session.scalars(disputes.limit(MAX_REFRESHED))]
    payouts = select(Payout.payout_id, Payout.account_id).where(Payout.state == "paying", Payout.payout_id.is_not(None))
    found += [("payout", str(each), account) for each, account in session.execute(payouts.limit(MAX_REFRESHED))]
    owning = select(OwnerAccount.account_id).where(OwnerAccount.account_id.is_not(None))
    owning = owning.where(OwnerAccount.state.not_in(("active", "rejected")))
    found += [("account", str(each), "") for each in session.scalars(owning.limit(MAX_REFRESHED))]
    return found


def _look(factory: SessionFactory, payments: port.Payments, place: Place, now: datetime) -> None:
    """One object as it is now. What fails shows as a break, and does not keep the rest from being looked at."""
    try:
        views = effects.look(payments, *place)
        with transaction(factory) as session:
            for view in views:
                effects.apply(session, view, now)
    except (FallowError, ledger.LedgerError, IntegrityError) as error:
        log.warning("object_not_applied", kind=place[0], object=place[1], error=str(error)[:300])


# --- the processor's lines ----------------------------------------------------------------------------------------


def _accounts(factory: SessionFactory, now: datetime) -> list[str]:
    """Owners' accounts through which money went lately."""
    recent = select(Payout.account_id).where(
        (Payout.created_at >= now - ACCOUNT_DAYS) | Payout.state.not_in(("paid", "returned", "cancelled"))
    )
    with factory() as session:
        return sorted(set(session.scalars(recent)))


def _read_lines(factory: SessionFactory, payments: port.Payments, accounts: Iterable[str], now: datetime) -> int:
    total = 0
    for account in accounts:
        with factory() as session:
            newest = session.scalar(select(func.max(StatementLine.at)).where(StatementLine.account == account))
        since = (newest or now - timedelta(days=3_650)) - OVERLAP
        lines = list(payments.lines(since, account))
        with transaction(factory) as session:
            total += sum(_keep_line(session, line) for line in reversed(lines))
            _match_lines(session)
    return total


def _keep_line(session: Session, line: port.ProcessorLine) -> bool:
    """Write a line down once, and book what only the processor knows: its fees, and money between it and our bank."""
    values = {
        "line_id": line.line_id,
        "account": line.account,
        "type": line.type,
        "category": line.category,
        "amount_minor": line.amount,
        "fee_minor": line.fee,
        "currency": line.currency,
        "source": line.source,
        "at": line.at,
        "matched": _own(line),
    }
    fresh = session.scalar(
        insert(StatementLine).values(values).on_conflict_do_nothing().returning(StatementLine.line_id)
    )
    if fresh is None or line.account or line.currency != port.CURRENCY:
        return fresh is not None
    fee = line.fee - line.amount if line.type in FEE_TYPES else line.fee
    _book(session, f"processor-fee:{line.line_id}", "processor_fee", ledger.PROCESSOR_FEES, fee)
    if line.type in BANK_TYPES:
        _book(session, f"bank:{line.line_id}", "bank_movement", ledger.BANK, -line.amount)
    return True


def _own(line: port.ProcessorLine) -> str | None:
    """Lines that need no row of ours."""
    if line.account:
        return f"mirror:{line.line_id}" if line.type in MIRRORED else None
    return f"booked:{line.line_id}" if line.type in FEE_TYPES | BANK_TYPES else None


def _book(session: Session, key: str, kind: str, code: str, amount_minor: int) -> None:
    """Move from the processor to another account; less than nothing moves back."""
    if not amount_minor:
        return
    ids = ledger.open_accounts(session, [ledger.charted(each) for each in (code, ledger.CLEARING)])
    nano = minor.from_minor(amount_minor, port.CURRENCY)
    lines = (
        ledger.Line(ids[code], ledger.Money(nano)),
        ledger.Line(ids[ledger.CLEARING], ledger.Money(-nano)),
    )
    draft = ledger.JournalDraft(idempotency_key=key, kind=kind, source=SOURCE, outside_id=key, lines=lines)
    ledger.post(session, draft)


_MATCHES: Final[tuple[tuple[frozenset[str], str, Any, Any], ...]] = (
    (frozenset({"charge", "payment"}), "payment", Payment.charge_id, Payment.id),
    (frozenset({"refund", "refund_failure", "payment_refund"}), "refund", Refund.refund_id, Refund.id),
    (frozenset({"adjustment"}), "dispute", Dispute.id, Dispute.id),
    (frozenset({"transfer"}), "transfer", Payout.transfer_id, Payout.id),
    (frozenset({"transfer_refund"}), "reversal", Payout.reversal_id, Payout.id),
    (frozenset({"payout", "payout_failure", "payout_cancel"}), "payout", Payout.payout_id, Payout.id),
)
"""Types of lines, the kind of row that they belong to, where their source stands in it, and its id."""


def _match_lines(session: Session) -> None:
    unmatched = StatementLine.matched.is_(None)
    for types, name, column, identity in _MATCHES:
        hexed = func.replace(cast(identity, String), "-", "") if name != "dispute" else identity
        session.execute(
            update(StatementLine)
            .where(unmatched, StatementLine.type.in_(types), StatementLine.source == column)
            .values(matched=func.concat(name, ":", hexed))
            .execution_options(synchronize_session=False)
        )


def _heal(factory: SessionFactory, payments: port.Payments, now: datetime) -> int:
    """Look at the objects of lines that say something else than our rows; returns how many."""
    with factory() as session:
        rows = {row.row for row in session.execute(_DIFFERENCES, {"before": now, "limit": MAX_BREAKS})}
        query = select(StatementLine).where(StatementLine.matched.is_(None) | StatementLine.matched.in_(rows))
        lines = session.scalars(query.order_by(StatementLine.at).limit(MAX_REFRESHED)).all()
    seen = set()
    for line in lines:
        kind = _HEALING.get(line.type)
        if kind is not None and line.source is not None and line.source not in seen:
            seen.add(line.source)
            _look(factory, payments, (kind, line.source, line.account), now)
    return len(seen)


# --- comparing --------------------------------------------------------------------------------------------------------


def _totals(session: Session, platform_minor: int, connected_minor: int, now: datetime) -> Reconciliation:
    rows = {row.code: row.balance_nano for row in ledger.trial_balance(session).rows}
    in_flight = select(func.coalesce(func.sum(Payout.amount_minor), 0)).where(
        Payout.state == "paying", Payout.payout_id.is_not(None)
    )
    # The processor takes a payout from the account when it begins, we when it has arrived.
    connected_minor += int(session.scalar(in_flight) or 0)
    return Reconciliation(
        at=now,
        ledger_platform_nano=rows.get(ledger.CLEARING, 0),
        processor_platform_nano=minor.from_minor(platform_minor, port.CURRENCY),
        ledger_connected_nano=rows.get(ledger.CONNECTED, 0),
        processor_connected_nano=minor.from_minor(connected_minor, port.CURRENCY),
        payable_nano=owners.owed_nano(session),
    )


def _total_differences(totals: Reconciliation) -> list[Difference]:
    pairs = (
        ("platform_total", totals.ledger_platform_nano, totals.processor_platform_nano),
        ("connected_total", totals.ledger_connected_nano, totals.processor_connected_nano),
    )
    return [
        Difference(
            kind,
            "usd",
            f"The ledger says {ledger.format_nano(ours)} USD, the processor {ledger.format_nano(theirs)}.",
            theirs - ours,
        )
        for kind, ours, theirs in pairs
        if ours != theirs
    ]


def _differences(session: Session, now: datetime) -> list[Difference]:
    limit = {"limit": MAX_BREAKS}
    found = []
    unmatched = select(StatementLine).where(StatementLine.matched.is_(None)).order_by(StatementLine.at)
    for line in session.scalars(unmatched.limit(MAX_BREAKS)):
        story = f"{line.type} of {line.source or 'nothing'} on {line.account or 'the platform'} is none of ours."
        nano = minor.from_minor(line.amount_minor - line.fee_minor, line.currency)
        found.append(Difference("line_unmatched", line.line_id, story, nano))
    for row in session.execute(_DIFFERENCES, {"before": now - GRACE, **limit}):
        story = f"Ours says {row.expected} {port.CURRENCY} (minor units), the processor's lines {row.actual}."
        nano = minor.from_minor(row.actual - row.expected, port.CURRENCY)
        found.append(Difference("amount", row.row, story, nano))
    for row in session.execute(_IN_DOUBT, {"before": now - GRACE, **limit}):
        found.append(Difference("call_unknown", row.id.hex, f"{row.kind}: {row.error or 'no answer'}", 0))
    for row in session.execute(_QUARANTINED, limit):
        found.append(Difference("webhook_quarantined", str(row.id), f"{row.type}: {row.error}", 0))
    return found


def _keep(session: Session, found: Sequence[Difference], now: datetime) -> Sequence[Break]:
    """Open what is new, close what is gone, and return what is open, oldest first."""
    known = {
        (each.kind, each.subject): each
        for each in session.scalars(select(Break).where(Break.resolved_at.is_(None)).with_for_update())
    }
    for difference in found:
        existing = known.pop((difference.kind, difference.subject), None)
        if existing is None:
            session.add(
                Break(
                    kind=difference.kind,
                    subject=difference.subject,
                    story=difference.story[:500],
                    amount_nano=difference.amount_nano,
                    opened_at=now,
                )
            )
        else:
            existing.story, existing.amount_nano = difference.story[:500], difference.amount_nano
    for gone in known.values():
        gone.resolved_at = now
    session.flush()
    return open_breaks(session)


def open_breaks(session: Session) -> Sequence[Break]:
    """Differences that nobody has explained yet, oldest first."""
    query = select(Break).where(Break.resolved_at.is_(None)).order_by(Break.opened_at, Break.id)
    return session.scalars(query.limit(MAX_BREAKS)).all()


def newest(session: Session) -> Reconciliation | None:
    """The last comparison."""
    return session.scalars(select(Reconciliation).order_by(Reconciliation.id.desc()).limit(1)).first()
