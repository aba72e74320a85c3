"""Jobs in random order, on the real database: admitted, assigned, checkpointed, failed, cancelled, swept, settled, by
gateways that die and come late. After each step the published rules hold; once faults stop, every job ends."""

from __future__ import annotations

import itertools
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import select

from marketplace.billing import checks
from marketplace.billing import service as billing
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.jobs import endings, repository
from marketplace.jobs.hot import Checkpoint, Close, Lease
from marketplace.jobs.models import Attempt, Job
from marketplace.jobs.states import FINAL, TRANSITIONS, JobState
from marketplace.jobs.sweeping import close_waiting
from marketplace.jobs.tasks import assign_until_done, sweep
from marketplace.metering.models import Receipt
from tests.market import MAX_OUTPUT_TOKENS, OneNode
from tests.queue_world import QueueWorld

REACHABLE = {state: {state} | {later for earlier, later in TRANSITIONS if earlier is state} for state in JobState}
PICK = st.integers(min_value=0, max_value=63)


def reachable(start: JobState, steps: int) -> set[JobState]:
    found = {start}
    for _ in range(steps):
        found |= set(itertools.chain.from_iterable(REACHABLE[state] for state in found))
    return found


class Jobs(RuleBasedStateMachine):
    """The model remembers states and epochs; the database is the thing under test."""

    def __init__(self, world: QueueWorld) -> None:
        super().__init__()
        self.world = world
        self.jobs: list[UUID] = []
        self.states: dict[UUID, JobState] = {}
        self.nodes: list[OneNode] = [world.market.node, world.another_node(), world.another_node()]
        self.stale: list[Close] = []
        world.offers.clear()
        for node in self.nodes:
            world.connect(node, slots=2)

    # --- steps ----------------------------------------------------------------------------------------------------

    @rule(deadline_s=st.sampled_from([5.0, 60.0, 600.0]))
    def accept_a_queued_job(self, deadline_s: float) -> None:
        record = self.world.market.admit(queued=True, deadline_s=deadline_s)
        self.world.write(record)
        self.jobs.append(record.job_id)

    @rule()
    def admit_an_interactive_job(self) -> None:
        record = self.world.market.admit()
        self.world.write(record)
        self.jobs.append(record.job_id)

    @rule(seed=st.integers(0, 3))
    def assign(self, seed: int) -> None:
        self.world.publish()
        assign_until_done(self.world.factory, self.world.client, self.world.matcher(seed))

    @precondition(lambda self: self.leased())
    @rule(pick=PICK, tokens=st.integers(0, MAX_OUTPUT_TOKENS), epoch_off=st.sampled_from([0, 0, 0, 1, -1]))
    def checkpoint(self, pick: int, tokens: int, epoch_off: int) -> None:
        attempt = self.one_leased(pick)
        (answer,) = self.world.write(Checkpoint(attempt.id, attempt.epoch + epoch_off, tokens, 15.0))
        assert answer.alive is (epoch_off == 0)

    @precondition(lambda self: self.leased())
    @rule(pick=PICK, tokens=st.integers(1, MAX_OUTPUT_TOKENS))
    def deliver(self, pick: int, tokens: int) -> None:
        attempt = self.one_leased(pick)
        node = next(node for node in self.nodes if node.node_id == attempt.node_id)
        receipt = self.world.market.receipt(max(tokens, attempt.accepted_tokens), node=node)
        self.close(
            attempt,
            job_state="delivered",
            outcome="complete",
            end_code="delivered",
            accepted_tokens=max(tokens, attempt.accepted_tokens),
            receipt=receipt,
            first_token=True,
        )

    @precondition(lambda self: self.leased())
    @rule(pick=PICK, fault=st.sampled_from(["node", "owner", "platform", None]))
    def fail_an_attempt(self, pick: int, fault: str | None) -> None:
        """As gateways do: a queued job waits again, an interactive one stays and moves on."""
        attempt = self.one_leased(pick)
        queued = self.world.job(attempt.job_id).kind == "queued"
        self.close(attempt, job_state="queued" if queued else "running", end_code="failed", fault=fault)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK, node=st.integers(0, 2))
    def move_on(self, pick: int, node: int) -> None:
        job_id = self.jobs[pick % len(self.jobs)]
        self.world.write(Lease(job_id, self.world.market.lease(self.nodes[node])))

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        job_id = self.jobs[pick % len(self.jobs)]
        (closed,) = self.world.write(close_waiting(job_id, endings.unwanted()))
        if not closed.ok:
            with transaction(self.world.factory) as session:
                repository.request_cancel(session, job_id)

    @rule(seconds=st.sampled_from([1.0, 16.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        self.free_slots()

    @rule()
    def sweep(self) -> None:
        self.world.publish()
        sweep(self.world.factory, self.world.client, self.world.settings)

    @precondition(lambda self: self.stale)
    @rule(pick=PICK)
    def a_late_gateway_repeats_itself(self, pick: int) -> None:
        (answer,) = self.world.write(self.stale[pick % len(self.stale)])
        assert not answer.ok

    @rule()
    def settle(self) -> None:
        with transaction(self.world.factory) as session:
            billing.settle(session, 100)

    # --- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def the_books_and_the_jobs_agree(self) -> None:
        with self.world.factory() as session:
            assert checks.invariants(session) == []

    @invariant()
    def states_follow_the_table_and_final_ones_stay(self) -> None:
        with self.world.factory() as session:
            rows = session.execute(select(Job.id, Job.state, Job.outcome).where(Job.id.in_(self.jobs))).all()
        for job_id, state, outcome in rows:
            before, now = self.states.get(job_id, JobState(state)), JobState(state)
            assert now in ({before} if before in FINAL else reachable(before, 3))
            assert (outcome is not None) == (now in {JobState.DELIVERED, *FINAL})
            self.states[job_id] = now

    @invariant()
    def attempts_are_bounded_and_no_node_fails_a_job_twice(self) -> None:
        with self.world.factory() as session:
            rows = session.execute(
                select(Attempt.job_id, Attempt.node_id, Attempt.fault, Attempt.state).where(
                    Attempt.job_id.in_(self.jobs)
                )
            ).all()
        for job_id in self.jobs:
            own = [row for row in rows if row.job_id == job_id]
            failed = [row.node_id for row in own if row.fault == "node"]
            assert len(failed) == len(set(failed))
            assert sum(row.fault != "owner" for row in own) <= endings.MAX_ATTEMPTS
            assert sum(row.state == "leased" for row in own) <= 1

    def teardown(self) -> None:
        """Faults stop, gateways are gone: within deadline, lease and two sweeps all has ended, and nothing is held."""
        self.world.offers.clear()
        for seconds in (16.0, 700.0):
            self.world.pass_time(seconds)
            sweep(self.world.factory, self.world.client, self.world.settings)
        self.settle()
        with self.world.factory() as session:
            states = set(session.scalars(select(Job.state).where(Job.id.in_(self.jobs))))
            receipts = list(session.scalars(select(Receipt.job_id).where(Receipt.job_id.in_(self.jobs))))
            outcomes = sum(len(self.world.outcomes(job_id)) for job_id in self.jobs)
        assert states <= {state.value for state in FINAL}
        assert len(receipts) == len(set(receipts))
        assert outcomes == len(self.jobs)
        assert self.world.held_nano() == 0
        self.the_books_and_the_jobs_agree()

    # --- helpers --------------------------------------------------------------------------------------------------

    def leased(self) -> list[Attempt]:
        with self.world.factory() as session:
            return list(
                session.scalars(
                    select(Attempt)
                    .where(Attempt.state == "leased", Attempt.job_id.in_(self.jobs))
                    .order_by(Attempt.leased_at, Attempt.id)
                )
            )

    def one_leased(self, pick: int) -> Attempt:
        attempts = self.leased()
        return attempts[pick % len(attempts)]

    def close(self, attempt: Attempt, **changes: Any) -> None:
        record = Close(
            **{
                "job_id": attempt.job_id,
                "attempt_id": attempt.id,
                "epoch": attempt.epoch,
                "outcome": None,
                "fault": None,
                "accepted_tokens": attempt.accepted_tokens,
                "busy_ms": 5,
                "first_token": False,
                **changes,
            }
        )
        (answer,) = self.world.write(record)
        assert answer.ok, answer.reason
        self.stale.append(record)
        self.free_slots()

    def free_slots(self) -> None:
        """Reservations of what ended run out by themselves; the tests' clock does not move Valkey's."""
        keys: Any = self.world.client.keys("fallow:slots:*")
        if keys:
            self.world.client.delete(*keys)


@pytest.mark.timeout(120)
def test_jobs_hold_to_their_rules_whatever_happens(settings: Settings, session_factory: SessionFactory) -> None:
    def make() -> Jobs:
        return Jobs(QueueWorld.make(settings, session_factory, credit_nano=10**12))

    run_state_machine_as_test(
        make,
        settings=hypothesis_settings(
            max_examples=8,
            stateful_step_count=25,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
