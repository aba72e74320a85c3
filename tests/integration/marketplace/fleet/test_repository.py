"""Offers, the time that they were offered, and energy, in the database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from agent.protocol import DeviceReport
from marketplace.catalog.prices import set_price
from marketplace.core.database import SessionFactory, transaction
from marketplace.fleet import repository
from marketplace.fleet.claims import Claim
from marketplace.fleet.energy import Stretch
from marketplace.fleet.models import Device, EnergySample, Node, Offer, OfferedInterval
from marketplace.fleet.repository import Listed, NodeIdentity
from marketplace.matching.types import Rates
from tests.fleet_world import add_variant, device, enrol_node

GATEWAY = "gw-a"


class World:
    """One node of one owner, and what it is told to offer."""

    def __init__(self, factory: SessionFactory) -> None:
        self.factory = factory
        self.variant_id = add_variant(factory)
        enrolled = enrol_node(factory)
        with factory() as session:
            node = repository.find_node(session, enrolled.node_id)
        assert node is not None
        self.node: NodeIdentity = node

    def claim(self, *, device_id: str = "cpu", output: int = 400, slots: int = 2) -> Claim:
        rates = Rates(100, 50, output)
        return Claim(self.variant_id, device_id, slots, 2_048, rates, "e", "1", False, True, 0.0, None, None)

    def sync(self, *claims: Claim, available: bool = True, devices: tuple[DeviceReport, ...] = ()) -> list[Listed]:
        with transaction(self.factory) as session:
            return repository.sync_node(
                session,
                self.node,
                GATEWAY,
                claims,
                devices,
                available=available,
                declared_idle_mw=1,
                declared_load_mw=None,
                set_price=set_price,
            )

    def connect(self) -> int:
        with transaction(self.factory) as session:
            return repository.connect_node(session, self.node.node_id, "2")

    def intervals(self) -> list[tuple[datetime, datetime, datetime | None]]:
        with self.factory() as session:
            query = select(OfferedInterval.started_at, OfferedInterval.seen_at, OfferedInterval.ended_at)
            return [(row[0], row[1], row[2]) for row in session.execute(query.order_by(OfferedInterval.id))]

    def age(self, seconds: float) -> None:
        """Let all intervals have begun, and been seen, that much earlier."""
        with transaction(self.factory) as session:
            earlier = func.make_interval(0, 0, 0, 0, 0, 0, seconds)
            session.execute(
                update(OfferedInterval).values(
                    started_at=OfferedInterval.started_at - earlier, seen_at=OfferedInterval.seen_at - earlier
                )
            )


@pytest.fixture
def world(session_factory: SessionFactory) -> World:
    return World(session_factory)


def count(session: Session, model: type) -> int:
    return session.execute(select(func.count()).select_from(model)).scalar_one()


class TestOffers:
    def test_keep_their_id_and_an_unchanged_price_its_version(self, world: World) -> None:
        (first,) = world.sync(world.claim())
        (again,) = world.sync(world.claim(slots=5))
        assert (again.offer_id, again.price_id) == (first.offer_id, first.price_id)
        (dearer,) = world.sync(world.claim(output=401))
        assert dearer.offer_id == first.offer_id
        assert dearer.price_id != first.price_id
        with world.factory() as session:
            assert count(session, Offer) == 1
            assert session.execute(select(Offer.price_id)).scalar_one() == dearer.price_id

    def test_come_with_their_devices(self, world: World) -> None:
        world.sync(world.claim(), devices=(device(), device(device_id="gpu0", kind="gpu")))
        world.sync(world.claim(), devices=(device(memory_total_bytes=None),))
        with world.factory() as session:
            rows = session.execute(select(Device.device_id, Device.memory_total_bytes).order_by(Device.device_id))
            assert [tuple(row) for row in rows] == [("cpu", None), ("gpu0", 8 << 30)]


class TestOfferedTime:
    def test_begins_once_and_ends_with_the_offer(self, world: World) -> None:
        world.sync(world.claim(), world.claim(device_id="gpu0"))
        world.sync(world.claim(), world.claim(device_id="gpu0"))
        assert [ended for *_, ended in world.intervals()] == [None, None]
        world.sync(world.claim())
        assert sum(ended is None for *_, ended in world.intervals()) == 1
        world.sync()
        assert all(ended is not None for *_, ended in world.intervals())

    def test_stands_still_while_the_owner_has_the_machine(self, world: World) -> None:
        world.sync(world.claim())
        world.sync(world.claim(), available=False)
        world.sync(world.claim())
        assert [ended is None for *_, ended in world.intervals()] == [False, True]

    def test_of_a_lost_socket_ends_where_the_node_was_last_heard(self, world: World) -> None:
        world.sync(world.claim())
        world.age(100.0)
        with transaction(world.factory) as session:
            repository.disconnect_node(session, world.node.node_id, GATEWAY, silent_s=30.0)
        ((started, _, ended),) = world.intervals()
        assert ended is not None
        assert (ended - started).total_seconds() == pytest.approx(70.0, abs=2.0)

    def test_never_ends_before_it_began(self, world: World) -> None:
        world.sync(world.claim())
        with transaction(world.factory) as session:
            repository.disconnect_node(session, world.node.node_id, GATEWAY, silent_s=3_600.0)
        ((started, _, ended),) = world.intervals()
        assert ended == started

    def test_left_open_by_a_dead_gateway_ends_where_it_was_last_seen(self, world: World) -> None:
        world.sync(world.claim())
        with transaction(world.factory) as session:
            assert repository.end_stale_intervals(session) == 0
        world.age(repository.STALE_INTERVAL_S + 5)
        with transaction(world.factory) as session:
            assert repository.end_stale_intervals(session) == 1
        ((_, seen, ended),) = world.intervals()
        assert ended == seen

    def test_left_open_ends_when_the_node_comes_back(self, world: World) -> None:
        world.sync(world.claim())
        first = world.connect()
        ((_, seen, ended),) = world.intervals()
        assert ended == seen
        assert world.connect() > first

    def test_moves_on_while_the_node_is_connected_and_tells_how_much_did(self, world: World) -> None:
        world.sync(world.claim())
        world.age(50.0)
        with transaction(world.factory) as session:
            assert repository.touch(session, GATEWAY, [world.node.node_id, UUID(int=1)]) == {world.node.node_id: 1}
        ((started, seen, _),) = world.intervals()
        assert (seen - started).total_seconds() == pytest.approx(50.0, abs=2.0)
        with transaction(world.factory) as session:
            assert repository.touch(session, "gw-other", [world.node.node_id]) == {world.node.node_id: 0}
            assert repository.touch(session, GATEWAY, []) == {}

    def test_does_not_wait_for_a_node_that_somebody_writes_about(self, world: World) -> None:
        world.sync(world.claim())
        with transaction(world.factory) as other, transaction(world.factory) as session:
            other.execute(select(Node.id).where(Node.id == world.node.node_id).with_for_update(key_share=True))
            session.execute(text("set local lock_timeout = '200ms'"))
            assert repository.touch(session, GATEWAY, [world.node.node_id]) == {}


class TestEnergy:
    def test_grows_in_one_row_and_unknown_stays_unknown(self, world: World) -> None:
        start = datetime(2026, 3, 1, tzinfo=UTC)
        known = Stretch("cpu", "declared", start, start + timedelta(seconds=5), exact_mj=10.4)
        unknown = Stretch("gpu0", "unknown", start, start + timedelta(seconds=5))
        with transaction(world.factory) as session:
            known.row_id, unknown.row_id = repository.write_energy(session, world.node.node_id, [known, unknown])
        known.exact_mj, known.ended_at = 20.6, start + timedelta(seconds=10)
        with transaction(world.factory) as session:
            assert repository.write_energy(session, world.node.node_id, [known]) == [known.row_id]
        with world.factory() as session:
            rows = session.execute(select(EnergySample).order_by(EnergySample.device_id)).scalars().all()
            assert [(row.source, row.energy_mj) for row in rows] == [("declared", 21), ("unknown", None)]
            assert (rows[0].ended_at - rows[0].started_at).total_seconds() == 10
