"""`fallow`: one command, its subcommands loaded only when asked for, so that the agent needs none of the server's libraries."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys

from rich.console import Console
from rich.table import Table

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("marketplace.local", "run everything on this machine, until Ctrl-C"),
    "demo": ("marketplace.demo", "the main job, told with real data"),
    "agent": ("agent.cli", "the owner's side: enroll, run, status"),
    "org": ("marketplace.accounts.cli:org", "organisations"),
    "key": ("marketplace.accounts.cli:key", "API keys: create, list, revoke"),
    "credit": ("marketplace.billing.cli", "a renter's credit"),
    "node": ("marketplace.fleet.cli", "enrolment tokens and nodes"),
    "catalog": ("marketplace.catalog.cli", "models and variants"),
    "finance": ("marketplace.finance.cli", "statements, bills, trial balance, checks"),
    "gateway": ("marketplace.commands:gateway", "the OpenAI-compatible door"),
    "worker": ("marketplace.commands:worker", "the Celery worker"),
    "beat": ("marketplace.commands:beat", "the Celery clock"),
    "migrate": ("marketplace.commands:migrate", "bring the database to this version"),
}
"""Subcommand: (module[:app], what it is for). The app is a typer application; its name is `app` unless given."""


def main() -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 failed, 2 called wrongly."""
    arguments = sys.argv[1:]
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        _print_help()
        return
    if name in ("-V", "--version"):
        print(importlib.metadata.version("fallow"))
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean `fallow {near[0]}`?" if near else ""
        print(f"fallow: there is no command {name!r}.{hint} `fallow --help` lists them.", file=sys.stderr)
        raise SystemExit(2)
    target, _ = COMMANDS[name]
    module, _, attribute = target.partition(":")
    try:
        app = getattr(importlib.import_module(module), attribute or "app")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("agent", "ledger", "marketplace"):
            raise
        extra = "agent" if name == "agent" else "server,embedded"
        print(
            f"fallow {name}: the library {error.name!r} is not installed. Install it with: pip install 'fallow[{extra}]'",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    app(args=arguments[1:], prog_name=f"fallow {name}")


def _print_help() -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, (_, purpose) in COMMANDS.items():
        table.add_row(f"  [bold]{name}[/bold]", purpose)
    console = Console()
    console.print("Usage: fallow COMMAND [OPTIONS]\n\nIdle GPUs serve other people's inference, and their owners are paid.\n")
    console.print(table)
    console.print("\n`fallow COMMAND --help` tells each one's options.")


if __name__ == "__main__":
    main()
