"""`fallow node`: enrolment tokens and nodes, on the server's side."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated
from uuid import UUID

import typer
from rich.table import Table

from marketplace.accounts import service as accounts
from marketplace.catalog.service import Catalog
from marketplace.core import process, tables
from marketplace.core.amounts import nano_per_mtok, usd
from marketplace.core.arguments import node_id
from marketplace.core.database import transaction
from marketplace.core.errors import FallowError
from marketplace.fleet import enrolment
from marketplace.fleet.market import offered, paid
from marketplace.fleet.repository import NodeRow, attest, list_nodes, set_region
from marketplace.matching.market import Market, market, place
from marketplace.metering.pricing import Rates

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


@app.command("market")
def market_(
    model: Annotated[str, typer.Argument(help="A model's name, as renters say it.")],
    region: Annotated[str | None, typer.Option(help="Only nodes in this region.")] = None,
    ask_input: Annotated[str | None, typer.Option(help="Your ask for input, USD a million tokens.")] = None,
    ask_output: Annotated[str | None, typer.Option(help="Your ask for output, USD a million tokens.")] = None,
) -> None:
    """Show what the market pays for a model, by how many offers, and where an ask of yours would stand."""
    try:
        catalog = Catalog(process.session_factory())
        catalog.load()
        variant = catalog.resolve(model)
        offers = offered(process.valkey_client(), variant.id)
        with transaction(process.session_factory()) as session:
            found = market(offers, region=region, paid=paid(session, variant.id))
        ask = _ask(ask_input, ask_output)
    except (FallowError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(
        f"{model}: {found.offers} offers of {found.owners} owners on {found.nodes} nodes, "
        f"{found.busy_part:.0%} of {found.slots} slots taken."
    )
    tables.show(_market_table(found))
    if ask is not None:
        typer.echo(place(offers, ask).sentence())


def _ask(input_: str | None, output: str | None) -> Rates | None:
    """Raises ValueError for a price that is none."""
    if input_ is None or output is None:
        return None
    rate = nano_per_mtok(input_)
    return Rates(rate, rate, nano_per_mtok(output))


def _market_table(found: Market) -> Table:
    table = Table("USD a million tokens", "lowest", "lower quarter", "median", "upper quarter", "highest", "paid, 24 h")
    bought = found.paid
    for name, spread, nano in (
        ("input", found.input, bought.input_nano_per_mtok if bought else None),
        ("output", found.output, bought.output_nano_per_mtok if bought else None),
    ):
        asks = (
            (spread.lowest, spread.lower_quarter, spread.median, spread.upper_quarter, spread.highest)
            if spread
            else (None,) * 5
        )
        table.add_row(name, *("-" if value is None else usd(value) for value in (*asks, nano)))
    return table


@app.command("region")
def region_(
    node: Annotated[UUID, typer.Argument(parser=node_id, metavar="NODE", help="The node's id.")],
    region: Annotated[str, typer.Argument(help="Where it stands, such as `eu-central`; empty: not said.")],
) -> None:
    """Say where a node stands. Renters may ask for regions."""
    try:
        with transaction(process.session_factory()) as session:
            set_region(session, node, region)
    except FallowError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(1) from None
    typer.echo(f"The node stands in {region}." if region else "Where the node stands is not said.")


@app.command("attest")
def attest_(
    node: Annotated[UUID, typer.Argument(parser=node_id, metavar="NODE", help="The node's id.")],
    no: Annotated[bool, typer.Option("--no", help="It no longer holds.")] = False,
) -> None:
    """Say that you have seen proof of the data policy that a node's owner declares. Renters read it."""
    try:
        with transaction(process.session_factory()) as session:
            attest(session, node, attested=not no)
    except FallowError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(1) from None
    typer.echo("No longer attested." if no else "Attested: answers of this node say so from now on.")


def _table(rows: list[NodeRow]) -> Table:
    table = Table("node", "name", "organisation", "state", "last seen (UTC)", "live offers", "faults", "agent")
    for row in rows:
        seen = f"{row.last_seen_at:%Y-%m-%d %H:%M:%S}" if row.last_seen_at else "never"
        facts = (str(row.node_id), row.name, row.organisation, row.state, seen)
        table.add_row(*facts, str(row.live_offers), str(row.faults), row.agent_version)
    return table
