"""Standing as rows: judged from attempts, with appeals and amnesties."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import BadRequest, Conflict
from marketplace.core.settings import Settings
from marketplace.fleet import repository
from marketplace.fleet.models import NodeStanding
from marketplace.jobs import standing
from marketplace.jobs.models import Attempt
from marketplace.matching.standing import PROMOTE_COMPLETED, Standing
from tests.market import OneNode
from tests.queue_world import QueueWorld


@pytest.fixture
def world(settings: Settings, session_factory: SessionFactory) -> QueueWorld:
    return QueueWorld.make(settings, session_factory)


def enrol(session: Session, node: OneNode, *, days_ago: float = 2.0, state: str = "probation") -> None:
    since = datetime.now(UTC) - timedelta(days=days_ago)
    session.add(NodeStanding(node_id=node.node_id, standing=state, since=since))
    session.flush()


def worked(world: QueueWorld, node: OneNode, faults: Sequence[str | None], *, job_id: UUID | None = None) -> None:
    """Ended attempts of the node, one for each fault."""
    with transaction(world.factory) as session:
        for fault in faults:
            job = job_id or world.admit().job_id
            now = datetime.now(UTC)
            session.add(
                Attempt(
                    id=uuid4(),
                    job_id=job,
                    epoch=1 + session.query(Attempt).filter(Attempt.job_id == job).count(),
                    node_id=node.node_id,
                    offer_id=node.offer_id,
                    gateway_id="gw",
                    state="ended",
                    price_id=node.price_id,
                    input_nano_usd_per_mtok=1,
                    cached_input_nano_usd_per_mtok=1,
                    output_nano_usd_per_mtok=1,
                    lease_expires_at=now,
                    leased_at=now,
                    ended_at=now,
                    end_code="delivered" if fault is None else "engine_died",
                    fault=fault,
                )
            )
            session.flush()


def now_of(world: QueueWorld, node: OneNode) -> Standing:
    with transaction(world.factory) as session:
        standing.review(session)
        return standing.show(session, node.node_id).standing


class TestANodesStanding:
    def test_is_earned_by_work_and_told_with_its_reason(self, world: QueueWorld) -> None:
        node = world.market.node
        with transaction(world.factory) as session:
            enrol(session, node)
        worked(world, node, [None] * (PROMOTE_COMPLETED - 1))
        assert now_of(world, node) is Standing.PROBATION
        worked(world, node, [None])
        assert now_of(world, node) is Standing.PROVEN
        with world.factory() as session:
            view = standing.show(session, node.node_id)
            assert view.changes[0].reason.startswith("it has proven itself: 20 completed and 0 failed")
            assert repository.find_node(session, node.node_id).standing == "proven"  # type: ignore[union-attr]

    def test_is_lost_by_its_own_faults_only(self, world: QueueWorld) -> None:
        node = world.market.node
        with transaction(world.factory) as session:
            enrol(session, node, state="proven")
        worked(world, node, [None, None, "owner", "platform", "request", "owner", "platform"])
        assert now_of(world, node) is Standing.PROVEN
        worked(world, node, ["node"] * 3)
        assert now_of(world, node) is Standing.PROBATION

    def test_is_not_lost_twice_for_one_fault(self, world: QueueWorld) -> None:
        node = world.market.node
        with transaction(world.factory) as session:
            enrol(session, node, state="proven")
        worked(world, node, ["node"] * 12)
        assert now_of(world, node) is Standing.BARRED
        with transaction(world.factory) as session:
            session.execute(text("update node_standings set since = since - interval '2 days'"))
            session.execute(text("update attempts set ended_at = ended_at - interval '3 days'"))
        assert now_of(world, node) is Standing.PROBATION
        assert now_of(world, node) is Standing.PROBATION

    def test_does_not_suffer_from_a_request_that_breaks_every_node(self, world: QueueWorld) -> None:
        node, other = world.market.node, world.another_node()
        with transaction(world.factory) as session:
            enrol(session, node, state="proven")
            enrol(session, other, state="proven")
        for _ in range(4):
            job_id = world.admit().job_id
            worked(world, node, ["node"], job_id=job_id)
            worked(world, other, ["node"], job_id=job_id)
        assert now_of(world, node) is Standing.PROVEN
        with world.factory() as session:
            assert standing.show(session, node.node_id).record.forgiven == 4

    def test_does_not_suffer_from_an_outage_of_ours(self, world: QueueWorld) -> None:
        nodes = [world.market.node, *(world.another_node() for _ in range(4))]
        with transaction(world.factory) as session:
            for node in nodes:
                enrol(session, node, state="proven")
        for node in nodes:
            worked(world, node, ["node"] * 3)
        with transaction(world.factory) as session:
            session.execute(text("update attempts set ended_at = date_trunc('minute', now()) - interval '30 seconds'"))
        assert [now_of(world, node) for node in nodes] == [Standing.PROVEN] * 5
        with transaction(world.factory) as session:
            assert standing.note_outages(session) == 0


class TestAnAmnesty:
    def test_forgives_what_fell_into_it(self, world: QueueWorld) -> None:
        node = world.market.node
        with transaction(world.factory) as session:
            enrol(session, node, state="proven")
        worked(world, node, ["node"] * 4)
        now = datetime.now(UTC)
        with transaction(world.factory) as session:
            standing.grant_amnesty(session, now - timedelta(hours=1), now + timedelta(minutes=1), "a bad release")
        assert now_of(world, node) is Standing.PROVEN

    def test_has_an_order_and_a_bound(self, world: QueueWorld) -> None:
        now = datetime.now(UTC)
        for ended in (now, now - timedelta(hours=1), now + timedelta(days=31)):
            with world.factory() as session, pytest.raises(BadRequest):
                standing.grant_amnesty(session, now, ended, "why")


class TestAnAppeal:
    def test_is_made_once_and_decided_once(self, world: QueueWorld) -> None:
        node = world.market.node
        with transaction(world.factory) as session:
            enrol(session, node, state="barred")
            made = standing.appeal(session, node.node_id, "My router was replaced.")
            with pytest.raises(standing.AppealOpen):
                standing.appeal(session, node.node_id, "Again.")
            assert [item.id for item in standing.open_appeals(session)] == [made.id]
            number = made.id
        with transaction(world.factory) as session:
            standing.decide(session, number, granted=True, answer="Seen, thank you.")
            with pytest.raises(Conflict):
                standing.decide(session, number, granted=False, answer="No.")
        with world.factory() as session:
            view = standing.show(session, node.node_id)
            assert view.standing is Standing.PROVEN
            assert view.changes[0].reason == "an appeal was granted: Seen, thank you."
            assert standing.open_appeals(session) == []

    def test_needs_words_and_the_owners_own_node(self, world: QueueWorld) -> None:
        node = world.market.node
        with transaction(world.factory) as session:
            enrol(session, node)
            with pytest.raises(BadRequest):
                standing.appeal(session, node.node_id, "   ")
            with pytest.raises(standing.NoSuchNode):
                standing.appeal(session, node.node_id, "Mine?", organisation_id=uuid4())
            with pytest.raises(standing.NoSuchAppeal):
                standing.decide(session, 99, granted=True, answer="")


def test_a_node_that_joined_before_there_was_a_standing_counts_as_proven(world: QueueWorld) -> None:
    with world.factory() as session:
        found = repository.find_node(session, world.market.node.node_id)
        assert found is not None
        assert found.standing == "proven"
        assert found.region == ""
