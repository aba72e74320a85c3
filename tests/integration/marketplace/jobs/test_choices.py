"""Queued jobs run only where their renters let them: SQL and matcher agree on where, and nobody starves."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.jobs import repository
from marketplace.jobs.hot import Close
from marketplace.jobs.tasks import assign_until_done, sweep
from marketplace.matching.choice import Choice
from marketplace.matching.types import DataTerms, Rates, Sort
from tests.market import RATES
from tests.queue_world import QueueWorld

SEED = 20_261_130
PRIVATE = DataTerms(country="DE", retention_days=0, trains=False)


@pytest.fixture
def world(settings: Settings, session_factory: SessionFactory) -> QueueWorld:
    return QueueWorld.make(settings, session_factory)


def assign(world: QueueWorld) -> int:
    return assign_until_done(world.factory, world.client, world.matcher())


def admit(world: QueueWorld, choice: Choice, **changes: Any) -> UUID:
    return world.admit(choice=choice.to_row(), **changes).job_id


def state(world: QueueWorld, job_id: UUID) -> str:
    return world.job(job_id).state


def failed(world: QueueWorld, job_id: UUID, fault: str | None) -> None:
    """The running attempt ends, and the job waits again."""
    attempt = world.attempts(job_id)[-1]
    world.write(
        Close(
            job_id=job_id,
            attempt_id=attempt.id,
            epoch=attempt.epoch,
            job_state="queued",
            outcome=None,
            end_code="ended",
            fault=fault,
            accepted_tokens=0,
            busy_ms=None,
            first_token=False,
        )
    )
    world.pass_time(6.0)
    world.publish()


def stuck_for_long(world: QueueWorld, job_id: UUID) -> None:
    world.client.set(f"fallow:stuck:{job_id.hex}", 0)
    world.publish()


def a_choice(rng: Random, names: list[UUID]) -> Choice:
    def some(most: int) -> list[UUID]:
        return rng.sample(names, rng.randint(1, most)) if rng.random() < 0.35 else []

    return Choice(
        only=frozenset(some(4)),
        ignored=frozenset(some(2)),
        order=tuple(some(3)),
        fallbacks=rng.random() < 0.6,
        sort=rng.choice(list(Sort)),
        regions=frozenset(rng.sample(["eu", "DE", "us"], rng.randint(1, 2)) if rng.random() < 0.35 else ()),
        proven_only=rng.random() < 0.25,
        private_only=rng.random() < 0.25,
    )


class TestTheSql:
    def test_lets_a_job_run_exactly_where_its_choice_allows(self, world: QueueWorld) -> None:
        rng = Random(SEED)
        nodes = [world.market.node, *(world.another_node() for _ in range(4))]
        names = [name for node in nodes for name in (node.node_id, node.owner_organisation_id)]
        offers = [
            world.connect(
                node,
                region=rng.choice(["eu", "us", ""]),
                data=replace(rng.choice([PRIVATE, DataTerms()]), country=rng.choice(["DE", "FR", ""])),
                probation=rng.random() < 0.4,
            )
            for node in nodes
        ]
        choices = {}
        for _ in range(60):
            choice = a_choice(rng, names)
            choices[admit(world, choice, hold_nano=200_000, max_output_tokens=1)] = choice
        world.pass_time(60.0)
        variant_id = world.market.variant_id
        found = 0
        with world.factory() as session:
            for offer in offers:
                runnable = {job.job_id for job in repository.next_in_line(session, variant_id, [offer], limit=100)}
                assert runnable == {job_id for job_id, choice in choices.items() if choice.allows(offer)}, SEED
                found += len(runnable)
            stuck = repository.misfits(
                session, variant_id, [replace(offers[0], context_per_slot=1)], older_than_s=10, limit=100
            )
            assert {job.job_id for job in stuck} == {
                job_id for job_id, choice in choices.items() if choice.allows(offers[0])
            }
            assert all(job.choice == choices[job.job_id] for job in stuck)
        assert 0 < found < len(choices) * len(offers)


class TestWhereAJobRuns:
    @pytest.mark.parametrize(
        "how", ["only node", "only owner", "ignore", "order", "regions", "country", "deny", "proven"]
    )
    def test_is_within_its_choice(self, world: QueueWorld, how: str) -> None:
        chosen = world.another_node()
        cheap = Rates(1, 1, 1)
        world.connect(rates=cheap, probation=True)
        world.connect(chosen, region="eu", data=PRIVATE)
        choice = {
            "only node": Choice(only=frozenset({chosen.node_id})),
            "only owner": Choice(only=frozenset({chosen.owner_organisation_id})),
            "ignore": Choice(ignored=frozenset({world.market.node.node_id})),
            "order": Choice(order=(chosen.node_id,)),
            "regions": Choice(regions=frozenset({"eu"})),
            "country": Choice(regions=frozenset({"DE"})),
            "deny": Choice(private_only=True),
            "proven": Choice(proven_only=True),
        }[how]
        jobs = [admit(world, choice) for _ in range(3)]
        assert assign(world) == 3
        assert {world.attempts(job)[0].node_id for job in jobs} == {chosen.node_id}

    def test_is_where_it_costs_least_or_goes_fastest_if_it_says_so(self, world: QueueWorld) -> None:
        fast = world.another_node()
        world.connect(rates=replace(RATES, output=RATES.output // 2))
        world.connect(fast, decode_tokens_per_s=500.0)
        quick, cheap = admit(world, Choice(by_speed=True)), admit(world, Choice(sort=Sort.PRICE))
        assert assign(world) == 2
        assert world.attempts(quick)[0].node_id == fast.node_id
        assert world.attempts(cheap)[0].node_id == world.market.node.node_id

    def test_is_the_next_of_its_order_where_the_first_is_full(self, world: QueueWorld) -> None:
        second = world.another_node()
        world.connect(slots=1)
        world.connect(second)
        jobs = [admit(world, Choice(order=(world.market.node.node_id, second.node_id))) for _ in range(2)]
        assert assign(world) == 2
        assert [world.attempts(job)[0].node_id for job in jobs] == [world.market.node.node_id, second.node_id]


class TestThoseWhoWait:
    def test_hold_up_nobody_who_may_run(self, world: QueueWorld) -> None:
        elsewhere = Choice(regions=frozenset({"eu"}))
        waiting = [admit(world, elsewhere) for _ in range(40)]
        free = admit(world, Choice())
        world.connect(slots=1)
        assert assign(world) == 1
        assert state(world, free) == "running"
        assert {state(world, job) for job in waiting} == {"queued"}

    def test_keep_no_room_where_they_may_not_run(self, world: QueueWorld) -> None:
        other = world.another_node()
        taken = world.connect(slots=1)
        world.connect(other, slots=1)
        assert world.matcher().slots.reserve(taken, UUID(int=1), 60.0)
        bound = admit(world, Choice(only=frozenset({world.market.node.node_id})))
        matcher = world.matcher()
        for _ in range(3):
            job = admit(world, Choice())
            assert assign_until_done(world.factory, world.client, matcher) == 1
            assert world.attempts(job)[0].node_id == other.node_id
            world.client.delete(f"fallow:slots:{other.offer_id.hex}")
        assert state(world, bound) == "queued"

    def test_hope_while_nobody_whom_they_chose_is_connected(self, world: QueueWorld) -> None:
        world.connect(region="us")
        job = admit(world, Choice(regions=frozenset({"eu"})), deadline_s=3_600.0)
        world.pass_time(60.0)
        stuck_for_long(world, job)
        sweep(world.factory, world.client, world.settings)
        assert state(world, job) == "queued"
        world.connect(world.another_node(), region="eu")
        assert assign(world) == 1

    def test_end_where_those_whom_they_chose_could_never_run_them(self, world: QueueWorld) -> None:
        world.connect(region="us")
        world.connect(world.another_node(), region="eu", rates=replace(RATES, output=RATES.output * 2))
        job = admit(world, Choice(regions=frozenset({"eu"})), deadline_s=3_600.0)
        world.pass_time(60.0)
        stuck_for_long(world, job)
        sweep(world.factory, world.client, world.settings)
        ended = world.job(job)
        assert (ended.state, ended.outcome) == ("voided", "no_capacity")
        assert ended.error_message is not None
        assert "1 node: outside the regions asked for" in ended.error_message
        assert "1 node: price above the maximum" in ended.error_message


class TestWithoutFallbacks:
    def test_the_first_pick_alone_runs_it_however_often_it_gives_way(self, world: QueueWorld) -> None:
        first = world.connect(slots=1)
        job = admit(world, Choice(fallbacks=False))
        assert assign(world) == 1
        failed(world, job, "owner")
        world.connect(world.another_node(), rates=Rates(1, 1, 1))
        # The slot is not free yet; the other node is, and cheaper.
        assert assign(world) == 0
        world.client.delete(f"fallow:slots:{first.offer_id.hex}")
        assert assign(world) == 1
        assert [attempt.node_id for attempt in world.attempts(job)] == [first.node_id] * 2

    def test_nobody_but_those_of_its_order_runs_it(self, world: QueueWorld) -> None:
        world.connect()
        named = world.another_node()
        job = admit(world, Choice(order=(named.owner_organisation_id,), fallbacks=False))
        assert assign(world) == 0
        world.connect(named)
        assert assign(world) == 1
        failed(world, job, "node")
        assign(world)
        stuck_for_long(world, job)
        assign(world)
        ended = world.job(job)
        assert (ended.outcome, len(world.attempts(job))) == ("node_failed", 1)
        assert "not among the providers asked for" in (ended.error_message or "")


def test_an_older_job_without_a_choice_runs_anywhere(world: QueueWorld) -> None:
    world.connect()
    job = world.admit().job_id
    with transaction(world.factory) as session:
        assert session.scalar(text("select choice is null from jobs")) is True
    assert assign(world) == 1
    assert state(world, job) == "running"
