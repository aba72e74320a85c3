"""NVIDIA devices through NVML: the only module that imports pynvml.

The driver is initialised once, devices are known by UUID (an index changes at a reboot), and each figure is asked on
its own: one that the card does not give is unknown, and the sample still goes.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, Final

from agent.protocol import DeviceReport

LIBRARY: Final = "libnvidia-ml.so.1"
_NOT_SUPPORTED: Final = 3
_NO_PERMISSION: Final = 4
_GPU_IS_LOST: Final = 15
_FUNCTION_NOT_FOUND: Final = 13
_VERSION_MISMATCH: Final = 25
_MIG_ENABLED: Final = 1
_INIT_REASONS: Final = {
    4: "no permission to open the NVIDIA device nodes",
    9: "the NVIDIA driver is not loaded",
    12: "the NVIDIA driver library was not found",
    18: "the NVIDIA driver was upgraded underneath: reboot this machine",
}


class NvmlAbsent(Exception):
    """There is no usable NVIDIA driver here; the message says why."""


def open_source(library: Any | None = None) -> NvmlSource:
    """Initialise NVML. `library` stands in for the pynvml module. Raises NvmlAbsent."""
    nvml = library if library is not None else _load()
    try:
        nvml.nvmlInit()
        return NvmlSource(nvml)
    except nvml.NVMLError as error:
        code = _code(error)
        raise NvmlAbsent(_INIT_REASONS.get(code, f"NVML error {code} at start")) from error


def _load() -> Any:
    try:
        # Looking for the driver first saves a machine without one the memory of the bindings.
        ctypes.CDLL(LIBRARY)
        return importlib.import_module("pynvml")
    except (OSError, ImportError) as error:
        raise NvmlAbsent(f"no NVIDIA driver on this machine ({LIBRARY} or its bindings are missing)") from error


class NvmlSource:
    """All NVIDIA devices of this machine. Use it from one thread: a wedged driver call must cost only that thread."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._last: dict[str, DeviceReport] = {}
        for index in range(int(nvml.nvmlDeviceGetCount())):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            self._handles[_text(nvml.nvmlDeviceGetUUID(handle))] = handle

    def sample(self) -> list[DeviceReport]:
        reports = [self._report(uuid, handle) for uuid, handle in self._handles.items()]
        self._last = {report.device_id: report for report in reports}
        return reports

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return  # the process ends, and its handles with it

    def _report(self, uuid: str, handle: Any) -> DeviceReport:
        previous = self._last.get(uuid)
        if previous is not None and previous.state == "lost":
            return previous  # a card that fell off the bus does not come back without a reset
        nvml = self._nvml
        try:
            name = self._ask(nvml.nvmlDeviceGetName, handle)
            if self._mig(handle):
                return _without_figures(uuid, _text(name), "refused", "MIG is on: this device is split")
            total, used, reserved = self._memory(handle)
            power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
            return DeviceReport(
                device_id=uuid,
                name=_text(name) or "NVIDIA GPU",
                kind="gpu",
                memory_total_bytes=total,
                memory_used_bytes=used,
                memory_reserved_bytes=reserved,
                utilisation_pct=self._utilisation(handle),
                power_mw=power,
                power_source="unknown" if power is None else "nvml",
                power_limit_mw=self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
                energy_mj=self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
                temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            )
        except nvml.NVMLError as error:
            known_name = previous.name if previous else "NVIDIA GPU"
            code = _code(error)
            if code == _GPU_IS_LOST:
                return _without_figures(uuid, known_name, "lost", "the GPU fell off the bus (NVML error 15)")
            if code == _NO_PERMISSION:
                return _without_figures(uuid, known_name, "refused", "no permission to read this device")
            return _without_figures(uuid, known_name, "unavailable", f"NVML error {code}")

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The figure, or None where this card or driver has none. Raises the bindings' error for a broken device."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if _code(error) in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
                return None
            raise

    def _mig(self, handle: Any) -> bool:
        modes = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
        return modes is not None and int(modes[0]) == _MIG_ENABLED

    def _utilisation(self, handle: Any) -> float | None:
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        return None if rates is None else float(rates.gpu)

    def _memory(self, handle: Any) -> tuple[int | None, int | None, int | None]:
        """(total, used, reserved). Version 1 of the call counts reserved memory as used, so version 2 comes first."""
        nvml = self._nvml
        try:
            second = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            return _bytes(second.total), _bytes(second.used), _bytes(second.reserved)
        except nvml.NVMLError as error:
            if _code(error) not in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _VERSION_MISMATCH):
                raise
        first = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        return (None, None, None) if first is None else (_bytes(first.total), _bytes(first.used), None)


def _without_figures(uuid: str, name: str, state: str, reason: str) -> DeviceReport:
    return DeviceReport(device_id=uuid, name=name or "NVIDIA GPU", kind="gpu", state=state, reason=reason)


def _bytes(value: Any) -> int | None:
    return None if value is None or value >= 2**64 - 1 else int(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _code(error: Any) -> int:
    return int(getattr(error, "value", -1))
