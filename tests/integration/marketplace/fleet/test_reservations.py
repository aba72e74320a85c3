"""Slot reservations on a real Valkey, and without one."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import TypeVar
from uuid import UUID, uuid4

import pytest
import redis

from agent.protocol import Inventory
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.core.valkey import ValkeyDownError, ValkeyPipe, connect, connect_async
from marketplace.embedded import EmbeddedValkey
from marketplace.fleet.occupancy import Occupancy
from marketplace.fleet.reservations import Reservations, SyncReservations, slots_key
from marketplace.fleet.snapshot import SILENT_S, gateway_key, read_fleet
from marketplace.fleet.view import FleetView
from marketplace.matching.rank import rank
from marketplace.matching.types import OfferView, Ranked
from tests.fleet_world import (
    SHA256,
    add_variant,
    agent,
    demand,
    enrol_node,
    gateway,
    offer_report,
    offer_view,
    telemetry,
    until,
)

T = TypeVar("T")
TTL_S = 15.0


class Desk:
    """A gateway's reservations with a view of some offers."""

    def __init__(self, url: str, offers: list[OfferView], seed: int = 0) -> None:
        self.pipe = ValkeyPipe(connect_async(url))
        self.occupancy = Occupancy()
        self.reservations = Reservations(self.pipe, self.occupancy)
        self.view = FleetView("gw-a", self.occupancy, lambda _: True)
        for offer in offers:
            self.view.put_local(offer.node_id, [offer], 1, asyncio.get_running_loop().time())
        self.rng = Random(seed)
        self.snapshot = offers

    def rank(self) -> Ranked:
        return rank(self.view.all_offers(), demand(), self.rng)

    async def pick(self) -> OfferView | None:
        return await self.reservations.reserve_first(self.rank(), uuid4(), TTL_S)


def with_desk(url: str, offers: list[OfferView], story: Callable[[Desk], Awaitable[T]]) -> T:
    async def main() -> T:
        desk = Desk(url, offers)
        try:
            return await story(desk)
        finally:
            await desk.pipe.close()

    return asyncio.run(main())


@pytest.fixture
def own_valkey() -> Iterator[EmbeddedValkey]:
    """One that a test may kill."""
    with tempfile.TemporaryDirectory(prefix="fallow-valkey-") as folder:
        home = Path(folder)
        valkey = EmbeddedValkey(home / "data", home, home)
        valkey.start()
        yield valkey
        valkey.stop()


class TestASlot:
    def test_is_taken_once_and_comes_free(self, valkey_url: str) -> None:
        offer = offer_view(slots=1)

        async def story(desk: Desk) -> None:
            first, second = uuid4(), uuid4()
            assert await desk.reservations.reserve(offer, first, TTL_S)
            assert await desk.reservations.reserve(offer, first, TTL_S)
            assert not await desk.reservations.reserve(offer, second, TTL_S)
            await desk.reservations.release(offer, first)
            assert await desk.reservations.reserve(offer, second, TTL_S)

        with_desk(valkey_url, [offer], story)

    def test_that_nobody_renews_comes_free_by_itself(self, valkey_url: str) -> None:
        offer = offer_view(slots=1)

        async def story(desk: Desk) -> None:
            assert await desk.reservations.reserve(offer, uuid4(), 0.05)
            await asyncio.sleep(0.08)
            assert await desk.reservations.reserve(offer, uuid4(), TTL_S)

        with_desk(valkey_url, [offer], story)

    def test_that_is_renewed_stays_taken_even_if_valkey_forgot_it(self, valkey_url: str) -> None:
        offer = offer_view(slots=1)

        async def story(desk: Desk) -> None:
            attempt = uuid4()
            assert await desk.reservations.reserve(offer, attempt, 0.05)
            with connect(valkey_url) as client:
                client.flushall()
            await desk.reservations.renew(offer, attempt, TTL_S)
            await asyncio.sleep(0.08)
            assert not await desk.reservations.reserve(offer, uuid4(), TTL_S)

        with_desk(valkey_url, [offer], story)

    def test_is_the_same_for_gateway_and_worker(self, valkey_url: str) -> None:
        offer = offer_view(slots=1)

        async def story(desk: Desk) -> None:
            attempt = uuid4()
            with connect(valkey_url) as client:
                worker = SyncReservations(client)
                assert worker.reserve(offer, attempt, TTL_S)
                assert not worker.reserve(offer, uuid4(), TTL_S)
                assert await desk.reservations.reserve(offer, attempt, TTL_S)
                assert not await desk.reservations.reserve(offer, uuid4(), TTL_S)
                worker.renew(offer.offer_id, attempt, TTL_S)
                worker.release(offer.offer_id, attempt)
                assert await desk.reservations.reserve(offer, uuid4(), TTL_S)

        with_desk(valkey_url, [offer], story)


