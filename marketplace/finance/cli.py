"""`fallow finance`: statements, bills and the state of the books, from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy.orm import Session

from marketplace.accounts.service import find_organisation
from marketplace.core.clock import utcnow
from marketplace.core.errors import FallowError
from marketplace.core.process import session_factory
from marketplace.finance import period as periods
from marketplace.finance import service
from marketplace.finance.bill import RenterBill
from marketplace.finance.period import InvalidPeriod, Period
from marketplace.finance.statement import YieldStatement
from marketplace.finance.summary import energy, share, summary, usd

app = typer.Typer(help="Statements, bills, trial balance, checks.", no_args_is_help=True, add_completion=False)

Organisation = Annotated[str, typer.Argument(help="The organisation's name.")]
PeriodName = Annotated[
    str | None, typer.Option("--period", help="A year, month or day: 2026, 2026-03, 2026-03-14. Default: this month.")
]
ZoneName = Annotated[str, typer.Option("--zone", help="IANA time zone whose midnights bound the period.")]


@app.command()
def statement(
    owner: Organisation,
    period: PeriodName = None,
    zone: ZoneName = "UTC",
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the statement to this file.")] = None,
    receipts: Annotated[Path | None, typer.Option("--receipts", help="Write each receipt to this file.")] = None,
) -> None:
    """An owner's statement of yield, device by device. Exit code 1 if receipts and ledger disagree."""
    with _reading() as session:
        bounds = _period(period, zone)
        owner_id = find_organisation(session, owner).id
        found = service.yield_statement(session, owner_id, bounds.start, bounds.end, bounds.zone_name)
        _print_statement(found)
        if csv is not None:
            typer.echo(f"Statement: {service.write_csv(found, csv)}")
        if receipts is not None:
            typer.echo(f"Receipts: {service.write_receipts_csv(session, found, receipts)}")
    if found.problems:
        _fail(" ".join(found.problems))


@app.command()
def bill(renter: Organisation, period: PeriodName = None, zone: ZoneName = "UTC") -> None:
    """A renter's bill: input tokens, output tokens, and the price of each."""
    with _reading() as session:
        bounds = _period(period, zone)
        renter_id = find_organisation(session, renter).id
        _print_bill(service.renter_bill(session, renter_id, bounds.start, bounds.end, bounds.zone_name))


@app.command()
def trial_balance(
    as_of: Annotated[
        str | None, typer.Option("--as-of", help="Before this time, ISO 8601 with its offset. Default: now.")
    ] = None,
) -> None:
    """Every account's debits and credits. Exit code 1 if they are not equal."""
    with _reading() as session:
        trial = service.trial_balance(session, None if as_of is None else _instant(as_of))
    table = Table("account", "kind", "debits", "credits", "balance")
    for row in trial.rows:
        amounts = (usd(row.debit_nano), usd(row.credit_nano), usd(row.balance_nano))
        table.add_row(escape(row.code), row.kind.value, *amounts)
    for currency, (debits, credits_) in trial.totals.items():
        table.add_row(f"total {currency}", "", usd(debits), usd(credits_), usd(debits - credits_), style="bold")
    Console().print(table)
    if not trial.balanced:
        _fail("Debits and credits differ.")


@app.command()
def check() -> None:
    """Recompute every balance from its postings. Exit code 1 if anything does not hold."""
    with _reading() as session:
        problems = service.check(session)
    for problem in problems:
        typer.echo(problem)
    if problems:
        _fail(f"{len(problems)} problems.")
    typer.echo("The books are in order.")


@contextmanager
def _reading() -> Iterator[Session]:
    try:
        with service.snapshot(session_factory()) as session:
            yield session
    except FallowError as error:
        _fail(error.message)


def _fail(message: str) -> NoReturn:
    typer.echo(f"fallow finance: {message}", err=True)
    raise typer.Exit(1)


def _period(name: str | None, zone: str) -> Period:
    return Period.named(name or f"{utcnow().astimezone(periods.zone(zone)):%Y-%m}", zone)


def _instant(text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None:
        raise InvalidPeriod(f"{text[:40]!r} is no time with an offset, such as 2026-03-01T00:00:00+01:00.")
    return instant


def _print_statement(found: YieldStatement) -> None:
    console = Console()
    console.print(f"[bold]{escape(found.owner_name)}[/bold]")
    table = Table("node", "device", "requests", "in", "cached", "out", "net", "rented", "busy", "tokens", "energy")
    for device in found.devices:
        tokens = device.tokens
        table.add_row(
            escape(device.node_name),
            escape(device.device_name) + (" (simulated)" if device.simulated else ""),
            f"{device.earnings.jobs:,}",
            f"{tokens.input:,}",
            f"{tokens.input_cached:,}",
            f"{tokens.output:,}",
            usd(device.earnings.net_nano),
            share(device.usage.rented_share),
            share(device.usage.busy_share),
            share(device.token_share),
            energy(device),
        )
    console.print(table)
    for name, figure in summary(found):
        console.print(f"  {name:<26} {figure}", markup=False, highlight=False)


def _print_bill(found: RenterBill) -> None:
    console = Console()
    console.print(f"[bold]{escape(found.organisation_name)}[/bold]  {found.period}")
    table = Table("model", "lever", "tokens", "USD per million", "amount")
    for line in found.lines:
        table.add_row(escape(line.model_id), line.lever, f"{line.tokens:,}", line.rate_usd, usd(line.amount_nano))
    table.add_row("total", f"{found.requests:,} requests", "", "", usd(found.total_nano), style="bold")
    console.print(table)
    if found.waived_jobs:
        console.print(f"Not charged, by our own fault: {found.waived_jobs:,} requests, {usd(found.waived_nano)}.")
    outcomes = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in found.outcomes.items())
    console.print(f"Requests by outcome: {outcomes or 'none'}.", highlight=False)
    console.print(
        f"Credit: {usd(found.opening_nano)} before, {usd(found.added_nano)} added, {usd(found.settled_nano)} spent,"
        f" {usd(found.closing_nano)} after.",
        highlight=False,
    )
