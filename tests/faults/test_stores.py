"""Stores that die: losing Valkey costs speed at most; while PostgreSQL is away nothing is promised that is not kept."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.stack import Stack, until, wait_for_database
from tests.witness import (
    Background,
    Seen,
    ask,
    assert_invariants,
    ended,
    mid_stream,
    outcome_of,
    stream,
    submit,
)


class TestValkeyKilled:
    @pytest.mark.parametrize("gateway", ["gw-0", "gw-1"], ids=["at the node's gateway", "over the link"])
    def test_mid_stream_changes_nothing_for_the_reader(self, stack: Stack, gateway: str) -> None:
        client = stack.client(gateway, stack.renter())
        seen = stream(
            client,
            f"Valkey dies, {gateway}.",
            model="solo",
            on_piece=mid_stream(5, stack.kill_valkey),
            max_tokens=120,
        )
        assert seen.complete, seen
        stack.start_valkey()
        assert_invariants(stack, [seen])

    def test_leaves_each_gateway_its_own_nodes(self, stack: Stack) -> None:
        renter = stack.renter()
        stack.kill_valkey()
        seen = [stream(stack.client("gw-0", renter), f"Without it, {number}.", max_tokens=5) for number in range(3)]
        seen += [ask(stack.client("gw-1", renter), f"Without it, {number}.", max_tokens=5) for number in range(3)]
        assert all(each.complete for each in seen), seen
        stack.start_valkey()
        stack.wait_offered()
        assert_invariants(stack, seen)

    def test_while_requests_are_admitted_loses_none(self, stack: Stack) -> None:
        renter = stack.renter()
        with Background() as background:
            for number in range(16):
                client = stack.client(f"gw-{number % 2}", renter)
                background.add(stream, client, f"Now or then, {number}.", max_tokens=10 + number)
                time.sleep(0.05)
                if number == 5:
                    stack.kill_valkey()
                if number == 11:
                    stack.start_valkey()
            seen = background.all()
        assert all(each.complete or each.status == 503 for each in seen), [e for e in seen if not e.complete]
        assert sum(each.complete for each in seen) >= 8
        assert_invariants(stack, seen)

    def test_while_jobs_are_queued_loses_none(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        ids = [submit(client, f"Before {number}.", max_tokens=30) for number in range(8)]
        until(lambda: stack.rows("select 1 from attempts where state = 'leased'"), "a running job")
        stack.kill_valkey()
        ids += [submit(client, f"Meanwhile {number}.") for number in range(4)]
        time.sleep(0.5)
        stack.start_valkey()
        shown = [ended(client, job_id) for job_id in ids]
        assert [job["status"] for job in shown] == ["completed"] * len(ids)
        assert_invariants(stack)


def restart_postgres(stack: Stack, number: signal.Signals) -> None:
    if number is signal.SIGKILL:
        stack.kill_postgres()
    else:
        stack.stores.postgres.stop()
    stack.start_postgres()
    wait_for_database(stack.urls)


class TestPostgresRestarted:
    @pytest.fixture(scope="class")
    def patient(self, whole_stack: Stack) -> Iterator[str]:
        """A gateway with leases as long as in production: longer than a restart of PostgreSQL on a busy machine."""
        whole_stack.add_gateways("gw-patient", FALLOW_LEASE_S="15")
        yield "gw-patient"
        whole_stack.remove_gateway("gw-patient")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["in order", "by kill -9"])
    def test_mid_stream_is_not_noticed_by_the_reader(self, patient: str, stack: Stack, number: signal.Signals) -> None:
        client = stack.client(patient, stack.renter())
        act = mid_stream(5, lambda: restart_postgres(stack, number))
        seen = stream(client, f"PostgreSQL ends by {number.name}.", model="solo", on_piece=act, max_tokens=200)
        assert seen.complete, seen
        assert_invariants(stack, [seen])

    def test_at_the_end_of_many_answers_charges_each_once(self, patient: str, stack: Stack) -> None:
        renter = stack.renter()
        with Background() as background:
            for number in range(10):
                client = stack.client(patient, renter)
                background.add(
                    stream, client, f"Ends in the outage, {number}.", model="solo", max_tokens=30 + number * 4
                )
            until(lambda: stack.rows("select 1 from attempts where state = 'leased'"), "streams")
            time.sleep(0.7)
            restart_postgres(stack, signal.SIGKILL)
            seen = background.all()
        assert all(each.complete for each in seen), [each for each in seen if not each.complete]
        assert_invariants(stack, seen)

    def test_while_jobs_are_queued_loses_none(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter(), max_retries=2)
        ids = [submit(client, f"Row {number}.", max_tokens=30) for number in range(8)]
        until(lambda: stack.rows("select 1 from attempts where state = 'leased'"), "a running job")
        restart_postgres(stack, signal.SIGKILL)
        ids += [submit(client, f"After {number}.") for number in range(2)]
        shown = [ended(client, job_id) for job_id in ids]
        assert [job["status"] for job in shown] == ["completed"] * len(ids)
        assert_invariants(stack)


class TestPostgresAway:
    def test_for_longer_than_a_lease_ends_streams_as_our_failure_and_refuses_new_ones(self, stack: Stack) -> None:
        renter = stack.renter()
        client = stack.client("gw-0", renter)
        refused: list[Seen] = []

        def away() -> None:
            stack.kill_postgres()
            refused.append(ask(stack.client("gw-1", renter), "Nobody writes this down."))

        seen = stream(client, "Who keeps the books?", model="solo", on_piece=mid_stream(5, away), max_tokens=950)
        assert (refused[0].status, refused[0].error) == (503, "unavailable")
        assert seen.error in ("platform_failed", "unavailable"), seen
        stack.start_postgres()
        wait_for_database(stack.urls)
        assert_invariants(stack, [seen])
        assert outcome_of(stack, seen) == "platform_failed"
