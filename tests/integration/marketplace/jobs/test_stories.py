"""Queued jobs from their acceptance to their books, over a real gateway and its agents' sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

from agent.protocol import Run
from marketplace.billing.service import settle
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.core.valkey import connect
from marketplace.jobs.tasks import assign_until_done, make_matcher, sweep
from tests.fleet_world import until
from tests.gateway_world import (
    CHAT,
    MODEL_ID,
    WORDS,
    ScriptedAgent,
    World,
    add_renter,
    answers,
    fails,
    refuses,
    stalls,
    thinks,
    world,
)

OPEN = ("queued", "running", "cancelling")
TICK_S = 0.1


@contextlib.asynccontextmanager
async def ticking(market: World) -> AsyncIterator[None]:
    """What a worker does on its timers, in this process."""
    client = connect(market.settings.valkey_url)
    matcher = make_matcher(client, market.settings)

    async def work() -> None:
        while True:
            await asyncio.to_thread(assign_until_done, market.factory, client, matcher)
            await asyncio.to_thread(sweep, market.factory, client, market.settings)
            await asyncio.sleep(TICK_S)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        client.close()


async def submit(client: AsyncOpenAI, **fields: Any) -> str:
    body = {"request": {"model": MODEL_ID, "messages": CHAT, "max_tokens": 20}, **fields}
    return str((await client.post("/jobs", body=body, cast_to=object))["id"])  # type: ignore[index]


async def show(client: AsyncOpenAI, job_id: str) -> dict[str, Any]:
    return await client.get(f"/jobs/{job_id}", cast_to=object)  # type: ignore[return-value]


async def ended(client: AsyncOpenAI, job_id: str) -> dict[str, Any]:
    """The job once it has ended."""
    for _ in range(300):
        job = await show(client, job_id)
        if job["status"] not in OPEN:
            return job
        await asyncio.sleep(0.05)
    raise AssertionError(f"still open: {job}")


def tell(
    story: Callable[[World, AsyncOpenAI], Awaitable[None]], settings: Settings, factory: SessionFactory, **changes: Any
) -> None:
    """Run a story in a fresh market with a worker, settle, and look at the books."""
    renter = add_renter(factory)

    async def run() -> None:
        async with world(settings, factory, **changes) as market, ticking(market):
            async with market.client(renter) as client:
                await story(market, client)
            await market.settled()
            with transaction(factory) as session:
                settle(session, 1_000)
            assert market.books.broken_rules() == []
            assert market.books.credit(renter).held_nano == 0

    asyncio.run(run())


class TestAnswers:
    def test_ten_jobs_over_two_slots_are_all_answered_and_paid(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, client: AsyncOpenAI) -> None:
            await market.connect(slots=2)
            jobs = [await ended(client, job_id) for job_id in [await submit(client) for _ in range(10)]]
            assert {job["status"] for job in jobs} == {"completed"}
            for job in jobs:
                assert job["result"]["choices"][0]["message"]["content"] == "".join(WORDS)
                assert job["result"]["usage"]["cost"] == job["cost"]
                assert job["result"]["usage"]["completion_tokens"] == len(WORDS)
            assert market.books.outcomes() == ["complete"] * 10

        tell(story, settings, session_factory)

    def test_a_job_waits_for_a_node_that_comes_later(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, client: AsyncOpenAI) -> None:
            job_id = await submit(client, max_price={"input": "100", "output": "100"})
            await asyncio.sleep(0.5)
            assert (await show(client, job_id))["status"] == "queued"
            await market.connect()
            assert (await ended(client, job_id))["status"] == "completed"

        tell(story, settings, session_factory)


class TestFailures:
    def test_a_failing_node_costs_nothing_and_another_answers(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, client: AsyncOpenAI) -> None:
            await market.connect(fails("engine_died", after=3))
            job_id = await submit(client)
            await until(lambda: [attempt.fault for attempt in market.books.attempts()] == ["node"])
            await market.connect()
            job = await ended(client, job_id)
            assert (job["status"], job["attempts"]) == ("completed", 2)
            assert len(market.books.receipts()) == 1

        tell(story, settings, session_factory)

    def test_an_owner_who_is_at_the_machine_is_passed_over(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, client: AsyncOpenAI) -> None:
            busy = await market.connect(refuses("owner_active"))
            job_id = await submit(client)
            await until(lambda: len(busy.runs) > 0)
            await busy.close()
            market.agents.remove(busy)
            await market.connect()
            assert (await ended(client, job_id))["status"] == "completed"

        tell(story, settings, session_factory)

    def test_a_node_that_vanishes_mid_answer_is_replaced(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, client: AsyncOpenAI) -> None:
            gone = await market.connect(stalls)
            job_id = await submit(client)
            await until(lambda: len(gone.runs) > 0)
            gone.abort()
            await market.connect()
            assert (await ended(client, job_id))["status"] == "completed"

        tell(story, settings, session_factory)


class TestEnds:
    def test_a_job_cancelled_while_running_pays_for_what_was_delivered(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, client: AsyncOpenAI) -> None:
            agent = await market.connect(stalls)
            job_id = await submit(client)
            await until(lambda: any(attempt.accepted_tokens for attempt in market.books.attempts()))
            assert (await client.delete(f"/jobs/{job_id}", cast_to=object))["status"] == "cancelling"  # type: ignore[index]
            job = await ended(client, job_id)
            assert (job["status"], job["outcome"]) == ("cancelled", "cancelled")
            assert len(agent.cancels) == 1
            assert [receipt.output_visible_tokens for receipt in market.books.receipts()] == [3]

        tell(story, settings, session_factory, checkpoint_s=0.2)

    def test_a_job_that_reaches_its_deadline_before_a_token_is_free(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, client: AsyncOpenAI) -> None:
            await market.connect(thinks)
            job = await ended(client, await submit(client, deadline_s=1))
            assert (job["status"], job["outcome"], job["cost"]) == ("expired", "expired", "0")

        tell(story, settings, session_factory)


class TestGivingWay:
    def test_a_running_job_gives_its_slot_to_a_client_that_waits_and_is_run_again(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, client: AsyncOpenAI) -> None:
            async def first_one_thinks(agent: ScriptedAgent, run: Run) -> None:
                await (thinks if run is agent.runs[0] else answers)(agent, run)

            agent = await market.connect(first_one_thinks, slots=1)
            request = {"model": MODEL_ID, "messages": CHAT, "max_tokens": 400}
            job_id = await submit(client, request=request)
            await until(lambda: len(agent.runs) == 1)
            answer = await client.chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=20)
            assert answer.choices[0].message.content == "".join(WORDS)
            assert [cancel.attempt for cancel in agent.cancels] == [agent.runs[0].attempt]
            job = await ended(client, job_id)
            assert job["status"] == "completed"
            assert market.books.faults() == [0]
            assert [attempt.end_code for attempt in market.books.attempts()] == ["gave_way", "delivered", "delivered"]

        tell(story, settings, session_factory)
