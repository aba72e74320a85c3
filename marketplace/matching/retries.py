"""The retry budget: retries may add a little to a model's load, never multiply it. Pure: the caller brings the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

RATIO: Final = 0.1
"""Retries per request..."""
WINDOW_S: Final = 10
"""...within this many seconds..."""
FLOOR_PER_S: Final = 3
"""...and so many more each second, so that a quiet model can retry at all."""
MAX_MODELS: Final = 10_000


@dataclass(slots=True)
class _Second:
    at: int
    requests: int = 0
    retries: int = 0


@dataclass(slots=True)
class _Window:
    seconds: deque[_Second] = field(default_factory=deque)
    requests: int = 0
    retries: int = 0

    def at(self, now_s: float) -> _Second:
        """The bucket of this second; what left the window is forgotten."""
        second = int(now_s)
        while self.seconds and self.seconds[0].at <= second - WINDOW_S:
            gone = self.seconds.popleft()
            self.requests -= gone.requests
            self.retries -= gone.retries
        if not self.seconds or self.seconds[-1].at < second:
            self.seconds.append(_Second(second))
        return self.seconds[-1]


class RetryBudget:
    """Counts per model. Times are seconds of one monotonic clock, never going back."""

    def __init__(self) -> None:
        self._windows: dict[UUID, _Window] = {}

    def request(self, variant_id: UUID, now_s: float) -> None:
        """A first attempt starts."""
        window = self._window(variant_id)
        window.at(now_s).requests += 1
        window.requests += 1

    def try_retry(self, variant_id: UUID, now_s: float) -> bool:
        """True, and counted, if another attempt may be made: at most RATIO of the window's requests, plus FLOOR_PER_S
        for each of its seconds, and of those extra ones at most FLOOR_PER_S in one second."""
        window = self._window(variant_id)
        second = window.at(now_s)
        earned = int(window.requests * RATIO)
        if window.retries >= earned + FLOOR_PER_S * WINDOW_S or second.retries >= earned + FLOOR_PER_S:
            return False
        second.retries += 1
        window.retries += 1
        return True

    def heard(self, variant_id: UUID, requests: int, retries: int, now_s: float) -> None:
        """Somebody else, of the same budget, made so many."""
        window = self._window(variant_id)
        second = window.at(now_s)
        second.requests += requests
        second.retries += retries
        window.requests += requests
        window.retries += retries

    def _window(self, variant_id: UUID) -> _Window:
        window = self._windows.pop(variant_id, None) or _Window()
        self._windows[variant_id] = window
        if len(self._windows) > MAX_MODELS:
            del self._windows[next(iter(self._windows))]
        return window
