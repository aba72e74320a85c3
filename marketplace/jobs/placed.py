"""Placed jobs, shown in the traces that their requests began."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError

from marketplace.core.database import SessionFactory
from marketplace.core.ids import show
from marketplace.core.logs import get_logger
from marketplace.core.tracing import Tracing, Value
from marketplace.jobs.assignment import Placed
from marketplace.metering import traces

log = get_logger(__name__)


def show_placed(factory: SessionFactory, tracing: Tracing, placed: Sequence[Placed], began_ns: int) -> None:
    """One `assign` span a traced job, from the round's beginning on. The placing is durable by now: a database that is
    away costs the span alone."""
    try:
        with factory() as session:
            parents = traces.of_jobs(session, [item.job_id for item in placed])
    except SQLAlchemyError as error:
        log.warning("trace_not_read", error=type(error).__name__)
        return
    for item in placed:
        if item.job_id in parents:
            attributes: dict[str, Value] = {
                "fallow.job.id": show("job", item.job_id),
                "fallow.offer.id": show("offer", item.offer_id),
                "fallow.gateway.id": item.gateway_id,
            }
            tracing.start("assign", attributes, parent=parents[item.job_id], start_ns=began_ns).end()
