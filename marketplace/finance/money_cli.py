"""Money in and out from the command line, as parts of `fallow finance`."""

from __future__ import annotations

import getpass
from typing import Annotated
from uuid import UUID

import typer
from rich.table import Table

import ledger
from marketplace.accounts.service import find_organisation
from marketplace.billing import clawback, inbox, owners, payouts, reconciliation
from marketplace.billing.desk import Desk
from marketplace.billing.models import Payout
from marketplace.billing.payments import minor, port
from marketplace.billing.payments.factory import claim_books, make_payments
from marketplace.core import tables
from marketplace.core.process import session_factory
from marketplace.core.settings import get_settings

payouts_app = typer.Typer(help="What owners are paid.", no_args_is_help=True)
webhooks_app = typer.Typer(help="What the payment processor told.", no_args_is_help=True)
Person = Annotated[str | None, typer.Option("--as", help="Who says so. Default: the name of the login.")]


def open_desk() -> Desk:
    """The desk of this installation; says so where no money moves."""
    settings, factory = get_settings(), session_factory()
    payments = make_payments(settings, factory)
    claim_books(factory, payments)
    found = Desk(settings, factory, payments)
    if found.sandbox:
        typer.echo("SANDBOX: no money moves.", err=True)
    return found


@payouts_app.command()
def preview() -> None:
    """Show what a run would do now. Changes nothing."""
    desk = open_desk()
    _print_plans(desk.write(lambda session: payouts.preview(session, desk.clock(), desk.settings)))


@payouts_app.command()
def run(
    key: Annotated[str | None, typer.Option(help="A run of a key happens once. Default: this week's.")] = None,
    person: Person = None,
) -> None:
    """Run this week's payouts."""
    desk = open_desk()
    _print_plans(desk.run_payouts(key or payouts.week_key(desk.clock()), _name(person)))


@payouts_app.command()
def status(
    *,
    owner: Annotated[str | None, typer.Option(help="Only this owner's, each with its statement.")] = None,
    open_only: Annotated[bool, typer.Option("--open", help="Only those under way.")] = False,
) -> None:
    """List payouts, newest first."""
    desk = open_desk()
    owner_id = None if owner is None else desk.write(lambda session: find_organisation(session, owner).id)
    found = desk.write(lambda session: payouts.status(session, owner_id=owner_id, open_only=open_only))
    table = Table("id", "owner", "USD", "state", "since", "note")
    for each in found:
        name = str(each.statement["owner"])
        table.add_row(each.id.hex, name, _usd(each), each.state, f"{each.created_at:%Y-%m-%d}", each.failure or "")
    tables.show(table)
    for each in found if owner is not None else ():
        typer.echo(f"\nStatement of {each.id.hex} ({each.statement['run']})")
        for line, amount in payouts.statement_lines(each):
            typer.echo(f"  {line:<24} {amount}")


@payouts_app.command()
def approve(payout: UUID, person: Person = None) -> None:
    """Say yes to a payout above the limit. It takes two people."""
    desk = open_desk()
    found = desk.write(lambda session: payouts.approve(session, payout, _name(person), desk.clock()))
    typer.echo(f"{found.id.hex} is {found.state}.")


@payouts_app.command()
def cancel(payout: UUID, person: Person = None) -> None:
    """Stop a payout that was not sent yet."""
    desk = open_desk()
    found = desk.write(lambda session: payouts.cancel(session, payout, _name(person), desk.clock()))
    typer.echo(f"{found.id.hex} is {found.state}.")


@webhooks_app.command("list")
def list_events(
    state: Annotated[str | None, typer.Option(help=f"One of {', '.join(inbox.STATES)}.")] = None,
) -> None:
    """List events, newest first."""
    desk = open_desk()
    table = Table("id", "event", "type", "state", "tries", "error")
    for each in desk.write(lambda session: inbox.read_events(session, state)):
        table.add_row(str(each.id), each.event_id, each.type, each.state, str(each.attempts), each.error or "")
    tables.show(table)


