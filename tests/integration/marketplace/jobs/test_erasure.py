"""What was asked and answered is erased a set time after the end; what was counted and paid is not."""

from __future__ import annotations

import pytest
from sqlalchemy import select, text

from marketplace.billing.checks import invariants
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.jobs.hot import Close
from marketplace.jobs.models import Attempt, Job
from marketplace.jobs.schemas import job_object
from marketplace.jobs.service import get
from marketplace.jobs.tasks import SWEEP_BATCH, assign_until_done, erase_old
from marketplace.metering.models import Receipt
from tests.queue_world import QueueWorld

DAY_S = 86_400.0


@pytest.fixture
def world(settings: Settings, session_factory: SessionFactory) -> QueueWorld:
    return QueueWorld.make(settings, session_factory)


def answer(world: QueueWorld, attempt: Attempt) -> None:
    world.write(
        Close(
            job_id=attempt.job_id,
            attempt_id=attempt.id,
            epoch=1,
            job_state="delivered",
            outcome="complete",
            end_code="delivered",
            fault=None,
            accepted_tokens=50,
            busy_ms=5,
            first_token=True,
            result='{"object":"chat.completion"}',
            receipt=world.market.receipt(50),
        )
    )


def age(world: QueueWorld, days: float) -> None:
    """Let every job have ended so long ago."""
    with transaction(world.factory) as session:
        session.execute(
            text("update jobs set ended_at = now() - make_interval(secs => :s) where ended_at is not null"),
            {"s": days * DAY_S},
        )


class TestErasure:
    def test_takes_the_texts_of_old_jobs_and_leaves_what_was_paid(self, world: QueueWorld) -> None:
        world.connect()
        old = world.admit()
        assert assign_until_done(world.factory, world.client, world.matcher()) == 1
        answer(world, world.attempts(old.job_id)[0])
        age(world, 8)
        waiting = world.admit()
        assert erase_old(world.factory, 9 * DAY_S) == 0
        shown = job_object(get(world.factory, old.organisation_id, old.job_id), "m")
        assert (shown.erased, shown.result) == (False, {"object": "chat.completion"})
        assert erase_old(world.factory, 7 * DAY_S) == 1
        with world.factory() as session:
            jobs = {job.id: job for job in session.scalars(select(Job))}
            (receipt,) = session.scalars(select(Receipt))
            assert invariants(session) == []
        assert (jobs[old.job_id].body, jobs[old.job_id].result) == (None, None)
        assert jobs[waiting.job_id].body is not None
        assert (jobs[old.job_id].prompt_tokens, receipt.output_visible_tokens) == (old.prompt_tokens, 50)
        gone = job_object(get(world.factory, old.organisation_id, old.job_id), "m")
        assert (gone.erased, gone.result, gone.cost) == (True, None, shown.cost)
        assert erase_old(world.factory, 7 * DAY_S) == 0

    def test_goes_on_in_batches_until_nothing_is_due(self, world: QueueWorld) -> None:
        many = SWEEP_BATCH + 5
        jobs = [world.admit() for _ in range(3)]
        with transaction(world.factory) as session:
            session.execute(
                text(
                    """
                    insert into jobs (id, organisation_id, key_id, request_id, kind, state, variant_id, body,
                                      prompt_tokens, max_output_tokens, max_input_nano_usd_per_mtok,
                                      max_cached_input_nano_usd_per_mtok, max_output_nano_usd_per_mtok, hold_nano,
                                      deadline_at, ended_at)
                    select gen_random_uuid(), organisation_id, key_id, 'copy-' || n, kind, 'voided', variant_id, body,
                           1, 1, 0, 0, 0, 0, now(), now() - interval '30 days'
                    from jobs, generate_series(1, :many) n where id = :job
                    """
                ),
                {"many": many, "job": jobs[0].job_id},
            )
        assert erase_old(world.factory, DAY_S) == many
        with world.factory() as session:
            left = session.scalars(select(Job.id).where(Job.body.is_not(None))).all()
        assert set(left) == {job.job_id for job in jobs}
