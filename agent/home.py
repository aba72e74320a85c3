"""The agent's folder while it runs: one agent at a time, a pause that survives restarts, and a status to look at."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO, Final

import msgspec

from agent.identity import prepare_home, write_private
from agent.protocol import DeviceReport

LEVEL_VARIABLE: Final = "FALLOW_LOG_LEVEL"
URL_VARIABLE: Final = "FALLOW_AGENT_URL"
"""The marketplace's address, instead of the one at enrolment."""
ASKS: Final = ("pause", "drain", "evict")
STATUS_STALE_S: Final = 30.0
LOCK_TRIES: Final = 5
LOCK_PAUSE_S: Final = 0.02


class AlreadyRunning(Exception):
    """Another agent uses this folder; the message says which process."""


class OfferStatus(msgspec.Struct, frozen=True):
    """One engine, as the owner sees it."""

    variant_sha256: str
    phase: str
    engine: str
    simulated: bool
    slots: int
    busy: int
    context_per_slot: int
    last_error: str
    device_id: str = "cpu"
    protection: str = ""
    """What keeps the engine from the owner's files and the network."""
    decode_tokens_per_s: float | None = None
    wanted: bool = True
    """False: it waits for a plan."""
    why: str = ""
    """What the plan said that had it loaded, or evicted."""
    name: str = ""
    task: str = "chat"

    @property
    def title(self) -> str:
        """What people know it by: its file's name, or the beginning of its hash."""
        known = self.name or self.variant_sha256[:12]
        return known if self.task == "chat" else f"{known} ({self.task})"


class HoldStatus(msgspec.Struct, frozen=True):
    """Why a part of the machine gets no new work. An empty scope is the whole of it."""

    scope: str
    action: str
    reason: str


class AttemptStatus(msgspec.Struct, frozen=True):
    """One answer that is being made."""

    engine_key: str
    age_s: float
    pieces: int


class EnergyStatus(msgspec.Struct, frozen=True):
    """Energy of one device since the agent's start."""

    device_id: str
    source: str
    """`counter`, `integrated`, `declared` or `unknown`."""
    millijoules: int
    seconds: int


class Status(msgspec.Struct, frozen=True):
    """status.json: written by the running agent, read by `fallow agent status`."""

    pid: int
    written_at_s: float
    """Unix time."""
    started_at_s: float
    node_id: str
    url: str
    connected: bool
    gateway_id: str
    last_error: str
    available: bool
    unavailable_reason: str
    offers: list[OfferStatus]
    reports_waiting: int
    counters: dict[str, int]
    """Since the start of the agent."""
    holds: list[HoldStatus] = []
    problems: list[str] = []
    """What the owner should look at."""
    devices: list[DeviceReport] = []
    attempts: list[AttemptStatus] = []
    energy: list[EnergyStatus] = []
    earned_today_nano_usd: int = 0
    """By the owner's asks, before the fee; the marketplace's statement decides."""


class Lock:
    """Held while the agent runs. The kernel lets go of it when the process ends, however it ends."""

    def __init__(self, home: Path) -> None:
        self._path = home / "agent.lock"
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Raises AlreadyRunning."""
        prepare_home(self._path.parent)
        file = self._path.open("a+", encoding="utf-8")
        if not _locked(file):
            file.seek(0)
            pid = file.read(20).strip() or "unknown"
            file.close()
            raise AlreadyRunning(f"An agent already runs from {self._path.parent} (process {pid}).")
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let go."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _locked(file: IO[str]) -> bool:
    """Lock the file. Tries again for a moment: somebody who only asks whether an agent runs holds it very briefly."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(LOCK_PAUSE_S)
        else:
            return True
    return False


def is_running(home: Path) -> bool:
    """True if an agent holds the folder's lock."""
    try:
        with (home / "agent.lock").open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def asked(home: Path) -> str:
    """What the owner asked for: `pause`, `drain`, `evict`, or nothing."""
    try:
        said = (home / "paused").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError):
        return "pause"
    return said if said in ASKS else "pause"


def paused(home: Path) -> bool:
    """True while the owner has paused or drained the node."""
    return bool(asked(home))


def ask(home: Path, what: str) -> None:
    """Ask for one of ASKS, or for nothing more; a running agent sees it within a second, a later one at its start."""
    marker = home / "paused"
    if what:
        write_private(marker, what.encode())
    else:
        marker.unlink(missing_ok=True)


def set_paused(home: Path, value: bool) -> None:
    """Pause or resume."""
    ask(home, "pause" if value else "")


def write_status(home: Path, status: Status) -> None:
    """Replace status.json."""
    write_private(home / "status.json", msgspec.json.encode(status), durable=False)


def read_status(home: Path) -> Status | None:
    """The last status, or None if there is none that can be read."""
    try:
        return msgspec.json.decode((home / "status.json").read_bytes(), type=Status)
    except (OSError, msgspec.DecodeError):
        return None


def standing(status: Status) -> tuple[bool, str]:
    """Whether a running agent can take work, and if not, why: without an engine that is ready it cannot either."""
    if not status.available:
        return False, status.unavailable_reason
    if status.offers and all(offer.phase != "ready" for offer in status.offers):
        if not any(offer.wanted for offer in status.offers):
            return False, "its models wait for a plan to ask for them"
        starting = any(offer.phase == "starting" for offer in status.offers)
        return False, "its engine is starting" if starting else "no engine of it is ready"
    return True, ""


def is_fresh(status: Status) -> bool:
    """True if the agent that wrote it is likely to be alive and well."""
    return time.time() - status.written_at_s <= STATUS_STALE_S
