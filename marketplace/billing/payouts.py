"""Money out: a weekly run over all owners, by separate charges and transfers.

A payout moves the owner's payable to `transit` when it is decided, the platform's money to the owner's account at the
processor (transfer), and from there to the owner's bank (payout). Whatever fails comes back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

import ledger
from marketplace.accounts.models import Organisation
from marketplace.billing import outgoing, owners
from marketplace.billing.models import OwnerAccount, Payout, PayoutApproval, PayoutRun, Reconciliation
from marketplace.billing.notices import tell
from marketplace.billing.payments import minor, port
from marketplace.core.errors import Conflict, NotFound
from marketplace.core.ids import new_id
from marketplace.core.settings import Settings

APPROVALS: Final = 2
MAX_LISTED: Final = 1_000
REVERSAL_RETRY: Final = timedelta(days=1)
"""An owner's account that is below zero cannot give a transfer back: ask again each day."""

STATEMENT_LINES: Final = (
    "payable_before",
    "earnings_released",
    "kept_in_reserve",
    "released_from_reserve",
    "set_off_against_debt",
    "paid_out",
    "carried_over",
)
"""A payout's statement: the first five sum to the last two."""

TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    "awaiting_approval": frozenset({"scheduled", "cancelled"}),
    "scheduled": frozenset({"paying", "returned", "cancelled"}),
    "paying": frozenset({"paid", "returning"}),
    # A bank may send back what had arrived.
    "paid": frozenset({"returning"}),
    "returning": frozenset({"returned"}),
    "returned": frozenset(),
    "cancelled": frozenset(),
}
"""State -> where it may go."""


class PayoutsStopped(Conflict):
    """The ledger owes more than the processor holds: nothing leaves until that is explained."""

    code = "payouts_stopped"


class UnknownPayout(NotFound):
    code = "unknown_payout"


class PayoutConflict(Conflict):
    """The payout is past that."""

    code = "payout_conflict"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do for one owner."""

    owner_id: UUID
    owner_name: str
    account_id: str | None
    due: owners.Maturing
    amount_minor: int
    left_nano: int
    """Stays payable: below the minimum, or less than the smallest unit."""
    blocked: str | None
    """Why nothing is paid; None: it is."""
    needs_approval: bool


def plan(
    session: Session,
    owner: owners.Owner,
    accounts: owners.OwnerAccounts,
    *,
    now: datetime,
    settings: Settings,
) -> Plan:
    """Decide for one owner. Reads only."""
    due = owners.maturing(session, accounts, owner.since, now, settings)
    owner_id = owner.owner_id
    split = minor.payout_split(due.available_nano, port.CURRENCY)
    account = session.get(OwnerAccount, owner_id, populate_existing=True)
    blocked = _blocked(session, owner_id, account, split.minor, settings)
    return Plan(
        owner_id=owner_id,
        owner_name=session.get_one(Organisation, owner_id).name,
        account_id=None if account is None else account.account_id,
        due=due,
        amount_minor=0 if blocked else split.minor,
        left_nano=due.available_nano if blocked else split.left_nano,
        blocked=blocked,
        needs_approval=not blocked and split.minor > settings.payout_approval_cents,
    )


def _blocked(
    session: Session, owner_id: UUID, account: OwnerAccount | None, amount_minor: int, settings: Settings
) -> str | None:
    if account is None or account.account_id is None:
        return "has no account at the payment processor"
    if not account.payouts_enabled:
        return f"the account is {account.state}"
    if outgoing.in_doubt(session, owner_id):
        return "an earlier call's outcome is unknown"
    if amount_minor < settings.payout_minimum_cents:
        return "below the minimum: carried over"
    return None


def preview(session: Session, now: datetime, settings: Settings) -> list[Plan]:
    """What a run at this time would do. Changes nothing but opens accounts of owners that lack some."""
    return [
        plan(session, owner, owners.open_owner(session, owner.owner_id), now=now, settings=settings)
        for owner in owners.list_owners(session)
    ]


# --- runs -------------------------------------------------------------------------------------------------------------


def week_key(now: datetime) -> str:
    """The key of the week's run."""
    year, week, _ = now.isocalendar()
    return f"{year}-W{week:02d}"


