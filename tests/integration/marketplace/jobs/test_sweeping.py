"""Whatever is left behind ends: leases, deadlines, jobs that nobody wants or that fit nowhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import select, text

from marketplace.billing.checks import invariants
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.core.valkey import connect
from marketplace.jobs import repository
from marketplace.jobs.hot import Admit, Checkpoint, Close
from marketplace.jobs.sweeping import lost_leases
from marketplace.jobs.tasks import assign_until_done, close_all, sweep
from marketplace.metering.models import Receipt
from marketplace.metering.pricing import price
from marketplace.metering.tokens import TokenCounts
from tests.market import MAX_OUTPUT_TOKENS, PROMPT_TOKENS, RATES
from tests.queue_world import QueueWorld


@pytest.fixture
def world(settings: Settings, session_factory: SessionFactory) -> QueueWorld:
    return QueueWorld.make(settings, session_factory)


def run_sweep(world: QueueWorld) -> int:
    return sweep(world.factory, world.client, world.settings)


def start_interactive(world: QueueWorld, *, accepted: int = 0) -> Admit:
    job = world.market.admit()
    world.write(job)
    if accepted:
        assert job.attempt is not None
        world.write(Checkpoint(job.attempt.attempt_id, 1, accepted, 15.0))
    return job


def start_queued(world: QueueWorld, *, accepted: int = 0, **changes: object) -> Admit:
    world.connect()
    job = world.admit(**changes)
    assert assign_until_done(world.factory, world.client, world.matcher()) == 1
    if accepted:
        world.write(Checkpoint(world.attempts(job.job_id)[0].id, 1, accepted, 15.0))
    return job


def receipts(world: QueueWorld) -> list[Receipt]:
    with world.factory() as session:
        return list(session.scalars(select(Receipt)))


class TestLostLeases:
    def test_a_living_lease_is_left_alone(self, world: QueueWorld) -> None:
        job = start_interactive(world, accepted=5)
        assert run_sweep(world) == 0
        assert world.job(job.job_id).state == "running"

    def test_an_interactive_job_whose_gateway_died_is_paid_from_our_loss_account(self, world: QueueWorld) -> None:
        job = start_interactive(world, accepted=30)
        world.pass_time(20.0)
        assert run_sweep(world) == 1
        (receipt,) = receipts(world)
        counts = TokenCounts.of(prompt=PROMPT_TOKENS, cached=0, output=30)
        expected = price(counts, RATES, world.settings.fee_basis_points)
        assert (receipt.charge_nano, receipt.loss_nano) == (0, expected.gross_nano)
        assert (receipt.owner_nano, receipt.fee_nano) == (expected.owner_nano, expected.fee_nano)
        assert receipt.output_visible_tokens == 30
        ended = world.job(job.job_id)
        assert (ended.state, ended.outcome) == ("delivered", "platform_failed")
        assert world.outcomes(job.job_id) == ["platform_failed"]
        assert world.held_nano() == 0
        (attempt,) = world.attempts(job.job_id)
        assert (attempt.state, attempt.end_code, attempt.fault) == ("ended", "lease_expired", "platform")

    def test_with_nothing_accepted_nobody_pays(self, world: QueueWorld) -> None:
        job = start_interactive(world)
        world.pass_time(20.0)
        run_sweep(world)
        assert receipts(world) == []
        assert (world.job(job.job_id).state, world.held_nano()) == ("voided", 0)

    def test_a_queued_job_waits_again_and_keeps_its_hold(self, world: QueueWorld) -> None:
        job = start_queued(world, accepted=7)
        held = world.held_nano()
        world.pass_time(20.0)
        run_sweep(world)
        assert world.job(job.job_id).state == "queued"
        assert world.held_nano() == held > 0
        world.client.delete(*world.client.keys("fallow:slots:*"))  # type: ignore[misc]
        assert assign_until_done(world.factory, world.client, world.matcher()) == 1
        assert [attempt.epoch for attempt in world.attempts(job.job_id)] == [1, 2]

    def test_a_queued_job_ends_with_its_third_lost_lease(self, world: QueueWorld) -> None:
        job = start_queued(world)
        for _ in range(2):
            world.pass_time(20.0)
            run_sweep(world)
            world.client.delete(*world.client.keys("fallow:slots:*"))  # type: ignore[misc]
            assign_until_done(world.factory, world.client, world.matcher())
        world.write(Checkpoint(world.attempts(job.job_id)[-1].id, 3, 4, 15.0))
        world.pass_time(20.0)
        run_sweep(world)
        ended = world.job(job.job_id)
        assert (ended.state, ended.outcome) == ("delivered", "platform_failed")
        assert [receipt.charge_nano for receipt in receipts(world)] == [0]

    def test_a_cancelled_job_whose_gateway_died_is_not_tried_again(self, world: QueueWorld) -> None:
        job = start_queued(world)
        with world.factory() as session, session.begin():
            assert repository.request_cancel(session, job.job_id)
        world.pass_time(20.0)
        run_sweep(world)
        assert world.job(job.job_id).outcome == "cancelled_early"

    def test_two_sweepers_pay_once(self, world: QueueWorld) -> None:
        start_interactive(world, accepted=30)
        world.pass_time(20.0)
        with world.factory() as session:
            first = lost_leases(session, fee_basis_points=2_000, limit=10)
            second = lost_leases(session, fee_basis_points=2_000, limit=10)
        assert (close_all(world.factory, first), close_all(world.factory, second)) == (1, 0)
        assert len(receipts(world)) == 1

    def test_the_late_gateway_finds_its_epoch_void(self, world: QueueWorld) -> None:
        job = start_interactive(world, accepted=30)
        world.pass_time(20.0)
        run_sweep(world)
        (answer,) = world.write(world.market.delivered(job))
        assert not answer.ok
        assert receipts(world)[0].charge_nano == 0

    def test_more_than_a_batch_is_swept_at_once(self, world: QueueWorld) -> None:
        jobs = [world.market.admit(hold_nano=10**8 // 1_000) for _ in range(450)]
        world.write(*jobs)
        world.pass_time(20.0)
        assert run_sweep(world) == 450


class TestDeadlines:
    def test_a_queued_job_past_its_deadline_is_void(self, world: QueueWorld) -> None:
        job = world.admit(deadline_s=60.0)
        world.pass_time(61.0)
        run_sweep(world)
        ended = world.job(job.job_id)
        assert (ended.state, ended.outcome, world.held_nano()) == ("voided", "expired", 0)
        assert ended.ended_at is not None

    def test_a_lost_lease_past_the_deadline_ends_the_job(self, world: QueueWorld) -> None:
        job = start_queued(world, deadline_s=30.0)
        world.pass_time(31.0)
        run_sweep(world)
        assert world.job(job.job_id).outcome == "expired"

    def test_a_running_job_without_an_attempt_ends_after_its_deadline(self, world: QueueWorld) -> None:
        job = start_interactive(world)
        world.write(world.market.voided(job, job_state="running", outcome=None))
        world.pass_time(600.0)
        run_sweep(world)
        assert world.job(job.job_id).state == "running"
        world.pass_time(world.settings.lease_s + 1)
        run_sweep(world)
        assert (world.job(job.job_id).outcome, world.held_nano()) == ("platform_failed", 0)

    def test_deadlines_pass_while_valkey_is_away(self, world: QueueWorld) -> None:
        job = world.admit(deadline_s=60.0)
        world.pass_time(61.0)
        sweep(world.factory, connect("unix:///nonexistent/valkey.sock"), world.settings)
        assert world.job(job.job_id).state == "voided"


class TestJobsThatFitNowhere:
    def stay_stuck(self, world: QueueWorld, job: Admit) -> None:
        """Two looks, SETTLE_IN_S apart by Valkey's clock."""
        world.pass_time(11.0)
        run_sweep(world)
        assert world.job(job.job_id).state == "queued"
        world.client.set(f"fallow:stuck:{job.job_id.hex}", 0)
        run_sweep(world)

    def test_a_maximum_below_every_offer_fails_soon_and_says_so(self, world: QueueWorld) -> None:
        world.connect()
        job = world.admit(ceiling=replace(RATES, output=1))
        self.stay_stuck(world, job)
        ended = world.job(job.job_id)
        assert (ended.state, ended.outcome, ended.error_code) == ("voided", "no_capacity", "no_capacity")
        assert ended.error_message == ("No node can run this job: 1 node: price above the maximum. Nothing is charged.")

    def test_a_context_over_every_slot_fails_soon(self, world: QueueWorld) -> None:
        world.connect(context_per_slot=PROMPT_TOKENS + MAX_OUTPUT_TOKENS - 1)
        job = world.admit()
        self.stay_stuck(world, job)
        assert "context per slot too small" in (world.job(job.job_id).error_message or "")

    def test_a_busy_node_is_worth_waiting_for(self, world: QueueWorld) -> None:
        world.connect(slots_busy=4)
        job = world.admit()
        self.stay_stuck(world, job)
        assert world.job(job.job_id).state == "queued"

    def test_with_no_node_at_all_a_job_waits_for_its_deadline(self, world: QueueWorld) -> None:
        job = world.admit()
        self.stay_stuck(world, job)
        assert world.job(job.job_id).state == "queued"

    def test_a_new_job_is_given_time(self, world: QueueWorld) -> None:
        world.connect()
        job = world.admit(ceiling=replace(RATES, output=1))
        world.client.set(f"fallow:stuck:{job.job_id.hex}", 0)
        run_sweep(world)
        assert world.job(job.job_id).state == "queued"

    def test_a_job_marked_as_cancelled_in_the_queue_is_void(self, world: QueueWorld) -> None:
        job = start_queued(world)
        with world.factory() as session, session.begin():
            repository.request_cancel(session, job.job_id)
        (attempt,) = world.attempts(job.job_id)
        world.write(Close(job.job_id, attempt.id, 1, "queued", None, "engine_died", "node", 0, None, False))
        assert world.job(job.job_id).state == "queued"
        run_sweep(world)
        assert world.job(job.job_id).outcome == "cancelled_early"


