"""`fallow`: one command. Subcommands are loaded when asked for, so that the agent needs no library of the server's."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

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
    "standing": ("marketplace.jobs.cli", "standing of nodes: reasons, appeals, amnesties"),
    "plan": ("marketplace.jobs.plan_cli", "what nodes were advised to load, and why"),
    "catalog": ("marketplace.catalog.cli", "models and variants"),
    "finance": ("marketplace.finance.cli", "statements, bills, trial balance, checks"),
    "explain": ("marketplace.finance.explain_cli", "why a node did not earn in an hour"),
    "simulate": ("marketplace.matching.simulate.cli", "replay demand against a fleet; what would my card have earned"),
    "gateway": ("marketplace.commands:gateway", "the OpenAI-compatible door"),
    "worker": ("marketplace.commands:worker", "the Celery worker"),
    "beat": ("marketplace.commands:beat", "the Celery clock"),
    "migrate": ("marketplace.commands:migrate", "bring the database to this version"),
    "settings": ("marketplace.commands:settings", "what can be set, with its default and its meaning"),
}
"""Subcommand: (module[:app], what it is for). The app is a typer application; its name is `app` unless given."""

ON_LOCAL_STACK = frozenset(
    {"org", "key", "credit", "node", "catalog", "finance", "standing", "plan", "explain", "migrate"}
)
"""Without DATABASE_URL these talk to the database of a running `fallow up`."""


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
        extra = {"agent": "agent", "simulate": "simulate"}.get(name, "server,embedded")
        print(
            f"fallow {name}: the library {error.name!r} is not installed. Mend it with: pip install 'fallow[{extra}]'",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    if name in ON_LOCAL_STACK:
        _use_local_stack()
    try:
        app(args=arguments[1:], prog_name=f"fallow {name}")
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        print(f"fallow {name}: {sentence}", file=sys.stderr)
        raise SystemExit(1) from None


def _use_local_stack() -> None:
    if os.environ.get("DATABASE_URL") or os.environ.get("FALLOW_DATABASE_URL"):
        return
    with contextlib.suppress(ImportError, OSError, ValueError, KeyError):
        import platformdirs

        folder = Path(os.environ.get("FALLOW_DATA_DIR") or platformdirs.user_data_dir("fallow"))
        found = json.loads((folder / "running.json").read_text())
        os.environ["DATABASE_URL"] = found["database_url"]
        os.environ.setdefault("VALKEY_URL", found["valkey_url"])


def _sentence(error: Exception) -> str | None:
    """What to tell a person about an error that is theirs to mend; None for a defect of ours."""
    library = type(error).__module__.partition(".")[0]
    if library == "pydantic_core" and getattr(error, "title", "") == "Settings":
        return _faults_of_settings(error)
    # Of click: Celery's own options, which stand behind ours.
    if library == "click" or (hasattr(error, "message") and hasattr(error, "status")):
        return str(error)
    if library not in ("sqlalchemy", "psycopg", "redis"):
        return None
    reason = str(getattr(error, "orig", error)).strip().splitlines()[0]
    if "does not exist" in reason:
        return f"The database is not up to date ({reason}). Run `fallow migrate`."
    if type(error).__name__ in ("OperationalError", "ConnectionError", "TimeoutError"):
        return (
            f"The database does not answer ({reason}). Start `fallow up`, or set DATABASE_URL; "
            "for a stack with its own --data-dir set FALLOW_DATA_DIR."
        )
    return None


def _faults_of_settings(error: Any) -> str:
    """Each wrong setting by its name in the environment, and what is wrong. Never its value, which may be a secret.

    `error` is pydantic's ValidationError, whose library the agent does without.
    """
    faults = []
    for fault in error.errors(include_input=False, include_url=False):
        name = str(fault["loc"][0]) if fault["loc"] else "settings"
        shown = f"FALLOW_{name.upper()}" if name.islower() else name
        faults.append(f"{shown}: {fault['msg'].removeprefix('Value error, ')}.")
    return " ".join(faults)


def _print_help() -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, (_, purpose) in COMMANDS.items():
        table.add_row(f"  [bold]{name}[/bold]", purpose)
    console = Console()
    console.print(
        "Usage: fallow COMMAND [OPTIONS]\n\nIdle GPUs serve other people's inference, and their owners are paid.\n"
    )
    console.print(table)
    console.print("\n`fallow COMMAND --help` tells each one's options.")


if __name__ == "__main__":
    main()