def begin_run(session: Session, key: str, started_by: str, now: datetime) -> PayoutRun:
    """The run of this key, begun now or before."""
    values = {"id": new_id(), "key": key, "started_by": started_by, "at": now}
    session.execute(insert(PayoutRun).values(values).on_conflict_do_nothing())
    return session.scalars(select(PayoutRun).where(PayoutRun.key == key)).one()


def pay_owner(session: Session, run: PayoutRun, owner: owners.Owner, *, now: datetime, settings: Settings) -> Plan:
    """One owner's part of a run, in one transaction. Again within the same run changes nothing."""
    owner_id = owner.owner_id
    owners.lock_owner(session, owner_id)
    accounts = owners.open_owner(session, owner_id)
    ledger.lock_balances(session, (accounts.available, accounts.reserve, accounts.transit, accounts.receivable))
    opening_nano = owners.balances(session, accounts).available_nano
    found = plan(session, owner, accounts, now=now, settings=settings)
    done = select(Payout.id).where(Payout.run_id == run.id, Payout.organisation_id == owner_id)
    if session.scalar(done) is not None:
        return found
    owners.mature(session, owner_id, accounts, found.due, f"{run.key}:{now.isoformat()}")
    if found.blocked is None and found.account_id is not None:
        payout = Payout(
            id=new_id(),
            run_id=run.id,
            organisation_id=owner_id,
            account_id=found.account_id,
            amount_minor=found.amount_minor,
            currency=port.CURRENCY,
            state="awaiting_approval" if found.needs_approval else "scheduled",
            statement=_statement(run, found, opening_nano),
            created_at=now,
            arrived=False,
        )
        session.add(payout)
        session.flush()
        _post(session, payout, "started", accounts.available, accounts.transit)
        if payout.state == "scheduled":
            _transfer(session, payout, now)
    return found


def _statement(run: PayoutRun, found: Plan, opening_nano: int) -> dict[str, Any]:
    """What the owner is told, in decimal strings of USD: opening + changes = amount + left."""
    due = found.due
    nanos = (
        opening_nano,
        due.released_nano,
        -due.reserved_nano,
        due.reserve_released_nano,
        -due.netted_nano,
        minor.from_minor(found.amount_minor, port.CURRENCY),
        found.left_nano,
    )
    amounts = {name: ledger.format_nano(nano) for name, nano in zip(STATEMENT_LINES, nanos, strict=True)}
    return {"run": run.key, "owner": found.owner_name, "currency": port.CURRENCY.upper(), "amounts": amounts}


def _transfer(session: Session, payout: Payout, now: datetime) -> None:
    wish = port.TransferWish(
        reference=payout.id.hex,
        amount=payout.amount_minor,
        currency=payout.currency,
        account=payout.account_id,
        group=payout.id.hex,
    )
    outgoing.intend(session, wish, organisation_id=payout.organisation_id, now=now)


def statement_lines(payout: Payout) -> list[tuple[str, str]]:
    """What the owner is told with the money, in order: (line, USD)."""
    amounts = payout.statement["amounts"]
    return [(name.replace("_", " "), str(amounts[name])) for name in STATEMENT_LINES]


def check_cover(session: Session, held_minor: int) -> None:
    """Raise PayoutsStopped if owners are owed more than the processor holds for the platform."""
    owed_nano = owners.owed_nano(session)
    held_nano = minor.from_minor(held_minor, port.CURRENCY)
    if owed_nano > held_nano:
        raise PayoutsStopped(
            f"Owners are owed {ledger.format_nano(owed_nano)} USD, the payment processor holds "
            f"{ledger.format_nano(held_nano)}. Reconcile, or add funds there."
        )


def covered(session: Session) -> bool:
    """What the newest reconciliation says; without one, yes."""
    newest = session.scalars(select(Reconciliation).order_by(Reconciliation.id.desc()).limit(1)).first()
    return newest is None or newest.covered


# --- people -----------------------------------------------------------------------------------------------------------


