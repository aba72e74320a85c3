"""The systemd unit that runs the agent for its owner: no root, started at boot, restarted when it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from agent.errors import ConfigError

NAME: Final = "fallow-agent.service"
STOP_SPARE_S: Final = 30
"""Beyond the owner's grace, until systemd kills what is left."""


def text(home: Path, stop_grace_s: float) -> str:
    """A user's unit for the agent of this folder."""
    return f"""\
# Written by `fallow agent install`. A user's service: it needs no root, and runs without a login where lingering is on.
[Unit]
Description=Fallow agent: idle GPUs at work
After=network-online.target
StartLimitIntervalSec=300
StartLimitBurst=10

[Service]
ExecStart={_quoted(sys.executable)} -P -m agent {_quoted(str(home))}
Restart=always
RestartSec=5
TimeoutStopSec={int(stop_grace_s) + STOP_SPARE_S}
KillMode=mixed
NoNewPrivileges=true
UMask=0077
Nice=5

[Install]
WantedBy=default.target
"""


def unit_path() -> Path:
    """Where a user's units lie."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user" / NAME


def install(home: Path, stop_grace_s: float) -> list[str]:
    """Write the unit, and have systemd run it. Returns what is left to do by hand. Raises ConfigError."""
    path = unit_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(home, stop_grace_s))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return [f"systemd is not here: start `fallow agent run --dir {home}` by your own means."]
    for command in (["daemon-reload"], ["enable", "--now", NAME]):
        done = subprocess.run([systemctl, "--user", *command], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            return [f"systemctl --user {' '.join(command)}   # it said: {done.stderr.strip()[:200]}"]
    return ["loginctl enable-linger   # so that it also runs while you are not logged in"]


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$") + '"'
