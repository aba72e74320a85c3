"""Queued jobs find idle capacity: in turn, within their price, never twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from marketplace.core.database import SessionFactory
from marketplace.core.ids import new_id
from marketplace.core.settings import Settings
from marketplace.core.valkey import connect
from marketplace.jobs import repository
from marketplace.jobs.hot import Close
from marketplace.jobs.tasks import assign_once, assign_until_done, sweep
from marketplace.matching.types import Rates
from tests.market import RATES
from tests.queue_world import GATEWAY, QueueWorld


@pytest.fixture
def world(settings: Settings, session_factory: SessionFactory) -> QueueWorld:
    return QueueWorld.make(settings, session_factory)


def assign(world: QueueWorld) -> int:
    return assign_until_done(world.factory, world.client, world.matcher())


def failed(job_id: object, attempt_id: object, epoch: int, fault: str | None = "node") -> Close:
    return Close(
        job_id=job_id,  # type: ignore[arg-type]
        attempt_id=attempt_id,  # type: ignore[arg-type]
        epoch=epoch,
        job_state="queued",
        outcome=None,
        end_code="engine_died",
        fault=fault,
        accepted_tokens=0,
        busy_ms=None,
        first_token=False,
    )


class TestPlacing:
    def test_a_queued_job_is_leased_and_its_gateway_hears_of_it(self, world: QueueWorld) -> None:
        world.connect()
        job = world.admit()
        assert assign(world) == 1
        (attempt,) = world.attempts(job.job_id)
        assert world.job(job.job_id).state == "running"
        assert (attempt.state, attempt.epoch, attempt.gateway_id) == ("leased", 1, GATEWAY)
        assert world.dispatched() == [attempt.id]

    def test_the_dispatch_holds_what_a_gateway_needs(self, world: QueueWorld) -> None:
        offer = world.connect()
        job = world.admit()
        assign(world)
        with world.factory() as session:
            found = repository.load_dispatch(session, world.dispatched()[0])
        assert found is not None
        assert (found.job_id, found.offer_id, found.rates) == (job.job_id, offer.offer_id, RATES)
        assert found.body == {"messages": [{"role": "user", "content": "hi"}]}
        assert 10 < found.lease_left_s <= world.settings.lease_s
        assert 590 < found.deadline_left_s <= 600
        assert not found.cancel_requested

    def test_nothing_is_dispatched_from_a_lease_that_ran_out(self, world: QueueWorld) -> None:
        world.connect()
        world.admit()
        assign(world)
        world.pass_time(world.settings.lease_s + 1)
        with world.factory() as session:
            assert repository.load_dispatch(session, world.dispatched()[0]) is None

    def test_only_idle_capacity_is_used(self, world: QueueWorld) -> None:
        offer = world.connect(slots=2)
        assert world.matcher().slots.reserve(offer, new_id(), 60.0)
        for _ in range(3):
            world.admit()
        assert assign(world) == 1

    def test_no_slot_is_given_twice_over_rounds(self, world: QueueWorld) -> None:
        world.connect(slots=3)
        for _ in range(5):
            world.admit()
        assert assign(world) == 3
        assert assign(world) == 0

    @pytest.mark.parametrize("changes", [{"available": False}, {"sampled_age_s": 3_600.0}])
    def test_an_owner_at_work_or_a_silent_node_gets_nothing(
        self, world: QueueWorld, changes: dict[str, object]
    ) -> None:
        world.connect(**changes)
        world.admit()
        assert assign(world) == 0

    def test_without_valkey_the_queue_waits(self, world: QueueWorld) -> None:
        world.connect()
        job = world.admit()
        nowhere = connect("unix:///nonexistent/valkey.sock")
        assert assign_until_done(world.factory, nowhere, world.matcher()) == 0
        assert world.job(job.job_id).state == "queued"

    def test_a_dispatch_that_valkey_lost_costs_time_and_no_job(self, world: QueueWorld) -> None:
        world.connect()
        job = world.admit()
        assign(world)
        world.client.flushall()
        assert world.dispatched() == []
        world.pass_time(world.settings.lease_s + 1)
        world.publish()
        sweep(world.factory, world.client, world.settings)
        assert assign(world) == 1
        assert world.dispatched() == [world.attempts(job.job_id)[1].id]

    def test_the_reservation_of_a_refused_lease_is_given_back(self, world: QueueWorld) -> None:
        offer = world.connect(slots=1)
        job = world.admit()
        matcher = world.matcher()

        class Dearer:
            """An offer whose price rose above the job's maximum between reading the fleet and leasing."""

            def reserve_first(self, *args: object) -> object:
                taken = matcher.slots.reserve_first(*args)  # type: ignore[arg-type]
                assert taken is not None
                return replace(taken, rates=replace(RATES, output=RATES.output * 2))

            release = matcher.slots.release

        done = assign_once(world.factory, world.client, replace(matcher, slots=Dearer()))
        assert (len(done.placed), len(done.refused)) == (0, 1)
        assert world.client.zcard(f"fallow:slots:{offer.offer_id.hex}") == 0
        assert world.job(job.job_id).state == "queued"


