"""Energy of this machine's devices since the agent's start, each with the way it came about. Pure.

The card's own counter where it has one; else its power over time, which on most cards is an average of the last second
and lags a change by as much, so that only windows of several seconds mean anything; else the owner's declared watts. A
gap in the samples is no energy: nothing is invented for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agent.protocol import DeviceReport

MAX_GAP_S: Final = 10.0
COUNTER: Final = "counter"
INTEGRATED: Final = "integrated"
DECLARED: Final = "declared"
UNKNOWN: Final = "unknown"


@dataclass(slots=True)
class _Device:
    at: float
    report: DeviceReport
    source: str = UNKNOWN
    millijoules: float = 0.0
    seconds: float = 0.0
    """For how long energy was known."""


class EnergyTally:
    """All devices of this machine."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}

    def add(self, reports: Iterable[DeviceReport], now: float) -> None:
        """Take a sample. Times are monotonic seconds."""
        for report in reports:
            known = self._devices.get(report.device_id)
            if known is None:
                self._devices[report.device_id] = _Device(now, report)
                continue
            elapsed_s = now - known.at
            if 0 < elapsed_s <= MAX_GAP_S:
                source, millijoules = _energy(known.report, report, elapsed_s)
                if source != UNKNOWN:
                    known.source = source
                    known.millijoules += millijoules
                    known.seconds += elapsed_s
            known.at, known.report = now, report

    def totals(self) -> dict[str, tuple[str, int, int]]:
        """By device: source, millijoules, seconds that they cover."""
        return {
            name: (device.source, round(device.millijoules), round(device.seconds))
            for name, device in self._devices.items()
        }


def _energy(last: DeviceReport, now: DeviceReport, elapsed_s: float) -> tuple[str, float]:
    if last.energy_mj is not None and now.energy_mj is not None and now.energy_mj >= last.energy_mj:
        return COUNTER, float(now.energy_mj - last.energy_mj)
    if last.power_mw is None or now.power_mw is None:
        return UNKNOWN, 0.0
    source = DECLARED if now.power_source == "declared" else INTEGRATED
    return source, (last.power_mw + now.power_mw) / 2 * elapsed_s
