"""Keeps the machine from falling asleep under an answer: an inhibitor of systemd-logind, held while there is work."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

log = logging.getLogger("fallow.agent")


class Awake:
    """Held through a child that ends with our end of its pipe, so that nothing stays behind if the agent is killed."""

    def __init__(self, *, wanted: bool, root: Path = Path("/")) -> None:
        found = shutil.which("systemd-inhibit") if wanted and (root / "run/systemd/system").is_dir() else None
        self._program = found
        self._child: subprocess.Popen[bytes] | None = None

    def hold(self, busy: bool) -> None:
        """Hold while busy, let go otherwise. Cheap to call again; what cannot be held is given up for good."""
        if self._program is None or busy == (self._child is not None):
            return
        if not busy:
            self.release()
            return
        try:
            self._child = subprocess.Popen(
                [
                    *(self._program, "--what=sleep:idle", "--who=Fallow", "--mode=block"),
                    *("--why=an answer is being made", "cat"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.info("sleep_not_inhibited reason=%r", str(error))
            self._program = None

    def release(self) -> None:
        """Let the machine sleep again."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            child.stdin.close()
            child.terminate()
            child.wait(timeout=5)
