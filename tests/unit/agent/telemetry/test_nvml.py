"""NVML: absent here for real, and present through the real bindings over a stand-in library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.protocol import DeviceReport
from agent.telemetry import nvml as telemetry
from agent.telemetry import nvml_faults as faults
from agent.telemetry.nvml import NvmlAbsent, NvmlSource, open_source
from agent.telemetry.port import GpuProcess
from agent.telemetry.watched import Watched
from tests.fakes import nvml


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(script: nvml.Script, clock: Clock, tmp_path: Path) -> Iterator[NvmlSource]:
    source = NvmlSource(root=tmp_path, clock=clock)
    yield source
    source.close()


def states(reports: list[DeviceReport]) -> list[str]:
    return [report.state for report in reports]


class TestTheStandIn:
    def test_exports_every_name_that_the_bindings_look_up(self, script: nvml.Script) -> None:
        library = nvml.load()
        names = nvml.functions_of_pynvml()
        assert len(names) > 400
        assert [name for name in sorted(names) if not hasattr(library, name)] == []

    def test_has_the_structures_that_the_bindings_expect(self) -> None:
        import ctypes

        import pynvml

        sizes = {
            pynvml.c_nvmlMemory_t: 24,
            pynvml.c_nvmlMemory_v2_t: 40,
            pynvml.c_nvmlUtilization_t: 8,
            pynvml.c_nvmlProcessInfo_v3_t: 24,
            pynvml.nvmlPciInfo_t: 68,
        }
        assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
        assert pynvml.nvmlMemory_v2 == 0x02000028


class TestAMachineWithoutADriver:
    def test_says_so_and_does_not_load_the_bindings(self) -> None:
        code = (
            "import sys\nfrom agent.telemetry.nvml import NvmlAbsent, has_library, open_source\n"
            "try:\n    open_source()\nexcept NvmlAbsent as absent:\n    print('pynvml' in sys.modules, absent)\n"
            "else:\n    print('driver')"
        )
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
        if answer.stdout.startswith("driver"):
            pytest.skip("this machine has the NVIDIA driver")
        assert answer.stdout.startswith("False no NVIDIA driver on this machine")

    @pytest.mark.parametrize(("code", "word"), [(9, "not loaded"), (18, "reboot"), (999, "999"), (4, "permission")])
    def test_whose_driver_does_not_start_says_why(self, script: nvml.Script, code: int, word: str) -> None:
        script.init = code
        script.write()
        with pytest.raises(NvmlAbsent, match=word):
            open_source()

    def test_names_the_device_node_that_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "dev").mkdir()
        assert "/dev/nvidiactl is missing" in faults.missing_nodes(tmp_path)
        (tmp_path / "dev/nvidiactl").touch()
        assert "/dev/nvidia0 is missing" in faults.missing_nodes(tmp_path)

    def test_that_gets_one_is_seen_later(self, source: NvmlSource, script: nvml.Script, clock: Clock) -> None:
        script.init = 9
        script.write()
        assert source.sample() == []
        assert "not loaded" in source.problem
        script.init = 0
        script.write()
        assert source.sample() == [], "it does not try at every sample"
        clock.now += 10
        assert states(source.sample()) == ["ok", "ok"]
        assert source.problem == ""


class TestCards:
    def test_report_what_they_know(self, source: NvmlSource, script: nvml.Script) -> None:
        script.cards[0] = nvml.card(0, throttle=0x4 | 0x20, ecc_uncorrected=2)
        script.write()
        first, second = source.sample()
        assert first == DeviceReport(
            device_id=script.cards[0].uuid,
            name="NVIDIA GeForce RTX 4090",
            kind="gpu",
            memory_total_bytes=24 * nvml.GIB,
            memory_used_bytes=1 * nvml.GIB,
            memory_reserved_bytes=308 << 20,
            utilisation_pct=0.0,
            power_mw=30_000,
            power_source="nvml",
            power_limit_mw=450_000,
            energy_mj=1_000_000,
            temperature_c=40,
            sm_clock_mhz=210,
            memory_clock_mhz=405,
            throttle=["power_cap", "heat"],
            pcie_generation=4,
            pcie_width=16,
            ecc_uncorrected=2,
        )
        assert (second.device_id, second.throttle, second.ecc_uncorrected) == (script.cards[1].uuid, [], None)

    def test_are_known_by_uuid_whatever_their_order(self, source: NvmlSource, script: nvml.Script) -> None:
        source.sample()
        script.order = [1, 0]
        script.cards[0].figures["temperature"] = 77
        script.write()
        again = {report.device_id: report.temperature_c for report in open_source().sample()}
        assert again == {script.cards[0].uuid: 77, script.cards[1].uuid: 40}
        assert [report.temperature_c for report in source.sample()] == [77, 40]

    def test_are_initialised_once(self, source: NvmlSource) -> None:
        library = nvml.load()
        before = library.standin_inits()
        for _ in range(50):
            source.sample()
        assert library.standin_inits() == before + 1

    def test_are_let_go_of(self, source: NvmlSource) -> None:
        library = nvml.load()
        before = library.standin_open()
        source.sample()
        source.close()
        assert library.standin_open() == before

    def test_are_never_asked_what_blocks(self, source: NvmlSource, script: nvml.Script) -> None:
        script.hangs_ms = {"nvmlDeviceGetPcieThroughput": 1_000}
        script.write()
        began = time.monotonic()
        for _ in range(40):
            source.sample()
        assert time.monotonic() - began < 0.5

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("nvmlDeviceGetPowerUsage", ["power_mw"]),
            ("nvmlDeviceGetEnforcedPowerLimit", ["power_limit_mw"]),
            ("nvmlDeviceGetTotalEnergyConsumption", ["energy_mj"]),
            ("nvmlDeviceGetUtilizationRates", ["utilisation_pct"]),
            ("nvmlDeviceGetTemperature", ["temperature_c"]),
            ("nvmlDeviceGetClockInfo", ["sm_clock_mhz", "memory_clock_mhz"]),
        ],
    )
    @pytest.mark.parametrize("code", [3, 4, 6, 13, 25, 999])
    def test_lack_a_figure_and_still_report(
        self, source: NvmlSource, script: nvml.Script, name: str, fields: list[str], code: int
    ) -> None:
        script.cards[0].errors = {name: code}
        script.write()
        first, second = source.sample()
        assert (first.state, [getattr(first, field) for field in fields]) == ("ok", [None] * len(fields))
        assert all(getattr(second, field) is not None for field in fields)
        assert first.power_source == ("unknown" if "power_mw" in fields else "nvml")
        script.cards[0].errors = {}
        script.write()
        assert source.sample()[0].power_source == "nvml", "a figure that comes back is taken again"

    def test_whose_reasons_have_the_older_name_are_asked_by_that(self, source: NvmlSource, script: nvml.Script) -> None:
        script.errors = {"nvmlDeviceGetCurrentClocksEventReasons": 13}
        script.cards[0].figures["throttle"] = 0x40
        script.write()
        assert source.sample()[0].throttle == ["hardware_heat"]

    def test_whose_limit_changes_by_itself_say_so(self, source: NvmlSource, script: nvml.Script) -> None:
        source.sample()
        script.cards[0].figures["power_limit_mw"] = 320_000
        script.write()
        assert source.sample()[0].power_limit_mw == 320_000

    def test_say_nothing_that_no_card_can_mean(self, source: NvmlSource, script: nvml.Script) -> None:
        script.cards[0].figures |= {"power_mw": 4_294_967_295, "temperature": 65_535, "utilisation": 4_294_967_295}
        script.write()
        first = source.sample()[0]
        assert (first.power_mw, first.temperature_c, first.utilisation_pct) == (None, None, None)

    def test_are_capped_where_the_owner_asks_and_may(self, source: NvmlSource, script: nvml.Script) -> None:
        assert "needs root" in source.limit_power(300.0)


class TestMemory:
    def test_of_version_1_is_taken_only_without_version_2(self, source: NvmlSource, script: nvml.Script) -> None:
        for code in (3, 13, 25):
            script.errors = {"nvmlDeviceGetMemoryInfo_v2": code}
            script.write()
            first = source.sample()[0]
            assert (first.memory_used_bytes, first.memory_reserved_bytes) == (nvml.GIB + (308 << 20), None)

    def test_that_the_card_does_not_know_is_unknown(self, source: NvmlSource, script: nvml.Script) -> None:
        script.cards[0].figures["memory_unknown"] = 1
        script.write()
        first = source.sample()[0]
        assert (first.memory_total_bytes, first.memory_used_bytes, first.state) == (None, None, "ok")


class TestACardThatFails:
    def test_falls_off_the_bus_alone_and_stays_lost(
        self, source: NvmlSource, script: nvml.Script, clock: Clock
    ) -> None:
        source.sample()
        script.cards[0].lost = 15
        script.write()
        first, second = source.sample()
        assert (first.state, second.state) == ("lost", "ok")
        assert "fell off the bus" in first.reason
        script.cards[0].lost = 0
        script.write()
        assert states(source.sample()) == ["lost", "ok"], "not believed at once"
        clock.now += telemetry.LOST_LOOK_S
        assert states(source.sample()) == ["ok", "ok"], "found again after a reset"

    def test_that_needs_a_reset_gets_no_work(self, source: NvmlSource, script: nvml.Script) -> None:
        script.cards[1].errors = {"nvmlDeviceGetMemoryInfo_v2": 16}
        script.write()
        assert states(source.sample()) == ["ok", "unavailable"]

    @pytest.mark.parametrize(("xid", "state"), [(79, "lost"), (48, "unavailable"), (119, "unavailable"), (31, "ok")])
    def test_tells_by_an_event(self, source: NvmlSource, script: nvml.Script, xid: int, state: str) -> None:
        source.sample()
        script.events.append((0, xid))
        script.write()
        first, second = source.sample()
        assert (first.state, first.xid, second.state, second.xid) == (state, xid, "ok", None)

    def test_whose_memory_cannot_be_repaired_gets_no_work(self, script: nvml.Script, source: NvmlSource) -> None:
        script.cards[0].figures |= {"rows_remapped": 8, "remap_failed": 1}
        script.write()
        first, second = source.sample()
        assert (first.state, second.state) == ("unavailable", "ok")
        assert "replaced" in first.reason

    def test_that_is_split_is_refused(self, source: NvmlSource, script: nvml.Script) -> None:
        script.cards[0].figures["mig"] = 1
        script.cards[0].errors = {"nvmlDeviceGetUtilizationRates": 3, "nvmlDeviceGetMemoryInfo_v2": 4}
        script.write()
        first, second = source.sample()
        assert (first.state, second.state) == ("refused", "ok")
        assert "MIG" in first.reason

    def test_that_may_not_be_read_is_refused(self, source: NvmlSource, script: nvml.Script) -> None:
        script.cards[1].errors = {"nvmlDeviceGetMemoryInfo_v2": 4}
        script.write()
        assert states(source.sample()) == ["ok", "refused"]


class TestADriverThatFails:
    def test_upgraded_underneath_refuses_new_work_and_is_tried_slowly(
        self, source: NvmlSource, script: nvml.Script, clock: Clock
    ) -> None:
        source.sample()
        script.errors, script.init = {"*": 18}, 18
        script.write()
        reports = source.sample()
        assert states(reports) == ["refused", "refused"]
        assert "reboot" in reports[0].reason
        assert not source.needs_restart
        script.errors, script.init = {}, 0
        script.write()
        clock.now += 60
        assert states(source.sample()) == ["refused", "refused"]
        clock.now += 300
        assert states(source.sample()) == ["ok", "ok"]

    def test_answering_999_for_ever_asks_for_a_new_process(
        self, source: NvmlSource, script: nvml.Script, clock: Clock
    ) -> None:
        source.sample()
        script.errors, script.init = {"*": 999}, 999
        script.write()
        assert states(source.sample()) == ["unavailable", "unavailable"]
        for _ in range(20):
            clock.now += 300
            source.sample()
        assert source.needs_restart

    def test_never_having_worked_asks_for_none(self, source: NvmlSource, script: nvml.Script, clock: Clock) -> None:
        script.init = 999
        script.write()
        for _ in range(30):
            clock.now += 300
            source.sample()
        assert not source.needs_restart, "a machine without a working card serves with its processor"

    def test_that_unloads_and_loads_again_is_survived(
        self, source: NvmlSource, script: nvml.Script, clock: Clock
    ) -> None:
        source.sample()
        script.errors, script.init = {"*": 9}, 9
        script.write()
        assert states(source.sample()) == ["refused", "refused"]
        script.errors, script.init = {}, 0
        script.cards.pop()
        script.write()
        clock.now += 10
        assert states(source.sample()) == ["ok", "lost"], "a card that did not come back is lost"

    def test_that_hangs_costs_a_thread(self, script: nvml.Script, tmp_path: Path) -> None:
        clock = Clock()
        watched = Watched(NvmlSource(root=tmp_path), interval_s=0.02, stale_s=5.0, clock=clock)
        watched.start()
        assert states(watched.sample()) == ["ok", "ok"]
        script.hangs_ms = {"nvmlDeviceGetPowerUsage": 600}
        script.write()
        wait_until(lambda: script_was_read(watched))
        clock.now += 10
        began = time.monotonic()
        assert states(watched.sample()) == ["unavailable", "unavailable"]
        assert watched.problem == "the driver does not answer"
        assert time.monotonic() - began < 0.1
        script.hangs_ms = {}
        script.write()
        wait_until(lambda: states(watched.sample()) == ["ok", "ok"], limit_s=5)
        watched.close()


def script_was_read(watched: Watched) -> bool:
    time.sleep(0.1)
    return True


def wait_until(condition: Callable[[], bool], limit_s: float = 2.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TestProcesses:
    def test_are_told_with_their_memory(self, source: NvmlSource, script: nvml.Script) -> None:
        script.cards[0].compute = {4_000: 2 * nvml.GIB, 4_001: None}
        script.cards[0].graphics = {900: 40 << 20}
        script.write()
        source.sample()
        assert source.processes() == {
            script.cards[0].uuid: (
                GpuProcess(4_000, "compute", 2 * nvml.GIB),
                GpuProcess(4_001, "compute", None),
                GpuProcess(900, "graphics", 40 << 20),
            ),
            script.cards[1].uuid: (),
        }

    def test_that_are_garbled_are_dropped_and_told(self, source: NvmlSource, script: nvml.Script) -> None:
        script.driver = "535.86.05"
        script.cards[0].figures["wide_records"] = 1
        script.cards[0].compute = {4_000: nvml.GIB, 4_001: nvml.GIB, 4_002: nvml.GIB}
        script.write()
        first, second = source.sample()
        assert (first.state, "garbled" in first.reason, second.reason) == ("ok", True, "")
        assert source.processes()[script.cards[0].uuid] is None

    def test_that_the_driver_does_not_tell_are_unknown(self, source: NvmlSource, script: nvml.Script) -> None:
        script.errors = {"nvmlDeviceGetComputeRunningProcesses_v3": 3}
        script.write()
        source.sample()
        assert source.processes()[script.cards[0].uuid] is None


class TestWindowsLinux:
    def test_says_nothing_rather_than_zero(self, script: nvml.Script, tmp_path: Path) -> None:
        release = tmp_path / "proc/sys/kernel/osrelease"
        release.parent.mkdir(parents=True)
        release.write_text("5.15.153.1-microsoft-standard-WSL2\n")
        script.cards[0].compute = {4_000: None}
        script.write()
        source = NvmlSource(root=tmp_path)
        first = source.sample()[0]
        assert (first.utilisation_pct, first.power_mw, first.memory_used_bytes) == (None, 30_000, nvml.GIB)
        assert source.processes()[script.cards[0].uuid] is None


class TestOtherReaders:
    def test_of_nvml_can_use_the_stand_in(self, script: nvml.Script) -> None:
        code = (
            f"import pynvml as p\np.nvmlInit()\nh = p.nvmlDeviceGetHandleByUUID('{script.cards[1].uuid}')\n"
            "print(p.nvmlDeviceGetName(h), p.nvmlDeviceGetPciInfo(h).busId, p.nvmlSystemGetDriverVersion())"
        )
        environment = os.environ | {"LD_LIBRARY_PATH": str(nvml.build().parent)}
        answer = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20, env=environment
        )
        assert re.match(r"NVIDIA GeForce RTX 4090 00000000:02:00.0 550.54.14", answer.stdout)
