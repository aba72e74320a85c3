"""Several answers to one request: `n` of a chat and of a text completion, streamed and whole, and who pays for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from agent import protocol
from agent.protocol import Accepted, Run, Tokens
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.metering.pricing import Rates, price, worst_case
from marketplace.metering.tokens import TokenCounts
from tests.gateway_world import (
    CHAT,
    MODEL_ID,
    WORDS,
    Behaviour,
    Renter,
    ScriptedAgent,
    World,
    add_renter,
    answers,
    fails,
    until,
    world,
)

ANSWER = "".join(WORDS)
RATES = Rates(100_000_000, 50_000_000, 400_000_000)


def ask(market: World, renter: Renter, **changes: Any) -> Any:
    """A chat that wants three answers."""
    return market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, **{"n": 3, **changes})


async def differs(agent: ScriptedAgent, run: Run) -> None:
    """Answers of different lengths and ends, the second one empty."""
    await agent.say(Accepted(run.attempt, run.epoch))
    await agent.tokens(run, WORDS[:4], choice=0)
    await agent.tokens(run, WORDS[:2], start=4, choice=2)
    await agent.finish(run, 6, "length", reasons=("stop", "stop", "length"))


def goes(*order: int) -> Behaviour:
    """Says one word of each of these choices, then that all is done."""

    async def behave(agent: ScriptedAgent, run: Run) -> None:
        for sequence, choice in enumerate(order):
            await agent.tokens(run, ("a ",), start=sequence, choice=choice)
        await agent.finish(run, len(order), reasons=("stop",) * run.choices)

    return behave


async def chunks_of(market: World, renter: Renter, **changes: Any) -> list[Any]:
    stream = await ask(market, renter, stream=True, stream_options={"include_usage": True}, **changes)
    return [chunk async for chunk in stream]


class TestAWholeAnswer:
    def test_has_every_choice_and_pays_the_prompt_once(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(differs)
                done = await ask(market, renter, max_tokens=20, seed=5)
                found = [(one.index, one.message.content, one.finish_reason) for one in done.choices]
                assert found == [(0, "".join(WORDS[:4]), "stop"), (1, "", "stop"), (2, "".join(WORDS[:2]), "length")]
                (run,) = agent.runs
                assert (run.choices, run.max_output_tokens, json.loads(run.body)["seed"]) == (3, 20, 5)
                counts = TokenCounts.of(prompt=run.prompt_tokens, cached=0, output=6)
                assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (run.prompt_tokens, 6)
                await market.settled()
                (job,), (receipt,) = market.books.jobs(), market.books.receipts()
                assert job.hold_nano == worst_case(RATES, run.prompt_tokens, 3 * 20)
                assert market.books.credit(renter).held_nano == price(counts, RATES, 0).gross_nano
                assert receipt.output_visible_tokens == 6
                assert receipt.node_signature is not None
                assert len(market.books.attempts()) == 1
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_of_a_small_balance_lowers_the_bound_of_each_or_says_what_it_affords(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        poor = add_renter(session_factory, credit_nano=30_000)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                done = await ask(market, poor)
                bound = agent.runs[0].max_output_tokens
                assert worst_case(RATES, agent.runs[0].prompt_tokens, 3 * bound) <= 30_000
                assert done.usage.output_cap["max_tokens"] == bound
                with pytest.raises(openai.APIStatusError) as refused:
                    await ask(market, poor, max_tokens=500)
                assert refused.value.status_code == 402

        asyncio.run(story())

    def test_follows_its_schema_choice_by_choice(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

        async def speaks(agent: ScriptedAgent, run: Run) -> None:
            await agent.tokens(run, ('{"a": 1}',))
            await agent.tokens(run, ('{"b": 1}',), start=1, choice=1)
            await agent.finish(run, 2, reasons=("stop", "stop"))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(speaks)
                done = await ask(market, renter, n=2, response_format=wanted)
                assert [one.schema_check["valid"] for one in done.choices] == [True, False]
                chunks = await chunks_of(market, renter, n=2, response_format=wanted)
                ends = [one for chunk in chunks for one in chunk.choices if one.finish_reason]
                assert [one.schema_check["valid"] for one in ends] == [True, False]

        asyncio.run(story())

    def test_of_a_text_completion_has_every_choice(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                complete = market.client(renter).completions.create
                done = await complete(model=MODEL_ID, prompt="The fox", n=2, best_of=2)
                assert [(one.index, one.text) for one in done.choices] == [(0, ANSWER), (1, ANSWER)]
                texts = ["", ""]
                async for chunk in await complete(model=MODEL_ID, prompt="The fox", n=2, stream=True):
                    for one in chunk.choices:
                        texts[one.index] += one.text
                assert texts == [ANSWER, ANSWER]

        asyncio.run(story())


class TestAStream:
    def test_has_a_role_and_a_finish_for_each_choice_and_one_usage(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(differs)
                chunks = await chunks_of(market, renter)
                assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [6]
                assert chunks[-1].choices == []
                seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
                for chunk in chunks[:-1]:
                    (one,) = chunk.choices
                    seen[one.index].append(one)
                for own in seen.values():
                    assert [one.delta.role for one in own] == ["assistant"] + [None] * (len(own) - 1)
                ends = {index: [one.finish_reason for one in own if one.finish_reason] for index, own in seen.items()}
                assert ends == {0: ["stop"], 1: ["stop"], 2: ["length"]}
                texts = ["".join(one.delta.content or "" for one in own) for own in seen.values()]
                assert texts == ["".join(WORDS[:4]), "", "".join(WORDS[:2])]
                assert chunks[-2].provider["name"].startswith("node_")

        asyncio.run(story())

    def test_is_given_again_in_the_same_bytes(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)
        body = {"model": MODEL_ID, "messages": CHAT, "n": 3, "stream": True}

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(differs)
                sent = {"json": body, "headers": {"idempotency-key": "again"}}
                first = await market.call("POST", "/v1/chat/completions", renter, **sent)
                second = await market.call("POST", "/v1/chat/completions", renter, **sent)
                assert second.headers["idempotent-replayed"] == "true"
                assert first.body == second.body
                assert first.body.count(b'"finish_reason":"') == 3
                assert len(agent.runs) == 1

        asyncio.run(story())

    def test_that_the_client_leaves_in_its_second_choice_pays_for_what_came(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def hangs(agent: ScriptedAgent, run: Run) -> None:
            await agent.tokens(run, WORDS)
            await agent.tokens(run, WORDS[:3], start=len(WORDS), choice=1)
            await agent.cancelled(run)
            await agent.finish(run, len(WORDS) + 3, "cancelled")

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(hangs)
                stream = await ask(market, renter, stream=True)
                async for chunk in stream:
                    if chunk.choices[0].index == 1 and chunk.choices[0].delta.content == WORDS[2]:
                        break
                await stream.close()
                await until(lambda: market.books.outcomes() == ["cancelled"])
                await market.settled()
                assert market.books.receipts()[0].output_visible_tokens == len(WORDS) + 3
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_that_breaks_in_its_second_choice_costs_nothing_and_ends_with_an_error(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def breaks(agent: ScriptedAgent, run: Run) -> None:
            await agent.tokens(run, WORDS)
            await agent.tokens(run, WORDS[:1], start=len(WORDS), choice=1)
            await asyncio.sleep(0.05)
            await agent.fail(run, len(WORDS) + 1, "engine_error")

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(breaks)
                with pytest.raises(openai.APIError):
                    await chunks_of(market, renter)
                await market.settled()
                assert market.books.outcomes() == ["node_failed"]
                assert market.books.receipts() == []
                assert market.books.credit(renter).held_nano == 0

        asyncio.run(story())

    def test_outlives_a_short_break_of_its_nodes_socket(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(begins, resumes=True)
                asking = asyncio.create_task(chunks_of(market, renter, n=2))
                await until(lambda: bool(agent.runs))
                (run,) = agent.runs
                await asyncio.sleep(0.1)
                agent.abort()
                await until(lambda: market.gateway.services.fleet.nodes_connected == 0)
                known = [protocol.RunningAttempt(run.attempt, run.epoch)]
                back = await market.connect(answers, node=agent.node, resumes=True, attempts=known)
                back._texts = agent._texts
                await back.tokens(run, WORDS[1:3], start=2, choice=1)
                await back.finish(run, 4, reasons=("stop", "stop"))
                chunks = await asking
                texts = ["", ""]
                for chunk in chunks:
                    for one in chunk.choices:
                        texts[one.index] += one.delta.content or ""
                assert texts == [WORDS[0], "".join(WORDS[:3])]

        async def begins(agent: ScriptedAgent, run: Run) -> None:
            await agent.tokens(run, WORDS[:1])
            await agent.tokens(run, WORDS[:1], start=1, choice=1)

        asyncio.run(story())


class TestANodeThatLies:
    @pytest.mark.parametrize("order", [(0, 1, 0), (0, 3), (0, 200)])
    def test_about_whose_turn_it_is_fails(
        self, settings: Settings, session_factory: SessionFactory, order: tuple[int, ...]
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(goes(*order))
                with pytest.raises(openai.APIError):
                    await ask(market, renter)
                await market.settled()
                assert market.books.outcomes() == ["node_failed"]
                assert market.books.credit(renter).held_nano == 0

        asyncio.run(story())

    def test_about_the_number_of_answers_fails_and_another_serves(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def short(agent: ScriptedAgent, run: Run) -> None:
            await agent.say(Tokens(run.attempt, run.epoch, 0, "one"))
            await agent.finish(run, 1)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(short, output_nano_usd_per_mtok=100_000_000)
                with pytest.raises(openai.APIError):
                    await ask(market, renter)
                await market.connect(answers, output_nano_usd_per_mtok=100_000_000)
                done = await ask(market, renter)
                assert len(done.choices) == 3

        asyncio.run(story())


class TestAnOldAgent:
    def test_gets_no_request_for_several_answers(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                old = await market.connect(answers, choices=False)
                with pytest.raises(openai.APIStatusError) as refused:
                    await ask(market, renter)
                assert "gives one answer a request" in refused.value.message
                assert (await ask(market, renter, n=1)).choices[0].message.content == ANSWER
                await market.connect(fails("engine_died"), choices=False)
                new = await market.connect(answers)
                assert len((await ask(market, renter)).choices) == 3
                assert ([run.choices for run in old.runs], [run.choices for run in new.runs]) == ([1], [3])

        asyncio.run(story())


class TestAQuote:
    def test_tells_what_all_answers_cost(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)
        body = {"model": MODEL_ID, "messages": CHAT, "max_tokens": 50}

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                one = (await market.call("POST", "/v1/quote", renter, json=body)).json
                four = (await market.call("POST", "/v1/quote", renter, json={**body, "n": 4})).json
                assert (one["n"], four["n"]) == (1, 4)
                prompt = one["prompt_tokens"]
                difference = worst_case(RATES, prompt, 200) - worst_case(RATES, prompt, 50)
                nano = [round(float(quote["cost"]["at_most"]) * 1e9) for quote in (one, four)]
                assert nano[1] - nano[0] == difference
                affordable = [quote["balance"]["affordable_output_tokens"] for quote in (one, four)]
                assert affordable[1] <= affordable[0]

        asyncio.run(story())
