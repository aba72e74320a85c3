"""When a delivery is tried again, and when that is enough: pure."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Final

DELAYS_S: Final = (5, 60, 300, 1_800, 7_200, 18_000, 43_200)
"""After the first, second, ... failure: eight tries over some twenty hours."""
MAX_TRIES: Final = len(DELAYS_S) + 1
JITTER: Final = 0.2
"""Each delay is so much longer or shorter, so that what failed together does not come back together."""
GONE: Final = 410
"""The receiver's own word for: never again."""
DISABLE_AFTER: Final = timedelta(days=3)
"""An endpoint that has taken nothing for this long is told nothing more."""


def delay_s(tries: int, rng: Random) -> float | None:
    """Seconds until the next try after so many failed ones; None: it is given up."""
    if tries >= MAX_TRIES:
        return None
    return DELAYS_S[max(tries, 1) - 1] * rng.uniform(1 - JITTER, 1 + JITTER)


def why_disable(status: int | None, failing_for: timedelta) -> str | None:
    """Why an endpoint is to be told nothing more; None: it is tried on."""
    if status == GONE:
        return "It answered 410 Gone."
    if failing_for >= DISABLE_AFTER:
        return f"It has taken nothing for {DISABLE_AFTER.days} days."
    return None
