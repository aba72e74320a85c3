"""Whether somebody else uses a card: by processes where they can be told, else by growth of what is used. Pure.

Signals by trust: a compute process that is not ours; graphics memory that grew above what the desktop usually takes;
and, where processes cannot be told (a container sees the host's numbers, a driver says nothing), memory that grew above
what was used when our own engines had settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.protocol import DeviceReport
from agent.telemetry.port import GpuProcess

SETTLE_S: Final = 5.0
"""After an engine's start or end, memory moves for so long because of us."""
LEARNING: Final = 0.02
"""Share of a quiet sample in what the desktop usually takes."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a process: whose it is and what it is called. `ours` None: it is not in this machine's list."""

    ours: bool | None
    name: str = ""


@dataclass(slots=True)
class _Device:
    stamp: object = None
    stamped_at: float = float("-inf")
    settled_bytes: int | None = None
    graphics_bytes: float | None = None
    accepted: frozenset[int] = field(default_factory=frozenset)


class ForeignWatch:
    """One machine's cards. Remembers what is usual on each."""

    def __init__(self, ignored: Iterable[str], growth_bytes: int) -> None:
        self._ignored = frozenset(ignored)
        self._growth_bytes = growth_bytes
        self._devices: dict[str, _Device] = {}

    def look(
        self,
        report: DeviceReport,
        processes: tuple[GpuProcess, ...] | None,
        known: Mapping[int, Known],
        *,
        stamp: object,
        attached: bool,
        now: float,
    ) -> str:
        """Who is in the way on this card, or nothing.

        `stamp` changes whenever an engine of ours on it starts, serves or ends. `attached`: the owner's own server is
        what we sell there, so that what computes when it is taken up is in nobody's way.
        """
        device = self._devices.setdefault(report.device_id, _Device())
        if stamp != device.stamp:
            device.stamp, device.stamped_at, device.settled_bytes = stamp, now, None
        settled = now - device.stamped_at >= SETTLE_S
        if processes is None or any(known[entry.pid].ours is None for entry in processes if entry.pid in known):
            return self._grown(device, report, settled)
        compute = [entry.pid for entry in processes if entry.kind == "compute"]
        if attached and not settled:
            device.accepted = frozenset(compute)
        for pid in compute:
            about = known.get(pid, Known(None))
            if not about.ours and about.name not in self._ignored and pid not in device.accepted:
                return f"{about.name or 'another program'} computes on {report.name}"
        return self._drawn(device, report, processes)

    def _grown(self, device: _Device, report: DeviceReport, settled: bool) -> str:
        used = report.memory_used_bytes
        if used is None or not settled:
            return ""
        if device.settled_bytes is None:
            device.settled_bytes = used
        device.settled_bytes = min(device.settled_bytes, used)
        if used - device.settled_bytes > self._growth_bytes:
            return f"somebody else uses the memory of {report.name}"
        return ""

    def _drawn(self, device: _Device, report: DeviceReport, processes: tuple[GpuProcess, ...]) -> str:
        drawing = sum(entry.memory_bytes or 0 for entry in processes if entry.kind == "graphics")
        usual = device.graphics_bytes
        if usual is None:
            device.graphics_bytes = usual = float(drawing)
        if drawing - usual > self._growth_bytes:
            return f"something draws on {report.name}"
        # Less is believed at once; more only slowly, or a game that grows slowly would be taken for the desktop.
        device.graphics_bytes = min(float(drawing), usual + LEARNING * max(drawing - usual, 0.0))
        return ""
