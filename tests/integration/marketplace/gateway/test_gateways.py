"""Two gateways as one, an end in good order, and the endpoints beside the chat."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import aiohttp
import openai
import pytest

from agent.protocol import Accepted, Goodbye, Run
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.gateway_world import (
    CHAT,
    MODEL_ID,
    WORDS,
    ScriptedAgent,
    add_renter,
    answers,
    stalls,
    until,
    world,
)

ANSWER = "".join(WORDS)


async def get(url: str, key: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        body = await (response.json() if "json" in response.headers["content-type"] else response.text())
        return response.status, body


class TestTwoGateways:
    def test_serve_at_one_what_a_node_at_the_other_answers(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with (
                world(settings, session_factory, gateway_id="gw-one") as one,
                world(settings, session_factory, variant_id=one.variant_id, gateway_id="gw-two") as two,
            ):
                agent = await one.connect(answers)
                await until(two.offers)
                await until(lambda: two.gateway.services.fleet._peers.linked("gw-one"))
                stream = await two.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                assert text == ANSWER
                done = await one.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert done.choices[0].message.content == ANSWER
                await two.settled()
                await one.settled()
                assert two.books.outcomes() == ["complete"] * 2
                assert [attempt.gateway_id for attempt in two.books.attempts()] == ["gw-two", "gw-one"]
                await until(lambda: len(agent.acks) == 2)
                assert two.books.broken_rules() == []

        asyncio.run(story())

    def test_pass_a_cancel_on_to_the_node(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with (
                world(settings, session_factory, gateway_id="gw-one") as one,
                world(settings, session_factory, variant_id=one.variant_id, gateway_id="gw-two") as two,
            ):
                agent = await one.connect(stalls)
                await until(two.offers)
                await until(lambda: two.gateway.services.fleet._peers.linked("gw-one"))
                stream = await two.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                await anext(aiter(stream))
                await stream.close()
                await until(lambda: agent.cancels, within_s=2.0)
                await two.settled()
                assert two.books.outcomes() == ["cancelled"]
                assert two.books.broken_rules() == []

        asyncio.run(story())


class TestTheEnd:
    def test_lets_running_streams_finish_and_refuses_new_ones(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        go = asyncio.Event()

        async def waits(agent: ScriptedAgent, run: Run) -> None:
            await agent.say(Accepted(run.attempt, run.epoch))
            await agent.tokens(run, WORDS[:3])
            await go.wait()
            await agent.tokens(run, WORDS[3:], start=3)
            await agent.finish(run, len(WORDS))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(waits)
                stream = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                chunks = aiter(stream)
                text = (await anext(chunks)).choices[0].delta.content or ""
                market.server.handle_exit(signal.SIGTERM, None)
                await until(lambda: market.gateway.services.draining)
                assert (await get(f"{market.url}/readyz"))[0] == 503
                with pytest.raises(openai.InternalServerError) as caught:
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert caught.value.code == "gateway_draining"
                go.set()
                text += "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
                assert text == ANSWER
                await until(lambda: market.server.should_exit)
                await until(lambda: any(isinstance(frame, Goodbye) for frame in agent.frames))
                assert market.books.outcomes() == ["complete"]
                # uvicorn raises again what it captured: a gateway that ended in order exits with 0.
                assert market.server._captured_signals == []

        asyncio.run(story())

    def test_ends_what_does_not_finish_as_our_failure_and_pays_the_owner(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(stalls)
                stream = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                chunks = aiter(stream)
                await anext(chunks)
                stopping = asyncio.create_task(market.gateway.stop())
                with pytest.raises(openai.APIError):
                    await exhaust(chunks)
                await stopping
                assert market.books.outcomes() == ["platform_failed"]
                (receipt,) = market.books.receipts()
                assert receipt.charge_nano == 0
                assert receipt.loss_nano == receipt.owner_nano + receipt.fee_nano > 0
                assert market.books.credit(renter).held_nano == 0
                assert market.books.broken_rules() == []

        asyncio.run(story())


async def exhaust(chunks: Any) -> None:
    with contextlib.suppress(StopAsyncIteration):
        while True:
            await anext(chunks)


class TestAQuote:
    def test_counts_as_the_chat_will_and_bounds_what_it_costs(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                body = {"model": MODEL_ID, "messages": CHAT, "max_tokens": 50}
                agent = await market.connect(answers)
                async with (
                    aiohttp.ClientSession(headers={"authorization": f"Bearer {renter.secret}"}) as session,
                    session.post(f"{market.url}/v1/quote", json=body) as response,
                ):
                    assert response.status == 200
                    quote = await response.json()
                done = await market.client(renter).chat.completions.create(**body)  # type: ignore[call-overload]
                assert quote["prompt_tokens"] == done.usage.prompt_tokens == agent.runs[0].prompt_tokens
                assert quote["max_output_tokens"] == 50
                assert quote["capacity"]["available"] is True
                assert quote["rates_per_million_tokens"] == {"input": "0.1", "cached_input": "0.05", "output": "0.4"}
                cost = float(done.usage.model_extra["cost"])
                assert float(quote["cost"]["at_least"]) < cost < float(quote["cost"]["at_most"])
                await market.settled()
                assert market.books.outcomes() == ["complete"]

        asyncio.run(story())

    def test_without_capacity_says_why(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with (
                world(settings, session_factory) as market,
                aiohttp.ClientSession(headers={"authorization": f"Bearer {renter.secret}"}) as session,
                session.post(f"{market.url}/v1/quote", json={"model": MODEL_ID, "messages": CHAT}) as response,
            ):
                quote = await response.json()
                assert quote["capacity"] == {
                    "available": False,
                    "nodes": 0,
                    "predicted_ttft_s": None,
                    "predicted_tokens_per_s": None,
                    "refused": "no node is connected",
                }
                assert quote["cost"] is None
                assert quote["max_output_is_default"] is True

        asyncio.run(story())


class TestBesideTheChat:
    def test_models_are_listed_with_their_price(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                client = market.client(renter)
                (model,) = (await client.models.list()).data
                assert (model.id, model.object) == (MODEL_ID, "model")
                assert (model.model_extra or {})["pricing"] is None
                await market.connect(answers)
                one = await client.models.retrieve(MODEL_ID)
                assert (one.model_extra or {})["pricing"]["output"] == "0.4"
                assert (one.model_extra or {})["context_length"] == 2_048
                with pytest.raises(openai.NotFoundError):
                    await client.models.retrieve("nonesuch")
                assert (await get(f"{market.url}/v1/models"))[0] == 401

        asyncio.run(story())

    def test_health_and_figures_answer_without_a_key_from_this_machine(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                await market.settled()
                assert await get(f"{market.url}/healthz") == (200, {"status": "ok"})
                status, ready = await get(f"{market.url}/readyz")
                assert (status, ready["status"], ready["nodes"], ready["models"]) == (200, "ready", 1, 1)
                status, figures = await get(f"{market.url}/metrics")
                assert status == 200
                expected = 'fallow_outcomes_total{endpoint="/v1/chat/completions",outcome="complete"} 1.0'
                assert expected in figures
                assert f'fallow_tokens_total{{token_class="output_visible"}} {len(WORDS)}.0' in figures

        asyncio.run(story())

    def test_figures_are_not_for_strangers(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, aiohttp.ClientSession() as session:
                for headers, status in (
                    ({}, 401),
                    ({"authorization": f"Bearer {renter.secret}"}, 403),
                ):
                    forwarded = {**headers, "x-forwarded-for": "203.0.113.9"}
                    async with session.get(f"{market.url}/metrics", headers=forwarded) as response:
                        assert response.status == status

        asyncio.run(story())
