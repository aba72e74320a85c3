"""`fallow node`: enrolment tokens and nodes, on the server's side."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer
from rich.table import Table

from marketplace.accounts import service as accounts
from marketplace.core import process, tables
from marketplace.core.database import transaction
from marketplace.core.errors import FallowError
from marketplace.fleet import enrolment
from marketplace.fleet.repository import NodeRow, list_nodes

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Enrolment tokens and nodes.")
MAX_HOURS = 24 * 30


@app.command("enrol-token")
def enrol_token(
    organisation: Annotated[str, typer.Option(help="Name of the owner's organisation.")],
    hours: Annotated[int, typer.Option(min=1, max=MAX_HOURS, help="For how long the token may be used.")] = 24,
) -> None:
    """Make a one-time token with which one machine joins an organisation. It is shown once."""
    try:
        with transaction(process.session_factory()) as session:
            owner = accounts.find_organisation(session, organisation)
            token = enrolment.create_token(session, owner.id, life=timedelta(hours=hours))
    except FallowError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(1) from None
    typer.echo(token)


@app.command("list")
def list_(
    organisation: Annotated[str | None, typer.Option(help="Only this organisation's nodes.")] = None,
) -> None:
    """Show nodes: when they were last seen, what they offer now, how often they failed."""
    try:
        with transaction(process.session_factory()) as session:
            owner = accounts.find_organisation(session, organisation) if organisation else None
            rows = list_nodes(session, owner.id if owner else None)
    except FallowError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(1) from None
    if rows:
        tables.show(_table(rows))
    else:
        typer.echo("No node is enrolled.")


def _table(rows: list[NodeRow]) -> Table:
    table = Table("node", "name", "organisation", "state", "last seen (UTC)", "live offers", "faults", "agent")
    for row in rows:
        seen = f"{row.last_seen_at:%Y-%m-%d %H:%M:%S}" if row.last_seen_at else "never"
        facts = (str(row.node_id), row.name, row.organisation, row.state, seen)
        table.add_row(*facts, str(row.live_offers), str(row.faults), row.agent_version)
    return table
