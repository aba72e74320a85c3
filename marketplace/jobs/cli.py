"""`fallow standing`: what a node may get and why, appeals, amnesties."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

import typer
from rich.table import Table
from sqlalchemy.orm import Session

from marketplace.core import process, tables
from marketplace.core.arguments import node_id
from marketplace.core.database import transaction
from marketplace.core.errors import FallowError
from marketplace.jobs import standing

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Standing of nodes: reasons, appeals, amnesties.")


@contextmanager
def _session() -> Iterator[Session]:
    try:
        with transaction(process.session_factory()) as session:
            yield session
    except FallowError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(1) from None


@app.command()
def show(node: Annotated[UUID, typer.Argument(parser=node_id, metavar="NODE", help="The node's id.")]) -> None:
    """Show a node's standing, what it counts on, what is missing, and every change with its reason."""
    with _session() as session:
        view = standing.show(session, node)
        typer.echo(f"{view.name}: {view.standing.value} since {view.since:%Y-%m-%d %H:%M} UTC.")
        typer.echo(f"Counted: {view.record.sentence()}.")
        if view.lacks:
            typer.echo(f"To be proven it lacks {view.lacks}.")
        changes = Table("at (UTC)", "standing", "reason")
        for change in view.changes:
            changes.add_row(f"{change.at:%Y-%m-%d %H:%M:%S}", change.standing, change.reason)
        tables.show(changes)
        for appeal in view.appeals:
            state = "open" if appeal.granted is None else "granted" if appeal.granted else "refused"
            typer.echo(f"Appeal {appeal.id}, {state}: {appeal.body} {appeal.answer}".rstrip())


@app.command()
def appeal(
    node: Annotated[UUID, typer.Argument(parser=node_id, metavar="NODE", help="The node's id.")],
    body: Annotated[str, typer.Argument(help="What was judged wrongly.")],
) -> None:
    """Object to a node's standing; the operator decides."""
    with _session() as session:
        typer.echo(f"Appeal {standing.appeal(session, node, body).id} waits for a decision.")


@app.command()
def appeals() -> None:
    """List appeals that wait for a decision."""
    with _session() as session:
        table = Table("appeal", "node", "made (UTC)", "body")
        for item in standing.open_appeals(session):
            table.add_row(str(item.id), str(item.node_id), f"{item.made_at:%Y-%m-%d %H:%M}", item.body)
        tables.show(table)


@app.command()
def decide(
    number: Annotated[int, typer.Argument(help="The appeal's number.")],
    answer: Annotated[str, typer.Argument(help="What the owner reads.")],
    grant: Annotated[bool, typer.Option("--grant/--refuse", help="Whether the node is proven again.")] = False,
) -> None:
    """Answer an appeal."""
    with _session() as session:
        standing.decide(session, number, granted=grant, answer=answer)
    typer.echo("Granted." if grant else "Refused.")


@app.command()
def amnesty(
    start: Annotated[datetime, typer.Argument(help="First moment, in UTC.")],
    end: Annotated[datetime, typer.Argument(help="First moment after it, in UTC.")],
    reason: Annotated[str, typer.Argument(help="What was broken on our side.")],
) -> None:
    """Faults within a time in which we were broken count against nobody."""
    with _session() as session:
        standing.grant_amnesty(session, start.replace(tzinfo=UTC), end.replace(tzinfo=UTC), reason)
        changed = standing.review(session)
    typer.echo(f"Noted; {changed} nodes changed their standing.")


@app.command()
def review() -> None:
    """Judge every node now, as the worker does each minute."""
    with _session() as session:
        typer.echo(f"{standing.review(session)} nodes changed their standing.")
