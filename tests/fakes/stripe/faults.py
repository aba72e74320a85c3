"""Faults on demand: which request fails, how, and how often."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatch

PAUSE_LIMIT_S = 30.0


class FaultKind(StrEnum):
    """What goes wrong, in the order in which a request meets it."""

    RATE_LIMITED = "429 before anything happens; the key stays free"
    UNAVAILABLE = "503 before anything happens; the key stays free"
    REFUSED = "the connection closes before anything happens"
    CONFLICT = "409 as if the key were in use"
    SLOW = "waits, then runs"
    PAUSED = "stops before it runs, until the test lets it go on"
    ERROR_BEFORE = "500 without the effect, remembered under the key"
    DECLINED_BALANCE = "the platform's balance is said not to suffice"
    ERROR_AFTER = "500 after the effect, remembered under the key"
    LOST = "the effect happens, then the connection closes without an answer"
    CUT = "the effect happens, then the connection closes in the middle of the answer"
    PAUSED_ANSWER = "the effect happens, then the answer waits until the test lets it go on"
    SLOW_ANSWER = "the effect happens, then the answer waits"


class Stage(StrEnum):
    """The moment at which a fault strikes."""

    ARRIVAL = "before the key is looked at"
    EXECUTION = "the key is claimed, the effect is next"
    RESPONSE = "the effect and the key are stored"


STAGES = {
    FaultKind.RATE_LIMITED: Stage.ARRIVAL,
    FaultKind.UNAVAILABLE: Stage.ARRIVAL,
    FaultKind.REFUSED: Stage.ARRIVAL,
    FaultKind.CONFLICT: Stage.ARRIVAL,
    FaultKind.SLOW: Stage.EXECUTION,
    FaultKind.PAUSED: Stage.EXECUTION,
    FaultKind.ERROR_BEFORE: Stage.EXECUTION,
    FaultKind.DECLINED_BALANCE: Stage.EXECUTION,
    FaultKind.ERROR_AFTER: Stage.EXECUTION,
    FaultKind.LOST: Stage.RESPONSE,
    FaultKind.CUT: Stage.RESPONSE,
    FaultKind.PAUSED_ANSWER: Stage.RESPONSE,
    FaultKind.SLOW_ANSWER: Stage.RESPONSE,
}


@dataclass
class Fault:
    """Strikes `times` requests that match, after letting `skip` of them pass."""

    kind: FaultKind
    method: str = "POST"
    path: str = "*"
    """A pattern of the path, as `/v1/transfers` or `/v1/accounts/*`."""
    times: int = 1
    skip: int = 0
    delay_s: float = 0.0
    struck: int = 0
    entered: threading.Event = field(default_factory=threading.Event)
    """Set when a PAUSED request has arrived."""
    resumed: threading.Event = field(default_factory=threading.Event)

    def matches(self, method: str, path: str) -> bool:
        return fnmatch(method, self.method) and fnmatch(path, self.path)

    def pause(self) -> None:
        """Called by the server: tell the test, and wait for `resume`, at most 30 s."""
        self.entered.set()
        self.resumed.wait(PAUSE_LIMIT_S)

    def resume(self) -> None:
        """Let a PAUSED request go on."""
        self.resumed.set()


class Faults:
    """The faults that wait for their request, and a seeded source of random ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Fault] = []
        self._paused: list[Fault] = []
        self._random: random.Random | None = None
        self._rates: dict[FaultKind, float] = {}

    def add(
        self,
        kind: FaultKind,
        path: str = "*",
        *,
        method: str = "POST",
        times: int = 1,
        skip: int = 0,
        delay_s: float = 0.0,
    ) -> Fault:
        """Plan a fault; the answer tells how often it struck."""
        fault = Fault(kind, method, path, times, skip, delay_s)
        with self._lock:
            self._waiting.append(fault)
        return fault

    def at_random(self, seed: int, rates: dict[FaultKind, float]) -> None:
        """From now on strike writes at random, with a probability for each kind."""
        with self._lock:
            self._random = random.Random(seed)
            self._rates = dict(rates)

    def clear(self) -> None:
        """No more faults; a paused request goes on."""
        with self._lock:
            for fault in [*self._waiting, *self._paused]:
                fault.resume()
            self._waiting.clear()
            self._paused.clear()
            self._random = None
            self._rates = {}

    def take(self, stage: Stage, method: str, path: str) -> Fault | None:
        """The fault that strikes this request at this stage, used up once."""
        with self._lock:
            for fault in self._waiting:
                if STAGES[fault.kind] is stage and fault.matches(method, path):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    self._use(fault)
                    return fault
            return self._draw(stage, method)

    def _use(self, fault: Fault) -> None:
        fault.struck += 1
        if fault.kind in {FaultKind.PAUSED, FaultKind.PAUSED_ANSWER}:
            self._paused.append(fault)
        if fault.struck >= fault.times:
            self._waiting.remove(fault)

    def _draw(self, stage: Stage, method: str) -> Fault | None:
        if self._random is None or method != "POST":
            return None
        for kind, rate in self._rates.items():
            if STAGES[kind] is stage and self._random.random() < rate:
                return Fault(kind, struck=1)
        return None
