"""What `fallow finance` shows on a terminal. What is unknown stays empty, or says so."""

from __future__ import annotations

from collections.abc import Iterable

import typer
from rich.markup import escape
from rich.table import Table

import ledger
from marketplace.core import tables
from marketplace.finance import trace
from marketplace.finance.bill import RenterBill
from marketplace.finance.document import Cell, Document, Format, plain
from marketplace.finance.heldback import Held
from marketplace.finance.statement import YieldStatement
from marketplace.finance.summary import duration, energy, share, summary, usd


def print_document(document: Document) -> None:
    console = tables.console()
    console.print(f"[bold]{escape(document.title)}[/bold]  {escape(document.party)}  {document.period}")
    for fact in document.facts:
        console.print(f"  {fact.name:<34} {shown(fact.value, fact.format)}", markup=False, highlight=False)
    for sheet in document.sheets:
        table = Table(*(column.title for column in sheet.columns), title=sheet.name, title_justify="left")
        for row in sheet.rows:
            cells = (shown(cell, column.format) for cell, column in zip(row, sheet.columns, strict=True))
            table.add_row(*(escape(cell) for cell in cells))
        if sheet.total is not None:
            cells = (shown(cell, column.format) for cell, column in zip(sheet.total, sheet.columns, strict=True))
            table.add_row(*(escape(cell) for cell in cells), style="bold")
        tables.show(table, console)
        for note in sheet.notes:
            console.print(note, markup=False, highlight=False, style="dim")


def shown(cell: Cell, kind: Format) -> str:
    value = plain(cell, kind)
    if value is None:
        return ""
    if kind is Format.SHARE:
        return f"{float(value):.1%}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def print_held(held: Iterable[Held]) -> None:
    table = Table("node", "held back by", "hours", "requests", "at most", "what, and what to do")
    for row in held:
        table.add_row(
            escape(row.node_name),
            row.limit.value,
            "" if row.hours_us is None else duration(row.hours_us),
            "" if row.requests is None else f"{row.requests:,}",
            "" if row.at_most_nano is None else usd(row.at_most_nano),
            escape(row.sentence),
        )
    tables.show(table)


def print_receipt(found: trace.TracedReceipt) -> None:
    receipt = found.receipt
    typer.echo(
        f"Receipt {receipt.id}: {receipt.outcome} of {found.model_id} at {receipt.at.isoformat()},"
        f" node {receipt.node_id}, charge {usd(receipt.charge_nano)}, fee {usd(receipt.fee_nano)},"
        f" owner {usd(receipt.owner_nano)}, paid by the platform {usd(receipt.loss_nano)}."
    )
    if found.journal is None:
        typer.echo("No journal: it came to nothing." if receipt.journal_id == 0 else "Not settled yet.")
    else:
        print_lines(found.journal)


def print_journal(found: trace.TracedJournal) -> None:
    print_lines(found.journal)
    typer.echo(
        f"{found.receipts:,} receipts: charges {usd(found.charge_nano)}, fees {usd(found.fee_nano)}, owners"
        f" {usd(found.owner_nano)}, paid by the platform {usd(found.loss_nano)}."
    )


def print_lines(journal: ledger.JournalView) -> None:
    typer.echo(f"Journal {journal.journal_id}: {journal.kind}, effective {journal.effective_at.isoformat()}.")
    for line in journal.lines:
        typer.echo(f"  {line.code:<60} {usd(line.nano)} {line.currency}")


def print_statement(found: YieldStatement) -> None:
    console = tables.console()
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
    tables.show(table, console)
    for name, figure in summary(found):
        console.print(f"  {name:<26} {figure}", markup=False, highlight=False)


def print_bill(found: RenterBill) -> None:
    console = tables.console()
    console.print(f"[bold]{escape(found.organisation_name)}[/bold]  {found.period}")
    table = Table("model", "lever", "tokens", "USD per million", "amount")
    for line in found.lines:
        table.add_row(escape(line.model_id), line.lever, f"{line.tokens:,}", line.rate_usd, usd(line.amount_nano))
    table.add_row("total", f"{found.requests:,} requests", "", "", usd(found.total_nano), style="bold")
    tables.show(table, console)
    if found.waived_jobs:
        console.print(f"Not charged, by our own fault: {found.waived_jobs:,} requests, {usd(found.waived_nano)}.")
    outcomes = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in found.outcomes.items())
    console.print(f"Requests by outcome: {outcomes or 'none'}.", highlight=False)
    console.print(
        f"Credit: {usd(found.opening_nano)} before, {usd(found.added_nano)} added, {usd(found.settled_nano)} spent,"
        f" {usd(found.closing_nano)} after.",
        highlight=False,
    )
