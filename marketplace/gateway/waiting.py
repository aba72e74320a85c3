"""Clients that wait here for their turn in the queue: flex requests, each a job that names this gateway.

The queue knows of them by their rows only. While a client waits, its row is told so every few seconds; a row that hears
nothing for a lease is voided by the sweep, since its gateway is gone, and its client with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Final
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import RateLimited
from marketplace.core.logs import get_logger
from marketplace.jobs.repository import Dispatch, JobEnd, keep_clients

log = get_logger(__name__)
BEAT_S: Final = 2.0
"""How often the rows are told, and asked whether somebody ended them."""
RETRY_S: Final = 10
LEAVE_PAUSE_S: Final = 0.05
LEAVE_S: Final = 5.0
"""When the gateway ends, its waiting clients are told so within this."""


class TooManyWaiting(RateLimited):
    """More requests would wait than may."""

    code = "too_many_waiting"


class Seat:
    """One client that waits. One waiter at a time."""

    __slots__ = ("_woken", "dispatch", "ended", "job_id", "organisation_id", "sent_away", "waits")

    def __init__(self, job_id: UUID, organisation_id: UUID) -> None:
        self.job_id = job_id
        self.organisation_id = organisation_id
        self.dispatch: Dispatch | None = None
        """Its turn has come: the attempt that was leased for it."""
        self.ended: JobEnd | None = None
        """Somebody else ended the job."""
        self.sent_away = False
        """The gateway ends: what has no turn yet is to go elsewhere."""
        self.waits = True
        """False while an attempt runs for it."""
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Let the waiter look again."""
        self._woken.set()

    async def wait(self, timeout_s: float) -> None:
        """Sleep until something happened, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._woken.wait()
        self._woken.clear()

    def take(self) -> Dispatch | None:
        """The attempt that came, once."""
        dispatch, self.dispatch = self.dispatch, None
        self.waits = dispatch is None
        return dispatch


class WaitingClients:
    """See the module. One event loop."""

    def __init__(self, factory: SessionFactory, *, lease_s: float, most: int, most_per_organisation: int) -> None:
        self._factory = factory
        self._lease_s = lease_s
        self._most = most
        self._most_per_organisation = most_per_organisation
        self._seats: dict[UUID, Seat] = {}
        self._by_organisation: Counter[UUID] = Counter()
        self._beating: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._seats)

    def sit(self, job_id: UUID, organisation_id: UUID) -> Seat:
        """A place for a client whose job is about to be written. Raises TooManyWaiting."""
        if len(self._seats) >= self._most or self._by_organisation[organisation_id] >= self._most_per_organisation:
            raise TooManyWaiting(
                f"Too many flex requests wait already ({self._by_organisation[organisation_id]} of yours). "
                "Send it again later, or with the default service tier. Nothing was charged.",
                headers={"retry-after": str(RETRY_S)},
            )
        seat = self._seats[job_id] = Seat(job_id, organisation_id)
        self._by_organisation[organisation_id] += 1
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())
        return seat

    def leave(self, seat: Seat) -> None:
        """The client is gone, or has its answer. Leaving twice does nothing more."""
        if self._seats.pop(seat.job_id, None) is not None:
            self._by_organisation[seat.organisation_id] -= 1
            self._by_organisation += Counter()

    def call(self, dispatch: Dispatch) -> bool:
        """The turn of a client has come. False: nobody waits for it here."""
        seat = self._seats.get(dispatch.job_id)
        if seat is None:
            return False
        seat.dispatch = dispatch
        seat.wake()
        return True

    async def look(self) -> None:
        """Tell the rows that their clients wait, and hear which of them have ended. With the database away, the next
        look does."""
        seats = dict(self._seats)
        if not seats:
            return
        try:
            ended = await asyncio.to_thread(self._keep, list(seats))
        except SQLAlchemyError as error:
            log.warning("waiting_clients_not_kept", clients=len(seats), error=type(error).__name__)
            return
        for end in ended:
            seats[end.job_id].ended = end
            seats[end.job_id].wake()

    async def send_away(self) -> None:
        """The gateway ends: let those go that have no turn yet, and see them off."""
        for seat in self._seats.values():
            seat.sent_away = True
            seat.wake()
        for _ in range(round(LEAVE_S / LEAVE_PAUSE_S)):
            if not any(seat.waits for seat in self._seats.values()):
                return
            await asyncio.sleep(LEAVE_PAUSE_S)

    async def _beat(self) -> None:
        while self._seats:
            await asyncio.sleep(BEAT_S)
            await self.look()

    def _keep(self, job_ids: list[UUID]) -> list[JobEnd]:
        with transaction(self._factory) as session:
            return keep_clients(session, job_ids, lease_s=self._lease_s)
