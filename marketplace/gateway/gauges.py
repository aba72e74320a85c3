"""What is looked up when figures are scraped: the fleet as this gateway sees it, and work and money that wait.

Every gateway tells the same fleet and the same queue: take the maximum over gateways, not the sum.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from marketplace.core.database import SessionFactory
from marketplace.core.logs import get_logger
from marketplace.gateway.services import Services

log = get_logger(__name__)
WITHIN_S: Final = 2.0
MOST_COUNTED: Final = 100_000
"""Rows counted at most: a scrape must stay cheap where much waits."""
_QUEUE: Final = text("""
    select count(*) filter (where state = 'queued') as queued, count(*) filter (where state = 'running') as running,
           coalesce(extract(epoch from now() - min(created_at) filter (where state = 'queued')), 0) as oldest_s
    from (select state, created_at from jobs
          where state in ('queued', 'running') and kind <> 'interactive' limit :most) open
""")
_UNSETTLED: Final = text("select count(*) from (select 1 from receipts where journal_id is null limit :most) open")
_OUTBOX: Final = text("select count(*) from (select 1 from outbox limit :most) waiting")


@dataclass(frozen=True, slots=True)
class Waiting:
    """Work and money that wait, over the whole marketplace."""

    queued: int = 0
    running: int = 0
    oldest_s: float = 0.0
    """Age of the oldest queued job."""
    unsettled: int = 0
    """Receipts without a journal."""
    outbox: int = 0
    """Tasks that the broker has not taken yet."""


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Offers with telemetry, by what may be done with them now."""

    nodes: int = 0
    slots: Counter[str] = field(default_factory=Counter)
    """`busy`, `idle`, and `withheld`: free, but the owner has the machine."""


async def refresh(services: Services) -> None:
    """Set the gauges anew. A database that is away leaves the last figures of what waits, and says so in a gauge."""
    gauges = services.metrics
    gauges.active.set(services.pulse.active)
    gauges.waiting.set(services.writer.waiting)
    seen = fleet_figures(services)
    gauges.nodes.set(seen.nodes)
    for state in ("busy", "idle", "withheld"):
        gauges.slots.labels(state).set(seen.slots[state])
    try:
        async with asyncio.timeout(WITHIN_S):
            found = await asyncio.to_thread(waiting, services.session_factory)
    except (TimeoutError, SQLAlchemyError) as error:
        log.warning("figures_not_read", error=type(error).__name__)
        gauges.database_up.set(0)
        return
    gauges.database_up.set(1)
    gauges.jobs.labels("queued").set(found.queued)
    gauges.jobs.labels("running").set(found.running)
    gauges.oldest_job.set(found.oldest_s)
    gauges.unsettled.set(found.unsettled)
    gauges.outbox.set(found.outbox)


def fleet_figures(services: Services) -> FleetFigures:
    """Nodes with offers, and their slots. Slots of several variants on one device are counted for each."""
    slots: Counter[str] = Counter()
    nodes = set()
    for offer in services.fleet.view.all_offers():
        nodes.add(offer.node_id)
        busy = min(offer.slots_busy, offer.slots)
        slots["busy"] += busy
        slots["idle" if offer.available else "withheld"] += offer.slots - busy
    return FleetFigures(len(nodes), slots)


def waiting(session_factory: SessionFactory) -> Waiting:
    """Counted in the database. Raises SQLAlchemyError."""
    with session_factory() as session:
        queue = session.execute(_QUEUE, {"most": MOST_COUNTED}).one()
        unsettled = session.execute(_UNSETTLED, {"most": MOST_COUNTED}).scalar_one()
        outbox = session.execute(_OUTBOX, {"most": MOST_COUNTED}).scalar_one()
    return Waiting(int(queue.queued), int(queue.running), float(queue.oldest_s), int(unsettled), int(outbox))