class TestABurst:
    def test_of_64_at_once_sees_its_own_picks(self, valkey_url: str) -> None:
        offers = [offer_view(slots=16) for _ in range(8)]

        async def story(desk: Desk) -> list[OfferView | None]:
            return await asyncio.gather(*(desk.pick() for _ in range(64)))

        picks = Counter(offer.node_id for offer in with_desk(valkey_url, offers, story) if offer)
        assert set(picks.values()) == {8}

    def test_from_16_gateways_with_one_snapshot_spreads_over_the_nodes(self, valkey_url: str) -> None:
        # One node looks best to everybody: it alone is idle in the snapshot.
        best = offer_view(slots=64)
        offers = [best, *(offer_view(slots=64, slots_busy=1) for _ in range(7))]

        async def story() -> Counter[UUID]:
            desks = [Desk(valkey_url, [], seed) for seed in range(16)]
            try:
                picks = await asyncio.gather(
                    *(
                        desk.reservations.reserve_first(rank(offers, demand(), desk.rng), uuid4(), TTL_S)
                        for desk in desks
                        for _ in range(4)
                    )
                )
            finally:
                for desk in desks:
                    await desk.pipe.close()
            return Counter(offer.node_id for offer in picks if offer)

        shares = asyncio.run(story())
        assert sum(shares.values()) == 64
        assert max(shares.values()) <= 2 * 64 / len(offers)

    def test_never_takes_more_slots_than_there_are(self, valkey_url: str) -> None:
        offers = [offer_view(slots=3) for _ in range(4)]

        async def story() -> int:
            desks = [Desk(valkey_url, offers, seed) for seed in range(4)]
            try:
                picks = await asyncio.gather(*(desk.pick() for desk in desks for _ in range(10)))
            finally:
                for desk in desks:
                    await desk.pipe.close()
            return sum(pick is not None for pick in picks)

        assert asyncio.run(story()) == 12
        with connect(valkey_url) as client:
            assert [client.zcard(slots_key(offer.offer_id)) for offer in offers] == [3] * 4

    def test_looks_beyond_the_first_candidates_of_one_round_trip(self, valkey_url: str) -> None:
        offers = [offer_view(slots=1) for _ in range(20)]

        async def story(desk: Desk) -> list[OfferView | None]:
            ranked = rank(offers, demand(), Random(1))
            return [await desk.reservations.reserve_first(ranked, uuid4(), TTL_S) for _ in range(21)]

        picks = with_desk(valkey_url, [], story)
        assert len({pick.offer_id for pick in picks if pick}) == 20
        assert picks[-1] is None


