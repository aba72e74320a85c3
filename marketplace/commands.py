"""The ordinary commands of a server installation: one process each, settings from the environment."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import AliasChoices, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from marketplace.core import logs
from marketplace.core import migrate as migrations
from marketplace.core.settings import Settings, get_settings

gateway = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
worker = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
beat = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
migrate = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
settings = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@gateway.command()
def run_gateway(
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback by default.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
) -> None:
    """Serve the renters' API and the agents' socket."""
    overrides = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    settings = Settings(**overrides)  # type: ignore[arg-type]
    migrations.require_upgraded(settings.database_url)
    serve_gateway(settings)


def serve_gateway(settings: Settings) -> None:
    """Run one gateway process until SIGTERM or SIGINT."""
    from marketplace.app import create_app
    from marketplace.gateway.server import make_server, spare_the_collector

    logs.configure(settings.log_format, settings.log_level)
    make_server(create_app(settings), settings, started=spare_the_collector).run()


@worker.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run_worker(context: typer.Context) -> None:
    """Run queued jobs, settlement and sweeps. Further options go to `celery worker`."""
    from marketplace import worker as process

    migrations.require_upgraded(get_settings().database_url)
    process.run_worker(context.args)


@beat.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run_beat(context: typer.Context) -> None:
    """Run the clock of the periodic tasks. Run exactly one. Further options go to `celery beat`."""
    from marketplace import worker as process

    migrations.require_upgraded(get_settings().database_url)
    process.run_beat(context.args)


@migrate.command()
def run_migrate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if the schemas differ.")] = False,
) -> None:
    """Bring the database to this version's schema."""
    url = get_settings().database_url
    if check:
        differences = migrations.check(url)
        for difference in differences:
            typer.echo(difference)
        if differences:
            raise typer.Exit(1)
        typer.echo("Models and migrations give the same schema.")
        return
    migrations.upgrade(url)
    typer.echo("The database is up to date.")


@settings.command()
def run_settings() -> None:
    """List what can be set in the environment or in `.env`: its name, its default, and what it means."""
    for name, field in Settings.model_fields.items():
        typer.echo(f"{environment_name(name)}={_shown(field)}\n    {' '.join((field.description or '').split())}")


def environment_name(field: str) -> str:
    """The variable that sets a field of Settings; of several the usual one."""
    alias = Settings.model_fields[field].validation_alias
    return str(alias.choices[0]) if isinstance(alias, AliasChoices) else f"FALLOW_{field.upper()}"


def _shown(field: FieldInfo) -> str:
    """A default as one would write it; nothing where there is none, or where each process makes its own."""
    default = field.default
    if default is PydanticUndefined or isinstance(default, SecretStr):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)
