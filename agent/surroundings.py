"""What goes on around the agent on this machine: battery, keyboard, programs, whose process is whose. Linux; elsewhere
most of it is unknown. `root` is for tests."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from agent.foreign import Known

MAX_ANCESTORS: Final = 32
COMM_CHARS: Final = 15
"""Of a program's name, the kernel keeps so many."""


def on_battery(root: Path = Path("/")) -> bool | None:
    """True if a battery feeds this machine. None: it has no battery, or does not say."""
    supplies = root / "sys/class/power_supply"
    has_battery, plugged, draining = False, None, False
    for supply in sorted(supplies.glob("*")):
        kind = _read(supply / "type")
        if kind == "Battery" and _read(supply / "scope") != "Device":
            has_battery = True
            draining = draining or _read(supply / "status") == "Discharging"
        elif kind in ("Mains", "USB"):
            plugged = bool(plugged) or _read(supply / "online") == "1"
    if not has_battery:
        return None
    return not plugged if plugged is not None else draining


class Desktop:
    """How long keyboard and mouse have rested."""

    def __init__(self, root: Path = Path("/"), *, x11: bool = True) -> None:
        self._root = root
        self._screen = _XScreen.open() if x11 and os.environ.get("DISPLAY") else None

    def idle_s(self) -> float | None:
        """Seconds since the last input at a terminal or at the X display; None: nothing tells."""
        told = [self._screen.idle_s()] if self._screen is not None else []
        now = time.time()
        for terminal in (*self._root.glob("dev/pts/[0-9]*"), *self._root.glob("dev/tty[1-9]")):
            try:
                # The kernel notes input as an access; a terminal that was only opened counts as well.
                told.append(max(now - terminal.stat().st_atime, 0.0))
            except OSError:
                continue
        known = [value for value in told if value is not None]
        return min(known) if known else None


class _ScreenSaverInfo(ctypes.Structure):
    _fields_ = (
        ("window", ctypes.c_ulong),
        ("state", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("til_or_since", ctypes.c_ulong),
        ("idle_ms", ctypes.c_ulong),
        ("event_mask", ctypes.c_ulong),
    )


class _XScreen:
    """The X server's own count, through libXss where it is installed."""

    def __init__(self, x11: Any, xss: Any, display: Any) -> None:
        self._xss, self._display = xss, display
        self._root_window = x11.XDefaultRootWindow(display)
        self._info = _ScreenSaverInfo()

    @classmethod
    def open(cls) -> _XScreen | None:
        try:
            x11, xss = ctypes.CDLL("libX11.so.6"), ctypes.CDLL("libXss.so.1")
        except OSError:
            return None
        x11.XOpenDisplay.restype = ctypes.c_void_p
        x11.XDefaultRootWindow.argtypes = [ctypes.c_void_p]
        x11.XDefaultRootWindow.restype = ctypes.c_ulong
        xss.XScreenSaverQueryInfo.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p]
        display = x11.XOpenDisplay(None)
        return cls(x11, xss, display) if display else None

    def idle_s(self) -> float | None:
        answered = self._xss.XScreenSaverQueryInfo(self._display, self._root_window, ctypes.byref(self._info))
        return self._info.idle_ms / 1000 if answered else None


class Programs:
    """Looks for the owner's programs among what runs. Reads only what is new since the last look."""

    def __init__(self, names: Iterable[str], root: Path = Path("/")) -> None:
        self._wanted = {name[:COMM_CHARS]: name for name in names}
        self._proc = root / "proc"
        self._names: dict[str, str] = {}

    def running(self) -> str:
        """The first of them that runs, or nothing."""
        if not self._wanted:
            return ""
        try:
            pids = [entry for entry in os.listdir(self._proc) if entry.isdigit()]  # noqa: PTH208 - names are enough
        except OSError:
            return ""
        self._names = {pid: self._names.get(pid) or _read(self._proc / pid / "comm") for pid in pids}
        return next((self._wanted[name] for name in self._names.values() if name in self._wanted), "")


def whose(pids: Iterable[int], roots: Iterable[int], root: Path = Path("/")) -> dict[int, Known]:
    """For each process whether it belongs to one of the process trees below `roots`."""
    ours = frozenset(roots)
    return {pid: _known(pid, ours, root / "proc") for pid in pids}


def _known(pid: int, roots: frozenset[int], proc: Path) -> Known:
    name = _read(proc / str(pid) / "comm")
    if not name and not (proc / str(pid)).exists():
        return Known(None)
    ancestor = pid
    for _ in range(MAX_ANCESTORS):
        if ancestor in roots:
            return Known(True, name)
        ancestor = _parent(ancestor, proc)
        if ancestor <= 1:
            break
    return Known(False, name)


def _parent(pid: int, proc: Path) -> int:
    # "pid (name) state ppid ...": the name may hold anything, also a closing bracket.
    fields = _read(proc / str(pid) / "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
