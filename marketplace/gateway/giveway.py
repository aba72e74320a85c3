"""Queued jobs of this gateway give way to a client that waits: the one that loses least, within the line's bounds.

Its attempt ends without fault or cost, as when an owner takes the machine back, and the queue tries it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from marketplace.core.logs import get_logger
from marketplace.gateway.outcomes import Ending
from marketplace.matching.line import Running, gives_way

log = get_logger(__name__)
ROOM_WAIT_S: Final = 2.0
"""A client waits so long for the slot of a job that was told to stop."""
MAX_REMEMBERED: Final = 10_000


@dataclass(slots=True)
class _Run:
    running: Running
    job_id: UUID
    stop: Callable[[Ending], None]
    may_stop: Callable[[], bool]
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    """It was told to stop already: nobody else pushes the same job aside."""


class FlexRuns:
    """Queued jobs that run here. One event loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._runs: dict[UUID, _Run] = {}
        self._gave_way: dict[UUID, int] = {}
        """How often a job gave way; the oldest are forgotten."""

    def began(
        self,
        attempt_id: UUID,
        job_id: UUID,
        offer_id: UUID,
        runs_s: float,
        stop: Callable[[Ending], None],
        *,
        may_stop: Callable[[], bool] = lambda: True,
    ) -> None:
        """An attempt of a queued or a flex job starts; `runs_s` is how long it will run, by prediction, `stop` ends it,
        as long as `may_stop` says that nobody has read any of its answer."""
        running = Running(attempt_id, offer_id, self._now(), runs_s, self._gave_way.get(job_id, 0))
        self._runs[attempt_id] = _Run(running, job_id, stop, may_stop)

    def ended(self, attempt_id: UUID) -> None:
        """It ended, however, and its slot is free."""
        run = self._runs.pop(attempt_id, None)
        if run is not None:
            run.freed.set()

    async def make_room(self, find_offers: Callable[[], Sequence[UUID]]) -> bool:
        """Stop one job on one of these offers and wait until its slot is free. False: nobody gives way, or not in
        time."""
        if not self._runs:
            return False
        now = self._now()
        movable = (run.running for run in self._runs.values() if not run.leaving and run.may_stop())
        victim = gives_way(movable, find_offers(), now)
        if victim is None:
            return False
        run = self._runs[victim.attempt_id]
        run.leaving = True
        self._gave_way[run.job_id] = victim.preempted + 1
        if len(self._gave_way) > MAX_REMEMBERED:
            del self._gave_way[next(iter(self._gave_way))]
        log.info("flex_job_gives_way", job=run.job_id.hex, lost_s=round(victim.loss_s(now), 1))
        run.stop(Ending.GAVE_WAY)
        try:
            async with asyncio.timeout(ROOM_WAIT_S):
                await run.freed.wait()
        except TimeoutError:
            return False
        return True