@webhooks_app.command()
def replay(event: Annotated[int, typer.Argument(help="Its id in the list.")]) -> None:
    """Apply an event again. Its effect happens once all the same."""
    desk = open_desk()
    now = desk.clock()
    desk.write(lambda session: inbox.replay(session, event, now))
    typer.echo(f"{event} is {inbox.process(desk.factory, desk.payments, event, now)}.")


@webhooks_app.command()
def quarantine(event: Annotated[int, typer.Argument(help="Its id in the list.")], reason: str) -> None:
    """Take an event out that can never be applied."""
    desk = open_desk()
    found = desk.write(lambda session: inbox.quarantine(session, event, reason))
    typer.echo(f"{found.id} is {found.state}.")


def reconcile() -> None:
    """Compare the ledger with the payment processor. Exit code 1 if anything differs."""
    desk = open_desk()
    report = reconciliation.reconcile(desk.factory, desk.payments, desk.clock())
    totals = report.totals
    for name, ours, theirs in (
        ("platform", totals.ledger_platform_nano, totals.processor_platform_nano),
        ("owners' accounts", totals.ledger_connected_nano, totals.processor_connected_nano),
    ):
        typer.echo(f"{name}: ledger {ledger.format_nano(ours)} USD, processor {ledger.format_nano(theirs)} USD")
    typer.echo(f"owed to owners: {ledger.format_nano(totals.payable_nano)} USD")
    if not totals.covered:
        typer.echo(
            "Payouts are stopped: more is owed than the processor holds. They go on when it holds enough; "
            "`fallow credit add` brings it nothing.",
            err=True,
        )
    for each in report.breaks:
        age = desk.clock() - each.opened_at
        typer.echo(f"{each.kind} {each.subject}, {age.days} d: {each.story}", err=True)
    if not report.clean or not totals.covered:
        raise typer.Exit(1)
    typer.echo("Everything agrees.")


def write_off(
    owner: Annotated[str, typer.Argument(help="The owner's name.")],
    amount: Annotated[str, typer.Argument(help="USD.")],
    reason: Annotated[str, typer.Argument(help="Why it will never be paid.")],
    key: Annotated[str, typer.Option(help="The same key writes off once.")],
    person: Person = None,
) -> None:
    """Give up what an owner owes."""
    desk = open_desk()
    journal = desk.write(
        lambda session: owners.write_off(
            session,
            find_organisation(session, owner).id,
            ledger.parse_nano(amount),
            reason,
            key=key,
            by=_name(person),
        )
    )
    typer.echo(f"Journal {journal}.")


def refund_usage(
    receipt: UUID,
    reason: str,
    key: Annotated[str, typer.Option(help="The same key refunds once.")],
    amount: Annotated[str | None, typer.Option(help="USD; all that is left by default.")] = None,
    person: Person = None,
) -> None:
    """Give a renter back what a receipt charged."""
    desk = open_desk()
    nano = None if amount is None else ledger.parse_nano(amount)
    journal = desk.write(
        lambda session: clawback.refund_usage(session, receipt, nano, reason, key=key, by=_name(person))
    )
    typer.echo(f"Journal {journal}.")


def _name(person: str | None) -> str:
    return f"cli:{person or getpass.getuser()}"


def _usd(payout: Payout) -> str:
    return ledger.format_nano(minor.from_minor(payout.amount_minor, payout.currency))


def _print_plans(plans: list[payouts.Plan]) -> None:
    table = Table("owner", "pays USD", "carried over", "to reserve", "set off", "note")
    for plan in plans:
        due = plan.due
        note = plan.blocked or ("two people must approve" if plan.needs_approval else "")
        amounts = (
            minor.from_minor(plan.amount_minor, port.CURRENCY),
            plan.left_nano,
            due.reserved_nano - due.reserve_released_nano,
            due.netted_nano,
        )
        table.add_row(plan.owner_name, *(ledger.format_nano(nano) for nano in amounts), note)
    tables.show(table)
