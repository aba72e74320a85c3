"""Whether the queue takes one more job: each renter's own bound at once, everybody's within a second."""

from __future__ import annotations

import pytest

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.jobs import service
from marketplace.jobs.service import QueueFull, QueueRoom
from tests.queue_world import QueueWorld


@pytest.fixture
def queue(settings: Settings, session_factory: SessionFactory) -> QueueWorld:
    return QueueWorld.make(settings, session_factory)


class TestARenter:
    def test_is_refused_at_its_own_bound_and_others_are_not(self, queue: QueueWorld) -> None:
        room = QueueRoom(queue.factory, most=100, most_own=1)
        room.require(queue.market.renter.organisation_id)
        queue.admit()
        with pytest.raises(QueueFull, match="1 of your jobs wait"):
            room.require(queue.market.renter.organisation_id)
        room.require(queue.another_renter().organisation_id)


class TestTheWholeQueue:
    def test_is_counted_for_each_job_where_it_is_nearly_full(self, queue: QueueWorld) -> None:
        room = QueueRoom(queue.factory, most=1, most_own=100)
        stranger = queue.another_renter().organisation_id
        room.require(stranger)
        queue.admit()
        with pytest.raises(QueueFull, match="of all renters"):
            room.require(stranger)

    def test_is_not_counted_again_for_a_second_where_there_is_ample_room(
        self, queue: QueueWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "AMPLE_ROOM", 0)
        now = 0.0
        room = QueueRoom(queue.factory, most=1, most_own=100, clock=lambda: now)
        stranger = queue.another_renter().organisation_id
        room.require(stranger)
        queue.admit()
        room.require(stranger)
        now = 2 * service.AMPLE_S
        with pytest.raises(QueueFull):
            room.require(stranger)
