"""When idle is idle: the owner's pause, hours, memory and heat decide, in this order. Pure.

A pause and the hours count at once. Memory and heat need two samples to make the node yield, and quiet time to let it
return; the quiet time doubles when the node has to yield again soon, so that a borderline machine does not flap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from agent.config import ConfigError, OwnerTable

SAMPLES_TO_YIELD: Final = 2
MAX_RETURN_S: Final = 3_600.0
_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW: Final = re.compile(
    r"(?P<first>[a-z]{3})(-(?P<last>[a-z]{3}))?\s+(?P<from>\d\d:\d\d)\s*-\s*(?P<to>\d\d:\d\d)", re.IGNORECASE
)
MINUTES_A_DAY: Final = 24 * 60


@dataclass(frozen=True, slots=True)
class Window:
    """Hours of some weekdays. One that ends before it begins runs into the next day."""

    days: frozenset[int]
    """0 is Monday. The day on which the window begins."""
    start_min: int
    end_min: int

    def holds(self, local: datetime) -> bool:
        """True if the local wall-clock time lies inside."""
        minute = local.hour * 60 + local.minute
        today = local.weekday() in self.days
        if self.start_min < self.end_min:
            return today and self.start_min <= minute < self.end_min
        yesterday = (local - timedelta(days=1)).weekday() in self.days
        return (today and minute >= self.start_min) or (yesterday and minute < self.end_min)


def parse_window(text: str) -> Window:
    """`mon-fri 18:00-08:00` -> Window. Raises ConfigError."""
    match = _WINDOW.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"owner.hours: {text!r} is not of the form 'mon-fri 18:00-08:00'.")
    first = _day(match["first"], text)
    last = _day(match["last"] or match["first"], text)
    count = (last - first) % 7 + 1
    start, end = _minute(match["from"], text), _minute(match["to"], text)
    if start == end:
        raise ConfigError(f"owner.hours: {text!r} begins and ends at the same time; a whole day is 00:00-24:00.")
    return Window(frozenset((first + step) % 7 for step in range(count)), start, end)


def _day(name: str, text: str) -> int:
    if name.lower() not in _DAYS:
        raise ConfigError(f"owner.hours: {name!r} in {text!r} is not a day; days are {', '.join(_DAYS)}.")
    return _DAYS.index(name.lower())


def _minute(clock: str, text: str) -> int:
    hours, minutes = int(clock[:2]), int(clock[3:])
    if minutes > 59 or hours * 60 + minutes > MINUTES_A_DAY:
        raise ConfigError(f"owner.hours: {clock!r} in {text!r} is not a time of day.")
    return hours * 60 + minutes


@dataclass(frozen=True, slots=True)
class Sight:
    """What the policy looks at, once a second. None: not known, and then it decides nothing."""

    now: float
    """Monotonic seconds."""
    local: datetime
    """The owner's wall clock."""
    paused: bool
    memory_free_bytes: int | None
    temperature_c: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the node may work, and why not."""

    available: bool
    reason: str = ""


class Policy:
    """One owner's rules. Remembers only what the quiet time needs. Raises ConfigError for unusable hours."""

    def __init__(self, owner: OwnerTable) -> None:
        self._windows = [parse_window(text) for text in owner.hours]
        self._reserve_bytes = owner.reserve_memory_mib * 1024 * 1024
        self._max_temperature_c = owner.max_temperature_c
        self._first_return_s = owner.return_s
        self._return_s = owner.return_s
        self._bad_samples = 0
        self._resting_reason = ""
        self._quiet_since = 0.0
        self._returned_at: float | None = None

    def decide(self, sight: Sight) -> Verdict:
        """Take one sample into account."""
        pressure = self._pressure(sight)
        resting = self._rest(pressure, sight.now)
        if sight.paused:
            return Verdict(False, "paused by the owner")
        if self._windows and not any(window.holds(sight.local) for window in self._windows):
            return Verdict(False, "outside the owner's hours")
        return Verdict(False, self._resting_reason) if resting else Verdict(True)

    def _pressure(self, sight: Sight) -> str:
        if sight.memory_free_bytes is not None and sight.memory_free_bytes < self._reserve_bytes:
            return "the owner needs the memory"
        if sight.temperature_c is not None and sight.temperature_c > self._max_temperature_c:
            return "the machine is too hot"
        return ""

    def _rest(self, pressure: str, now: float) -> bool:
        """True while memory or heat keep the node away."""
        if pressure:
            self._quiet_since = now
            self._bad_samples += 1
            if self._bad_samples == SAMPLES_TO_YIELD and not self._resting_reason:
                self._lengthen_quiet(now)
            if self._bad_samples >= SAMPLES_TO_YIELD or self._resting_reason:
                self._resting_reason = pressure
        else:
            self._bad_samples = 0
            if self._resting_reason and now - self._quiet_since >= self._return_s:
                self._resting_reason = ""
                self._returned_at = now
        return bool(self._resting_reason)

    def _lengthen_quiet(self, now: float) -> None:
        soon = self._returned_at is not None and now - self._returned_at < 10 * self._return_s
        self._return_s = min(self._return_s * 2, MAX_RETURN_S) if soon else self._first_return_s


def hottest_c(temperatures: Iterable[float | None]) -> float | None:
    """The highest known temperature."""
    known = [value for value in temperatures if value is not None]
    return max(known) if known else None
