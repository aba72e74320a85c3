"""The stand-in's time: it stands still until a test moves it, or follows the wall for local work."""

from __future__ import annotations

import time
from collections.abc import Callable

DAY_S = 86_400
# Monday, 5 January 2026, 09:00 UTC.
DEFAULT_START_S = 1_767_603_600


class Clock:
    """Unix time in whole seconds. It runs forward only; what falls due on the way happens in its order."""

    def __init__(self, start_s: int = DEFAULT_START_S, *, follows_wall: bool = False) -> None:
        self._start_s = start_s
        self._offset_s = 0
        self._follows_wall = follows_wall
        self.walk: Callable[[int], None] = self.set
        """How to get to a later time; the world replaces it."""

    def now(self) -> int:
        """Seconds since the epoch."""
        return self._base() + self._offset_s

    def _base(self) -> int:
        return int(time.time()) if self._follows_wall else self._start_s

    def set(self, at_s: int) -> None:
        """Jump to a time, leaving out what happens on the way; an earlier time changes nothing."""
        self._offset_s += max(0, at_s - self.now())

    def advance(self, seconds: int = 0, *, hours: int = 0, days: int = 0) -> int:
        """Move forward; returns the new time."""
        step = seconds + hours * 3_600 + days * DAY_S
        if step < 0:
            raise ValueError("this clock runs forward only")
        self.walk(self.now() + step)
        return self.now()


def midnight(at_s: int) -> int:
    """The start of that UTC day."""
    return at_s - at_s % DAY_S
