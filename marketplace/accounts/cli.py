"""`fallow org` and `fallow key`: organisations and keys from the command line."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated
from uuid import UUID

import typer
from rich.markup import escape
from rich.table import Table

from marketplace.accounts import service
from marketplace.accounts.models import ApiKey
from marketplace.core import tables
from marketplace.core.amounts import nano_of, usd
from marketplace.core.arguments import key_id as as_key_id
from marketplace.core.clock import utcnow
from marketplace.core.process import command_session

org = typer.Typer(help="Organisations: renters, owners, or both.", no_args_is_help=True, add_completion=False)
key = typer.Typer(help="API keys of an organisation.", no_args_is_help=True, add_completion=False)

KeyId = Annotated[UUID, typer.Argument(parser=as_key_id, metavar="KEY", help="The key's id, as `key list` shows it.")]


@org.command("create")
def create_organisation(name: Annotated[str, typer.Argument(help="Its name.")]) -> None:
    """Make an organisation, or find the one of this name. Prints its id."""
    with command_session() as session:
        typer.echo(service.create_organisation(session, name).id)


@org.command("list")
def list_organisations() -> None:
    """Show all organisations."""
    with command_session() as session:
        found = service.list_organisations(session)
    table = Table("id", "name", "since")
    for organisation in found:
        table.add_row(str(organisation.id), escape(organisation.name), f"{organisation.created_at:%Y-%m-%d}")
    tables.show(table)


@org.command("members")
def list_members(organisation: Annotated[str, typer.Argument(help="The organisation's name.")]) -> None:
    """Show an organisation's members."""
    with command_session() as session:
        found = service.list_members(session, service.find_organisation(session, organisation).id)
    table = Table("e-mail", "roles", "since")
    for row in found:
        table.add_row(escape(row.email), ", ".join(row.roles), f"{row.created_at:%Y-%m-%d}")
    tables.show(table)


@org.command("add-member")
def add_member(
    organisation: Annotated[str, typer.Argument(help="The organisation's name.")],
    email: Annotated[str, typer.Argument(help="Who.")],
    *,
    role: Annotated[list[str] | None, typer.Option(help="renter, owner, finance or operator; repeatable.")] = None,
) -> None:
    """Make a person a member, or give a member other roles; keys that need a lost role are revoked."""
    with command_session() as session:
        owner = service.find_organisation(session, organisation)
        member = service.add_member(session, owner.id, email, role or ["renter"])
        typer.echo(f"{member.email}: {', '.join(member.roles)}")


@org.command("remove-member")
def remove_member(
    organisation: Annotated[str, typer.Argument(help="The organisation's name.")],
    email: Annotated[str, typer.Argument(help="Who.")],
) -> None:
    """Take a person out, and revoke the keys that were made for them."""
    with command_session() as session:
        revoked = service.remove_member(session, service.find_organisation(session, organisation).id, email)
    typer.echo(f"Removed, and {revoked} keys revoked.")


@key.command("create")
def create_key(
    organisation: Annotated[str, typer.Argument(help="The organisation's name.")],
    *,
    name: Annotated[str, typer.Option(help="What the key is for.")] = "default",
    role: Annotated[list[str] | None, typer.Option(help="renter, owner, finance or operator; repeatable.")] = None,
    requests_per_minute: Annotated[int, typer.Option()] = service.DEFAULT_REQUESTS_PER_MINUTE,
    parallel_requests: Annotated[int, typer.Option()] = service.DEFAULT_PARALLEL_REQUESTS,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Not limited by default.")] = None,
    expires_in_days: Annotated[int | None, typer.Option(min=1, max=3650)] = None,
    model: Annotated[list[str] | None, typer.Option(help="The only models that it may use; repeatable.")] = None,
    network: Annotated[list[str] | None, typer.Option(help="The only CIDR blocks to come from; repeatable.")] = None,
    budget: Annotated[str | None, typer.Option(help="USD that it may spend, such as 25.00.")] = None,
    budget_period: Annotated[str, typer.Option(help="total, day, week or month.")] = "month",
    member: Annotated[str | None, typer.Option(help="E-mail of the member that it is for.")] = None,
) -> None:
    """Make a key. Its secret is printed on standard output, once: it cannot be shown again."""
    with command_session() as session:
        owner = service.find_organisation(session, organisation)
        created, secret = service.create_key(
            session,
            owner.id,
            name=name,
            roles=role or ["renter"],
            requests_per_minute=requests_per_minute,
            parallel_requests=parallel_requests,
            expires_in=None if expires_in_days is None else timedelta(days=expires_in_days),
            tokens_per_minute=tokens_per_minute,
            models=model,
            networks=network,
            budget=_budget(budget, budget_period),
            member=None if member is None else service.find_member(session, owner.id, member),
        )
        key_id = created.id
    typer.echo(f"Key {key_id}. Keep the secret: it is shown this once.", err=True)
    typer.echo(secret)


@key.command("list")
def list_keys(organisation: Annotated[str, typer.Argument(help="The organisation's name.")]) -> None:
    """Show an organisation's keys, newest first."""
    with command_session() as session:
        owner = service.find_organisation(session, organisation)
        found = service.list_keys(session, owner.id)
    table = Table("id", "key", "name", "roles", "a minute", "at once", "state")
    for row in found:
        limits = (str(row.requests_per_minute), str(row.parallel_requests))
        table.add_row(str(row.id), f"{row.shown_prefix}…", escape(row.name), ", ".join(row.roles), *limits, _state(row))
    tables.show(table)


@key.command("budget")
def set_budget(
    key_id: KeyId,
    amount: Annotated[str, typer.Argument(help="USD that it may spend in a period, or `none`.")],
    *,
    period: Annotated[str, typer.Option(help="total, day, week or month.")] = "month",
) -> None:
    """Give a key a budget, or take it away. What it spent in the running period stays spent."""
    with command_session() as session:
        service.set_budget(session, key_id, None if amount == "none" else _budget(amount, period))
        state = service.budget_of(session, key_id)
    if state is None:
        typer.echo("The key has no budget.")
    else:
        typer.echo(f"{usd(state.left_nano)} of {usd(state.limit_nano)} USD left ({state.period}).")


@key.command("revoke")
def revoke_key(
    key_id: KeyId,
) -> None:
    """Revoke a key for good. Gateways refuse it within two seconds."""
    with command_session() as session:
        revoked = service.revoke_key(session, key_id)
        shown, revoked_at = revoked.shown_prefix, revoked.revoked_at
    typer.echo(f"Key {shown}… is revoked since {revoked_at:%Y-%m-%d %H:%M:%S %Z}.")


def _budget(amount: str | None, period: str) -> service.Budget | None:
    if amount is None:
        return None
    try:
        return service.Budget(nano_of(amount), period)
    except ValueError as error:
        raise service.InvalidAccount(f"{error}.", param="budget") from None


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is not None and key.expires_at <= utcnow():
        return "expired"
    return "active"
