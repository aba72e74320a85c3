"""A settlement, shown in the traces of the requests that it settled."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError

from marketplace.core.database import SessionFactory
from marketplace.core.ids import show
from marketplace.core.logs import get_logger
from marketplace.core.tracing import Tracing, Value
from marketplace.metering import traces

log = get_logger(__name__)


def show_settled(factory: SessionFactory, tracing: Tracing, journal_id: int, receipts: int) -> None:
    """One `settle` span for the journal, linked to the traces in it, and a `settlement` in each of these, linked back.
    The books are written by now: a database that is away costs the spans alone."""
    try:
        with factory() as session:
            parents = traces.of_journal(session, journal_id)
    except SQLAlchemyError as error:
        log.warning("trace_not_read", error=type(error).__name__)
        return
    if not parents:
        return
    whole = tracing.start(
        "settle", {"fallow.journal.id": journal_id, "fallow.receipts": receipts}, links=list(parents.values())
    )
    for job_id, parent in parents.items():
        attributes: dict[str, Value] = {"fallow.journal.id": journal_id, "fallow.job.id": show("job", job_id)}
        tracing.start("settlement", attributes, parent=parent, links=[whole.traceparent]).end()
    whole.end()
