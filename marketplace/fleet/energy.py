"""Energy from telemetry: stretches of time per device, each with one source. Pure: the caller brings the time.

Time is the gateway's, never the node's. Between two samples the earlier power counts. A gap in the telemetry is no
stretch at all: nothing is invented for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from agent.protocol import DeviceReport
from marketplace.fleet.claims import MAX_POWER_MW

MAX_GAP_S: Final = 35.0
"""Samples further apart belong to no common stretch: a little over three heartbeats."""
CAPPED_PART: Final = 0.97
"""Of the power limit: regulation keeps a card a little under it."""
STRETCH_S: Final = 300.0
"""A stretch is closed at this length, so that a statement's bounds cut little."""


@dataclass(slots=True)
class Stretch:
    """Energy of one device over one stretch. `row_id` is where it is stored, once it is."""

    device_id: str
    source: str
    """`nvml_counter`, `nvml_integrated`, `declared` or `unknown`."""
    started_at: datetime
    ended_at: datetime
    exact_mj: float = 0.0
    row_id: int | None = None
    dirty: bool = True
    used_pct_s: float = 0.0
    used_s: float = 0.0
    """Of it, in which the device said how busy it was."""
    capped_s: float | None = None
    """In which its power stood at its limit; None: it never said."""

    @property
    def energy_mj(self) -> int | None:
        """Millijoules; None when the source is unknown."""
        return None if self.source == "unknown" else round(self.exact_mj)

    @property
    def utilisation_pct(self) -> float | None:
        """Mean; None where the device never said it."""
        return self.used_pct_s / self.used_s if self.used_s else None

    @property
    def capped_ms(self) -> int | None:
        """For how long power bound it; None where the device never said it."""
        return None if self.capped_s is None else round(self.capped_s * 1000)

    def pass_by(self, report: DeviceReport, elapsed_s: float) -> None:
        """So long it was as this report says."""
        if report.utilisation_pct is not None:
            self.used_pct_s += report.utilisation_pct * elapsed_s
            self.used_s += elapsed_s
        capped = _capped(report)
        if capped is not None:
            self.capped_s = (self.capped_s or 0.0) + elapsed_s * capped


@dataclass(slots=True)
class _Device:
    at: datetime
    report: DeviceReport
    current: Stretch | None = None


class EnergyMeter:
    """All devices of one node."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._closed: list[Stretch] = []

    def sample(self, reports: Sequence[DeviceReport], now: datetime) -> None:
        """A sample arrived, or `now` shall be reached with the last one again."""
        for report in reports:
            known = self._devices.get(report.device_id)
            if known is None:
                self._devices[report.device_id] = _Device(now, report)
                continue
            self._advance(known, report, now)
        for device_id in self._devices.keys() - {report.device_id for report in reports}:
            self._close(self._devices.pop(device_id))

    def due(self) -> list[Stretch]:
        """Stretches that changed since they were last stored. The caller stores them and sets `dirty` and `row_id`."""
        open_ = [device.current for device in self._devices.values() if device.current is not None]
        closed, self._closed = self._closed, []
        return [stretch for stretch in (*closed, *open_) if stretch.dirty]

    def _advance(self, device: _Device, report: DeviceReport, now: datetime) -> None:
        elapsed_s = (now - device.at).total_seconds()
        if elapsed_s <= 0:
            device.report = report
            return
        if elapsed_s > MAX_GAP_S:
            self._close(device)
        else:
            source, millijoules = _energy(device.report, report, elapsed_s)
            current = device.current
            if current is None or current.source != source or (now - current.started_at).total_seconds() > STRETCH_S:
                self._close(device)
                current = device.current = Stretch(report.device_id, source, device.at, device.at)
            current.exact_mj += millijoules
            current.pass_by(device.report, elapsed_s)
            current.ended_at = now
            current.dirty = True
        device.at = now
        device.report = report

    def _close(self, device: _Device) -> None:
        if device.current is not None:
            self._closed.append(device.current)
            device.current = None


def _capped(report: DeviceReport) -> bool | None:
    """True while power bounds the device; None: it does not say."""
    measured = report.power_mw is not None and report.power_source == "nvml" and report.power_limit_mw
    if report.throttle is None and not measured:
        return None
    held = any("power" in name for name in report.throttle or ())
    at_limit = bool(measured) and (report.power_mw or 0) >= CAPPED_PART * (report.power_limit_mw or 1)
    return held or at_limit


def _energy(before: DeviceReport, after: DeviceReport, elapsed_s: float) -> tuple[str, float]:
    if before.energy_mj is not None and after.energy_mj is not None:
        counted = after.energy_mj - before.energy_mj
        # A counter that fell was reset by a reboot; one that leapt is a lie or another card.
        if 0 <= counted <= MAX_POWER_MW * elapsed_s:
            return "nvml_counter", float(counted)
    if before.power_mw is None:
        return "unknown", 0.0
    source = "declared" if before.power_source == "declared" else "nvml_integrated"
    return source, before.power_mw * elapsed_s