def approve(session: Session, payout_id: UUID, person: str, now: datetime) -> Payout:
    """One person's yes; the second one's sends it. Raises UnknownPayout, PayoutConflict."""
    payout = _get(session, payout_id)
    if payout.state != "awaiting_approval":
        raise PayoutConflict(f"The payout is {payout.state}: nobody needs to approve it.")
    session.execute(insert(PayoutApproval).values(payout_id=payout_id, person=person[:200]).on_conflict_do_nothing())
    count = session.scalar(select(func.count()).where(PayoutApproval.payout_id == payout_id)) or 0
    if count >= APPROVALS:
        _go(payout, "scheduled")
        _transfer(session, payout, now)
    session.flush()
    return payout


def cancel(session: Session, payout_id: UUID, person: str, now: datetime) -> Payout:
    """Stop a payout that was not sent; the owner has the money again. Raises UnknownPayout, PayoutConflict."""
    # Whoever sends the transfer locks its call first, and the payout afterwards.
    call = outgoing.of_subject(session, port.TransferWish, payout_id, locked=True)
    payout = _get(session, payout_id)
    if payout.state == "scheduled" and call is None:
        call = outgoing.of_subject(session, port.TransferWish, payout_id, locked=True)
    if payout.state not in ("awaiting_approval", "scheduled") or (call is not None and call.state != "intended"):
        raise PayoutConflict(f"The payout is {payout.state}, and on its way.")
    if call is not None:
        call.state, call.ended_at, call.error = "cancelled", now, f"cancelled by {person[:150]}"
    _end(session, payout, "cancelled", f"cancelled by {person[:150]}", now)
    return payout


def status(session: Session, *, owner_id: UUID | None = None, open_only: bool = False) -> Sequence[Payout]:
    """Payouts, newest first."""
    query = select(Payout).order_by(Payout.created_at.desc(), Payout.id.desc())
    if owner_id is not None:
        query = query.where(Payout.organisation_id == owner_id)
    if open_only:
        query = query.where(Payout.state.not_in(("paid", "returned", "cancelled")))
    return session.scalars(query.limit(MAX_LISTED)).all()


def get(session: Session, payout_id: UUID) -> Payout:
    """A payout. Raises UnknownPayout."""
    payout = session.get(Payout, payout_id, populate_existing=True)
    if payout is None:
        raise UnknownPayout(f"There is no payout {payout_id.hex}.")
    return payout


# --- what the processor says --------------------------------------------------------------------------------------


def apply_transfer(session: Session, view: port.TransferView, now: datetime) -> bool:
    """The money is in the owner's account: send it on. False: it is none of ours, or not yet."""
    payout = _find(session, Payout.transfer_id, view.transfer_id, view.reference)
    if payout is None:
        return False
    if payout.state == "scheduled":
        payout.transfer_id = view.transfer_id
        _go(payout, "paying")
        ids = _platform(session)
        _post(session, payout, "transferred", ids[ledger.CONNECTED], ids[ledger.CLEARING])
        wish = port.PayoutWish(
            reference=payout.id.hex, amount=payout.amount_minor, currency=payout.currency, account=payout.account_id
        )
        outgoing.intend(session, wish, organisation_id=payout.organisation_id, now=now)
    session.flush()
    return True


def apply_payout(session: Session, view: port.PayoutView, now: datetime) -> bool:
    """Arrived, or sent back by the bank, even after that. False: it is none of ours, or not yet."""
    payout = _find(session, Payout.payout_id, view.payout_id, view.reference)
    if payout is None:
        return False
    payout.payout_id = view.payout_id
    if view.status == "paid" and payout.state == "paying":
        _arrive(session, payout, now)
    elif view.status in ("failed", "canceled") and payout.state in ("paying", "paid"):
        _bounce(session, payout, view.failure or view.status, now)
    session.flush()
    return True


def apply_reversal(session: Session, view: port.ReversalView, now: datetime) -> bool:
    """The platform has the money again, and the owner the claim. False: it is none of ours, or not yet."""
    payout = _find(session, Payout.reversal_id, view.reversal_id, view.reference)
    if payout is None:
        return False
    if payout.state == "returning":
        payout.reversal_id = view.reversal_id
        ids = _platform(session)
        _post(session, payout, "transfer_reversed", ids[ledger.CLEARING], ids[ledger.CONNECTED])
        _end(session, payout, "returned", payout.failure or "returned", now)
    session.flush()
    return True


