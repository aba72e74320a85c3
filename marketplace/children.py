"""Child processes of a stack on one machine: started, watched, ended together, logs kept in files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marketplace.core.logs import get_logger

log = get_logger(__name__)
PR_SET_PDEATHSIG = 1
RESTART_LIMIT = 5
"""Restarts of one child within RESTART_WINDOW_S before it is given up."""
RESTART_WINDOW_S = 60.0


class ChildFailed(Exception):
    """A part did not start or does not stay up. Says which, why, and where its log is."""

    def __init__(self, name: str, reason: str, log_path: Path) -> None:
        super().__init__(f"The {name} {reason}.\n{tail(log_path)}\nIts log: {log_path}")
        self.name = name
        self.log_path = log_path


def tail(path: Path, lines: int = 12, most_bytes: int = 16_384) -> str:
    """The last lines of a log, for an error message."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return "(it wrote no log)"
    return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:]) or "(its log is empty)"


def die_with_parent(signal_number: int) -> Callable[[], None]:
    """For preexec_fn: on Linux the kernel signals the child when its parent dies; kill -9 leaves nothing behind."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def set_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the call

    return set_signal


@dataclass
class Child:
    """One process of the stack. `stop_signal` ends it in order; SIGKILL follows after `grace_s`."""

    name: str
    command: Sequence[str]
    log_path: Path
    environment: Mapping[str, str] | None = None
    cwd: Path | None = None
    user: int | None = None
    stop_signal: int = signal.SIGTERM
    grace_s: float = 10.0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    restarts: list[float] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Start it in a session of its own: a Ctrl-C reaches the stack alone, which ends its parts in order."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as sink:
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=None if self.environment is None else dict(self.environment),
                cwd=self.cwd,
                user=self.user,
                group=self.user,
                extra_groups=None if self.user is None else [],
                start_new_session=True,
                preexec_fn=die_with_parent(self.stop_signal),  # noqa: PLW1509 - one prctl call, no locks
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_until(self, ready: Callable[[], bool], *, timeout_s: float, every_s: float = 0.05) -> None:
        """Wait until it serves. Raises ChildFailed if it exits first or takes longer."""
        limit = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                code = None if self.process is None else self.process.returncode
                raise ChildFailed(self.name, f"ended at once (exit {code})", self.log_path)
            if time.monotonic() > limit:
                raise ChildFailed(self.name, f"was not ready within {timeout_s:.0f} s", self.log_path)
            time.sleep(every_s)

    def stop(self) -> None:
        """End it: its signal, then after its grace SIGKILL to its whole session. Never raises."""
        if self.process is None:
            return
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(self.stop_signal)
            try:
                self.process.wait(self.grace_s)
            except subprocess.TimeoutExpired:
                log.warning("child_killed", name=self.name, grace_s=self.grace_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to its whole session, so that no grandchild stays."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def restart_if_dead(self) -> bool:
        """Start it again if it died. Raises ChildFailed if it keeps dying. Returns True if it was restarted."""
        if self.process is None or self.running:
            return False
        now = time.monotonic()
        self.restarts = [moment for moment in self.restarts if now - moment < RESTART_WINDOW_S]
        if len(self.restarts) >= RESTART_LIMIT:
            raise ChildFailed(self.name, f"ended {RESTART_LIMIT + 1} times within a minute", self.log_path)
        self.restarts.append(now)
        log.warning("child_restarted", name=self.name, exit_code=self.process.returncode)
        self.start()
        return True
