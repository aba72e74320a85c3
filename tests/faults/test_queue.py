"""The queue while its workers, its clock, its gateways and its nodes die."""

from __future__ import annotations

import time

import openai

from tests.stack import Stack, until
from tests.witness import assert_invariants, ended, submit


def submit_many(stack: Stack, count: int, *, max_tokens: int = 30) -> tuple[openai.OpenAI, list[str]]:
    """So many jobs for the common model, through both gateways; and a client to look with."""
    renter = stack.renter()
    clients = [stack.client("gw-0", renter), stack.client("gw-1", renter)]
    ids = [submit(clients[number % 2], f"Job {number}.", max_tokens=max_tokens) for number in range(count)]
    return clients[0], ids


def running(stack: Stack) -> int:
    return int(stack.rows("select count(*) from jobs where kind = 'queued' and state = 'running'")[0][0])


def all_complete(stack: Stack, client: openai.OpenAI, ids: list[str]) -> None:
    shown = [ended(client, job_id) for job_id in ids]
    assert {job["id"]: job["error"] for job in shown if job["status"] != "completed"} == {}
    for job in shown:
        assert job["result"]["choices"][0]["message"]["content"]
        assert float(job["cost"]) > 0
    assert_invariants(stack)


class TestAWorkerKilled:
    def test_while_the_other_lives_loses_no_job(self, stack: Stack) -> None:
        client, ids = submit_many(stack, 16)
        until(lambda: running(stack), "running jobs")
        stack.kill("worker-0")
        all_complete(stack, client, ids)

    def test_together_with_the_other_and_the_clock_only_makes_jobs_wait(self, stack: Stack) -> None:
        client, ids = submit_many(stack, 6)
        until(lambda: running(stack), "running jobs")
        stack.kill("worker-0", "worker-1", "beat")
        more = [submit(client, f"Meanwhile {number}.") for number in range(4)]
        time.sleep(1.0)
        stack.start("worker-1", "beat")
        all_complete(stack, client, ids + more)

    def test_again_and_again_settles_each_job_once(self, stack: Stack) -> None:
        client, ids = submit_many(stack, 12, max_tokens=15)
        for name in ("worker-0", "worker-1"):
            time.sleep(0.7)
            stack.restart(name)
        all_complete(stack, client, ids)


class TestAGatewayKilled:
    def test_with_queued_jobs_on_its_node_lets_them_run_again(self, stack: Stack) -> None:
        client, ids = submit_many(stack, 8, max_tokens=60)
        until(lambda: running(stack) >= 4, "running jobs")
        stack.restart("gw-1")
        all_complete(stack, client, ids)


class TestANodeKilled:
    def test_with_queued_jobs_on_it_lets_them_run_elsewhere(self, stack: Stack) -> None:
        client, ids = submit_many(stack, 8, max_tokens=60)
        until(lambda: running(stack) >= 4, "running jobs")
        stack.kill("beta")
        all_complete(stack, client, ids)

    def test_that_alone_serves_a_model_fails_the_job_and_says_so(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        job_id = submit(client, "Only you can.", model="solo", max_tokens=300)
        until(lambda: running(stack), "a running job")
        stack.restart("solo")
        shown = ended(client, job_id)
        assert (shown["status"], shown["outcome"], shown["cost"]) == ("failed", "node_failed", "0")
        assert shown["error"]["message"]
        assert_invariants(stack)


class TestADeadline:
    def test_that_passes_in_the_queue_costs_nothing(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        job_id = submit(
            client, "Nobody serves this.", model="scripted", max_price={"input": "1", "output": "1"}, deadline_s=1
        )
        shown = ended(client, job_id, within_s=15)
        assert (shown["status"], shown["cost"]) == ("expired", "0")
        assert_invariants(stack)

    def test_that_passes_while_it_runs_pays_for_what_was_accepted(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        job_id = submit(client, "Too long.", model="solo", max_tokens=900, deadline_s=3)
        shown = ended(client, job_id, within_s=15)
        assert (shown["status"], shown["outcome"]) == ("expired", "deadline")
        assert float(shown["cost"]) > 0
        assert_invariants(stack)
