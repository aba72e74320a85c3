"""NVIDIA devices through NVML: the only module that imports pynvml.

The driver is initialised once and again only after it failed as a whole; devices are known by UUID (an index changes at
a reboot); each figure is asked on its own: one that the card does not give is unknown, and the sample still goes. What
blocks (PCIe throughput) is never asked, what rarely changes is asked of one card a sample.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from agent.protocol import DeviceReport
from agent.telemetry import nvml_faults as faults
from agent.telemetry.nvml_faults import Trouble
from agent.telemetry.port import GpuProcess, Processes

LIBRARY: Final = "libnvidia-ml.so.1"
MAX_CARDS: Final = 64
MAX_EVENTS_A_SAMPLE: Final = 16
REOPEN_FIRST_S: Final = 5.0
REOPEN_MAX_S: Final = 300.0
STUCK_TRIES: Final = 10
"""So many failed starts in a row after NVML had worked, all of them with error 999, mean that this process is stuck."""
LOST_LOOK_S: Final = 60.0
"""How often a card that was lost is looked for."""
SLOW_EVERY_SAMPLES: Final = 30
MUTE_SAMPLES: Final = 3
_MUTE: Final = faults.device_state(faults.UNKNOWN)[1]
_XID_EVENT: Final = 8
_MIG_ENABLED: Final = 1
_UNCORRECTED: Final = 1
_LIFETIME: Final = 1
_SM_CLOCK: Final = 1
_MEMORY_CLOCK: Final = 2


class NvmlAbsent(Exception):
    """There is no usable NVIDIA driver here; the message says why."""


class _Failed(Exception):
    """A call failed so that more than its figure is affected."""

    def __init__(self, code: int, trouble: Trouble) -> None:
        super().__init__(code)
        self.code = code
        self.trouble = trouble


@dataclass(slots=True)
class _Slow:
    """What rarely changes."""

    pcie_generation: int | None = None
    pcie_width: int | None = None
    ecc_uncorrected: int | None = None


@dataclass(slots=True)
class _Card:
    uuid: str
    handle: Any
    name: str = "NVIDIA GPU"
    slow: _Slow = field(default_factory=_Slow)
    xid: int | None = None
    verdict: tuple[str, str] | None = None
    """A state that outlasts the sample: lost, or in need of a reset."""
    look_at: float = 0.0
    processes: tuple[GpuProcess, ...] | None = None
    turn: int = 0
    """In which sample of a round the slow figures are asked, so that no sample asks them of every card."""


def open_source(library: Any | None = None) -> NvmlSource:
    """A source whose driver works now. Raises NvmlAbsent with the reason."""
    source = NvmlSource(library)
    source.open()
    if source.problem:
        raise NvmlAbsent(source.problem)
    return source


def has_library() -> bool:
    """True if the driver's library can be loaded. A machine without it is spared the memory of the bindings."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


