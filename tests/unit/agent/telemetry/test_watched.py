"""A driver call that never returns costs a thread, not the agent."""

from __future__ import annotations

import threading
import time

from agent.protocol import DeviceReport
from agent.telemetry.port import GpuProcess, Processes, worth_sending
from agent.telemetry.watched import Watched

REPORT = DeviceReport("GPU-1", "gpu", "gpu", memory_total_bytes=8 << 30, memory_used_bytes=1 << 30, power_mw=100_000)


class StickySource:
    """Answers until told to hang."""

    def __init__(self) -> None:
        self.hang = threading.Event()
        self.release = threading.Event()
        self.closed = threading.Event()
        self.samples = 0

    def sample(self) -> list[DeviceReport]:
        if self.hang.is_set():
            self.release.wait(5)
        self.samples += 1
        return [REPORT]

    def processes(self) -> Processes:
        return {"GPU-1": (GpuProcess(7, "compute"),)}

    problem = ""
    needs_restart = False

    def close(self) -> None:
        self.closed.set()


def wait_for(condition: threading.Event | None = None, *, true: object = None, limit_s: float = 2.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if callable(true) and true():
            return
        if condition is not None and condition.is_set():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen in time")


class TestAWatchedSource:
    def test_hands_out_the_latest_sample(self) -> None:
        source = StickySource()
        watched = Watched(source, interval_s=0.01)
        assert watched.sample() == []
        watched.start()
        wait_for(true=lambda: watched.sample() == [REPORT])
        watched.close()
        wait_for(source.closed)

    def test_says_unavailable_while_the_driver_hangs_and_recovers(self) -> None:
        source = StickySource()
        watched = Watched(source, interval_s=0.01, stale_s=0.05)
        watched.start()
        wait_for(true=lambda: source.samples > 1)
        source.hang.set()
        wait_for(true=lambda: watched.sample()[0].state == "unavailable")
        assert watched.sample()[0].reason == "the driver does not answer"
        source.hang.clear()
        source.release.set()
        wait_for(true=lambda: watched.sample()[0].state == "ok")
        watched.close()


class TestWhatIsWorthSending:
    def test_is_what_placement_or_pay_would_notice(self) -> None:
        changed = {
            "state": "lost",
            "memory_used_bytes": 2 << 30,
            "power_mw": 200_000,
            "power_source": "nvml",
            "temperature_c": 50.0,
            "memory_total_bytes": None,
        }
        assert not worth_sending(REPORT, REPORT)
        for field, value in changed.items():
            values = {name: getattr(REPORT, name) for name in REPORT.__struct_fields__} | {field: value}
            assert worth_sending(REPORT, DeviceReport(**values)), field

    def test_is_not_what_always_flickers(self) -> None:
        values = {name: getattr(REPORT, name) for name in REPORT.__struct_fields__}
        flicker = values | {"utilisation_pct": 99.0, "memory_used_bytes": (1 << 30) + 4096, "energy_mj": 5}
        assert not worth_sending(REPORT, DeviceReport(**flicker))
