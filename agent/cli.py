"""`fallow agent`: the owner's side. Errors are one sentence on standard error, and exit code 1."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from agent import config as configuration
from agent import enrol as enrolment
from agent import home as folder
from agent import identity as identities
from agent.config import DEFAULT_WEIGHTS, ConfigError, Initial
from agent.enrol import EnrolError
from agent.home import LEVEL_VARIABLE, URL_VARIABLE, AlreadyRunning, Status
from agent.identity import IdentityError
from agent.version import version

app = typer.Typer(
    help="Put this machine's idle GPU, or CPU, to work.", no_args_is_help=True, pretty_exceptions_enable=False
)
HomeOption = Annotated[
    Path | None, typer.Option("--dir", help="The agent's folder; default: FALLOW_AGENT_DIR, or your data folder.")
]
_console = Console(highlight=False)
_errors = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except (ConfigError, IdentityError, EnrolError, AlreadyRunning) as error:
        _errors.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except PermissionError as error:
        _errors.print(f"{error.filename} may not be used: {error.strerror}.", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


@app.command()
def enroll(
    *,
    url: Annotated[str, typer.Option(help="Address of the marketplace, such as https://fallow.example.")],
    token: Annotated[str, typer.Option(envvar="FALLOW_ENROL_TOKEN", help="One-time token from the marketplace.")],
    home: HomeOption = None,
    name: Annotated[str, typer.Option(help="What to call this machine; default: its host name.")] = "",
    engine: Annotated[str, typer.Option(help="llama.cpp, openai or simulated.")] = "llama.cpp",
    engine_url: Annotated[str | None, typer.Option(help="For openai: where your server answers.")] = None,
    weights: Annotated[str, typer.Option(help="GGUF file: a path, or package:NAME/FILE.")] = DEFAULT_WEIGHTS,
    slots: Annotated[int, typer.Option(help="Requests served at once.")] = 2,
    context_per_slot: Annotated[int, typer.Option(help="Tokens that each request may use.")] = 2048,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: every core but one.")] = None,
    ask_input: Annotated[str, typer.Option(help="USD per million input tokens.")] = "0.05",
    ask_cached_input: Annotated[str, typer.Option(help="USD per million cached input tokens.")] = "0.01",
    ask_output: Annotated[str, typer.Option(help="USD per million output tokens.")] = "0.20",
    idle_watts: Annotated[float | None, typer.Option(help="What it draws at rest, if you measured it.")] = None,
    load_watts: Annotated[float | None, typer.Option(help="What it draws under load, if you measured it.")] = None,
) -> None:
    """Join this machine to your organisation, once. Writes config.toml for you to edit."""
    home = home or configuration.default_home()
    initial = Initial(
        weights=weights,
        engine=engine,
        engine_url=engine_url,
        slots=slots,
        context_per_slot=context_per_slot,
        threads=threads,
        ask_input=ask_input,
        ask_cached_input=ask_cached_input,
        ask_output=ask_output,
        idle_watts=idle_watts,
        load_watts=load_watts,
    )
    with _plain_errors():
        if not enrolment.is_private(url):
            _errors.print("Warning: this address is not https; others on the way can read the token.", markup=False)
        file = asyncio.run(
            enrolment.enrol(
                home,
                url=url,
                token=token,
                name=name or platform.node()[: enrolment.MAX_NAME_CHARS] or "node",
                initial=initial,
                agent_version=version(),
            )
        )
    _console.print(f"Enrolled as node {file.node_id} of {file.organisation}.", markup=False, soft_wrap=True)
    _console.print(
        f"Look at {home / 'config.toml'}, then start it with: fallow agent run --dir {home}",
        markup=False,
        soft_wrap=True,
    )


@app.command()
def run(
    home: HomeOption = None,
    url: Annotated[str, typer.Option(envvar=URL_VARIABLE, help="The marketplace's address, if it has moved.")] = "",
    log_level: Annotated[str, typer.Option(envvar=LEVEL_VARIABLE, help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Serve until Ctrl-C or SIGTERM. Leaves no process behind."""
    with _plain_errors():
        url = configuration.check_url(url) if url else ""
    folder_name = str(home or configuration.default_home())
    # In place of this process: same pid, and none of the command line's libraries in memory while it serves.
    os.execve(  # noqa: S606 - no shell is wanted
        sys.executable,
        [sys.executable, "-P", "-m", "agent", folder_name],
        {**os.environ, LEVEL_VARIABLE: log_level, URL_VARIABLE: url},
    )


@app.command()
def status(
    home: HomeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what the agent of this machine does now. Exit code 3: it does not run."""
    home = home or configuration.default_home()
    running = folder.is_running(home)
    found = folder.read_status(home)
    with _plain_errors():
        known = identities.find(home)
    if as_json:
        report = {
            "enrolled": known is not None,
            "running": running,
            "paused": folder.paused(home),
            "status": found if running else None,
        }
        print(msgspec.json.encode(report).decode())
    elif known is None:
        _console.print(f"Not enrolled ({home}).", markup=False, soft_wrap=True)
    else:
        _print_status(known, found if running else None, folder.paused(home))
    if not running:
        raise typer.Exit(3)


def _print_status(known: identities.IdentityFile, found: Status | None, paused: bool) -> None:
    lines = [f"Node {known.node_id} ({known.name}) of {known.organisation}"]
    if found is None:
        lines.append("Not running." + (" Paused." if paused else ""))
    else:
        lines += _status_lines(found)
    for line in lines:
        _console.print(line, markup=False, soft_wrap=True)


def _status_lines(found: Status) -> list[str]:
    minutes = int(time.time() - found.started_at_s) // 60
    link = f"connected to {found.url}" if found.connected else f"not connected: {found.last_error or 'connecting'}"
    counters = found.counters
    lines = [f"Running for {minutes} min (process {found.pid}), {link}"]
    if not folder.is_fresh(found):
        lines.append(f"It has not said anything for {time.time() - found.written_at_s:.0f} s.")
    lines.append("Taking work" if found.available else f"Taking no work: {found.unavailable_reason}")
    for offer in found.offers:
        label = f"{offer.engine or 'engine'}{' (simulated)' if offer.simulated else ''}"
        error = f", last error: {offer.last_error}" if offer.last_error else ""
        lines.append(
            f"  {offer.variant_sha256[:12]}  {label} {offer.phase}, {offer.busy} of {offer.slots} slots busy, "
            f"{offer.context_per_slot} tokens each{error}"
        )
    lines.append(
        f"Since the start: {counters['completed']} answers, {counters['cancelled']} cancelled, "
        f"{counters['failed']} failed, {counters['refused']} refused; "
        f"{found.reports_waiting} reports wait for the marketplace"
    )
    return lines


@app.command()
def pause(home: HomeOption = None) -> None:
    """Take the machine back: running answers get a short grace, the engine's memory is freed. Lasts until `resume`."""
    _set_paused(home, True)
    _console.print("Paused. `fallow agent resume` ends it.", markup=False)


@app.command()
def resume(home: HomeOption = None) -> None:
    """Let the machine work again."""
    _set_paused(home, False)
    _console.print("Resumed.", markup=False)


def _set_paused(home: Path | None, value: bool) -> None:
    home = home or configuration.default_home()
    with _plain_errors():
        if identities.find(home) is None:
            raise IdentityError(f"This machine is not enrolled ({home}): run `fallow agent enroll` first.")
        folder.set_paused(home, value)


if __name__ == "__main__":
    app()
