"""`fallow finance`: statements, bills and the state of the books, from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from fractions import Fraction
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar
from uuid import UUID

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from sqlalchemy.orm import Session

from marketplace.accounts.service import find_organisation
from marketplace.core import tables
from marketplace.core.clock import utcnow
from marketplace.core.database import transaction
from marketplace.core.errors import BadRequest, FallowError
from marketplace.core.process import session_factory
from marketplace.finance import closing, costs, invoicing, money_cli, printing, reports, service, trace
from marketplace.finance import export as csv_export
from marketplace.finance import period as periods
from marketplace.finance.document import Document, Sheet
from marketplace.finance.documents import invoice_document, platform_document
from marketplace.finance.files import written
from marketplace.finance.period import InvalidPeriod, Period
from marketplace.finance.summary import usd

T = TypeVar("T")
app = typer.Typer(help="Statements, invoices, exports, and the books.", no_args_is_help=True, add_completion=False)
app.add_typer(money_cli.payouts_app, name="payouts")
app.add_typer(money_cli.webhooks_app, name="webhooks")
app.command("write-off")(money_cli.write_off)
app.command("refund-usage")(money_cli.refund_usage)

Organisation = Annotated[str, typer.Argument(help="The organisation's name.")]
PeriodName = Annotated[
    str | None, typer.Option("--period", help="A year, month or day: 2026, 2026-03, 2026-03-14. Default: this month.")
]
ZoneName = Annotated[str, typer.Option("--zone", help="IANA time zone whose midnights bound the period.")]


@app.command()
def statement(
    owner: Organisation,
    *,
    period: PeriodName = None,
    zone: ZoneName = "UTC",
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the statement to this file.")] = None,
    receipts: Annotated[Path | None, typer.Option("--receipts", help="Write each receipt to this file.")] = None,
    held_back: Annotated[bool, typer.Option("--held-back", help="Show what kept capacity from being used.")] = False,
) -> None:
    """An owner's statement of yield, device by device. Exit code 1 if receipts and ledger disagree."""
    with _reading() as session:
        bounds = _period(period, zone)
        owner_id = find_organisation(session, owner).id
        found = service.yield_statement(session, owner_id, bounds.start, bounds.end, bounds.zone_name)
        printing.print_statement(found)
        if held_back:
            printing.print_held(reports.held_back_of(session, found))
        if csv is not None:
            typer.echo(f"Statement: {service.write_csv(found, csv)}")
        if receipts is not None:
            line = trace.Line(owner_id=owner_id, period=bounds)
            typer.echo(f"Receipts: {_write_receipts(session, line, receipts)}")
    if found.problems:
        _fail(" ".join(found.problems))


@app.command()
def bill(renter: Organisation, period: PeriodName = None, zone: ZoneName = "UTC") -> None:
    """A renter's bill: input tokens, output tokens, and the price of each."""
    with _reading() as session:
        bounds = _period(period, zone)
        renter_id = find_organisation(session, renter).id
        printing.print_bill(service.renter_bill(session, renter_id, bounds.start, bounds.end, bounds.zone_name))


@app.command()
def invoice(
    renter: Organisation,
    period: PeriodName = None,
    zone: ZoneName = "UTC",
    out: Annotated[Path | None, typer.Option("--out", help="Write it to this file: .csv, .xlsx or .pdf.")] = None,
) -> None:
    """A renter's invoice by key, model and day: why it changed, and what would make it smaller."""
    with _reading() as session:
        found = invoicing.make_invoice(session, find_organisation(session, renter).id, _period(period, zone))
    document = invoice_document(found)
    if out is None:
        printing.print_document(document)
    else:
        typer.echo(f"Invoice: {_write_document(document, out, document.sheets[1])}")