class TestWithoutValkey:
    def test_a_gateway_counts_for_itself(self, tmp_path: Path) -> None:
        offers = [offer_view(slots=2) for _ in range(2)]

        async def story(desk: Desk) -> list[OfferView | None]:
            return [await desk.pick() for _ in range(5)]

        picks = with_desk(f"unix://{tmp_path}/nowhere.sock", offers, story)
        assert Counter(pick.offer_id for pick in picks if pick) == {offer.offer_id: 2 for offer in offers}
        assert picks[-1] is None

    def test_releasing_and_renewing_never_raise(self, tmp_path: Path) -> None:
        offer = offer_view(slots=1)

        async def story(desk: Desk) -> None:
            attempt = uuid4()
            assert await desk.reservations.reserve(offer, attempt, TTL_S)
            await desk.reservations.renew(offer, attempt, TTL_S)
            assert not await desk.reservations.reserve(offer, uuid4(), TTL_S)
            await desk.reservations.release(offer, attempt)
            assert await desk.reservations.reserve(offer, uuid4(), TTL_S)

        with_desk(f"unix://{tmp_path}/nowhere.sock", [offer], story)

    def test_a_worker_says_so(self, tmp_path: Path) -> None:
        client = redis.Redis.from_url(f"unix://{tmp_path}/nowhere.sock")
        with pytest.raises(ValkeyDownError):
            SyncReservations(client).reserve(offer_view(), uuid4(), TTL_S)
        with pytest.raises(ValkeyDownError):
            read_fleet(client)

    def test_killed_under_a_gateway_its_own_nodes_go_on_and_its_return_heals_the_rest(
        self, settings: Settings, session_factory: SessionFactory, own_valkey: EmbeddedValkey
    ) -> None:
        variant_id = add_variant(session_factory)
        node = enrol_node(session_factory)
        on_it = settings.model_copy(update={"valkey_url": own_valkey.url})

        async def story() -> None:
            async with (
                gateway(on_it, session_factory, {SHA256: variant_id}, "gw-a") as home,
                gateway(on_it, session_factory, {SHA256: variant_id}, "gw-b") as other,
                agent(home, node) as running,
            ):
                await running.say(telemetry(), Inventory([offer_report()]))
                await until(lambda: other.fleet.view.offers(variant_id))
                first = uuid4()
                wanted = demand(variant_id=variant_id)
                offer = await home.fleet.reservations.reserve_first(home.fleet.rank(wanted), first, TTL_S)
                assert offer is not None
                await asyncio.to_thread(own_valkey.stop)

                second = await home.fleet.reservations.reserve_first(home.fleet.rank(wanted), uuid4(), TTL_S)
                assert second is not None
                assert await home.fleet.reservations.reserve_first(home.fleet.rank(wanted), uuid4(), TTL_S) is None
                assert home.fleet.view.offers(variant_id)[0].slots_busy == 2

                await asyncio.to_thread(own_valkey.start)
                with connect(own_valkey.url) as client:
                    client.flushall()
                    await until(lambda: _seen(client) == [2])
                    await home.fleet.reservations.renew(offer, first, TTL_S)
                    assert client.zcard(slots_key(offer.offer_id)) == 1
                await until(lambda: other.fleet.view.offers(variant_id))

        asyncio.run(story())


def _seen(client: redis.Redis) -> list[int]:
    """Busy slots of each offer as a worker reads them."""
    return [offer.slots_busy for offer in read_fleet(client)]


class TestTheWorkersView:
    def test_of_an_empty_valkey_is_empty(self, valkey_url: str) -> None:
        with connect(valkey_url) as client:
            assert read_fleet(client) == []

    def test_leaves_out_a_gateway_whose_heart_stopped_before_its_snapshot_ends(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        variant_id = add_variant(session_factory)
        node = enrol_node(session_factory)

        async def story() -> None:
            async with (
                gateway(settings, session_factory, {SHA256: variant_id}) as home,
                agent(home, node) as running,
            ):
                await running.say(telemetry(), Inventory([offer_report()]))
                with connect(settings.valkey_url) as client:
                    await until(lambda: _seen(client) == [0])
                    key = gateway_key("gw-a")
                    first = int(client.hget(key, "h") or 0)
                    await until(lambda: int(client.hget(key, "h") or 0) > first)
                    await home.kill()
                    assert len(read_fleet(client, silent_up_to_s=SILENT_S)) == 1
                    client.hset(key, "h", int(client.hget(key, "h") or 0) - int(SILENT_S * 1_000))
                    assert read_fleet(client, silent_up_to_s=SILENT_S) == []
                    assert len(read_fleet(client)) == 1, "for what is not assigned it is believed on"

        asyncio.run(story())

    def test_counts_what_was_reserved_since_the_snapshot(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        variant_id = add_variant(session_factory)
        node = enrol_node(session_factory)

        async def story() -> None:
            async with (
                gateway(settings, session_factory, {SHA256: variant_id}) as home,
                agent(home, node) as running,
            ):
                await running.say(telemetry(), Inventory([offer_report()]))
                with connect(settings.valkey_url) as client:
                    await until(lambda: _seen(client) == [0])
                    (offer,) = read_fleet(client)
                    assert SyncReservations(client).reserve(offer, uuid4(), TTL_S)
                    assert _seen(client) == [1]

        asyncio.run(story())
        with connect(settings.valkey_url) as client:
            assert read_fleet(client) == []