class NvmlSource:
    """All NVIDIA devices of this machine. Use it from one thread: a wedged driver call must cost only that thread.

    Nothing is touched before the first sample. `library` stands in for the pynvml module, `root` for the file system.
    """

    def __init__(
        self, library: Any | None = None, *, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._given = library
        self._nvml: Any = None
        self._root = root
        self._clock = clock
        self._wsl = faults.inside_wsl(root)
        self._cards: dict[str, _Card] = {}
        self._events: Any = None
        self._open = False
        self._worked = False
        self._reopen_at = 0.0
        self._failures = 0
        self._stuck = 0
        self._samples = 0
        self._mute_samples = 0
        self._reports: list[DeviceReport] = []
        self.problem = ""
        self.driver_version = ""

    @property
    def needs_restart(self) -> bool:
        """True once a library that had worked answers nothing but error 999: a container whose devices were taken."""
        return self._stuck >= STUCK_TRIES

    def open(self) -> None:
        """Initialise the driver's library. Never raises: `problem` says why it did not work."""
        try:
            if self._nvml is None:
                self._nvml = self._given if self._given is not None else _load()
            self._nvml.nvmlInit()
        except NvmlAbsent as absent:
            self._not_open(faults.LIBRARY_NOT_FOUND, str(absent))
        except self._error as error:
            code = _code(error)
            self._not_open(code, faults.init_reason(code, self._root))
        else:
            self._open = self._worked = True
            self._failures = self._stuck = 0
            self.problem = ""
            self._find_cards()

    @property
    def _error(self) -> type[Exception]:
        return self._nvml.NVMLError if self._nvml is not None else NvmlAbsent

    def _not_open(self, code: int, reason: str) -> None:
        self.problem = reason
        self._stuck = self._stuck + 1 if code == faults.UNKNOWN and self._worked else 0
        pause_s = (
            REOPEN_MAX_S if code == faults.LIBRARY_MISMATCH else min(REOPEN_FIRST_S * 2**self._failures, REOPEN_MAX_S)
        )
        self._failures = min(self._failures + 1, 16)
        self._reopen_at = self._clock() + pause_s

    def _find_cards(self) -> None:
        nvml = self._nvml
        self.driver_version = _text(self._quiet(nvml.nvmlSystemGetDriverVersion))
        self._events = self._quiet(nvml.nvmlEventSetCreate)
        found: set[str] = set()
        for index in range(min(int(self._quiet(nvml.nvmlDeviceGetCount) or 0), MAX_CARDS)):
            handle = self._quiet(nvml.nvmlDeviceGetHandleByIndex, index)
            uuid = _text(self._quiet(nvml.nvmlDeviceGetUUID, handle)) if handle is not None else ""
            if uuid:
                found.add(uuid)
                self._adopt(uuid, handle)
        for uuid in self._cards.keys() - found:
            self._condemn(self._cards[uuid], *faults.device_state(faults.GPU_IS_LOST))

    def _adopt(self, uuid: str, handle: Any) -> None:
        """Use this handle for the card; what was known about its state counts no more."""
        known = self._cards.get(uuid)
        card = self._cards[uuid] = _Card(uuid, handle, turn=len(self._cards) % SLOW_EVERY_SAMPLES)
        if known is not None:
            card.name, card.xid = known.name, known.xid
        if self._events is not None:
            self._quiet(self._nvml.nvmlDeviceRegisterEvents, handle, _XID_EVENT, self._events)
        self._ask_slow(card)

    def sample(self) -> list[DeviceReport]:
        """As the port says."""
        if not self._open and self._clock() >= self._reopen_at:
            self.open()
        if self._open:
            self._samples += 1
            try:
                self._hear_events()
                # A copy: a card that is found again takes a new place in the table.
                self._reports = [self._report(card) for card in list(self._cards.values())]
                self._check_all_mute()
            except _Failed as failed:
                self._close_library()
                self._not_open(failed.code, faults.init_reason(failed.code, self._root))
        if not self._open:
            # An engine that runs goes on; nothing new is placed on cards that nobody can look at.
            self._reports = [
                _without_figures(card, "refused", self.problem) if card.verdict is None else _verdict(card)
                for card in self._cards.values()
            ]
        return self._reports

    def _check_all_mute(self) -> None:
        """Every card answering error 999 is no fault of a card: the library lost its devices as a whole."""
        asked = [report for report in self._reports if self._cards[report.device_id].verdict is None]
        mute = bool(asked) and all(report.reason == _MUTE for report in asked)
        self._mute_samples = self._mute_samples + 1 if mute else 0
        if self._mute_samples >= MUTE_SAMPLES:
            self._mute_samples = 0
            raise _Failed(faults.UNKNOWN, Trouble.DRIVER)

    def processes(self) -> Processes:
        """As the port says."""
        return {uuid: card.processes for uuid, card in self._cards.items()}

    def limit_power(self, watts: float) -> str:
        """Cap every card, as the owner asked; needs root, and ends with a reboot. Returns what kept it from working."""
        if not self._open:
            self.open()
        for card in self._cards.values():
            try:
                self._nvml.nvmlDeviceSetPowerManagementLimit(card.handle, round(watts * 1000))
            except self._error as error:
                return f"the power limit of {card.name} could not be set (NVML error {_code(error)}); it needs root"
        return ""

    def close(self) -> None:
        """As the port says."""
        self._close_library()

    def _close_library(self) -> None:
        if self._open:
            self._open = False
            if self._events is not None:
                self._quiet(self._nvml.nvmlEventSetFree, self._events)
                self._events = None
            self._quiet(self._nvml.nvmlShutdown)
        for card in self._cards.values():
            card.processes = None

    # --- one card -------------------------------------------------------------------------------------------------

    def _report(self, card: _Card) -> DeviceReport:
        if card.verdict is not None and not self._recovered(card):
            return _verdict(card)
        try:
            return self._figures(card)
        except _Failed as failed:
            if failed.trouble is Trouble.DRIVER:
                raise
            card.processes = None
            state, reason = faults.device_state(failed.code)
            if failed.code in (faults.GPU_IS_LOST, faults.RESET_REQUIRED):
                self._condemn(card, state, reason)
            return _without_figures(card, state, reason)

    def _figures(self, card: _Card) -> DeviceReport:
        nvml, handle = self._nvml, card.handle
        card.name = _text(self._ask(nvml.nvmlDeviceGetName, handle)) or card.name
        if self._mig(handle):
            card.processes = None
            return _without_figures(card, "refused", "MIG is on: this device is split, which the agent does not use")
        total, used, reserved = self._memory(handle)
        if self._samples % SLOW_EVERY_SAMPLES == card.turn:
            self._ask_slow(card)
        power = _within(self._ask(nvml.nvmlDeviceGetPowerUsage, handle), faults.MAX_POWER_MW)
        garbled = self._read_processes(card, total)
        return DeviceReport(
            device_id=card.uuid,
            name=card.name,
            kind="gpu",
            memory_total_bytes=total,
            memory_used_bytes=used,
            memory_reserved_bytes=reserved,
            utilisation_pct=self._utilisation(handle),
            power_mw=power,
            power_source="unknown" if power is None else "nvml",
            power_limit_mw=_within(self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle), faults.MAX_POWER_MW),
            energy_mj=self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
            temperature_c=_within(
                self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU), faults.MAX_TEMPERATURE_C
            ),
            reason=garbled,
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, _SM_CLOCK),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, _MEMORY_CLOCK),
            throttle=faults.throttle_names(self._throttle(handle)),
            pcie_generation=card.slow.pcie_generation,
            pcie_width=card.slow.pcie_width,
            ecc_uncorrected=card.slow.ecc_uncorrected,
            xid=card.xid,
        )

    def _ask_slow(self, card: _Card) -> None:
        nvml, handle = self._nvml, card.handle
        card.slow = _Slow(
            pcie_generation=self._quiet(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_width=self._quiet(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            ecc_uncorrected=self._quiet(nvml.nvmlDeviceGetTotalEccErrors, handle, _UNCORRECTED, _LIFETIME),
        )
        rows = self._quiet(nvml.nvmlDeviceGetRemappedRows, handle)
        if rows is not None and rows[3]:
            self._condemn(card, "unavailable", "the card's memory could not be repaired: it should be replaced")

    def _condemn(self, card: _Card, state: str, reason: str) -> None:
        card.verdict = (state, reason)
        card.look_at = self._clock() + LOST_LOOK_S
        card.processes = None

    def _recovered(self, card: _Card) -> bool:
        """Look again, now and then: after a reset a card is back, under a new handle."""
        if self._clock() < card.look_at:
            return False
        card.look_at = self._clock() + LOST_LOOK_S
        handle = self._quiet(self._nvml.nvmlDeviceGetHandleByUUID, card.uuid)
        if handle is None or self._quiet(self._nvml.nvmlDeviceGetMemoryInfo, handle) is None:
            return False
        state, _ = card.verdict or ("", "")
        if state != "lost":
            return False  # it answered all the time; only a new start of the agent clears what an event told
        self._adopt(card.uuid, handle)
        return self._cards[card.uuid].verdict is None

    def _hear_events(self) -> None:
        """Critical events since the last sample. Never waits."""
        if self._events is None:
            return
        for _ in range(MAX_EVENTS_A_SAMPLE):
            event = self._quiet(self._nvml.nvmlEventSetWait, self._events, 0)
            if event is None:
                return
            uuid = _text(self._quiet(self._nvml.nvmlDeviceGetUUID, event.device))
            card = self._cards.get(uuid) or self._by_handle(event.device)
            if card is None or int(event.eventType) != _XID_EVENT:
                continue
            card.xid = int(event.eventData)
            verdict = faults.xid_state(card.xid)
            if verdict is not None:
                self._condemn(card, *verdict)

    def _by_handle(self, handle: Any) -> _Card | None:
        wanted = _address(handle)
        return next((card for card in self._cards.values() if _address(card.handle) == wanted), None)

    # --- calls ----------------------------------------------------------------------------------------------------

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The figure, or None where this card or driver has none now. Raises _Failed if more is broken."""
        try:
            return call(*arguments)
        except self._error as error:
            code = _code(error)
            trouble = faults.reach(code)
            # A figure that needs rights is missing, no more: what a card without rights answers to memory decides.
            if trouble is Trouble.FIELD or code == faults.NO_PERMISSION:
                return None
            raise _Failed(code, trouble) from error

    def _quiet(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None, whatever went wrong."""
        try:
            return call(*arguments)
        except self._error:
            return None

    def _mig(self, handle: Any) -> bool:
        modes = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
        return modes is not None and int(modes[0]) == _MIG_ENABLED

    def _utilisation(self, handle: Any) -> float | None:
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        if rates is None or rates.gpu > 100 or (self._wsl and rates.gpu == 0):
            return None
        return float(rates.gpu)

    def _throttle(self, handle: Any) -> int | None:
        mask = self._ask(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if mask is None:  # the older name of the same call
            mask = self._ask(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return None if mask is None else int(mask)

    def _memory(self, handle: Any) -> tuple[int | None, int | None, int | None]:
        """(total, used, reserved). Version 1 of the call counts reserved memory as used, so version 2 comes first.

        Memory is what a card must say: an error here is the card's, not the figure's.
        """
        nvml = self._nvml
        try:
            second = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            return _bytes(second.total), _bytes(second.used), _bytes(second.reserved)
        except self._error as error:
            if _code(error) not in (faults.NOT_SUPPORTED, faults.FUNCTION_NOT_FOUND, faults.VERSION_MISMATCH):
                raise self._failed(_code(error)) from error
        try:
            first = nvml.nvmlDeviceGetMemoryInfo(handle)
            return _bytes(first.total), _bytes(first.used), None
        except self._error as error:
            if _code(error) in (faults.NOT_SUPPORTED, faults.FUNCTION_NOT_FOUND):
                return None, None, None
            raise self._failed(_code(error)) from error

    @staticmethod
    def _failed(code: int) -> _Failed:
        trouble = faults.reach(code)
        return _Failed(code, Trouble.DEVICE if trouble is Trouble.FIELD else trouble)

    def _read_processes(self, card: _Card, total_bytes: int | None) -> str:
        """Take the process lists; returns why they were dropped, if they were."""
        nvml = self._nvml
        compute = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, card.handle)
        graphics = self._ask(nvml.nvmlDeviceGetGraphicsRunningProcesses, card.handle)
        if compute is None or self._wsl:
            card.processes = None
            return ""
        by_compute = [_process(entry, "compute") for entry in compute]
        known = {entry.pid for entry in by_compute}
        drawing = [_process(entry, "graphics") for entry in graphics or ()]
        both = (*by_compute, *(entry for entry in drawing if entry.pid not in known))
        if faults.sane(by_compute, total_bytes) and faults.sane(drawing, total_bytes):
            card.processes = both
            return ""
        card.processes = None
        return "the driver's process list is garbled, and was dropped"


def _load() -> Any:
    if not has_library():
        raise NvmlAbsent(f"no NVIDIA driver on this machine ({LIBRARY} is missing)")
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlAbsent("the NVIDIA bindings are missing: install fallow[agent]") from error


def _process(entry: Any, kind: Literal["compute", "graphics"]) -> GpuProcess:
    return GpuProcess(int(entry.pid), kind, None if entry.usedGpuMemory is None else int(entry.usedGpuMemory))


def _verdict(card: _Card) -> DeviceReport:
    state, reason = card.verdict or ("unavailable", "")
    return _without_figures(card, state, reason)


def _without_figures(card: _Card, state: str, reason: str) -> DeviceReport:
    return DeviceReport(device_id=card.uuid, name=card.name, kind="gpu", state=state, reason=reason, xid=card.xid)


def _bytes(value: Any) -> int | None:
    return None if value is None or value >= 2**64 - 1 else int(value)


def _within(value: Any, limit: int) -> int | None:
    """None for what no card can mean."""
    return int(value) if value is not None and 0 <= value <= limit else None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value if isinstance(handle, ctypes._Pointer) else id(handle)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _code(error: Exception) -> int:
    return int(getattr(error, "value", -1))
