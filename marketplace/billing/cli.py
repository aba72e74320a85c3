"""`fallow credit`: a renter's credit from the command line."""

from __future__ import annotations

from typing import Annotated

import typer

import ledger
from marketplace.accounts.service import find_organisation
from marketplace.billing import service
from marketplace.core.database import transaction
from marketplace.core.errors import FallowError
from marketplace.core.ids import new_id
from marketplace.core.process import session_factory

app = typer.Typer(help="A renter's credit.", no_args_is_help=True, add_completion=False)


@app.command()
def add(
    organisation: Annotated[str, typer.Argument(help="The organisation's name.")],
    amount: Annotated[str, typer.Argument(help="USD, a plain decimal such as 25.00.")],
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: the same key adds the amount once. Random unless given.")
    ] = None,
) -> None:
    """Add paid credit."""
    try:
        nano = ledger.parse_nano(amount)
        with transaction(session_factory()) as session:
            renter = find_organisation(session, organisation)
            service.top_up(session, renter.id, nano, key or f"cli-{new_id().hex}")
            _print(organisation, service.balance(session, renter.id))
    except (FallowError, ledger.InvalidAmount) as error:
        _fail(error)


@app.command()
def promote(
    organisation: Annotated[str, typer.Argument(help="The organisation's name.")],
    amount: Annotated[str, typer.Argument(help="USD, a plain decimal such as 25.00.")],
    reason: Annotated[str, typer.Argument(help="Why it is given.")],
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: the same key gives once. Random unless given.")
    ] = None,
) -> None:
    """Give promotional credit: spent first, never refunded, never paid out."""
    try:
        nano = ledger.parse_nano(amount)
        with transaction(session_factory()) as session:
            renter = find_organisation(session, organisation)
            service.grant_promotion(session, renter.id, nano, key or f"cli-{new_id().hex}", reason)
            _print(organisation, service.balance(session, renter.id))
    except (FallowError, ledger.InvalidAmount) as error:
        _fail(error)


@app.command()
def show(organisation: Annotated[str, typer.Argument(help="The organisation's name.")]) -> None:
    """Show what is paid in, held and available."""
    try:
        with transaction(session_factory()) as session:
            renter = find_organisation(session, organisation)
            _print(organisation, service.balance(session, renter.id))
    except FallowError as error:
        _fail(error)


def _print(organisation: str, credit: service.Credit) -> None:
    typer.echo(f"{organisation}: {ledger.format_nano(credit.available_nano)} USD available")
    typer.echo(
        f"  credit {ledger.format_nano(credit.posted_nano)} USD, held {ledger.format_nano(credit.held_nano)} USD"
    )
    if credit.promotional_nano:
        typer.echo(f"  promotional {ledger.format_nano(credit.promotional_nano)} USD, spent first, never refunded")


def _fail(error: Exception) -> None:
    typer.echo(f"fallow credit: {error}", err=True)
    raise typer.Exit(1)