class TestTurns:
    def test_a_renters_first_job_goes_before_anothers_second(self, world: QueueWorld) -> None:
        many = [world.admit() for _ in range(4)]
        late = world.admit(renter=world.another_renter())
        world.connect(slots=2)
        assign(world)
        running = {job.job_id for job in (*many, late) if world.job(job.job_id).state == "running"}
        assert running == {many[0].job_id, late.job_id}

    def test_running_jobs_count_for_the_turn(self, world: QueueWorld) -> None:
        world.connect(slots=2)
        greedy = [world.admit() for _ in range(4)]
        assign(world)
        other = world.admit(renter=world.another_renter())
        world.offers.clear()
        world.connect(world.another_node(), slots=1)
        assign(world)
        assert world.job(other.job_id).state == "running"
        assert sum(world.job(job.job_id).state == "running" for job in greedy) == 2

    def test_of_one_renter_the_sooner_deadline_goes_first(self, world: QueueWorld) -> None:
        world.admit(deadline_s=500.0)
        urgent = world.admit(deadline_s=60.0)
        world.connect(slots=1)
        assign(world)
        assert world.job(urgent.job_id).state == "running"

    def test_a_patient_job_is_not_starved_by_urgent_ones(self, world: QueueWorld) -> None:
        patient = world.admit(deadline_s=80_000.0)
        world.pass_time(700.0)
        world.admit(deadline_s=60.0)
        world.connect(slots=1)
        assign(world)
        assert world.job(patient.job_id).state == "running"

    def test_a_job_that_does_not_fit_holds_up_nobody(self, world: QueueWorld) -> None:
        low = replace(RATES, output=1)
        for _ in range(30):
            world.admit(ceiling=low)
        fits = world.admit()
        world.connect(slots=1)
        assign(world)
        assert world.job(fits.job_id).state == "running"

    def test_a_slot_too_small_is_left_to_a_smaller_job(self, world: QueueWorld) -> None:
        big = world.admit(prompt_tokens=1_000, hold_nano=10**9 // 2)
        small = world.admit()
        world.connect(slots=1, context_per_slot=512)
        assign(world)
        assert world.job(big.job_id).state == "queued"
        assert world.job(small.job_id).state == "running"


class TestRetries:
    def test_a_node_that_failed_the_job_never_sees_it_again(self, world: QueueWorld) -> None:
        world.connect(slots=4)
        job = world.admit()
        assign(world)
        (first,) = world.attempts(job.job_id)
        world.write(failed(job.job_id, first.id, 1))
        assert assign(world) == 0
        second_node = world.another_node()
        world.connect(second_node)
        assert assign(world) == 1
        assert world.attempts(job.job_id)[1].node_id == second_node.node_id

    def test_a_job_that_every_node_failed_ends_and_says_so(self, world: QueueWorld) -> None:
        world.connect()
        job = world.admit()
        assign(world)
        (first,) = world.attempts(job.job_id)
        world.write(failed(job.job_id, first.id, 1))
        assign(world)
        assert world.job(job.job_id).state == "queued"
        world.client.set(f"fallow:stuck:{job.job_id.hex}", 0)
        assign(world)
        ended = world.job(job.job_id)
        assert (ended.state, ended.outcome) == ("voided", "node_failed")
        assert ended.error_message is not None
        assert "already failed this job" in ended.error_message
        assert world.held_nano() == 0

    def test_the_third_failure_is_the_last(self, world: QueueWorld) -> None:
        job = world.admit()
        for epoch in (1, 2, 3):
            world.offers.clear()
            world.connect(world.another_node())
            assert assign(world) == 1
            world.write(failed(job.job_id, world.attempts(job.job_id)[-1].id, epoch))
        world.connect(world.another_node())
        assert assign(world) == 0
        ended = world.job(job.job_id)
        assert (ended.state, ended.outcome) == ("voided", "node_failed")
        assert world.outcomes(job.job_id) == ["node_failed"]

    def test_pre_emptions_are_no_attempts_up_to_ten(self, world: QueueWorld) -> None:
        world.connect()
        job = world.admit()
        for epoch in range(1, 11):
            world.client.delete(*world.client.keys("fallow:slots:*") or ["none"])  # type: ignore[misc]
            assert assign(world) == 1
            world.write(failed(job.job_id, world.attempts(job.job_id)[-1].id, epoch, fault="owner"))
            world.pass_time(6.0)
        assert assign(world) == 0
        assert world.job(job.job_id).outcome == "owner_preempted"

    @pytest.mark.parametrize("fault", ["owner", None])
    def test_a_node_that_turned_the_job_away_is_left_alone_for_a_moment(
        self, world: QueueWorld, fault: str | None
    ) -> None:
        world.connect()
        job = world.admit()
        assign(world)
        world.write(failed(job.job_id, world.attempts(job.job_id)[0].id, 1, fault=fault))
        assert assign(world) == 0
        assert world.job(job.job_id).state == "queued"
        world.pass_time(6.0)
        assert assign(world) == 1

    def test_retries_are_bounded_by_the_models_budget(self, world: QueueWorld) -> None:
        nodes = [world.another_node() for _ in range(2)]
        world.connect(nodes[0], slots=20)
        jobs = [world.admit() for _ in range(10)]
        matcher = replace(world.matcher(), now_s=lambda: 100.0)
        assert assign_until_done(world.factory, world.client, matcher) == 10
        for job in jobs:
            world.write(failed(job.job_id, world.attempts(job.job_id)[0].id, 1))
        world.connect(nodes[1], slots=20)
        # One for ten requests, and three for the second.
        assert assign_until_done(world.factory, world.client, matcher) == 4


class TestPrices:
    def test_no_offer_above_the_maximum_is_taken(self, world: QueueWorld) -> None:
        world.connect(rates=Rates(RATES.input, RATES.cached_input, RATES.output + 1))
        world.admit()
        assert assign(world) == 0

    def test_the_cheaper_of_two_idle_offers_is_taken(self, world: QueueWorld) -> None:
        cheap_node = world.another_node()
        world.connect()
        cheap = Rates(RATES.input // 2, RATES.cached_input // 2, RATES.output // 2)
        world.connect(cheap_node, rates=cheap)
        job = world.admit()
        assign(world)
        (attempt,) = world.attempts(job.job_id)
        assert attempt.offer_id == cheap_node.offer_id
        assert attempt.output_nano_usd_per_mtok == cheap.output