@app.command()
def report(
    period: PeriodName = None,
    zone: ZoneName = "UTC",
    out: Annotated[Path | None, typer.Option("--out", help="Write it to this file: .csv, .xlsx or .pdf.")] = None,
) -> None:
    """The platform's period: income, losses, deferred revenue, payables by age, trial balance."""
    with _reading() as session:
        document = platform_document(reports.platform_report(session, _period(period, zone)))
    if out is None:
        printing.print_document(document)
    else:
        typer.echo(f"Report: {_write_document(document, out, document.sheets[2])}")


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="The file: .csv, .xlsx, .pdf or .beancount.")],
    *,
    owner: Annotated[
        str | None, typer.Option(help="An owner's statement; as .csv with --receipts, each receipt.")
    ] = None,
    renter: Annotated[
        str | None, typer.Option(help="A renter's invoice; as .csv with --receipts, each receipt.")
    ] = None,
    receipts: Annotated[bool, typer.Option("--receipts", help="Each receipt instead of their sums.")] = False,
    period: PeriodName = None,
    zone: ZoneName = "UTC",
) -> None:
    """Write a statement, an invoice, receipts or the whole books (.beancount) to a file, all of it or none."""
    with _reading() as session:
        bounds = _period(period, zone)
        if out.suffix.lower() == ".beancount":
            if owner is not None or renter is not None or receipts:
                raise service.InvalidFormat("The books are written whole: no --owner, --renter or --receipts.")
            written_to = _write_lines(reports.books(session, bounds), out)
        elif receipts:
            if out.suffix.lower() != ".csv":
                raise service.InvalidFormat("Receipts are written as .csv.")
            owner_id = find_organisation(session, owner).id if owner else None
            renter_id = find_organisation(session, renter).id if renter else None
            written_to = _write_receipts(session, trace.Line(owner_id, renter_id, bounds), out)
        elif owner is not None and renter is None:
            found = service.yield_statement(
                session, find_organisation(session, owner).id, bounds.start, bounds.end, bounds.zone_name
            )
            written_to = service.write_statement(found, out, reports.held_back_of(session, found))
        elif renter is not None and owner is None:
            document = invoice_document(invoicing.make_invoice(session, find_organisation(session, renter).id, bounds))
            written_to = _write_document(document, out, document.sheets[1])
        else:
            raise service.InvalidFormat("Name one owner or one renter, or a file that ends in .beancount.")
    typer.echo(str(written_to))


@app.command()
def close(
    period: Annotated[str, typer.Argument(help="A year, month or day: 2026, 2026-03, 2026-03-14.")],
    zone: ZoneName = "UTC",
) -> None:
    """Close a period of the books: nothing posts into it again. Repeating it is safe, after a crash too."""
    with _errors():
        view = closing.close_period(session_factory(), Period.named(period, zone), typer.echo)
    assert view.snapshot is not None
    typer.echo(
        f"Closed: {view.snapshot.journals:,} journals, {view.snapshot.postings:,} postings, up to link"
        f" {view.snapshot.head.sequence} of the chain."
    )
    typer.echo(f"Keep this outside the database: {view.snapshot.head}")


@app.command()
def verify() -> None:
    """Prove the books: chain, periods, guards, balances. Exit code 1 if anything was tampered with."""
    with _reading() as session, _working("reading every journal, line, hold and balance"):
        found = closing.prove(session)
    for problem in found.problems:
        typer.echo(f"{problem.rule}: {problem.story}")
    if found.problems:
        _fail(f"{len(found.problems)} problems.")
    typer.echo(f"The books are in order: {found.links:,} journals in the chain.")
    for head in found.heads:
        typer.echo(f"Keep this outside the database: {head}")


@app.command()
def reconcile(
    *,
    period: PeriodName = None,
    zone: ZoneName = "UTC",
    processor: Annotated[
        bool, typer.Option("--processor", help="Compare the ledger with the payment processor's books instead.")
    ] = False,
) -> None:
    """Compare a period's settlements with their receipts. Exit code 1 if they disagree."""
    if processor:
        money_cli.reconcile()
        return
    with _reading() as session, _progress("journals compared") as advance:
        found = closing.reconcile(session, _period(period, zone), advance)
    for finding in found.findings:
        typer.echo(finding)
    if found.findings:
        _fail(f"{len(found.findings)} findings.")
    typer.echo(f"{found.journals:,} settlements agree with {found.receipts:,} receipts.")


