"""NVML: absent here for real, and present through a stand-in for the bindings."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from agent.telemetry.nvml import LIBRARY, NvmlAbsent, open_source


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class FakeNvml:
    """Two cards that answer, unless `errors` says otherwise: (call, card) -> code."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 0x02000028  # noqa: N815 - the bindings' name

    def __init__(self) -> None:
        self.errors: dict[tuple[str, int | None], int] = {}
        self.inits = self.shutdowns = 0
        self.mig = 0
        self.calls: list[str] = []

    def _call(self, name: str, card: int | None = None) -> None:
        self.calls.append(name)
        for key in ((name, card), (name, None)):
            if key in self.errors:
                raise NVMLError(self.errors[key])

    def nvmlInit(self) -> None:
        self._call("nvmlInit")
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self._call("nvmlShutdown")
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, card: int) -> str:
        return f"GPU-{card}"

    def nvmlDeviceGetName(self, card: int) -> bytes:
        self._call("name", card)
        return b"Test GPU"

    def nvmlDeviceGetMigMode(self, card: int) -> list[int]:
        self._call("mig", card)
        return [self.mig, self.mig]

    def nvmlDeviceGetMemoryInfo(self, card: int, version: int | None = None) -> Any:
        self._call("memory2" if version else "memory1", card)
        return SimpleNamespace(total=24 << 30, used=6 << 30, reserved=300 << 20)

    def nvmlDeviceGetPowerUsage(self, card: int) -> int:
        self._call("power", card)
        return 120_000

    def nvmlDeviceGetEnforcedPowerLimit(self, card: int) -> int:
        self._call("limit", card)
        return 300_000

    def nvmlDeviceGetTotalEnergyConsumption(self, card: int) -> int:
        self._call("energy", card)
        return 5_000_000

    def nvmlDeviceGetTemperature(self, card: int, sensor: int) -> int:
        self._call("temperature", card)
        return 55

    def nvmlDeviceGetUtilizationRates(self, card: int) -> Any:
        self._call("utilisation", card)
        return SimpleNamespace(gpu=40, memory=2)


class TestAMachineWithoutADriver:
    def test_says_so_and_does_not_load_the_bindings(self) -> None:
        try:
            ctypes.CDLL(LIBRARY)
        except OSError:
            pass
        else:
            pytest.skip("this machine has the NVIDIA driver")
        with pytest.raises(NvmlAbsent, match="no NVIDIA driver"):
            open_source()
        code = (
            "import sys\nfrom agent.telemetry.nvml import NvmlAbsent, open_source\n"
            "try:\n    open_source()\nexcept NvmlAbsent:\n    print('pynvml' in sys.modules)"
        )
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
        assert answer.stdout.strip() == "False"

    @pytest.mark.parametrize(("code", "word"), [(9, "not loaded"), (4, "permission"), (18, "reboot"), (999, "999")])
    def test_whose_driver_does_not_start_says_why(self, code: int, word: str) -> None:
        nvml = FakeNvml()
        nvml.errors[("nvmlInit", None)] = code
        with pytest.raises(NvmlAbsent, match=word):
            open_source(nvml)


class TestDevices:
    def test_report_what_they_know(self) -> None:
        nvml = FakeNvml()
        source = open_source(nvml)
        first, second = source.sample()
        assert (first.device_id, second.device_id) == ("GPU-0", "GPU-1")
        assert (first.name, first.kind, first.state, first.power_source) == ("Test GPU", "gpu", "ok", "nvml")
        assert (first.memory_used_bytes, first.memory_reserved_bytes) == (6 << 30, 300 << 20)
        assert (first.power_mw, first.energy_mj, first.utilisation_pct) == (120_000, 5_000_000, 40.0)
        source.sample()
        assert nvml.inits == 1
        source.close()
        assert nvml.shutdowns == 1

    def test_leave_unknown_what_the_card_does_not_say(self) -> None:
        nvml = FakeNvml()
        for figure in ("power", "limit", "energy", "temperature", "utilisation", "mig"):
            nvml.errors[(figure, 0)] = 3
        first, second = open_source(nvml).sample()
        assert first.state == "ok"
        assert (first.power_mw, first.power_source, first.energy_mj, first.utilisation_pct) == (
            None,
            "unknown",
            None,
            None,
        )
        assert second.power_mw == 120_000

    def test_fall_back_to_the_first_version_of_memory(self) -> None:
        nvml = FakeNvml()
        nvml.errors[("memory2", 0)] = 13
        first, _ = open_source(nvml).sample()
        assert (first.memory_used_bytes, first.memory_reserved_bytes) == (6 << 30, None)

    def test_that_fell_off_the_bus_are_lost_and_the_others_stay(self) -> None:
        nvml = FakeNvml()
        source = open_source(nvml)
        source.sample()
        nvml.errors[("memory2", 0)] = 15
        first, second = source.sample()
        assert (first.state, first.name, second.state) == ("lost", "Test GPU", "ok")
        nvml.errors.clear()
        nvml.calls.clear()
        assert source.sample()[0].state == "lost"
        assert nvml.calls.count("name") == 1, "a lost card is not asked again"

    def test_in_mig_mode_or_without_permission_are_refused(self) -> None:
        nvml = FakeNvml()
        nvml.mig = 1
        assert {report.state for report in open_source(nvml).sample()} == {"refused"}
        nvml.mig = 0
        nvml.errors[("name", 1)] = 4
        first, second = open_source(nvml).sample()
        assert (first.state, second.state) == ("ok", "refused")
        assert "permission" in second.reason
