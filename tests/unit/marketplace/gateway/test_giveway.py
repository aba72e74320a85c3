"""Queued jobs that give way to a client that waits."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

from marketplace.gateway.giveway import FlexRuns
from marketplace.gateway.outcomes import FAULTS, RETRYABLE, Ending

OFFER = UUID(int=5)


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.flex = FlexRuns(lambda: self.now)
        self.stopped: list[tuple[UUID, Ending]] = []

    def began(self, job_id: UUID | None = None) -> UUID:
        attempt = uuid4()

        def stop(ending: Ending) -> None:
            self.stopped.append((attempt, ending))
            asyncio.get_running_loop().call_soon(self.flex.ended, attempt)

        self.flex.began(attempt, job_id or uuid4(), OFFER, 60.0, stop)
        return attempt


class TestGivingWay:
    async def make_room(self, world: World, offer: UUID = OFFER) -> bool:
        return await world.flex.make_room(lambda: [offer])

    def test_stops_the_youngest_and_waits_for_its_slot(self) -> None:
        async def story() -> None:
            world = World()
            world.began()
            world.now += 5.0
            young = world.began()
            assert await self.make_room(world)
            assert world.stopped == [(young, Ending.GAVE_WAY)]

        asyncio.run(story())

    def test_stops_nobody_elsewhere_and_nobody_where_nothing_runs(self) -> None:
        async def story() -> None:
            world = World()
            assert not await self.make_room(world)
            world.began()
            assert not await self.make_room(world, UUID(int=6))
            assert world.stopped == []

        asyncio.run(story())

    def test_spares_what_somebody_has_read(self) -> None:
        async def story() -> None:
            world = World()
            attempt, read = uuid4(), False
            world.flex.began(
                attempt,
                uuid4(),
                OFFER,
                60.0,
                lambda ending: world.flex.ended(attempt),
                may_stop=lambda: not read,
            )
            read = True
            assert not await self.make_room(world)
            read = False
            assert await self.make_room(world)

        asyncio.run(story())

    def test_asks_the_same_job_only_so_often(self) -> None:
        async def story() -> None:
            world, job_id = World(), uuid4()
            for _ in range(2):
                world.began(job_id)
                assert await self.make_room(world)
            world.began(job_id)
            assert not await self.make_room(world)

        asyncio.run(story())

    def test_costs_the_job_and_its_node_nothing(self) -> None:
        assert Ending.GAVE_WAY in RETRYABLE
        assert FAULTS[Ending.GAVE_WAY] == "owner"
