"""`service_tier: "flex"`: cheaper, waits in the queue while its client waits at the gateway, and gives way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy import text

from agent.protocol import Accepted, DataPolicy, Run
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.core.valkey import connect as connect_valkey
from marketplace.jobs.tasks import assign_until_done, make_matcher, sweep
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
    thinks,
    until,
    world,
)

ANSWER = "".join(WORDS)
FLEX: dict[str, Any] = {"model": MODEL_ID, "messages": CHAT, "service_tier": "flex"}
PLAIN: dict[str, Any] = {"model": MODEL_ID, "messages": CHAT}
URL = "/v1/chat/completions"
CHEAP = {
    "input_nano_usd_per_mtok": 10_000_000,
    "cached_input_nano_usd_per_mtok": 10_000_000,
    "output_nano_usd_per_mtok": 40_000_000,
}


@contextlib.asynccontextmanager
async def queue(market: World) -> AsyncIterator[None]:
    """What a worker does: assignment, again and again."""
    stopping = threading.Event()

    def work() -> None:
        with connect_valkey(market.settings.valkey_url) as client:
            matcher = make_matcher(client, market.settings)
            while not stopping.wait(0.05):
                assign_until_done(market.factory, client, matcher)

    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        yield
    finally:
        stopping.set()
        await task


def by_turns(*behaviours: Any) -> Any:
    """One behaviour for each run, the last one for all that follow."""
    left = list(behaviours)

    async def behave(agent: ScriptedAgent, run: Run) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(agent, run)

    return behave


def sweep_once(market: World) -> int:
    with connect_valkey(market.settings.valkey_url) as client:
        return sweep(market.factory, client, market.settings)


async def waiting(market: World, jobs: int = 1) -> None:
    """Until so many jobs wait in the queue."""
    await until(lambda: [job.state for job in market.books.jobs()].count("queued") == jobs)


async def waiting_or_more(market: World) -> None:
    """Until a job is written."""
    await until(lambda: bool(market.books.jobs()))


async def ask(market: World, renter: Renter, body: dict[str, Any] = FLEX, **sent: Any) -> Any:
    return await market.call("POST", URL, renter, json=body, **sent)


class TestTheAnswer:
    def test_says_its_tier_and_costs_half_whole_streamed_and_as_text(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, queue(market):
                await market.connect(answers)
                client = market.client(renter)
                plain = await client.chat.completions.create(**PLAIN)
                assert plain.service_tier is None
                done = await client.chat.completions.create(**FLEX)
                assert done.choices[0].message.content == ANSWER
                assert done.service_tier == "flex"
                stream = await client.chat.completions.create(**FLEX, stream=True)
                chunks = [chunk async for chunk in stream]
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
                assert {chunk.service_tier for chunk in chunks} == {"flex"}
                body = {"model": MODEL_ID, "prompt": "A fox", "service_tier": "flex"}
                legacy = await market.call("POST", "/v1/completions", renter, json=body)
                assert legacy.json["service_tier"] == "flex"
                assert legacy.json["choices"][0]["text"] == ANSWER
                await market.settled()
                one, two, three, _ = market.books.receipts()
                assert two.charge_nano == three.charge_nano
                assert abs(one.charge_nano - 2 * two.charge_nano) <= 2
                assert [job.kind for job in market.books.jobs()] == ["interactive", "flex", "flex", "flex"]
                assert {job.body for job in market.books.jobs()} == {None}
                shown = await market.call("GET", f"/v1/usage/{market.books.jobs()[1].request_id}", renter)
                assert shown.json["service_tier"] == "flex"
                assert shown.json["usage"]["cost"] == done.usage.cost  # type: ignore[union-attr]
                assert market.books.endpoints() == [URL, URL, URL, "/v1/completions"]
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_may_be_several(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, queue(market):
                await market.connect(answers)
                call = asyncio.create_task(ask(market, renter, {**FLEX, "n": 2, "max_tokens": 5}))
                await waiting_or_more(market)
                job = market.books.jobs()[0]
                assert job.body == {"n": 2}
                call.cancel()
                await until(lambda: market.books.jobs()[0].outcome is not None)

        asyncio.run(story())

    def test_is_quoted_and_listed_at_its_price(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                usual = (await market.call("POST", "/v1/quote", renter, json={**PLAIN, "max_tokens": 10})).json
                flex = (await market.call("POST", "/v1/quote", renter, json={**FLEX, "max_tokens": 10})).json
                assert (usual["service_tier"], flex["service_tier"]) == ("default", "flex")
                assert usual["rates_per_million_tokens"]["output"] == "0.4"
                assert flex["rates_per_million_tokens"]["output"] == "0.2"
                model = (await market.call("GET", f"/v1/models/{MODEL_ID}", renter)).json
                assert (model["pricing"]["output"], model["flex_pricing"]["output"]) == ("0.4", "0.2")

        asyncio.run(story())

    def test_is_given_again_for_the_same_idempotency_key(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, queue(market):
                agent = await market.connect(answers)
                first = await ask(market, renter, headers={"idempotency-key": "a"})
                again = await ask(market, renter, headers={"idempotency-key": "a"})
                assert (first.status, again.status) == (200, 200)
                assert again.body == first.body
                assert again.headers["idempotent-replayed"] == "true"
                assert len(agent.runs) == 1

        asyncio.run(story())


class TestWaiting:
    def test_lasts_until_a_slot_is_free_with_keep_alives_meanwhile(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, header_wait_s=0.1, keepalive_s=0.2) as market, queue(market):
                await market.connect(by_turns(stalls, answers), slots=1)
                busy = await market.client(renter).chat.completions.create(**PLAIN, stream=True)
                await anext(aiter(busy))
                headers = {"authorization": f"Bearer {renter.secret}"}
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(market.url + URL, json={**FLEX, "stream": True}, headers=headers) as response,
                ):
                    for _ in range(2):
                        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
                    await waiting(market)
                    await busy.close()
                    rest = await response.content.read()
                assert rest.endswith(b"data: [DONE]\n\n")
                await market.settled()
                assert sorted(market.books.outcomes()) == ["cancelled", "complete"]

        asyncio.run(story())

    def test_ends_in_time_and_costs_nothing(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                reply = await ask(market, renter, headers={"x-fallow-max-wait-s": "1"})
                assert (reply.status, reply.json["error"]["code"]) == (429, "resource_unavailable")
                assert reply.headers["retry-after"] == "10"
                assert market.books.outcomes() == ["no_capacity"]
                assert market.books.jobs()[0].state == "voided"
                assert market.books.credit(renter).held_nano == 0
                assert len(market.gateway.services.waiting) == 0

        asyncio.run(story())

    def test_ends_when_the_client_leaves(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                call = asyncio.create_task(ask(market, renter))
                await waiting(market)
                call.cancel()
                await until(lambda: market.books.outcomes() == ["cancelled_early"])
                await market.settled()
                async with queue(market):
                    await asyncio.sleep(0.3)
                assert agent.runs == []
                assert market.books.credit(renter).held_nano == 0

        asyncio.run(story())

    def test_ends_with_its_gateway_and_not_without(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                call = asyncio.create_task(ask(market, renter))
                await waiting(market)
                first = market.books.jobs()[0].client_until
                await market.gateway.services.waiting.look()
                assert market.books.jobs()[0].client_until == first, "said a moment ago: no row is written"
                with transaction(session_factory) as session:
                    # As if half of the lease had passed.
                    session.execute(text("update jobs set client_until = client_until - interval '8 s'"))
                await market.gateway.services.waiting.look()
                assert market.books.jobs()[0].client_until > first
                assert await asyncio.to_thread(sweep_once, market) == 0
                with transaction(session_factory) as session:
                    # As if its gateway had been silent for longer than a lease.
                    session.execute(text("update jobs set client_until = now() - interval '1 s'"))
                async with queue(market):
                    await asyncio.sleep(0.3)
                assert market.books.attempts() == []
                assert await asyncio.to_thread(sweep_once, market) == 1
                await market.gateway.services.waiting.look()
                reply = await call
                assert (reply.status, reply.json["error"]["code"]) == (503, "platform_failed")
                assert market.books.outcomes() == ["platform_failed"]
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_ends_at_once_when_the_gateway_drains_while_what_runs_goes_on_a_queued_job_too(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        goes_on = asyncio.Event()

        async def holds(agent: ScriptedAgent, run: Run) -> None:
            await agent.say(Accepted(run.attempt, run.epoch))
            await agent.tokens(run, WORDS[:3])
            await goes_on.wait()
            await agent.tokens(run, WORDS[3:], start=3)
            await agent.finish(run, len(WORDS))

        async def story() -> None:
            async with world(settings, session_factory) as market, queue(market):
                agent = await market.connect(holds, slots=2)
                running = await market.client(renter).chat.completions.create(**FLEX, stream=True)
                pieces = aiter(running)
                await anext(pieces)
                job = await market.call("POST", "/v1/jobs", renter, json={"request": PLAIN})
                await until(lambda: len(agent.runs) == 2)
                queued = asyncio.create_task(ask(market, renter))
                await waiting(market)
                draining = asyncio.create_task(market.gateway.drain(5.0))
                await until(lambda: market.gateway.services.draining)
                assert (await market.call("GET", "/readyz", None)).status == 503
                reply = await queued
                assert (reply.status, reply.json["error"]["code"]) == (503, "gateway_draining")
                goes_on.set()
                left = [chunk async for chunk in pieces]
                assert left[-1].choices[0].finish_reason == "stop"
                await draining
                assert sorted(market.books.outcomes()) == ["complete", "complete", "platform_failed"]
                shown = await market.call("GET", f"/v1/jobs/{job.json['id']}", renter)
                assert shown.json["status"] == "completed"

        asyncio.run(story())

    def test_is_bounded_per_organisation(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter, other = add_renter(session_factory), add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, flex_waiting_per_organisation=1) as market:
                await market.connect(answers)
                calls = [asyncio.create_task(ask(market, renter))]
                await waiting(market)
                refused = await ask(market, renter)
                assert (refused.status, refused.json["error"]["code"]) == (429, "too_many_waiting")
                calls.append(asyncio.create_task(ask(market, other)))
                await waiting(market, 2)
                async with queue(market):
                    assert [(await call).status for call in calls] == [200, 200]

        asyncio.run(story())


class TestGivingWay:
    def test_moves_a_request_that_nobody_has_read_and_answers_it_afterwards(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, queue(market):
                agent = await market.connect(by_turns(thinks, answers), slots=1)
                flex = asyncio.create_task(ask(market, renter))
                await until(lambda: len(agent.runs) == 1)
                urgent = await market.client(renter).chat.completions.create(**PLAIN)
                assert urgent.choices[0].message.content == ANSWER
                reply = await flex
                assert reply.status == 200
                assert reply.json["choices"][0]["message"]["content"] == ANSWER
                await market.settled()
                job = next(job for job in market.books.jobs() if job.kind == "flex")
                assert (job.preemptions, job.outcome) == (1, "complete")
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_spares_one_whose_client_has_read_a_token(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, queue(market):
                await market.connect(stalls, slots=1)
                stream = await market.client(renter).chat.completions.create(**FLEX, stream=True)
                await anext(aiter(stream))
                with pytest.raises(openai.APIStatusError) as caught:
                    await market.client(renter).chat.completions.create(**PLAIN)
                assert caught.value.code == "no_capacity"
                assert [job.preemptions for job in market.books.jobs()] == [0]
                await stream.close()
                await market.settled()

        asyncio.run(story())


class TestTwoGateways:
    def test_run_at_the_one_that_holds_the_client_on_a_node_of_the_other(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with (
                world(settings, session_factory, gateway_id="gw-one") as one,
                world(settings, session_factory, variant_id=one.variant_id, gateway_id="gw-two") as two,
                queue(two),
            ):
                await one.connect(answers)
                await until(two.offers)
                await until(lambda: two.gateway.services.fleet._peers.linked("gw-one"))
                done = await two.client(renter).chat.completions.create(**FLEX)
                assert done.choices[0].message.content == ANSWER
                assert [attempt.gateway_id for attempt in two.books.attempts()] == ["gw-two"]
                assert two.books.broken_rules() == []

        asyncio.run(story())


class TestAChoice:
    def test_of_the_key_or_the_request_is_kept_to(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory, routing={"regions": ["eu"]})

        async def story() -> None:
            async with world(settings, session_factory) as market, queue(market):
                await market.connect(answers, data=DataPolicy("us"), **CHEAP)
                away = await ask(market, renter)
                assert (away.status, away.code) == (503, "no_capacity")
                assert "1 node: outside the regions asked for" in away.json["error"]["message"]
                near = await market.connect(answers, data=DataPolicy("eu"))
                far = await market.connect(answers, data=DataPolicy("eu"), **CHEAP)
                for agent in (near, far):
                    provider = {"only": [f"node_{agent.node.node_id.hex}"]}
                    told = await ask(market, renter, {**FLEX, "provider": provider})
                    assert told.json["provider"]["name"] == provider["only"][0]
                told = await ask(market, renter, {**FLEX, "provider": {"max_price": {"completion": "0.3"}}})
                assert told.json["provider"]["name"] == f"node_{far.node.node_id.hex}"
                await market.settled()
                (_, _, capped) = market.books.jobs()
                assert capped.max_output_nano_usd_per_mtok == 150_000_000
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_of_nobody_but_the_first_ends_with_its_failure(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, queue(market):
                broken = await market.connect(fails("engine_died"))
                sound = await market.connect(answers)
                provider = {"order": [f"node_{broken.node.node_id.hex}"]}
                assert (await ask(market, renter, {**FLEX, "provider": provider})).status == 200
                assert len(sound.runs) == 1
                provider = {"only": [f"node_{broken.node.node_id.hex}", f"node_{sound.node.node_id.hex}"]}
                await sound.close()
                await until(lambda: len(market.offers()) == 1)
                told = await ask(market, renter, {**FLEX, "provider": {**provider, "allow_fallbacks": False}})
                assert (told.status, told.code) == (502, "node_failed")
                await market.settled()
                assert market.books.outcomes() == ["complete", "node_failed"]
                assert market.books.attempts()[-1].state == "ended"
                assert market.books.broken_rules() == []

        asyncio.run(story())


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "headers", "param"),
        [
            ({**FLEX, "provider": {"only": ["somebody"]}}, {}, "provider.only"),
            (FLEX, {"x-fallow-max-wait-s": "0"}, "x-fallow-max-wait-s"),
            (FLEX, {"x-fallow-max-wait-s": "3601"}, "x-fallow-max-wait-s"),
            (FLEX, {"x-fallow-max-wait-s": "soon"}, "x-fallow-max-wait-s"),
            ({**PLAIN, "service_tier": "priority"}, {}, "service_tier"),
        ],
    )
    def test_say_what_is_wrong(
        self,
        settings: Settings,
        session_factory: SessionFactory,
        body: dict[str, Any],
        headers: dict[str, str],
        param: str,
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                reply = await ask(market, renter, body, headers=headers)
                assert (reply.status, reply.param) == (400, param)
                assert market.books.jobs() == []

        asyncio.run(story())

    def test_hold_nothing_without_balance(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory, credit_nano=0)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                reply = await ask(market, renter)
                assert (reply.status, reply.json["error"]["code"]) == (402, "insufficient_balance")
                assert market.books.outcomes() == ["no_balance"]
                assert len(market.gateway.services.waiting) == 0

        asyncio.run(story())


class TestUnderLoad:
    def test_flex_is_turned_away_while_a_chat_is_still_taken(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                load = market.gateway.services.load
                await load.stop()
                load.late_s = 0.5
                reply = await ask(market, renter)
                assert (reply.status, reply.json["error"]["code"]) == (503, "overloaded")
                assert reply.headers["retry-after"] == "2"
                assert (await ask(market, renter, PLAIN)).status == 200
                load.late_s = 2.0
                assert (await ask(market, renter, PLAIN)).json["error"]["code"] == "overloaded"
                assert market.books.outcomes() == ["complete"], (
                    "a refusal writes nothing: the database may be what lags"
                )

        asyncio.run(story())

    def test_requests_in_hand_are_bounded_and_health_is_answered_all_the_same(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, requests_at_once=1) as market:
                await market.connect(stalls)
                stream = await market.client(renter).chat.completions.create(**PLAIN, stream=True)
                await anext(aiter(stream))
                reply = await ask(market, renter, PLAIN)
                assert (reply.status, reply.json["error"]["code"]) == (503, "overloaded")
                assert reply.headers["x-request-id"].startswith("req_")
                assert (await market.call("GET", "/readyz", None)).status == 200
                await stream.close()
                await until(lambda: market.gateway.services.load.requests == 0)

        asyncio.run(story())

    def test_a_queue_that_is_full_takes_neither_flex_nor_a_job(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter, other = add_renter(session_factory), add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, queued_jobs_per_organisation=1, queued_jobs=2) as market:
                await market.connect(answers)
                first = asyncio.create_task(ask(market, renter))
                await waiting(market)
                for path, body in ((URL, FLEX), ("/v1/jobs", {"request": PLAIN})):
                    reply = await market.call("POST", path, renter, json=body)
                    assert (reply.status, reply.json["error"]["code"]) == (429, "queue_full")
                    assert "1 of your jobs wait, and no more may" in reply.json["error"]["message"]
                job = await market.call("POST", "/v1/jobs", other, json={"request": PLAIN})
                assert job.status == 202
                assert job.json["waiting_for"] == "its turn: a node has room"
                third = add_renter(session_factory)
                error = (await ask(market, third)).json["error"]
                assert (error["code"], "of all renters" in error["message"]) == ("queue_full", True)
                async with queue(market):
                    assert (await first).status == 200

        asyncio.run(story())

    def test_a_job_says_that_no_node_meets_its_price(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                body = {"request": PLAIN, "max_price": {"input": "0.01", "output": "0.01"}}
                job = (await market.call("POST", "/v1/jobs", renter, json=body)).json
                shown = (await market.call("GET", f"/v1/jobs/{job['id']}", renter)).json
                assert "price" in shown["waiting_for"]

        asyncio.run(story())