@app.command(name="trace")
def trace_(
    what: Annotated[str, typer.Argument(help="A receipt's id, or a journal's number.")],
) -> None:
    """From a receipt to its journal, or from a journal to its receipts."""
    with _reading() as session:
        if what.isdigit():
            printing.print_journal(trace.journal(session, int(what)))
        else:
            printing.print_receipt(trace.receipt(session, _uuid(what)))


@app.command()
def declare(
    node: Annotated[str, typer.Argument(help="The node's id; `fallow node list` shows it.")],
    *,
    capital: Annotated[str | None, typer.Option(help="What it cost, USD, its share of the host included.")] = None,
    residual: Annotated[str | None, typer.Option(help="What it will fetch in the end, USD.")] = None,
    life_years: Annotated[str | None, typer.Option(help="Years of use, such as 4 or 4.5.")] = None,
    in_service: Annotated[str | None, typer.Option(help="The day it entered service: 2026-01-31.")] = None,
    method: Annotated[str, typer.Option(help="straight_line or declining.")] = "straight_line",
    energy: Annotated[str | None, typer.Option(help="USD a kWh.")] = None,
    pue: Annotated[str | None, typer.Option(help="Energy from the grid over energy of the machine; 1 at home.")] = None,
    other: Annotated[str | None, typer.Option(help="Other cost, USD an hour.")] = None,
) -> None:
    """Declare what a node costs. What is not named counts as not declared, and is never assumed."""
    with _errors(), transaction(session_factory()) as session:
        declaration = costs.Declaration(
            capital_usd=capital,
            residual_usd=residual,
            life_months=None if life_years is None else _months(life_years),
            method=method,
            in_service_on=None if in_service is None else _day(in_service),
            energy_usd_per_kwh=energy,
            pue=pue,
            other_usd_per_hour=other,
        )
        cost = costs.declare(session, _uuid(node), declaration)
        typer.echo(f"Declared, valid from {cost.valid_from.isoformat(timespec='seconds')}.")


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
    tables.show(table)
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


# --- shared ---------------------------------------------------------------------------------------------------------


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except FallowError as error:
        _fail(error.message)


@contextmanager
def _reading() -> Iterator[Session]:
    with _errors(), service.snapshot(session_factory()) as session:
        yield session


@contextmanager
def _working(text: str) -> Iterator[None]:
    with Console(stderr=True).status(text):
        yield


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int], None]]:
    """A count that people see grow, on standard error."""
    columns = (SpinnerColumn(), TextColumn("{task.completed:,}"), TextColumn(unit), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(unit, total=None)
        yield lambda count: progress.update(task, completed=count)


def _counted(rows: Iterable[T], advance: Callable[[int], None]) -> Iterator[T]:
    count = 0
    for count, row in enumerate(rows, start=1):
        yield row
        if count % 1_000 == 0:
            advance(count)
    advance(count)


def _write_receipts(session: Session, line: trace.Line, path: Path) -> Path:
    with _progress("receipts") as advance:
        return csv_export.write_receipts(_counted(trace.receipts(session, line), advance), path)


def _write_lines(lines: Iterable[str], path: Path) -> Path:
    with _progress("lines") as advance, written(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in _counted(lines, advance))
    return path.absolute()


def _write_document(document: Document, path: Path, csv_sheet: Sheet) -> Path:
    """As CSV the one sheet that machines want."""
    if path.suffix.lower() == ".csv":
        return csv_export.write_sheet(csv_sheet, path)
    return service.write_document(document, path)


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise BadRequest(f"{text[:80]!r} is no id.") from None


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"{text[:40]!r} is no day, such as 2026-01-31.") from None


def _months(years: str) -> int:
    try:
        months = Fraction(years) * 12
    except (ValueError, ZeroDivisionError):
        raise BadRequest(f"{years[:40]!r} is no number of years.") from None
    if months.denominator != 1:
        raise BadRequest(f"{years[:40]!r} years are no whole number of months.")
    return int(months)


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