class TestHolds:
    def test_a_hold_that_everybody_forgot_comes_free_in_the_end(self, world: QueueWorld) -> None:
        world.admit()
        with world.factory() as session, session.begin():
            session.execute(text("update ledger_holds set expires_at = now() - interval '1 second'"))
        run_sweep(world)
        assert world.held_nano() == 0

    def test_a_charge_that_waits_for_settlement_stays_held(self, world: QueueWorld) -> None:
        job = start_interactive(world)
        world.write(world.market.delivered(job))
        charge = receipts(world)[0].charge_nano
        world.pass_time(10**6)
        run_sweep(world)
        assert world.held_nano() == charge > 0


class TestADefect:
    def test_one_bad_close_does_not_keep_the_others_open(self, world: QueueWorld) -> None:
        jobs = [start_interactive(world) for _ in range(3)]
        closes = [world.market.voided(job) for job in jobs]
        closes[1] = replace(closes[1], fault="x" * 10, outcome="platform_failed", accepted_tokens=-(2**62))
        with world.factory() as session, session.begin():
            session.execute(text("alter table attempts add constraint sane check (accepted_tokens >= 0)"))
            session.execute(text("alter table attempts add constraint known check (fault <> 'xxxxxxxxxx')"))
        assert close_all(world.factory, closes) == 2
        assert [world.job(job.job_id).state for job in jobs] == ["voided", "running", "voided"]


def test_the_books_agree_after_every_kind_of_sweep(world: QueueWorld) -> None:
    start_interactive(world, accepted=30)
    start_interactive(world)
    start_queued(world)
    world.admit(deadline_s=5.0)
    world.pass_time(20.0)
    run_sweep(world)
    with world.factory() as session:
        assert invariants(session, since=utcnow().replace(year=2000)) == []
