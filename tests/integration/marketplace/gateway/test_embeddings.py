"""Embeddings through a whole gateway, with the official client and agents that follow a script."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from array import array
from typing import Any

import openai
import pytest

from agent.engines.simulated_vectors import embed
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.metering.pricing import Rates, price
from marketplace.metering.tokens import TokenCounts
from tests.embedding_world import (
    DIMENSIONS,
    EMBED_MODEL,
    RATE_NANO,
    connect,
    embedding_world,
    embeds,
    embeds_some,
    embeds_then_waits,
    lies,
)
from tests.gateway_world import (
    CHAT,
    MODEL_ID,
    Behaviour,
    Renter,
    Reply,
    World,
    add_renter,
    refuses,
    thinks,
    until,
)

TEXTS = ["The cat sleeps on the sofa.", "A fox.", "Stock markets fell on Monday."]
RATES = Rates(RATE_NANO, 50_000_000, 0)
NAN = struct.pack("<f", math.nan) * DIMENSIONS


def expected(text: str | list[int]) -> list[float]:
    return embed(text, DIMENSIONS).tolist()


def charge_nano(tokens: int) -> int:
    return price(TokenCounts.of(prompt=tokens, cached=0, output=0), RATES, 0).gross_nano


async def raw(market: World, renter: Renter, **changes: Any) -> Reply:
    headers = changes.pop("headers", None)
    body = {"model": EMBED_MODEL, "input": TEXTS, **changes}
    return await market.call("POST", "/v1/embeddings", renter, json=body, headers=headers)


def story_of(settings: Settings, factory: SessionFactory, story: Any, *behaviours: Behaviour, **changes: Any) -> None:
    """Tell a story of a renter and a market with a node for each behaviour; the books must balance after it."""
    renter = add_renter(factory, **changes)

    async def told() -> None:
        async with embedding_world(settings, factory) as market:
            for behaviour in behaviours:
                await connect(market, behaviour)
            await story(market, renter)
            await market.settled()
            assert market.books.broken_rules() == []

    asyncio.run(told())


class TestAnEmbedding:
    def test_is_what_the_node_made_and_costs_its_input(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            async with market.client(renter) as client:
                made = await client.embeddings.create(model=EMBED_MODEL, input=TEXTS)
            assert [each.index for each in made.data] == [0, 1, 2]
            assert [each.embedding for each in made.data] == [expected(text) for text in TEXTS]
            assert made.object == "list"
            assert made.model == EMBED_MODEL
            (receipt,) = market.books.receipts()
            assert receipt.input_uncached_tokens == made.usage.prompt_tokens == made.usage.total_tokens > len(TEXTS)
            assert (receipt.output_visible_tokens, receipt.output_reasoning_tokens, receipt.input_cached_tokens) == (
                0,
                0,
                0,
            )
            assert receipt.charge_nano == charge_nano(made.usage.prompt_tokens) > 0
            assert receipt.node_signature is not None
            assert market.books.outcomes() == ["complete"]
            assert market.books.endpoints() == ["/v1/embeddings"]
            (run,) = market.agents[0].runs
            assert (run.task, run.inputs, run.max_output_tokens) == ("embed", 3, 0)
            assert run.prompt_tokens == made.usage.prompt_tokens > run.longest_input_tokens > 0

        story_of(settings, session_factory, story, embeds)

    def test_comes_as_numbers_or_as_base64_of_the_same(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            numbers = (await raw(market, renter)).json
            packed = (await raw(market, renter, encoding_format="base64")).json
            unpacked = [array("f", base64.b64decode(each["embedding"])).tolist() for each in packed["data"]]
            assert unpacked == [each["embedding"] for each in numbers["data"]]
            assert numbers["usage"]["cost"] == packed["usage"]["cost"]
            assert numbers["provider"]["variant"].startswith(f"{EMBED_MODEL}@")

        story_of(settings, session_factory, story, embeds)

    def test_takes_one_text_token_ids_and_lists_of_them(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            for given, inputs in (("A fox.", ["A fox."]), ([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])):
                reply = await raw(market, renter, input=given, dimensions=DIMENSIONS, user="me", metadata={"a": "b"})
                assert [each["embedding"] for each in reply.json["data"]] == [expected(each) for each in inputs]
            assert [receipt.input_uncached_tokens for receipt in market.books.receipts()][1:] == [3, 3]

        story_of(settings, session_factory, story, embeds)

    def test_with_an_idempotency_key_is_made_and_paid_once(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            first, second = [await raw(market, renter, headers={"idempotency-key": "one"}) for _ in range(2)]
            assert first.status == second.status == 200
            assert first.body == second.body
            assert len(market.books.receipts()) == len(market.agents[0].runs) == 1

        story_of(settings, session_factory, story, embeds)

    def test_tells_its_use_by_request_id_and_its_price_before(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            body = {"model": EMBED_MODEL, "input": TEXTS}
            quoted = (await market.call("POST", "/v1/quote", renter, json=body)).json
            reply = await raw(market, renter)
            assert quoted["cost"]["likely"] == quoted["cost"]["at_most"] == reply.json["usage"]["cost"]
            assert quoted["prompt_tokens"] == reply.json["usage"]["prompt_tokens"]
            assert quoted["max_output_tokens"] == 0
            used = (await market.call("GET", f"/v1/usage/{reply.headers['x-request-id']}", renter)).json
            assert used["cost"] == reply.json["usage"]["cost"]
            assert used["endpoint"] == "/v1/embeddings"
            told = (await market.call("POST", "/v1/explain", renter, json=body)).json
            assert told["fitting"] == 1
            counted = await market.call("POST", "/v1/tokenize", renter, json={"model": EMBED_MODEL, "input": "A fox."})
            assert counted.json["count"] == len(counted.json["tokens"]) > 0

        story_of(settings, session_factory, story, embeds)

    def test_fits_where_each_input_does_though_all_together_do_not(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            await connect(market, embeds, context_per_slot=256)
            reply = await raw(market, renter, input=["word " * 200] * 4)
            assert reply.status == 200
            assert reply.json["usage"]["prompt_tokens"] > 4 * 200

        story_of(settings, session_factory, story)


class TestWhatIsRefused:
    def test_says_what_is_wrong_and_where(self, settings: Settings, session_factory: SessionFactory) -> None:
        wrong: list[tuple[dict[str, Any], str, str]] = [
            ({"input": ""}, "invalid_request", "input[0]"),
            ({"input": []}, "invalid_request", "input"),
            ({"input": ["a", ""]}, "invalid_request", "input[1]"),
            ({"input": ["a", [1]]}, "invalid_request", "input[1]"),
            ({"input": [[1], []]}, "invalid_request", "input[1]"),
            ({"input": [1, 10_000_000]}, "invalid_request", "input[0]"),
            ({"input": ["a"] * 2_049}, "invalid_request", "input"),
            ({"input": ["a", "word " * 3_000]}, "context_length_exceeded", "input[1]"),
            ({"input": ["a", "word " * 300_000]}, "context_length_exceeded", "input[1]"),
            ({"dimensions": 128}, "unsupported_dimensions", "dimensions"),
            ({"encoding_format": "int8"}, "invalid_request", "encoding_format"),
            ({"stream": True}, "invalid_request", "stream"),
            ({"model": MODEL_ID}, "wrong_task", "model"),
            ({"model": "fallow/auto"}, "invalid_request", "model"),
        ]

        async def story(market: World, renter: Renter) -> None:
            for changes, code, param in wrong:
                reply = await raw(market, renter, **changes)
                error = reply.json["error"]
                assert (reply.status, error["code"], error["param"]) == (400, code, param), error
            assert market.books.receipts() == []

        story_of(settings, session_factory, story, embeds)

    def test_a_chat_with_a_model_that_embeds_names_one_that_chats(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            with pytest.raises(openai.BadRequestError, match=MODEL_ID) as caught:
                await market.client(renter).chat.completions.create(model=EMBED_MODEL, messages=CHAT)
            assert caught.value.code == "wrong_task"
            assert market.books.outcomes() == ["request_rejected"]

        story_of(settings, session_factory, story, embeds)

    def test_models_say_what_they_are_for(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, renter: Renter) -> None:
            listed = (await market.call("GET", "/v1/models", renter)).json["data"]
            found = {each["id"]: (each["task"], each["endpoints"]) for each in listed}
            assert found == {
                MODEL_ID: ("chat", ["/v1/chat/completions", "/v1/completions"]),
                EMBED_MODEL: ("embed", ["/v1/embeddings"]),
            }
            (embedding,) = [each for each in listed if each["id"] == EMBED_MODEL]
            (chat,) = [each for each in listed if each["id"] == MODEL_ID]
            assert embedding["embedding"] == {"dimensions": DIMENSIONS, "pooling": "mean"}
            assert embedding["weights_sha256"] == chat["weights_sha256"]
            assert embedding["variant_sha256"] != chat["variant_sha256"]

        story_of(settings, session_factory, story, embeds)

    def test_a_key_with_a_list_of_models_keeps_to_it(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, renter: Renter) -> None:
            assert (await raw(market, renter)).status == 403

        story_of(settings, session_factory, story, embeds, models=[MODEL_ID])

    def test_an_empty_account_is_told_what_is_missing(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            reply = await raw(market, renter)
            assert (reply.status, reply.json["error"]["code"]) == (402, "insufficient_balance"), reply.json
            assert "max_tokens" not in reply.json["error"]["message"]
            assert market.books.outcomes() == ["no_balance"]

        story_of(settings, session_factory, story, embeds, credit_nano=0)


class TestAFailure:
    @pytest.mark.parametrize(
        "behaviour",
        [embeds_some(2), lies({"data": NAN * 3})],
        ids=["some", "nan"],
    )
    def test_of_a_node_costs_nothing(
        self, settings: Settings, session_factory: SessionFactory, behaviour: Behaviour
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            reply = await raw(market, renter)
            assert reply.status == 502, reply.body
            assert market.books.receipts() == []
            assert market.books.outcomes() == ["node_failed"]
            assert market.books.attempts()[0].fault == "node"

        story_of(settings, session_factory, story, behaviour)

    def test_midway_is_made_good_by_another_node_from_the_start(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        broken: list[Any] = []

        async def breaks_once(agent: Any, run: Any) -> None:
            if broken:
                await embeds(agent, run)
            else:
                broken.append(agent)
                await embeds_some(2)(agent, run)

        async def story(market: World, renter: Renter) -> None:
            reply = await raw(market, renter)
            assert [each["embedding"] for each in reply.json["data"]] == [expected(text) for text in TEXTS]
            assert len(market.books.attempts()) == 2
            assert len(market.books.receipts()) == 1

        story_of(settings, session_factory, story, breaks_once, breaks_once)

    def test_a_full_node_is_no_fault(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, renter: Renter) -> None:
            assert (await raw(market, renter)).status == 503
            assert market.books.outcomes() == ["no_capacity"]

        story_of(settings, session_factory, story, refuses("slot_taken"))


class TestAClientThatLeaves:
    @pytest.mark.parametrize("behaviour", [thinks, embeds_then_waits(2)], ids=["before", "midway"])
    def test_stops_the_node_and_pays_nothing(
        self, settings: Settings, session_factory: SessionFactory, behaviour: Behaviour
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            asked = asyncio.create_task(raw(market, renter))
            await until(lambda: market.agents[0].runs)
            await asyncio.sleep(0.05)
            asked.cancel()
            await until(lambda: market.agents[0].cancels)
            await until(lambda: market.books.outcomes() == ["cancelled_early"])
            assert market.books.receipts() == []

        story_of(settings, session_factory, story, behaviour)

    def test_too_often_pays_for_the_inputs_whose_vectors_were_made(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            tokens = [
                market.gateway.services.catalog.resolve(EMBED_MODEL).count_text_prompt(text).tokens for text in TEXTS
            ]
            asked = asyncio.create_task(raw(market, renter))
            beating = market.gateway.services.pulse._beating
            await until(lambda: any(one.run is not None and one.run.produced for one in beating))
            asked.cancel()
            await until(lambda: market.books.outcomes() == ["cancelled_early"])
            (receipt,) = market.books.receipts()
            assert receipt.input_uncached_tokens == sum(tokens[:2])

        story_of(
            settings.model_copy(update={"free_prefill_cancels_per_hour": 0}),
            session_factory,
            story,
            embeds_then_waits(2),
        )


def test_a_large_answer_is_whole_and_in_order(settings: Settings, session_factory: SessionFactory) -> None:
    texts = [f"text number {number}" for number in range(700)]

    async def story(market: World, renter: Renter) -> None:
        async with market.client(renter) as client:
            made = await client.embeddings.create(model=EMBED_MODEL, input=texts)
        assert len(made.data) == len(texts)
        assert made.data[-1].embedding == expected(texts[-1])
        assert json.loads(json.dumps([each.index for each in made.data])) == list(range(len(texts)))
        reply = await raw(market, renter, input=["a"] * 1_000, headers={"idempotency-key": "large"})
        assert (reply.status, reply.json["error"]["code"]) == (400, "answer_too_large")

    story_of(settings, session_factory, story, embeds)
