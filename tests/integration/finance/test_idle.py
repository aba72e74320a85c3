"""An hour's explanation from rows, and who may read it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from marketplace.accounts.service import create_key
from marketplace.app import create_app
from marketplace.core.settings import Settings
from marketplace.finance.idle import MINUTE_US, Cause, explain
from marketplace.finance.idle_rows import UnknownNode, read
from marketplace.fleet import held
from marketplace.fleet.models import EnergySample, HeldInterval, Node
from marketplace.jobs.demand import RefusalKey, RefusalSum, add_refusals
from tests.integration.finance.conftest import World

HOUR = datetime(2026, 11, 2, 13, tzinfo=UTC)


def after(minutes: float) -> datetime:
    return HOUR + timedelta(minutes=minutes)


@pytest.fixture
def rows(session: Session, world: World) -> Session:
    """Offered from 13:10 to 13:50, rented for 5 minutes of it, its owner's from 13:50, heard of from 13:00 to 13:55."""
    session.get_one(Node, world.node).enrolled_at = after(-60)
    world.offered(session, after(10), after(50))
    world.attempt(session, after(20), after(25), 1_000)
    session.add(
        HeldInterval(
            node_id=world.node, reason="a game runs", started_at=after(50), seen_at=after(60), ended_at=after(60)
        )
    )
    session.add(
        EnergySample(
            node_id=world.node,
            device_id="gpu-0",
            started_at=HOUR,
            ended_at=after(55),
            energy_mj=1,
            source="nvml_counter",
            utilisation_pct=30.0,
            capped_ms=60_000,
        )
    )
    add_refusals(
        session,
        {
            RefusalKey(after(30), world.node, world.variant, "CONTEXT"): RefusalSum(4, 100, 100),
            RefusalKey(after(31), UUID(int=0), world.variant, "VARIANT"): RefusalSum(2, 100, 100),
        },
    )
    session.commit()
    return session


class TestAnHour:
    def test_is_accounted_for_from_rows(self, rows: Session, world: World) -> None:
        found = explain(read(rows, world.node, after(33), world.owner))
        minutes = {part.cause: part.us / MINUTE_US for part in found.parts}
        assert minutes == {
            Cause.DEMAND: 34.0,
            Cause.NOT_OFFERED: 10.0,
            Cause.OWNER: 10.0,
            Cause.EARNING: 5.0,
            Cause.CONTEXT: 1.0,
        }
        assert "Its devices were busy 30% of the time" in found.notes[0]
        assert "for 1.0 minutes" in found.notes[1]

    def test_of_somebody_elses_node_is_unknown(self, rows: Session, world: World) -> None:
        with pytest.raises(UnknownNode):
            read(rows, world.node, HOUR, world.renter)

    def test_is_told_over_http_to_its_owner_alone(self, rows: Session, world: World, settings: Settings) -> None:
        keys = {
            role: create_key(rows, organisation, roles=[role])[1]
            for role, organisation in (("owner", world.owner), ("renter", world.renter))
        }
        rows.commit()
        app = create_app(settings)
        client = TestClient(app)
        path = f"/v1/finance/nodes/{world.node}/idle"
        ask = lambda who: client.get(  # noqa: E731
            path, params={"hour": f"{HOUR:%Y-%m-%dT%H}"}, headers={"authorization": f"Bearer {keys[who]}"}
        )
        answer = ask("owner").json()
        assert answer["bottleneck"] == "demand"
        assert sum(part["minutes"] for part in answer["parts"]) == 60
        assert ask("renter").status_code == 403
        app.services.session_factory.kw["bind"].dispose()


class TestHeldIntervals:
    def test_go_on_with_the_same_reason_and_end_with_another(self, session: Session, world: World) -> None:
        def stretches() -> list[tuple[str, bool]]:
            session.flush()
            found = session.query(HeldInterval).order_by(HeldInterval.id)
            return [(entry.reason, entry.ended_at is None) for entry in found]

        held.sync(session, world.node, "a game runs")
        held.sync(session, world.node, "a game runs")
        assert stretches() == [("a game runs", True)]
        held.sync(session, world.node, "")
        session.expire_all()
        assert stretches() == [("a game runs", False), (held.UNSAID, True)]
        held.sync(session, world.node, None)
        session.expire_all()
        assert stretches() == [("a game runs", False), (held.UNSAID, False)]
