"""Chats through a whole gateway, with the official client and agents that follow a script."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from agent.protocol import Run
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.metering.pricing import Rates, price
from marketplace.metering.tokens import TokenCounts
from tests.gateway_world import (
    CHAT,
    CREDIT_NANO,
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
    until,
    world,
)

ANSWER = "".join(WORDS)
RATES = Rates(input=100_000_000, cached_input=50_000_000, output=400_000_000)


async def stream_text(client: openai.AsyncOpenAI, **changes: Any) -> tuple[str, list[Any]]:
    stream = await client.chat.completions.create(
        **{"model": MODEL_ID, "messages": CHAT, "stream": True, "stream_options": {"include_usage": True}, **changes}
    )
    chunks = [chunk async for chunk in stream]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


async def collect(stream: Any, into: list[Any]) -> None:
    async for chunk in stream:
        into.append(chunk)


class TestACompleteAnswer:
    def test_streams_is_charged_once_and_says_what_it_cost(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                text, chunks = await stream_text(market.client(renter))
                assert text == ANSWER
                assert chunks[0].choices[0].delta.role == "assistant"
                finishes = [c for c in chunks if c.choices and c.choices[0].finish_reason]
                assert [c.choices[0].finish_reason for c in finishes] == ["stop"]
                usage = chunks[-1].usage
                assert not chunks[-1].choices
                assert usage is not None
                assert usage.completion_tokens == len(WORDS)
                prompt = agent.runs[0].prompt_tokens
                assert usage.prompt_tokens == prompt
                counts = TokenCounts.of(prompt=prompt, cached=0, output=len(WORDS))
                gross = price(counts, RATES, 0).gross_nano
                assert usage.model_extra is not None
                assert round(float(usage.model_extra["cost"]) * 1e9) == gross
                await market.settled()
                (receipt,) = market.books.receipts()
                assert receipt.charge_nano == gross == receipt.owner_nano + receipt.fee_nano
                assert (receipt.output_visible_tokens, receipt.input_uncached_tokens) == (len(WORDS), prompt)
                credit = market.books.credit(renter)
                assert (credit.posted_nano, credit.held_nano) == (CREDIT_NANO, gross)
                assert market.books.outcomes() == ["complete"]
                assert [attempt.end_code for attempt in market.books.attempts()] == ["delivered"]
                assert len(agent.acks) == 1
                assert market.offers()[0].slots_busy == 0
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_reads_the_same_without_streaming(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                raw = await market.client(renter).chat.completions.with_raw_response.create(
                    model=MODEL_ID, messages=CHAT
                )
                done = raw.parse()
                assert raw.headers["x-request-id"].startswith("req_")
                assert raw.headers["x-ratelimit-limit-requests"]
                assert done.choices[0].message.content == ANSWER
                assert done.choices[0].finish_reason == "stop"
                assert done.usage is not None
                assert done.usage.completion_tokens == len(WORDS)
                await market.settled()
                assert market.books.outcomes() == ["complete"]
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_shows_usage_in_a_stream_only_to_who_asked(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                for options in (None, {}, {"include_usage": False}):
                    _, chunks = await stream_text(market.client(renter), stream_options=options)
                    assert all(chunk.usage is None for chunk in chunks)
                    assert all(chunk.choices for chunk in chunks)
                await market.settled()
                charges = {receipt.charge_nano for receipt in market.books.receipts()}
                assert len(charges) == 1

        asyncio.run(story())

    def test_that_ends_at_once_with_stop_is_complete(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def silent(agent: ScriptedAgent, run: Run) -> None:
            await agent.finish(run, 0, "stop")

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(silent)
                text, chunks = await stream_text(market.client(renter))
                assert text == ""
                assert chunks[0].choices[0].finish_reason == "stop"
                await market.settled()
                (receipt,) = market.books.receipts()
                assert receipt.output_visible_tokens == 0
                assert receipt.charge_nano > 0
                assert market.books.outcomes() == ["complete"]

        asyncio.run(story())

    def test_is_never_billed_beyond_its_text_whatever_the_node_claims(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def boasts(agent: ScriptedAgent, run: Run) -> None:
            from agent.protocol import Tokens

            await agent.say(Tokens(run.attempt, run.epoch, 0, "The quick", [1] * 50))
            await agent.finish(run, 1, "stop")

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(boasts)
                await stream_text(market.client(renter))
                await market.settled()
                (receipt,) = market.books.receipts()
                assert receipt.output_visible_tokens == 2

        asyncio.run(story())


class TestAReceipt:
    def test_keeps_the_nodes_signature_only_where_it_covers_what_was_said(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def forges(agent: ScriptedAgent, run: Run) -> None:
            await agent.tokens(run)
            agent._texts[run.attempt] = "something else"
            await agent.finish(run, len(WORDS))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                await stream_text(market.client(renter))
                agent.behaviour = forges
                await stream_text(market.client(renter))
                await market.settled()
                signed, forged = market.books.receipts()
                assert signed.node_signature is not None
                assert forged.node_signature is None
                assert signed.charge_nano == forged.charge_nano

        asyncio.run(story())

    def test_bills_a_prefix_at_the_cached_rate_where_the_node_promised_to_keep_it(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                # It reports no cached tokens, but it said that it keeps prefixes for a minute.
                await market.connect(answers, prefix_cache_s=60.0)
                await stream_text(market.client(renter))
                _, chunks = await stream_text(market.client(renter))
                await market.settled()
                first, second = market.books.receipts()
                assert first.input_cached_tokens == 0
                assert second.input_uncached_tokens == 1
                assert second.input_cached_tokens == first.input_uncached_tokens - 1
                assert second.charge_nano < first.charge_nano
                details = chunks[-1].usage.prompt_tokens_details
                assert details.cached_tokens == second.input_cached_tokens

        asyncio.run(story())


class TestAClientThatLeaves:
    def test_pays_for_what_was_delivered_and_frees_the_engine(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(stalls)
                stream = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                seen = ""
                async for chunk in stream:
                    seen += chunk.choices[0].delta.content or ""
                    if seen == "".join(WORDS[:3]):
                        break
                await stream.close()
                await until(lambda: agent.cancels, within_s=2.0)
                await market.settled()
                assert market.books.outcomes() == ["cancelled"]
                (receipt,) = market.books.receipts()
                assert receipt.output_visible_tokens == 3
                assert market.offers()[0].slots_busy == 0
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_before_the_first_token_pays_nothing_the_first_times(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def leave(market: World, stream: bool) -> None:
            call = market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=stream)
            task = asyncio.ensure_future(call)
            runs = len(market.agents[0].runs)
            await until(lambda: len(market.agents[0].runs) > runs)
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await market.settled()

        async def story() -> None:
            async with world(settings, session_factory, free_prefill_cancels_per_hour=2) as market:
                await market.connect(thinks)
                for stream in (True, False, True):
                    await leave(market, stream)
                assert market.books.outcomes() == ["cancelled_early"] * 3
                (receipt,) = market.books.receipts()
                assert receipt.output_visible_tokens == 0
                assert receipt.input_uncached_tokens == market.agents[0].runs[0].prompt_tokens
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_of_an_answer_that_is_not_streamed_pays_as_for_a_cancel(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(stalls)
                task = asyncio.ensure_future(
                    market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                )
                await until(lambda: agent.runs)
                await asyncio.sleep(0.2)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await until(lambda: agent.cancels, within_s=2.0)
                await market.settled()
                assert market.books.outcomes() == ["cancelled"]
                assert market.books.receipts()[0].output_visible_tokens == 3

        asyncio.run(story())


class TestANodeThatFails:
    @pytest.mark.parametrize("behaviour", [fails("engine_error"), fails("owner_preempted"), refuses("slot_taken")])
    def test_before_the_first_token_hands_over_to_another(
        self, settings: Settings, session_factory: SessionFactory, behaviour: Any
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                # The cheaper one is tried first.
                await market.connect(behaviour, output_nano_usd_per_mtok=100_000_000)
                await market.connect(behaviour, output_nano_usd_per_mtok=100_000_000)
                await market.connect(answers, output_nano_usd_per_mtok=100_000_000)
                text, _ = await stream_text(market.client(renter))
                assert text == ANSWER
                await market.settled()
                assert market.books.outcomes() == ["complete"]
                attempts = market.books.attempts()
                assert attempts[-1].end_code == "delivered"
                assert len({attempt.node_id for attempt in attempts}) == len(attempts)
                assert market.books.broken_rules() == []

        asyncio.run(story())

    @pytest.mark.parametrize(
        ("code", "outcome", "status"),
        [
            ("engine_died", "node_failed", 502),
            ("engine_empty", "empty", 502),
            ("owner_preempted", "owner_preempted", 503),
            ("lease_expired", "platform_failed", 503),
            ("engine_rejected", "request_rejected", 400),
            ("context_overflow", "request_rejected", 400),
        ],
    )
    def test_alone_costs_nothing_and_keeps_its_status(
        self, settings: Settings, session_factory: SessionFactory, code: str, outcome: str, status: int
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(fails(code))
                for stream in (True, False):
                    market.gateway.services.fleet.breakers.forgive(market.agents[0].node.node_id, market.variant_id)
                    with pytest.raises(openai.APIStatusError) as caught:
                        await market.client(renter).chat.completions.create(
                            model=MODEL_ID, messages=CHAT, stream=stream
                        )
                    assert caught.value.status_code == status
                    assert caught.value.response.headers["x-request-id"]
                await market.settled()
                assert market.books.outcomes() == [outcome] * 2
                assert market.books.receipts() == []
                assert market.books.credit(renter).held_nano == 0
                assert market.books.broken_rules() == []

        asyncio.run(story())

    @pytest.mark.parametrize(
        ("code", "outcome"), [("engine_died", "node_failed"), ("owner_preempted", "owner_preempted")]
    )
    def test_mid_stream_ends_it_with_an_error_event_and_costs_nothing(
        self, settings: Settings, session_factory: SessionFactory, code: str, outcome: str
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(fails(code, after=3))
                await market.connect(fails(code, after=3))
                stream = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                seen: list[Any] = []
                with pytest.raises(openai.APIError):
                    await collect(stream, seen)
                assert "".join(chunk.choices[0].delta.content for chunk in seen) == "".join(WORDS[:3])
                assert all(chunk.choices[0].finish_reason is None for chunk in seen)
                await market.settled()
                assert market.books.outcomes() == [outcome]
                assert market.books.receipts() == []
                assert len(market.books.attempts()) == 1
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_mid_answer_that_is_not_streamed_hands_over(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                # The dearer one is tried second, at no more than the first one's price.
                await market.connect(fails("engine_died", after=3))
                second = await market.connect(answers)
                await until(lambda: len(market.offers()) == 2)
                first_tried = False
                for _ in range(8):
                    done = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                    assert done.choices[0].message.content == ANSWER
                    first_tried = bool(market.agents[0].runs)
                    if first_tried:
                        break
                assert first_tried
                assert second.runs
                await market.settled()
                assert set(market.books.outcomes()) == {"complete"}
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_because_the_request_kills_engines_is_not_blamed_after_the_second_one(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                for _ in range(3):
                    await market.connect(fails("engine_died"))
                with pytest.raises(openai.BadRequestError) as caught:
                    await stream_text(market.client(renter))
                assert "engines of two nodes" in caught.value.message
                assert sum(len(agent.runs) for agent in market.agents) == 2
                await market.settled()
                assert market.books.outcomes() == ["request_rejected"]
                assert market.books.faults() == [0, 0, 0]
                resting = market.gateway.services.fleet.breakers.resting(
                    [agent.node.node_id for agent in market.agents], market.variant_id, time.monotonic()
                )
                assert resting == frozenset()
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_that_vanishes_mid_stream_is_a_failure_of_the_node(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def vanishes(agent: ScriptedAgent, run: Run) -> None:
            await agent.tokens(run, WORDS[:3])
            await asyncio.sleep(0.1)
            agent.abort()

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(vanishes)
                with pytest.raises(openai.APIError):
                    await stream_text(market.client(renter))
                await market.settled()
                assert market.books.outcomes() == ["node_failed"]
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_that_closes_without_a_finish_reason_is_an_error_never_a_stop(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def blank(agent: ScriptedAgent, run: Run) -> None:
            await agent.tokens(run, WORDS[:3])
            await asyncio.sleep(0.05)
            await agent.finish(run, 3, "")

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(blank)
                with pytest.raises(openai.APIError):
                    await stream_text(market.client(renter))
                await market.settled()
                assert market.books.outcomes() == ["node_failed"]
                assert market.books.receipts() == []

        asyncio.run(story())
