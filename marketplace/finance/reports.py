"""What finance reads beside statements: the platform's report, what held nodes back, the books as text. Only reads."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

from sqlalchemy.orm import Session

import ledger
from marketplace.finance import beancount, market
from marketplace.finance.heldback import Held, held_back
from marketplace.finance.period import Period
from marketplace.finance.platform import Earned, PlatformReport, by_age
from marketplace.finance.statement import YieldStatement


def platform_report(session: Session, period: Period) -> PlatformReport:
    """The platform's period: income and expense within it, everything else at its end."""
    result = (ledger.Kind.INCOME, ledger.Kind.EXPENSE)
    accounts = [view.account_id for view in ledger.list_accounts(session) if view.kind in result]
    return PlatformReport(
        period=period,
        trial=ledger.trial_balance(session, period.end),
        movements=tuple(ledger.movements(session, accounts, period.start, period.end)) if accounts else (),
        ages=by_age(
            (Earned(net.reference, net.on, net.nano) for net in ledger.nets_by_day(session, "owner:", period.end)),
            period.end,
        ),
    )


def held_back_of(session: Session, statement: YieldStatement) -> tuple[Held, ...]:
    """What held the nodes of a statement back in its period."""
    owner_id, period = statement.owner_id, statement.period
    offered: dict[UUID, tuple[int, int]] = {}
    for device in statement.devices:
        if device.node_id is not None:
            offered_us, rented_us = offered.get(device.node_id, (0, 0))
            usage = device.usage
            offered[device.node_id] = (offered_us + usage.offered_us, rented_us + usage.rented_us)
    return held_back(
        market.node_times(session, owner_id, period, offered),
        market.asks(session, owner_id),
        market.elsewhere(session, owner_id, period),
        market.refused(session, owner_id, period),
        market.unserved(session, period),
    )


def books(session: Session, period: Period) -> Iterator[str]:
    """The whole ledger's period as Beancount text, line by line; streamed."""
    opening = ledger.trial_balance(session, period.start)
    return beancount.lines(period, opening, ledger.read_journals(session, period.start, period.end))
