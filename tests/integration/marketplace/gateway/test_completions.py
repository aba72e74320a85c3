"""Text completions through a whole gateway, with the official client and agents that follow a script."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from agent.protocol import Run, Tokens
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.gateway.completions import parse_completion
from marketplace.gateway.strict import InvalidBody
from tests.gateway_world import (
    MODEL_ID,
    WORDS,
    Renter,
    Reply,
    ScriptedAgent,
    World,
    add_renter,
    answers,
    fails,
    stalls,
    until,
    world,
)

PROMPT = "Once upon a time there was a fox."
ANSWER = "".join(WORDS)


async def says_probabilities(agent: ScriptedAgent, run: Run) -> None:
    """Two words with log probabilities, in the shape that agents send."""
    for index, word in enumerate((" in", " a")):
        top = [{"token": word, "logprob": -0.25, "bytes": None}]
        entry = {"token": word, "logprob": -0.25, "bytes": None, "top_logprobs": top}
        extra = json.dumps({"logprobs": {"content": [entry], "refusal": None}}).encode()
        await agent.say(Tokens(run.attempt, run.epoch, index, word, [], False, extra))
    await agent.finish(run, 2)


async def raw(market: World, renter: Renter, **changes: Any) -> Reply:
    return await market.call("POST", "/v1/completions", renter, json={"model": MODEL_ID, "prompt": PROMPT, **changes})


class TestATextCompletion:
    def test_goes_on_from_the_prompt_and_is_charged_once(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                done = await market.client(renter).completions.create(model=MODEL_ID, prompt=PROMPT, max_tokens=32)
                assert done.id.startswith("cmpl-")
                assert done.object == "text_completion"
                assert done.choices[0].text == ANSWER
                assert done.choices[0].finish_reason == "stop"
                assert done.usage is not None
                assert done.usage.completion_tokens == len(WORDS)
                body = json.loads(agent.runs[0].body)
                assert body == {"prompt": PROMPT, "max_tokens": 32}
                variant = market.gateway.services.catalog.resolve(MODEL_ID)
                assert agent.runs[0].prompt_tokens == variant.count_text(PROMPT) == done.usage.prompt_tokens
                await market.settled()
                (receipt,) = market.books.receipts()
                assert receipt.output_visible_tokens == len(WORDS)
                assert market.books.outcomes() == ["complete"]
                assert market.books.endpoints() == ["/v1/completions"]
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_streams_chunks_as_the_official_client_reads_them(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                stream = await market.client(renter).completions.create(
                    model=MODEL_ID, prompt=[PROMPT], stream=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == ANSWER
                reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
                assert [reason for reason in reasons if reason] == ["stop"]
                assert chunks[-1].usage is not None
                assert chunks[-1].usage.completion_tokens == len(WORDS)
                assert not chunks[-1].choices
                text = (await raw(market, renter, stream=True)).body.decode()
                assert text.count("data: [DONE]") == 1
                assert '"usage"' not in text

        asyncio.run(story())

    def test_tells_log_probabilities_in_its_own_shape(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        expected = {
            "tokens": [" in", " a"],
            "token_logprobs": [-0.25, -0.25],
            "top_logprobs": [{" in": -0.25}, {" a": -0.25}],
            "text_offset": [0, 3],
        }

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(says_probabilities)
                client = market.client(renter)
                done = await client.completions.create(model=MODEL_ID, prompt=PROMPT, logprobs=1)
                assert done.choices[0].logprobs is not None
                assert done.choices[0].logprobs.model_dump() == expected
                assert json.loads(agent.runs[0].body)["logprobs"] == 1
                stream = await client.completions.create(model=MODEL_ID, prompt=PROMPT, logprobs=1, stream=True)
                parts = [chunk.choices[0].logprobs async for chunk in stream]
                offsets = [part.text_offset for part in parts if part is not None]
                assert offsets == [[0], [3]]

        asyncio.run(story())

    def test_is_free_when_the_node_fails_and_paid_when_the_client_leaves(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                node = await market.connect(fails("engine_error", after=2))
                client = market.client(renter)
                with pytest.raises(openai.APIError):
                    async for _ in await client.completions.create(model=MODEL_ID, prompt=PROMPT, stream=True):
                        pass
                await market.settled()
                assert market.books.outcomes() == ["node_failed"]
                assert market.books.receipts() == []
                node.behaviour = stalls
                market.gateway.services.fleet.breakers.forgive(node.node.node_id, market.variant_id)
                stream = await client.completions.create(model=MODEL_ID, prompt=PROMPT, stream=True)
                async for _ in stream:
                    break
                await stream.close()
                await until(lambda: len(market.books.outcomes()) == 2)
                await market.settled()
                assert market.books.outcomes()[1] == "cancelled"
                assert market.books.receipts()[0].output_visible_tokens == 3
                assert market.books.broken_rules() == []

        asyncio.run(story())


class TestWhatIsNotTaken:
    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"echo": True}, "echo"),
            ({"suffix": "the end"}, "suffix"),
            ({"n": 9}, "n"),
            ({"best_of": 3}, "best_of"),
            ({"n": 2, "best_of": 3}, "best_of"),
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"prompt": [1, 2, 3]}, "prompt"),
            ({"prompt": [[1, 2]]}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"logprobs": 6}, "logprobs"),
            ({"logprobs": True}, "logprobs"),
            ({"messages": []}, "messages"),
            ({"grammar": "root ::= x"}, "grammar"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
        ],
    )
    def test_is_a_400_that_names_the_field(self, changes: dict[str, Any], field: str) -> None:
        body = {"model": MODEL_ID, "prompt": PROMPT, **changes}
        with pytest.raises(InvalidBody) as caught:
            parse_completion(json.dumps(body).encode())
        assert caught.value.param == field

    def test_has_an_outcome_where_it_was_parsed(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)
        poor = add_renter(session_factory, credit_nano=0)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                assert (await raw(market, renter, echo=True)).param == "echo"
                assert (await raw(market, renter)).status == 503
                await market.connect(answers)
                assert (await raw(market, poor)).status == 402
                long = await raw(market, renter, prompt="fox " * 5_000)
                assert (long.status, long.param) == (400, "prompt")
                assert long.json["error"]["code"] == "context_length_exceeded"
                await market.settled()
                assert market.books.outcomes() == ["no_capacity", "no_balance", "request_rejected"]
                assert set(market.books.endpoints()) == {"/v1/completions"}

        asyncio.run(story())
