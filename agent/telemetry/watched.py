"""Samples a source in a thread of its own, so that a driver call that never returns costs a thread, not the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from agent.protocol import DeviceReport
from agent.telemetry.port import Processes, Source

_STEP_S: Final = 0.2
FIRST_SAMPLE_S: Final = 2.0
"""How long `start` waits for the driver to say what there is."""


HURRY_S: Final = 0.2
"""Between a sample and the hurried one after it: a process that only looks in is gone by then."""


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    reports: list[DeviceReport] = field(default_factory=list)
    processes: Processes = field(default_factory=dict)
    problem: str = ""
    needs_restart: bool = False


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
        self._latest = _Look(clock())
        self._ended = False
        self._hurried = False
        self.on_news: Callable[[], None] | None = None
        """Called in the sampling thread when a process came or left, and after each hurried sample."""
        self._wake = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="telemetry", daemon=True)

    def start(self) -> None:
        """Begin sampling. Waits for the first sample, but not for a driver that hangs."""
        self._thread.start()
        self._first.wait(FIRST_SAMPLE_S)

    def hurry(self) -> None:
        """Take the next sample in a moment, and call `on_news` after it."""
        self._hurried = True
        self._wake.set()

    def sample(self) -> list[DeviceReport]:
        look = self._latest
        if not self._stale(look):
            return look.reports
        return [
            msgspec.structs.replace(report, state="unavailable", reason="the driver does not answer")
            if report.state == "ok"
            else report
            for report in look.reports
        ]

    def processes(self) -> Processes:
        look = self._latest
        return dict.fromkeys(look.processes) if self._stale(look) else look.processes

    @property
    def problem(self) -> str:
        look = self._latest
        return "the driver does not answer" if self._stale(look) else look.problem

    @property
    def needs_restart(self) -> bool:
        return self._latest.needs_restart

    def close(self) -> None:
        self._ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_STEP_S)

    def _stale(self, look: _Look) -> bool:
        return self._clock() - look.at > self._stale_s

    def _loop(self) -> None:
        while not self._ended:
            reports = self._source.sample()
            source, before, hurried = self._source, self._latest, self._hurried
            self._latest = _Look(self._clock(), reports, source.processes(), source.problem, source.needs_restart)
            self._first.set()
            self._hurried = False
            if self.on_news is not None and (hurried or _pids(before) != _pids(self._latest)):
                self.on_news()
            if self._wake.wait(self._interval_s) and not self._ended:
                time.sleep(HURRY_S)
            self._wake.clear()
        self._source.close()


def _pids(look: _Look) -> dict[str, frozenset[int]]:
    return {device: frozenset(entry.pid for entry in entries or ()) for device, entries in look.processes.items()}