def transfer_refused(session: Session, payout_id: UUID, reason: str, now: datetime) -> None:
    """The transfer was not made: the owner has the money again, until the next run."""
    payout = _get(session, payout_id)
    if payout.state == "scheduled":
        _end(session, payout, "returned", reason, now)


def payout_refused(session: Session, payout_id: UUID, reason: str, now: datetime) -> None:
    """The owner's account does not pay out: take the transfer back."""
    payout = _get(session, payout_id)
    if payout.state == "paying":
        _bounce(session, payout, reason, now)


def reversal_refused(session: Session, payout_id: UUID, reason: str, now: datetime) -> None:
    """The owner's account cannot give it back now. Ask again tomorrow; reconciliation shows how long it takes."""
    payout = _get(session, payout_id)
    if payout.state == "returning":
        payout.failure = reason[:200]
        _reverse(session, payout, now, after=REVERSAL_RETRY)


def _arrive(session: Session, payout: Payout, now: datetime) -> None:
    _go(payout, "paid")
    payout.arrived, payout.ended_at = True, now
    connected = _platform(session)[ledger.CONNECTED]
    _post(session, payout, "paid", owners.open_owner(session, payout.organisation_id).transit, connected)
    message = f"{_usd(payout.amount_minor)} USD arrived."
    tell(session, payout.organisation_id, "payout_paid", message, key=f"paid:{payout.id.hex}", now=now)


def _bounce(session: Session, payout: Payout, reason: str, now: datetime) -> None:
    _go(payout, "returning")
    payout.failure, payout.ended_at = reason[:200], None
    if payout.arrived:
        connected = _platform(session)[ledger.CONNECTED]
        _post(session, payout, "failed", connected, owners.open_owner(session, payout.organisation_id).transit)
    _reverse(session, payout, now)
    message = f"A payout of {_usd(payout.amount_minor)} USD did not reach your bank: {reason[:200]}."
    tell(session, payout.organisation_id, "payout_failed", message, key=f"failed:{payout.id.hex}", now=now)


def _reverse(session: Session, payout: Payout, now: datetime, after: timedelta = timedelta()) -> None:
    assert payout.transfer_id is not None  # it was transferred
    wish = port.ReversalWish(reference=payout.id.hex, transfer=payout.transfer_id, amount=payout.amount_minor)
    outgoing.intend(session, wish, organisation_id=payout.organisation_id, now=now, after=after)


def _end(session: Session, payout: Payout, state: str, reason: str, now: datetime) -> None:
    """Back to what is payable."""
    accounts = owners.open_owner(session, payout.organisation_id)
    _go(payout, state)
    payout.failure, payout.ended_at = reason[:200], now
    _post(session, payout, state, accounts.transit, accounts.available)
    session.flush()


def _go(payout: Payout, state: str) -> None:
    if state not in TRANSITIONS[payout.state]:
        raise PayoutConflict(f"A payout that is {payout.state} cannot become {state}.")
    payout.state = state


def _get(session: Session, payout_id: UUID) -> Payout:
    payout = session.get(Payout, payout_id, with_for_update={"key_share": True}, populate_existing=True)
    if payout is None:
        raise UnknownPayout(f"There is no payout {payout_id.hex}.")
    return payout


def _find(session: Session, column: Any, value: str, reference: str | None) -> Payout | None:
    conditions = [column == value]
    if reference is not None and len(reference) == 32:
        conditions.append(Payout.id == UUID(hex=reference))
    for condition in conditions:
        query = select(Payout).where(condition).with_for_update(key_share=True)
        found = session.scalars(query.execution_options(populate_existing=True)).one_or_none()
        if found is not None:
            return found
    return None


def _platform(session: Session) -> dict[str, int]:
    return ledger.open_accounts(session, [ledger.charted(code) for code in (ledger.CLEARING, ledger.CONNECTED)])


def _post(session: Session, payout: Payout, step: str, debited: int, credited: int) -> None:
    nano = minor.from_minor(payout.amount_minor, payout.currency)
    draft = ledger.JournalDraft(
        idempotency_key=f"payout:{payout.id.hex}:{step}",
        kind=f"payout_{step}",
        source=owners.SOURCE,
        outside_id=payout.id.hex,
        lines=(ledger.debit(debited, nano), ledger.credit(credited, nano)),
    )
    ledger.post(session, draft)


def _usd(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"
