"""The worker and its clock as an operator starts them: real processes, real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from marketplace.core.celery import MAX_BACKLOG, SWEEP, backlog, sender
from marketplace.core.database import SessionFactory
from marketplace.core.outbox import enqueue
from marketplace.core.pump import OutboxPump, empty_outbox
from marketplace.core.settings import Settings
from marketplace.jobs.hot import Admit
from marketplace.worker import make_worker
from tests.queue_world import QueueWorld, wait_until

START_S = 30.0
Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def world(settings: Settings, session_factory: SessionFactory) -> QueueWorld:
    return QueueWorld.make(settings, session_factory)


@pytest.fixture
def spawn(settings: Settings, tmp_path: Path) -> Iterator[Spawn]:
    """Start a process with the test's stores; at the end it is killed with all its children."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "DATABASE_URL": settings.database_url, "VALKEY_URL": settings.valkey_url}
        log = (tmp_path / f"{len(started)}.log").open("wb")
        child = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=environment,
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)


def outbox_rows(world: QueueWorld) -> int:
    with world.factory() as session:
        return int(session.scalars(text("select count(*) from outbox")).one())


def runs(world: QueueWorld, job: Admit) -> bool:
    """True once the job runs. Until then its gateway's heart beats with every look."""
    world.publish()
    return world.job(job.job_id).state == "running"


class TestProcesses:
    def test_the_clock_and_the_worker_assign_a_job_and_end_on_sigterm(self, world: QueueWorld, spawn: Spawn) -> None:
        beat = spawn("marketplace.cli", "beat")
        worker = spawn("marketplace.cli", "worker")
        world.connect()
        job = world.admit()
        assert wait_until(lambda: runs(world, job), timeout_s=START_S)
        assert len(world.dispatched()) == 1
        assert wait_until(lambda: outbox_rows(world) == 0)
        for child in (beat, worker):
            child.terminate()
        assert [child.wait(20) for child in (beat, worker)] == [0, 0]

    def test_celerys_own_commands_find_the_application(self, world: QueueWorld, spawn: Spawn) -> None:
        spawn("celery", "-A", "marketplace.worker", "worker", "--queues", "match,sweep,money")
        spawn("celery", "-A", "marketplace.worker", "beat")
        job = world.admit(deadline_s=0.1)
        assert wait_until(lambda: world.job(job.job_id).outcome == "expired", timeout_s=START_S)

    def test_a_worker_killed_at_work_loses_no_job(self, world: QueueWorld, spawn: Spawn) -> None:
        spawn("marketplace.cli", "beat")
        first = spawn("marketplace.cli", "worker")
        world.connect(slots=50)
        jobs = [world.admit() for _ in range(5)]
        assert wait_until(lambda: any(runs(world, job) for job in jobs), timeout_s=START_S)
        jobs += [world.admit() for _ in range(20)]
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(10)
        spawn("marketplace.cli", "worker")
        assert wait_until(lambda: all(runs(world, job) for job in jobs), timeout_s=START_S)
        assert all(len(world.attempts(job.job_id)) == 1 for job in jobs)


class TestSending:
    def test_a_nudge_reaches_its_queue_under_our_prefix(self, settings: Settings, world: QueueWorld) -> None:
        app = make_worker(settings)
        send = sender(app)
        for task in ("jobs.assign", "jobs.sweep", "billing.settle"):
            send(task, [])
        assert backlog(app) == {"match": 1, "money": 1, "sweep": 1, "batch": 0, "webhook": 0}
        names = {key.decode() for key in world.client.keys("fallow:celery:*")}  # type: ignore[union-attr]
        assert {"fallow:celery:match", "fallow:celery:money", "fallow:celery:sweep"} <= names

    def test_a_broker_that_is_away_is_reported_within_seconds(self, settings: Settings) -> None:
        away = settings.model_copy(update={"valkey_url": "redis://127.0.0.1:1/0"})
        started_s = time.monotonic()
        with pytest.raises(Exception, match="refused"):
            sender(make_worker(away))("jobs.assign", [])
        assert time.monotonic() - started_s < 5.0

    def test_the_clock_skips_a_queue_that_nobody_empties(self, settings: Settings, world: QueueWorld) -> None:
        from marketplace.core.celery import BoundedScheduler

        app = make_worker(settings)
        scheduler = BoundedScheduler(app=app)
        send = sender(app)
        for _ in range(MAX_BACKLOG):
            send("jobs.sweep", [])
        scheduler.apply_entry(scheduler.schedule["jobs.sweep"])
        scheduler.apply_entry(scheduler.schedule["jobs.assign"])
        assert backlog(app) == {"match": 1, "money": 0, SWEEP: MAX_BACKLOG, "batch": 0, "webhook": 0}

    def test_the_clock_outlives_a_broker_that_is_away(self, settings: Settings) -> None:
        from marketplace.core.celery import BoundedScheduler

        away = settings.model_copy(update={"valkey_url": "redis://127.0.0.1:1/0"})
        scheduler = BoundedScheduler(app=make_worker(away))
        scheduler.apply_entry(scheduler.schedule["jobs.assign"])
        assert backlog(make_worker(away)) == {}


class TestOutbox:
    def test_equal_nudges_go_once_and_all_rows_leave(self, world: QueueWorld) -> None:
        with world.factory() as session, session.begin():
            for _ in range(5):
                enqueue(session, "jobs.assign")
            enqueue(session, "billing.settle", "x")
        sent: list[tuple[str, list[object]]] = []
        assert empty_outbox(world.factory, lambda task, args: sent.append((task, args))) == 6
        assert sent == [("jobs.assign", []), ("billing.settle", ["x"])]
        assert outbox_rows(world) == 0

    def test_rows_stay_while_the_broker_is_away(self, world: QueueWorld) -> None:
        with world.factory() as session, session.begin():
            enqueue(session, "jobs.assign")

        def refuse(task: str, args: list[object]) -> None:
            raise ConnectionError("away")

        with pytest.raises(ConnectionError):
            empty_outbox(world.factory, refuse)
        assert outbox_rows(world) == 1

    def test_a_rolled_back_wish_is_never_sent(self, world: QueueWorld) -> None:
        with world.factory() as session:
            enqueue(session, "jobs.assign")
            session.flush()
            session.rollback()
        assert empty_outbox(world.factory, lambda task, args: pytest.fail("sent")) == 0

    def test_a_pump_sends_when_woken_and_survives_a_failure(self, world: QueueWorld) -> None:
        sent: list[str] = []
        failures = iter([True])

        def send(task: str, args: list[object]) -> None:
            if next(failures, False):
                raise ConnectionError("away")
            sent.append(task)

        pump = OutboxPump(world.factory, send)
        pump.start()
        world.admit()
        pump.wake()
        time.sleep(0.3)
        assert outbox_rows(world) == 1
        pump.wake()
        assert wait_until(lambda: sent == ["jobs.assign"])
        pump.stop()
        assert outbox_rows(world) == 0
