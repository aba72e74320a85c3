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
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from agent import config as configuration
from agent import earnings as earnings_note
from agent import enrol as enrolment
from agent import home as folder
from agent import identity as identities
from agent import runnable, screen, unit
from agent.assembly import fetch_missing, weight_store
from agent.calibration import SpeedBook
from agent.config import DEFAULT_WEIGHTS, ConfigError, Initial
from agent.doctor import examine
from agent.enrol import EnrolError
from agent.home import LEVEL_VARIABLE, URL_VARIABLE, AlreadyRunning, Status
from agent.identity import IdentityError
from agent.policy import DRAIN_S
from agent.protocol import DeviceReport
from agent.telemetry import nvml
from agent.telemetry.cpu import CpuSource
from agent.version import version
from agent.weights import PACKAGE_PREFIX, HashStore, is_url, locate

TOP_EVERY_S: Final = 1.0
DRAIN_SPARE_S: Final = 30.0

app = typer.Typer(
    help="Put this machine's idle GPU, or CPU, to work.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Resolved: engines run in folders of their own, where a relative path would lead elsewhere.
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--dir", resolve_path=True, help="The agent's folder; default: FALLOW_AGENT_DIR, or your data folder."
    ),
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
    engine: Annotated[str, typer.Option(help="llama.cpp, llama-server, vllm, openai or simulated.")] = "llama.cpp",
    device: Annotated[str, typer.Option(help="cpu, a GPU's UUID, or gpu for a replica on every card.")] = "cpu",
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
        weights=_lasting(weights),
        engine=engine,
        engine_url=engine_url,
        device=device,
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


def _lasting(weights: str) -> str:
    """The same weights, from wherever the agent is started: a path that leads to a file from here is made absolute."""
    path = Path(weights).expanduser()
    return str(path.absolute()) if not weights.startswith(PACKAGE_PREFIX) and path.exists() else weights


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
        _console.print(
            f"Not enrolled ({home}). Join with `fallow agent enroll`, or name another folder with --dir.",
            markup=False,
            soft_wrap=True,
        )
    else:
        _print_status(home, known, found if running else None)
    if not running:
        raise typer.Exit(3)


def _print_status(home: Path, known: identities.IdentityFile, found: Status | None) -> None:
    lines = [f"Node {known.node_id} ({known.name}) of {known.organisation}"]
    if found is None:
        lines.append("Not running." + (" Paused." if folder.paused(home) else ""))
        lines.append(f"Start it with: fallow agent run --dir {home}")
    else:
        lines += screen.status_lines(found)
    for line in lines:
        _console.print(line, markup=False, soft_wrap=True)


@app.command()
def top(home: HomeOption = None) -> None:
    """Watch it work: cards, engines, answers, what they come to. Ctrl-C ends the view, not the agent."""
    home = home or configuration.default_home()
    with contextlib.suppress(KeyboardInterrupt), Live(console=_console, auto_refresh=False) as live:
        while True:
            live.update(screen.top(folder.read_status(home), folder.is_running(home)), refresh=True)
            if not _console.is_terminal:
                break
            time.sleep(TOP_EVERY_S)


@app.command()
def earnings(
    home: HomeOption = None,
    days: Annotated[int, typer.Option(min=1, max=400, help="How many of the last days.")] = 14,
) -> None:
    """What your asks come to, by this machine's own note, before the fee. Your statement decides."""
    home = home or configuration.default_home()
    _console.print(screen.earnings(earnings_note.read(home / "earnings.json"), days))


@app.command()
def models(
    paths: Annotated[list[Path] | None, typer.Argument(help="GGUF files or folders; default: what is here.")] = None,
    home: HomeOption = None,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Requests served at once.")] = 4,
    context: Annotated[int, typer.Option("--context-per-slot", min=256, help="Tokens for each of them.")] = 2048,
    key: Annotated[str, typer.Option(envvar="FALLOW_API_KEY", help="Any API key of the marketplace, for prices.")] = "",
) -> None:
    """What can run here: whether it fits, how fast, and what it would earn at today's prices."""
    home = home or configuration.default_home()
    with _plain_errors():
        known = identities.find(home)
        today = asyncio.run(runnable.prices(known.url, key)) if key and known is not None else {}
        hashes = _known_files(home)
        found, problems = runnable.candidates(paths or list(hashes), hashes)
        book = SpeedBook(home / "speeds.json")
        verdicts = [
            runnable.judge(
                *(candidate, device),
                slots=slots,
                context=context,
                book=book,
                price=today.get(candidate.variant or ""),
            )
            for candidate in found
            for device in _devices_now()
        ]
    _console.print(screen.models(verdicts, slots=slots, context=context))
    for problem in problems:
        _errors.print(problem, markup=False, soft_wrap=True)
    if not today:
        _console.print("Earnings are unknown without prices: name an API key with --key.", markup=False)


