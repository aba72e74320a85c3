"""Two gateways on one Valkey: what one learns of a node the other goes by, and a node's probation is one for both."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.fleet.occupancy import Occupancy
from marketplace.fleet.reservations import Reservations
from marketplace.matching.rules import Rules
from tests.fleet_world import VARIANT_ID, gateway, offer_view, until


class TestTwoGateways:
    def test_share_breakers_and_the_retry_budget(self, settings: Settings, session_factory: SessionFactory) -> None:
        node, other = uuid4(), uuid4()

        async def story() -> None:
            async with (
                gateway(settings, session_factory, {}, "gw-a") as first,
                gateway(settings, session_factory, {}, "gw-b") as second,
            ):
                first.fleet.breakers.failed(node, VARIANT_ID, time.monotonic())
                resting = second.fleet.breakers.resting
                await until(lambda: resting({node, other}, VARIANT_ID, time.monotonic()) == {node})
                second.fleet.breakers.forgive(node, VARIANT_ID)
                await until(lambda: not first.fleet.breakers.knows(node, VARIANT_ID))
                for _ in range(1_000):
                    first.fleet.retries.request(VARIANT_ID, time.monotonic())
                await until(lambda: second.fleet.retries._window(VARIANT_ID).requests == 1_000)

        asyncio.run(story())

    def test_take_no_more_of_a_node_on_probation_together_than_one_may(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        offer = offer_view(slots=16, probation=True)
        rules = Rules(probation_slots=4)

        async def story() -> None:
            async with (
                gateway(settings, session_factory, {}, "gw-a") as first,
                gateway(settings, session_factory, {}, "gw-b") as second,
            ):
                desks = [Reservations(home.pipe, Occupancy(), rules) for home in (first, second)]
                taken = await asyncio.gather(*(desks[at % 2].reserve(offer, uuid4(), 30.0) for at in range(12)))
                assert sum(taken) == 4

        asyncio.run(story())
