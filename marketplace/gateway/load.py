"""How loaded this gateway is, and who is turned away for it: work that can wait first, clients that wait last.

Measured by what hurts first: how late the event loop is, and how many records wait for the database. Refusing is cheap
and at once, so that what is admitted stays fast.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from marketplace.core.errors import Unavailable

LOOK_S: Final = 0.1
"""How often the loop's lateness is measured."""
SMOOTHING: Final = 0.2
"""What a new measurement counts: one long pause alone turns nobody away, half a second of them does."""
RETRY_S: Final = 2


class Overloaded(Unavailable):
    """This gateway has more to do than it can do well."""

    code = "overloaded"


class Tier(IntEnum):
    """Who is turned away: the lower tier first."""

    WAITING = 0
    """Flex, jobs and batches."""
    INTERACTIVE = 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Above any of them a tier is turned away."""

    late_s: float
    """Of the event loop, smoothed."""
    records: int
    """That wait for the database."""
    requests_part: float
    """Of the requests that may be in hand at once."""


BOUNDS: Final = {
    Tier.WAITING: Bounds(late_s=0.25, records=1_000, requests_part=0.5),
    Tier.INTERACTIVE: Bounds(late_s=1.0, records=10_000, requests_part=1.0),
}


class Load:
    """See the module. One event loop. `records` says how many wait for the database."""

    def __init__(self, records: Callable[[], int], *, most_requests: int) -> None:
        self._records = records
        self._most_requests = most_requests
        self._looking: asyncio.Task[None] | None = None
        self.late_s = 0.0
        """How late the event loop is, smoothed."""
        self.requests = 0
        """In hand now."""

    def start(self) -> None:
        """Begin to measure."""
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """End."""
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
            self._looking = None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """One request in hand. Raises Overloaded if there are too many already."""
        if self.requests >= self._most_requests:
            raise _refusal()
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def require(self, tier: Tier) -> None:
        """Raises Overloaded if this tier is turned away now."""
        bounds = BOUNDS[tier]
        if (
            self.late_s > bounds.late_s
            or self._records() > bounds.records
            or self.requests > bounds.requests_part * self._most_requests
        ):
            raise _refusal()

    def measured(self, late_s: float) -> None:
        """Take a measurement."""
        self.late_s += SMOOTHING * (max(late_s, 0.0) - self.late_s)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.measured(loop.time() - due)


def _refusal() -> Overloaded:
    return Overloaded(
        "This gateway is overloaded; send the request again a little later. Nothing was charged.",
        headers={"retry-after": str(RETRY_S)},
    )
