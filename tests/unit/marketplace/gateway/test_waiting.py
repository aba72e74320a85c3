"""Clients that wait for their turn: seats, bounds, calls, and how they hear of an end."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from sqlalchemy.exc import OperationalError

from marketplace.core.database import SessionFactory
from marketplace.gateway import waiting
from marketplace.gateway.waiting import Seat, TooManyWaiting, WaitingClients
from marketplace.jobs.repository import Dispatch, JobEnd

OWN, OTHER = UUID(int=1), UUID(int=2)


class _Dispatch:
    def __init__(self, job_id: UUID) -> None:
        self.job_id = job_id


def clients(*, most: int = 3, most_per_organisation: int = 2) -> WaitingClients:
    factory = cast("SessionFactory", None)
    return WaitingClients(factory, lease_s=15.0, most=most, most_per_organisation=most_per_organisation)


def called(seat: Seat) -> Dispatch:
    return cast("Dispatch", _Dispatch(seat.job_id))


class TestSeats:
    def test_are_bounded_for_one_organisation_and_for_all(self) -> None:
        async def story() -> None:
            here = clients()
            first, _ = here.sit(uuid4(), OWN), here.sit(uuid4(), OWN)
            with pytest.raises(TooManyWaiting) as caught:
                here.sit(uuid4(), OWN)
            assert caught.value.status == 429
            here.sit(uuid4(), OTHER)
            with pytest.raises(TooManyWaiting):
                here.sit(uuid4(), OTHER)
            here.leave(first)
            here.leave(first)
            here.sit(uuid4(), OWN)
            assert len(here) == 3

        asyncio.run(story())


class TestATurn:
    def test_wakes_the_one_that_waits_and_is_taken_once(self) -> None:
        async def story() -> None:
            here = clients()
            seat = here.sit(uuid4(), OWN)
            sleeper = asyncio.create_task(seat.wait(30.0))
            await asyncio.sleep(0)
            dispatch = called(seat)
            assert here.call(dispatch)
            await sleeper
            assert seat.take() is dispatch
            assert not seat.waits
            assert seat.take() is None
            assert seat.waits

        asyncio.run(story())

    def test_finds_nobody_where_the_client_has_left(self) -> None:
        async def story() -> None:
            here = clients()
            seat = here.sit(uuid4(), OWN)
            here.leave(seat)
            assert not here.call(called(seat))

        asyncio.run(story())

    def test_that_came_before_the_wait_is_not_missed(self) -> None:
        async def story() -> None:
            here = clients()
            seat = here.sit(uuid4(), OWN)
            here.call(called(seat))
            await seat.wait(30.0)
            assert seat.take() is not None

        asyncio.run(story())


class TestAnEnd:
    def test_is_heard_of_at_the_next_look(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def story() -> None:
            here = clients()
            seat, other = here.sit(uuid4(), OWN), here.sit(uuid4(), OWN)
            end = JobEnd(seat.job_id, "expired", "deadline_exceeded", "Too late.")
            monkeypatch.setattr(here, "_keep", lambda job_ids: [end] if seat.job_id in job_ids else [])
            await here.look()
            assert (seat.ended, other.ended) == (end, None)

        asyncio.run(story())

    def test_waits_for_a_database_that_is_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def away(job_ids: list[UUID]) -> Any:
            raise OperationalError("select", {}, Exception("away"))

        async def story() -> None:
            here = clients()
            seat = here.sit(uuid4(), OWN)
            monkeypatch.setattr(here, "_keep", away)
            await here.look()
            assert seat.ended is None

        asyncio.run(story())

    def test_of_the_gateway_is_told_to_those_without_a_turn_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(waiting, "LEAVE_S", 0.2)

        async def story() -> None:
            here = clients()
            running, idle = here.sit(uuid4(), OWN), here.sit(uuid4(), OWN)
            here.call(called(running))
            running.take()
            going = asyncio.create_task(here.send_away())
            await idle.wait(30.0)
            assert idle.sent_away
            here.leave(idle)
            await going
            assert len(here) == 1

        asyncio.run(story())
