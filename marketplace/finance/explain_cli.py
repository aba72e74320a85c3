"""`fallow explain`: why a node did not earn in an hour."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer
from rich.markup import escape
from rich.table import Table

from marketplace.core import tables
from marketplace.core.arguments import node_id
from marketplace.core.clock import utcnow
from marketplace.core.errors import FallowError
from marketplace.core.process import session_factory
from marketplace.finance import idle, idle_rows, service
from marketplace.finance.period import within_hour

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Why things went as they did.")


@app.callback()
def _group() -> None:
    """Why things went as they did."""


@app.command("idle")
def idle_(
    *,
    node: Annotated[UUID, typer.Option(parser=node_id, metavar="NODE", help="The node's id.")],
    hour: Annotated[str, typer.Option(help="Within which hour: 2026-11-30T13. Default: the last whole one.")] = "",
    zone_name: Annotated[str, typer.Option("--zone", help="IANA time zone of the hour.")] = "UTC",
) -> None:
    """Account for an hour of a node: what it earned in, what it did not and why, in minutes that add up to sixty."""
    try:
        start = within_hour(hour, zone_name, now=utcnow())
        with service.snapshot(session_factory()) as session:
            found = idle.explain(idle_rows.read(session, node, start, None))
    except FallowError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    table = Table("cause", "minutes", "requests", "what, and what to do")
    for part in found.parts:
        table.add_row(part.cause.value, f"{part.us / idle.MINUTE_US:.1f}", f"{part.requests:,}", escape(part.sentence))
    typer.echo(f"{found.node_name}, the hour from {found.start:%Y-%m-%d %H:%M %Z}:")
    tables.show(table)
    for note in found.notes:
        typer.echo(note)
