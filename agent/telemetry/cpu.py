"""The processor and main memory of this machine as one device, `cpu`."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

import psutil

from agent.protocol import DeviceReport
from agent.telemetry.port import Processes

DEVICE_ID: Final = "cpu"
_SENSORS: Final = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})
_NO_LIMIT_BYTES: Final = 1 << 60


class DeclaredPower:
    """The owner's own figures, scaled by how busy the machine is. Both watts or none."""

    def __init__(self, idle_watts: float | None, load_watts: float | None) -> None:
        self._idle = idle_watts
        self._load = load_watts

    def milliwatts(self, utilisation_pct: float | None) -> int | None:
        """None unless declared and the utilisation is known."""
        if self._idle is None or self._load is None or utilisation_pct is None:
            return None
        share = min(max(utilisation_pct / 100, 0.0), 1.0)
        return round(1000 * (self._idle + (self._load - self._idle) * share))


class CpuSource:
    """Samples /proc through psutil, within the limits of the container around this process. `root` is for tests."""

    def __init__(self, power: DeclaredPower | None = None, root: Path = Path("/")) -> None:
        self._power = power or DeclaredPower(None, None)
        self._name = _cpu_name(root)
        self._sensor = _temperature_file(root)
        self._cgroup = root / "sys/fs/cgroup"
        psutil.cpu_percent(interval=None)  # the first call only sets the reference

    def sample(self) -> list[DeviceReport]:
        memory = psutil.virtual_memory()
        total, used = self._within_container(memory.total, memory.total - memory.available)
        utilisation = float(psutil.cpu_percent(interval=None))
        power_mw = self._power.milliwatts(utilisation)
        return [
            DeviceReport(
                device_id=DEVICE_ID,
                name=self._name,
                kind="cpu",
                memory_total_bytes=total,
                memory_used_bytes=used,
                utilisation_pct=utilisation,
                power_mw=power_mw,
                power_source="unknown" if power_mw is None else "declared",
                temperature_c=self._temperature_c(),
            )
        ]

    def processes(self) -> Processes:
        """Everybody may use the processor."""
        return {}

    @property
    def problem(self) -> str:
        """The processor is always there."""
        return ""

    @property
    def needs_restart(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Holds nothing."""

    def _within_container(self, total: int, used: int) -> tuple[int, int]:
        """The tighter of the machine and the control group: (total, used) whose difference is free to us."""
        limit = _read_int(self._cgroup / "memory.max")
        current = _read_int(self._cgroup / "memory.current")
        if limit is None or current is None or limit >= min(total, _NO_LIMIT_BYTES):
            return total, used
        # Page cache counts as current, and is given back under pressure.
        current -= min(current, _cgroup_reclaimable_bytes(self._cgroup / "memory.stat"))
        free = min(max(limit - current, 0), total - used)
        return limit, limit - free

    def _temperature_c(self) -> float | None:
        if self._sensor is None:
            return None
        millidegrees = _read_int(self._sensor)
        return None if millidegrees is None else millidegrees / 1000


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _cgroup_reclaimable_bytes(path: Path) -> int:
    try:
        fields = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return int(fields.get("inactive_file", "0"))
    except (OSError, ValueError):
        return 0


def _cpu_name(root: Path) -> str:
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()[:120]
    except (OSError, UnicodeDecodeError):
        pass
    return (platform.processor() or platform.machine() or "cpu")[:120]


def _temperature_file(root: Path) -> Path | None:
    for sensor in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        try:
            name = (sensor / "name").read_text().strip()
        except OSError:
            continue
        if name in _SENSORS and (sensor / "temp1_input").exists():
            return sensor / "temp1_input"
    return None
