"""Windows of the week, such as `mon-fri 18:00-08:00`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from agent.errors import ConfigError

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
    """`mon-fri 18:00-08:00` or `sat 10:00-24:00` -> Window. Raises ConfigError."""
    match = _WINDOW.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"hours: {text!r} is not of the form 'mon-fri 18:00-08:00'.")
    first = _day(match["first"], text)
    last = _day(match["last"] or match["first"], text)
    count = (last - first) % 7 + 1
    start, end = _minute(match["from"], text), _minute(match["to"], text)
    if start == end:
        raise ConfigError(f"hours: {text!r} begins and ends at the same time; a whole day is 00:00-24:00.")
    return Window(frozenset((first + step) % 7 for step in range(count)), start, end)


def inside(windows: Sequence[Window], local: datetime) -> bool:
    """True if one of them holds."""
    return any(window.holds(local) for window in windows)


def _day(name: str, text: str) -> int:
    if name.lower() not in _DAYS:
        raise ConfigError(f"hours: {name!r} in {text!r} is not a day; days are {', '.join(_DAYS)}.")
    return _DAYS.index(name.lower())


def _minute(clock: str, text: str) -> int:
    hours, minutes = int(clock[:2]), int(clock[3:])
    if minutes > 59 or hours * 60 + minutes > MINUTES_A_DAY:
        raise ConfigError(f"hours: {clock!r} in {text!r} is not a time of day.")
    return hours * 60 + minutes
