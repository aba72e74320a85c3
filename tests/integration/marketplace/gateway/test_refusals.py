"""What the gateway refuses, in which words, and that nothing is lost or charged over it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy import select

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.jobs.demand import RefusedMinute
from tests.fleet_world import telemetry
from tests.gateway_world import CHAT, MODEL_ID, WORDS, Renter, World, add_renter, answers, thinks, until, world


async def post(market: World, renter: Renter | None, body: bytes, path: str = "/v1/chat/completions") -> Any:
    """(status, headers, parsed body) of a raw POST."""
    headers = {"content-type": "application/json"}
    if renter is not None:
        headers["authorization"] = f"Bearer {renter.secret}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(market.url + path, data=body, headers=headers) as response,
    ):
        return response.status, response.headers, await response.json()


def chat_body(**changes: Any) -> bytes:
    return json.dumps({"model": MODEL_ID, "messages": CHAT, **changes}).encode()


class TestARequestThatCannotBeServed:
    def test_of_an_unknown_key_is_401_and_leaves_no_row(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story() -> None:
            async with world(settings, session_factory) as market:
                stranger = Renter(market.variant_id, market.variant_id, "sk-fallow-" + "x" * 43)
                for renter in (None, stranger):
                    status, headers, body = await post(market, renter, chat_body())
                    assert (status, body["error"]["type"]) == (401, "authentication_error")
                    assert headers["x-request-id"].startswith("req_")
                assert market.books.outcomes() == []

        asyncio.run(story())

    def test_for_an_unknown_model_is_404_with_the_nearest_names(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                with pytest.raises(openai.NotFoundError) as caught:
                    await market.client(renter).chat.completions.create(model="smolm2-135m", messages=CHAT)
                assert caught.value.code == "model_not_found"
                assert MODEL_ID in caught.value.message
                assert market.books.outcomes() == ["request_rejected"]

        asyncio.run(story())

    def test_for_larger_slots_than_any_is_400_and_noted_as_demand_unless_it_is_beyond_the_model(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                context = market.offers()[0].context_per_slot
                for wanted in (context, 10**6):
                    status, _, body = await post(market, renter, chat_body(max_tokens=wanted))
                    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            with session_factory() as session:
                noted = [
                    (row.node_id, row.filter, row.requests, row.max_output_tokens)
                    for row in session.scalars(select(RefusedMinute))
                ]
            assert noted == [(agent.node.node_id, "CONTEXT", 1, context)]

        asyncio.run(story())

    def test_without_a_node_is_503_and_says_when_to_come_back(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                with pytest.raises(openai.InternalServerError) as caught:
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                assert caught.value.status_code == 503
                assert "no node is connected" in caught.value.message
                assert int(caught.value.response.headers["retry-after"]) > 0
                assert market.books.outcomes() == ["no_capacity"]
                assert market.books.credit(renter).held_nano == 0

        asyncio.run(story())

    def test_with_all_slots_taken_says_which_filter_refused(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(thinks, slots=1)
                await market.connect(answers)
                await market.agents[1].say(telemetry(available=False, reason="a game runs"))
                await until(lambda: sum(offer.available for offer in market.offers()) == 1)
                first = asyncio.ensure_future(
                    market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                )
                await until(lambda: agent.runs)
                with pytest.raises(openai.InternalServerError) as caught:
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert "no free slot" in caught.value.message
                assert "owner is using the machine" in caught.value.message
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await market.settled()
                assert sorted(market.books.outcomes()) == ["cancelled_early", "no_capacity"]

        asyncio.run(story())

    def test_that_would_come_too_late_everywhere_says_both_times_and_when_to_come_back(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        # A prompt takes half of the useful time here: the third one to wait is one too many.
        eager = settings.model_copy(update={"first_token_s": 0.5, "first_token_tokens_per_s": 1e9})

        async def story() -> None:
            async with world(eager, session_factory) as market:
                agent = await market.connect(thinks, slots=64, prefill_tokens_per_s=200.0)
                waiting, refused = [], None
                for number in range(20):
                    asked = asyncio.ensure_future(post(market, renter, chat_body()))
                    waiting.append(asked)
                    await until(lambda asked=asked, number=number: asked.done() or len(agent.runs) > number)
                    if asked.done():
                        refused = waiting.pop().result()
                        break
                assert waiting
                assert refused is not None
                status, headers, body = refused
                error = body["error"]
                assert (status, error["code"], error["refused"]) == (503, "no_capacity", {"late": 1})
                assert error["predicted_ttft_s"] > error["useful_ttft_s"] >= 0.5
                assert "first token would come too late" in error["message"]
                assert "POST /v1/jobs" in error["message"]
                assert 1 <= int(headers["retry-after"]) <= 60
                for asked in waiting:
                    asked.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                await market.settled()
                assert market.books.credit(renter).held_nano == 0

        asyncio.run(story())

    def test_with_a_prompt_over_the_slot_is_400_before_any_charge(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers, context_per_slot=1_024)
                long = [{"role": "user", "content": "word " * 1_100}]
                for changes in ({"messages": long}, {"messages": CHAT, "max_tokens": 1_020}):
                    status, _, body = await post(market, renter, chat_body(**changes))
                    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
                done = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert done.choices[0].message.content == "".join(WORDS)
                assert len(agent.runs) == 1
                await market.settled()
                assert market.books.outcomes() == ["request_rejected", "request_rejected", "complete"]

        asyncio.run(story())

    def test_over_its_rate_is_429_and_recorded(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory, requests_per_minute=2)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                client = market.client(renter)
                for _ in range(2):
                    await client.chat.completions.create(model=MODEL_ID, messages=CHAT)
                with pytest.raises(openai.RateLimitError) as caught:
                    await client.chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert int(caught.value.response.headers["retry-after"]) >= 1
                assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
                await market.settled()
                assert market.books.outcomes() == ["complete", "complete", "rate_limited"]

        asyncio.run(story())

    def test_while_the_gateway_drains_is_503(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                market.gateway.services.draining = True
                status, headers, body = await post(market, renter, chat_body())
                assert (status, body["error"]["code"]) == (503, "gateway_draining")
                assert headers["retry-after"]

        asyncio.run(story())


class TestABalance:
    def test_that_is_small_lowers_an_answer_that_the_client_did_not_bound_and_says_so(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        # Five tokens of output at most, at 400 nano each, beside the prompt.
        renter = add_renter(session_factory, credit_nano=9_000)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                raw = await market.client(renter).chat.completions.with_raw_response.create(
                    model=MODEL_ID, messages=CHAT
                )
                done = raw.parse()
                cap = agent.runs[0].max_output_tokens
                assert cap < 1_000
                assert raw.headers["x-fallow-max-tokens"] == str(cap)
                assert done.usage is not None
                assert done.usage.model_extra is not None
                assert done.usage.model_extra["output_cap"] == {"max_tokens": cap, "reason": "balance"}
                await market.settled()
                credit = market.books.credit(renter)
                assert credit.available_nano >= 0
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_that_does_not_cover_the_bound_asked_is_402_with_the_shortfall_and_what_would_do(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory, credit_nano=9_000)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                with pytest.raises(openai.APIStatusError) as caught:
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=500)
                assert caught.value.status_code == 402
                error = caught.value.body
                assert isinstance(error, dict)
                assert error["code"] == "insufficient_balance"
                assert error["available"] == "0.000009"
                affordable = error["affordable_output_tokens"]
                assert 0 < affordable < 500
                await market.client(renter).chat.completions.create(
                    model=MODEL_ID, messages=CHAT, max_tokens=affordable
                )
                assert len(agent.runs) == 1
                await market.settled()
                assert market.books.outcomes() == ["no_balance", "complete"]

        asyncio.run(story())

    def test_of_nothing_is_served_by_a_free_offer(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory, credit_nano=0)
        free = {
            "input_nano_usd_per_mtok": 0,
            "cached_input_nano_usd_per_mtok": 0,
            "output_nano_usd_per_mtok": 0,
        }

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                with pytest.raises(openai.APIStatusError) as caught:
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert caught.value.status_code == 402
                await market.connect(answers, **free)
                done = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert done.choices[0].message.content == "".join(WORDS)
                await market.settled()
                assert market.books.outcomes() == ["no_balance", "complete"]
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_is_never_overspent_by_requests_at_once(self, settings: Settings, session_factory: SessionFactory) -> None:
        # Three worst cases of some 44,000 nano fit, a fourth does not.
        renter = add_renter(session_factory, credit_nano=140_000)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(thinks, slots=32)
                calls = [
                    asyncio.ensure_future(
                        market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=100)
                    )
                    for _ in range(20)
                ]
                await until(lambda: sum(call.done() for call in calls) == 17)
                refused = [call.exception() for call in calls if call.done()]
                assert all(isinstance(error, openai.APIStatusError) and error.status_code == 402 for error in refused)
                assert market.books.credit(renter).available_nano >= 0
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                await market.settled()
                assert market.books.outcomes().count("no_balance") == 17
                assert market.books.credit(renter).held_nano == 0
                assert market.books.broken_rules() == []

        asyncio.run(story())


class TestABadRequest:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"not json",
            b"[]",
            b'{"model":"m"}',
            b'{"model":"m","messages":[]}',
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
            b'{"model":"m","model":"m","messages":[{"role":"user","content":"x"}]}',
            b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
            b'{"model":"m","messages":[{"role":"user","content":"\\u0000"}]}',
            b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"colour":"blue"}',
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        ],
    )
    def test_is_400_in_the_shape_that_clients_know(
        self, settings: Settings, session_factory: SessionFactory, body: bytes
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                for path in ("/v1/chat/completions", "/v1/quote"):
                    status, headers, answer = await post(market, renter, body, path)
                    assert status == 400
                    assert headers["content-type"] == "application/json"
                    assert headers["x-request-id"].startswith("req_")
                    assert set(answer["error"]) >= {"message", "type", "param", "code"}
                assert market.books.outcomes() == []

        asyncio.run(story())

    def test_that_is_too_large_is_413(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, body_limit_bytes=2_048) as market:
                large = chat_body(user="x" * 4_000)
                for path in ("/v1/chat/completions", "/v1/quote", "/v1/jobs"):
                    status, _, answer = await post(market, renter, large, path)
                    assert (status, answer["error"]["code"]) == (413, "request_too_large")

        asyncio.run(story())

    def test_to_an_unknown_path_or_with_a_wrong_method_is_an_error_object(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story() -> None:
            async with world(settings, session_factory) as market, aiohttp.ClientSession() as session:
                for method, path, status in (
                    ("GET", "/v1/nothing", 404),
                    ("GET", "/v1/chat/completions", 405),
                    ("DELETE", "/v1/models", 405),
                    ("POST", "/healthz", 405),
                ):
                    async with session.request(method, market.url + path) as response:
                        assert response.status == status
                        assert (await response.json())["error"]["message"]
                        assert response.headers["x-request-id"]

        asyncio.run(story())

    def test_that_is_not_http_is_an_error_object(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story() -> None:
            async with world(settings, session_factory) as market:
                reader, writer = await asyncio.open_connection("127.0.0.1", market.settings.port)
                writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
                answer = await reader.read()
                head, _, body = answer.partition(b"\r\n\r\n")
                assert b" 400 " in head
                assert json.loads(body)["error"]["type"] == "invalid_request_error"
                writer.close()

        asyncio.run(story())
