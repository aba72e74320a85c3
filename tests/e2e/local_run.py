"""`fallow up` and `fallow demo` as a person types them, and the processes that belong to a run."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.stack import until

MARK = "PYTHON_FALLOW_TEST_RUN"
"""In the environment of every process of a run; engines are handed what begins with PYTHON."""


class LocalRun:
    """One `fallow <arguments>` with its output, and a way to find whatever it left behind."""

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.mark = secrets.token_hex(8)
        self._folder = folder
        self.output_path = folder / f"output-{self.mark}.txt"
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("FALLOW_") and name not in ("DATABASE_URL", "VALKEY_URL")
        }
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "marketplace.cli", *arguments],
                env={**clean, MARK: self.mark, **(environment or {})},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait_for(self, words: str, *, within_s: float = 90.0) -> None:
        """Until it has said this. Fails with its output if it ends first."""

        def said() -> bool:
            assert self.process.poll() is None or words in self.output, f"it ended:\n{self.output}"
            return words in self.output

        until(said, f"{words!r} in the output", within_s=within_s)

    def wait(self, *, within_s: float = 60.0) -> int:
        """Its exit code."""
        return self.process.wait(within_s)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """Everything that this run started and that lives."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and self._is_ours(process):
                    found.append(process)
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        # A PostgreSQL backend writes its title over its environment; it stays in its data directory.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == self.mark:
                return True
        with contextlib.suppress(psutil.Error, OSError):
            return Path(process.cwd()).is_relative_to(self._folder) and process.pid != os.getpid()
        return False

    def nothing_left(self, *, within_s: float = 20.0) -> None:
        """Fails, naming them, if processes stay."""
        until(lambda: not self.processes(), f"no process left, of {self.processes()}", within_s=within_s, every_s=0.2)

    def end(self) -> None:
        """For a test's end: whatever is left is killed."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(10)