def _known_files(home: Path) -> dict[Path, str]:
    """Model files that this machine knows by hash: those of config.toml, of the store, and the bundled one."""
    config = configuration.load(home) if (home / "config.toml").exists() else configuration.AgentConfig()
    hashes = HashStore(home / "weights.json")
    named = [model.weights for model in config.models if model.weights is not None and not is_url(model.weights)]
    files = [path for weights in named or [DEFAULT_WEIGHTS] if (path := locate(weights)).is_file()]
    files += weight_store(home, config).files()
    return {path: hashes.sha256(path) for path in files}


def _devices_now() -> list[DeviceReport]:
    reports = CpuSource().sample()
    if nvml.has_library():
        source = nvml.NvmlSource()
        reports += source.sample()
        source.close()
    return reports


@app.command()
def doctor(home: HomeOption = None) -> None:
    """Check everything that could keep this machine from working. Exit code 1: something needs you."""
    problems = 0
    for check in examine(home or configuration.default_home()):
        mark = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[check.grade]
        _console.print(f"{mark} {check.name}: {check.found}", markup=False, soft_wrap=True)
        if check.grade != "ok" and check.remedy:
            _console.print(f"          {check.remedy}", markup=False, soft_wrap=True)
        problems += check.grade == "problem"
    if problems:
        raise typer.Exit(1)


@app.command()
def fetch(home: HomeOption = None) -> None:
    """Get the weights that config.toml names by address, going on where an earlier try ended."""
    home = home or configuration.default_home()
    with _plain_errors(), _console.status("fetching ...") as shown:

        def told(have: int, total: int | None) -> None:
            shown.update(f"fetching: {runnable.gib(have)} of {runnable.gib(total)}")

        paths = asyncio.run(fetch_missing(home, configuration.load(home), told))
    for path in paths:
        _console.print(f"{path} is here.", markup=False, soft_wrap=True)
    if not paths:
        _console.print("config.toml names no weights by address: there is nothing to fetch.", markup=False)


@app.command()
def install(home: HomeOption = None) -> None:
    """Have systemd run the agent from now on, at each boot, as your own user."""
    home = home or configuration.default_home()
    with _plain_errors():
        identities.load(home)
        config = configuration.load(home)
        left = unit.install(home.resolve(), config.stop_grace_s)
    _console.print(f"Wrote {unit.unit_path()}.", markup=False, soft_wrap=True)
    for line in left:
        _console.print(f"Now run: {line}", markup=False, soft_wrap=True)


@app.command()
def pause(
    home: HomeOption = None,
    now: Annotated[bool, typer.Option("--now", help="Kill the engine instead of granting the grace.")] = False,
) -> None:
    """Take the machine back: running answers get a short grace, the engine's memory is freed. Lasts until `resume`."""
    _ask(home, "evict" if now else "pause")
    _console.print("Paused. `fallow agent resume` ends it.", markup=False)


@app.command()
def drain(
    home: HomeOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Come back when nothing runs any more.")] = False,
) -> None:
    """Take no new work, let what runs end, then free the memory. For an update: `drain --wait`, restart, `resume`."""
    folder_ = home or configuration.default_home()
    _ask(folder_, "drain")
    deadline = time.monotonic() + DRAIN_S + DRAIN_SPARE_S
    while wait and folder.is_running(folder_) and time.monotonic() < deadline:
        found = folder.read_status(folder_)
        if found is not None and not found.available and not any(offer.busy for offer in found.offers):
            break
        time.sleep(TOP_EVERY_S)
    _console.print("Drained. `fallow agent resume` ends it.", markup=False)


@app.command()
def resume(home: HomeOption = None) -> None:
    """Let the machine work again."""
    _ask(home, "")
    _console.print("Resumed.", markup=False)


def _ask(home: Path | None, what: str) -> None:
    home = home or configuration.default_home()
    with _plain_errors():
        if identities.find(home) is None:
            raise IdentityError(f"This machine is not enrolled ({home}): run `fallow agent enroll` first.")
        folder.ask(home, what)


if __name__ == "__main__":
    app()
