"""The Idempotency-Key: one run and one charge, whoever asks again, wherever, and whatever died meanwhile."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy import text

from agent.protocol import Accepted, Run
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.jobs import idempotency
from tests.gateway_world import (
    CHAT,
    MODEL_ID,
    WORDS,
    Renter,
    ScriptedAgent,
    World,
    add_renter,
    answers,
    fails,
    stalls,
    until,
    world,
)

ANSWER = "".join(WORDS)


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def request_id(self) -> str:
        return str(self.headers["x-request-id"])

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


async def post(market: World, renter: Renter, key: str, path: str = "/v1/chat/completions", **body: Any) -> Answer:
    headers = {"authorization": f"Bearer {renter.secret}", "idempotency-key": key}
    asked = body or {"model": MODEL_ID, "messages": CHAT}
    async with (
        aiohttp.ClientSession() as session,
        session.post(market.url + path, json=asked, headers=headers) as response,
    ):
        return Answer(response.status, response.headers, await response.read())


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL_ID, "messages": CHAT, **changes}


async def collect(stream: Any, into: list[str | None]) -> None:
    async for chunk in stream:
        into.append(chunk.choices[0].delta.content)


def lose_the_gateway(factory: SessionFactory) -> None:
    """As if the gateway had died before it wrote that the request ended, some time ago."""
    with transaction(factory) as session:
        session.execute(
            text(
                "update idempotent_requests set ended_at = null, status = null, answer = null,"
                " lease_expires_at = now() - interval '1 second'"
            )
        )


class TestTheSameRequestAgain:
    @pytest.mark.parametrize(
        "changes", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]
    )
    def test_gets_the_first_answer_in_the_same_bytes_for_one_charge(
        self, settings: Settings, session_factory: SessionFactory, changes: dict[str, Any]
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                first = await post(market, renter, "order-1", **chat(**changes))
                again = await post(market, renter, "order-1", **chat(**changes))
                assert first.status == again.status == 200
                assert again.body == first.body
                assert again.headers["content-type"] == first.headers["content-type"]
                assert (first.replayed, again.replayed) == (False, True)
                assert again.request_id == first.request_id
                assert len(agent.runs) == len(market.books.receipts()) == 1
                assert market.books.outcomes() == ["complete"]
                await market.settled()
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_reads_as_a_first_answer_to_the_official_client(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                client = market.client(renter, default_headers={"idempotency-key": "k"})
                texts = []
                for _ in range(2):
                    stream = await client.chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                    texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
                assert texts == [ANSWER, ANSWER]
                assert len(market.books.receipts()) == 1

        asyncio.run(story())

    def test_gets_its_job_back_instead_of_a_second_one(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        body = {"request": chat(max_tokens=5), "max_price": {"input": "1", "output": "1"}}

        async def story() -> None:
            async with world(settings, session_factory) as market:
                first = await post(market, renter, "job-1", "/v1/jobs", **body)
                again = await post(market, renter, "job-1", "/v1/jobs", **body)
                assert first.status == again.status == 202
                assert again.body == first.body
                assert len(market.books.jobs()) == 1
                lose_the_gateway(session_factory)
                found = await post(market, renter, "job-1", "/v1/jobs", **body)
                assert found.status == 200
                assert len(market.books.jobs()) == 1

        asyncio.run(story())

    def test_gets_its_batch_back_although_the_gateway_died(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat(max_tokens=2)}

        async def story() -> None:
            async with world(settings, session_factory) as market:
                data = json.dumps(line).encode()
                file = await market.client(renter).files.create(file=("lines.jsonl", data), purpose="batch")
                body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
                first = await post(market, renter, "b", "/v1/batches", **body)
                again = await post(market, renter, "b", "/v1/batches", **body)
                assert (first.status, again.body) == (200, first.body)
                lose_the_gateway(session_factory)
                found = await post(market, renter, "b", "/v1/batches", **body)
                assert json.loads(found.body)["id"] == json.loads(first.body)["id"]

        asyncio.run(story())

    def test_is_refused_while_the_first_one_runs_also_at_another_gateway(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        go = asyncio.Event()

        async def waits(agent: ScriptedAgent, run: Run) -> None:
            await agent.say(Accepted(run.attempt, run.epoch))
            await go.wait()
            await answers(agent, run)

        async def story() -> None:
            async with (
                world(settings, session_factory, gateway_id="gw-one") as one,
                world(settings, session_factory, variant_id=one.variant_id, gateway_id="gw-two") as two,
            ):
                agent = await one.connect(waits)
                first = asyncio.create_task(post(one, renter, "k"))
                await until(lambda: agent.runs)
                for market in (one, two):
                    meanwhile = await post(market, renter, "k")
                    assert meanwhile.status == 409
                    assert b"idempotency_in_progress" in meanwhile.body
                    assert meanwhile.headers["x-should-retry"] == "true"
                go.set()
                assert (await post(two, renter, "k")).status in (200, 409)
                assert (await first).status == 200
                assert (await post(two, renter, "k")).body == (await first).body
                assert len(agent.runs) == 1

        asyncio.run(story())

    def test_runs_once_however_many_come_at_once_through_two_gateways(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with (
                world(settings, session_factory, gateway_id="gw-one") as one,
                world(settings, session_factory, variant_id=one.variant_id, gateway_id="gw-two") as two,
            ):
                await one.connect(answers)
                await two.connect(answers)
                found = await asyncio.gather(*(post((one, two)[i % 2], renter, "k") for i in range(12)))
                assert {answer.status for answer in found} <= {200, 409}
                assert len({answer.body for answer in found if answer.status == 200}) == 1
                assert len(one.books.receipts()) == 1
                await one.settled()
                await two.settled()
                assert one.books.broken_rules() == []

        asyncio.run(story())


class TestAnotherRequest:
    def test_is_refused_under_the_same_key(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                await post(market, renter, "k", **chat())
                other = await post(market, renter, "k", **chat(max_tokens=3))
                assert other.status == 409
                assert b"idempotency_mismatch" in other.body
                assert other.headers["x-should-retry"] == "false"
                assert len(market.books.receipts()) == 1

        asyncio.run(story())

    def test_of_another_organisation_has_keys_of_its_own(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renters = add_renter(session_factory), add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                found = [await post(market, renter, "k") for renter in renters]
                assert [answer.replayed for answer in found] == [False, False]
                assert len(market.books.receipts()) == 2

        asyncio.run(story())

    @pytest.mark.parametrize("key", ["", " ", "x" * 256, "sch\u00fcssel"])
    def test_with_a_key_that_is_none_is_refused(
        self, settings: Settings, session_factory: SessionFactory, key: str
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                answer = await post(market, renter, key)
                assert answer.status == 400
                assert b"invalid_idempotency_key" in answer.body

        asyncio.run(story())


class TestWhatCostNothing:
    def test_frees_the_key(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                assert (await post(market, renter, "k")).status == 503
                agent = await market.connect(fails("engine_died"))
                assert (await post(market, renter, "k")).status == 502
                agent.behaviour = answers
                market.gateway.services.fleet.breakers.forgive(agent.node.node_id, market.variant_id)
                done = await post(market, renter, "k")
                assert (done.status, done.replayed) == (200, False)
                assert len(market.books.receipts()) == 1

        asyncio.run(story())


class TestAClientThatLeft:
    def test_gets_what_it_paid_for_and_is_told_that_it_is_cut(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(stalls)
                client = market.client(renter, default_headers={"idempotency-key": "k"})
                stream = await client.chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                await anext(aiter(stream))
                await stream.close()
                await market.settled()
                assert market.books.outcomes() == ["cancelled"]
                again = await client.chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                read: list[str | None] = []
                with pytest.raises(openai.APIError) as caught:
                    await collect(again, read)
                assert "".join(map(str, read)) == "".join(WORDS[:3])
                assert caught.value.code == "answer_cut"
                assert len(market.books.receipts()) == 1

        asyncio.run(story())


class TestAGatewayThatDied:
    @pytest.mark.parametrize("stream", [False, True])
    def test_after_the_receipt_leaves_the_answer(
        self, settings: Settings, session_factory: SessionFactory, stream: bool
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                first = await post(market, renter, "k", **chat(stream=stream))
                lose_the_gateway(session_factory)
                again = await post(market, renter, "k", **chat(stream=stream))
                assert again.replayed
                assert again.body == first.body
                assert len(market.books.receipts()) == 1

        asyncio.run(story())

    def test_before_it_ran_leaves_the_key_to_the_next_one_under_the_same_request_id(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                assert (await post(market, renter, "k")).status == 200
                with transaction(session_factory) as session:
                    session.execute(text("update jobs set request_id = 'req_other'"))
                lose_the_gateway(session_factory)
                with session_factory() as session:
                    known = session.scalar(text("select request_id from idempotent_requests"))
                done = await post(market, renter, "k")
                assert (done.status, done.replayed) == (200, False)
                # Should the first gateway live after all, its admission and this one exclude each other.
                assert done.request_id == known

        asyncio.run(story())


class TestADayLater:
    def test_the_answer_is_erased_and_the_key_is_free(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                await post(market, renter, "k")
                with transaction(session_factory) as session:
                    assert idempotency.erase(session, limit=10) == 0
                    assert session.scalar(text("select count(*) from jobs where result is not null")) == 1
                    session.execute(text("update idempotent_requests set ended_at = ended_at - interval '25 hours'"))
                with transaction(session_factory) as session:
                    assert idempotency.erase(session, limit=10) == 1
                    assert session.scalar(text("select count(*) from jobs where result is not null")) == 0
                assert not (await post(market, renter, "k")).replayed
                assert len(market.books.receipts()) == 2

        asyncio.run(story())

    def test_a_key_that_nobody_erased_yet_is_free_all_the_same(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                await post(market, renter, "k")
                with transaction(session_factory) as session:
                    session.execute(text("update idempotent_requests set ended_at = ended_at - interval '25 hours'"))
                assert not (await post(market, renter, "k", **chat(max_tokens=2))).replayed

        asyncio.run(story())
