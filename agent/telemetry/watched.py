"""Samples a source in a thread of its own, so that a driver call that never returns costs a thread, not the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from agent.protocol import DeviceReport
from agent.telemetry.port import Source

_STEP_S = 0.2


class Watched:
    """A Source whose `sample` never blocks: it hands out the latest sample, marked `unavailable` once that is stale."""

    def __init__(
        self,
        source: Source,
        *,
        interval_s: float = 1.0,
        stale_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._interval_s = interval_s
        self._stale_s = stale_s
        self._clock = clock
        self._latest: tuple[float, list[DeviceReport]] = (clock(), [])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="telemetry", daemon=True)

    def start(self) -> None:
        """Begin sampling."""
        self._thread.start()

    def sample(self) -> list[DeviceReport]:
        taken_at, reports = self._latest
        age_s = self._clock() - taken_at
        if age_s <= self._stale_s:
            return reports
        return [
            msgspec.structs.replace(report, state="unavailable", reason="the driver does not answer")
            if report.state == "ok"
            else report
            for report in reports
        ]

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=_STEP_S)

    def _loop(self) -> None:
        while not self._ended.is_set():
            reports = self._source.sample()
            self._latest = (self._clock(), reports)
            self._ended.wait(self._interval_s)
        self._source.close()
