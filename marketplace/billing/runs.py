"""Payout runs: one look at the cover, then one transaction an owner. Broken off and begun again, a run goes on."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from marketplace.billing import owners, payouts
from marketplace.billing.models import PayoutRun
from marketplace.billing.payments import port
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.logs import get_logger
from marketplace.core.settings import Settings

log = get_logger(__name__)


def run_payouts(
    factory: SessionFactory,
    payments: port.Payments,
    settings: Settings,
    *,
    key: str,
    started_by: str,
    now: datetime,
) -> list[payouts.Plan]:
    """Decide what each owner is paid and write the wishes down; sending them is `driving`'s. The same key again pays
    nobody twice. Blocking; raises PayoutsStopped, PaymentError."""
    held_minor = payments.funds().total
    with transaction(factory) as session:
        payouts.check_cover(session, held_minor)
        run = payouts.begin_run(session, key, started_by, now)
        everyone = owners.list_owners(session)
    plans = []
    for owner in everyone:
        with transaction(factory) as session:
            plans.append(payouts.pay_owner(session, run, owner, now=now, settings=settings))
    with transaction(factory) as session:
        session.get_one(PayoutRun, run.id).finished_at = now
    paid_minor = sum(plan.amount_minor for plan in plans)
    log.info("payout_run", key=key, owners=len(plans), paid_minor=paid_minor)
    return plans


def finished(session: Session, key: str) -> bool:
    """Whether the run of this key looked at everybody."""
    ended = session.scalar(select(PayoutRun.finished_at).where(PayoutRun.key == key))
    return ended is not None


def due_week(now: datetime, settings: Settings) -> str | None:
    """The key of the week's run once its day has come; None before it."""
    return payouts.week_key(now) if now.weekday() >= settings.payout_weekday else None
