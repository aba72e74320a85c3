"""What was used, as its renter asks for it; what a request would use, before it is sent."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.metering.pricing import Rates, price
from marketplace.metering.tokens import TokenCounts
from tests.gateway_world import (
    CHAT,
    MODEL_ID,
    WORDS,
    Renter,
    World,
    add_renter,
    answers,
    fails,
    stalls,
    thinks,
    until,
    world,
)

RATES = Rates(input=100_000_000, cached_input=50_000_000, output=400_000_000)


async def ask(market: World, renter: Renter, path: str, **query: Any) -> Any:
    reply = await market.call("GET", path, renter, params={name: str(value) for name, value in query.items()})
    assert reply.status == 200, reply.body
    return reply.json


class TestUsageByGroup:
    def test_every_receipt_is_in_one_bucket_and_the_sums_are_the_charges(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        stranger = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                client = market.client(renter)
                for _ in range(3):
                    await client.chat.completions.create(model=MODEL_ID, messages=CHAT)
                await client.completions.create(model=MODEL_ID, prompt="The fox")
                await market.settled()
                charged = sum(receipt.charge_nano for receipt in market.books.receipts())
                today = datetime.now(UTC).date()
                usage = await ask(market, renter, "/v1/usage")
                (bucket,) = usage["data"]
                assert (bucket["day"], bucket["model"], bucket["key_id"]) == (today.isoformat(), MODEL_ID, None)
                assert (bucket["requests"], bucket["completion_tokens"]) == (4, 4 * len(WORDS))
                assert round(float(bucket["cost"]) * 1e9) == charged
                assert usage["has_more"] is False
                by_key = await ask(market, renter, "/v1/usage", group_by="key", end=today + timedelta(days=1))
                assert by_key["data"][0]["key_id"] == f"key_{renter.key_id.hex}"
                assert by_key["data"][0]["day"] is None
                before = await ask(market, renter, "/v1/usage", start=today - timedelta(days=9), end=today)
                assert before["data"] == []
                assert (await ask(market, stranger, "/v1/usage"))["data"] == []

        asyncio.run(story())

    def test_a_day_begins_by_the_clocks_of_the_zone(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                for _ in range(2):
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                await market.settled()
                with transaction(session_factory) as session:
                    session.execute(text("alter table receipts disable trigger all"))
                    session.execute(
                        text(
                            "update receipts r set at = case when r.id = (select min(id::text)::uuid from receipts) "
                            "then timestamptz '2026-03-14 18:14:59.9+00' else timestamptz '2026-03-14 18:15:00+00' end"
                        )
                    )
                days = {"start": "2026-03-14", "end": "2026-03-16"}
                kathmandu = await ask(market, renter, "/v1/usage", zone="Asia/Kathmandu", **days)
                assert [(row["day"], row["requests"]) for row in kathmandu["data"]] == [
                    ("2026-03-14", 1),
                    ("2026-03-15", 1),
                ]
                utc = await ask(market, renter, "/v1/usage", **days)
                assert [(row["day"], row["requests"]) for row in utc["data"]] == [("2026-03-14", 2)]
                edge = await ask(
                    market, renter, "/v1/usage", zone="Asia/Kathmandu", start="2026-03-15", end="2026-03-16"
                )
                assert [row["requests"] for row in edge["data"]] == [1]

        asyncio.run(story())

    @pytest.mark.parametrize(
        ("query", "param"),
        [
            ({"start": "2026-02-02", "end": "2026-02-02"}, "end"),
            ({"start": "2024-01-01", "end": "2026-01-01"}, "start"),
            ({"zone": "Mars/Olympus"}, "zone"),
            ({"start": "yesterday"}, "start"),
            ({"group_by": "planet"}, "group_by.0"),
            ({"from": "2026-01-01"}, "from"),
            ({"start": "0001-01-01", "end": "0001-02-01"}, "start"),
        ],
    )
    def test_a_range_that_is_none_is_a_400(
        self, settings: Settings, session_factory: SessionFactory, query: dict[str, str], param: str
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                reply = await market.call("GET", "/v1/usage", renter, params=query)
                assert (reply.status, reply.param) == (400, param)

        asyncio.run(story())


class TestOneRequest:
    def test_what_a_client_that_left_has_to_pay_is_readable_afterwards(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        stranger = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, checkpoint_s=0.1) as market:
                agent = await market.connect(stalls)
                stream = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                async for _ in stream:
                    break
                request_id = stream.response.headers["x-request-id"]
                path = f"/v1/usage/{request_id}"
                await until(lambda: market.books.attempts()[0].accepted_tokens == 3)
                running = await ask(market, renter, path)
                assert running["accepted_tokens"] == 3
                assert (running["status"], running["outcome"], running["usage"]) == ("running", None, None)
                assert float(running["held"]) > 0
                await stream.close()
                await until(lambda: bool(market.books.outcomes()))
                await market.settled()
                ended = await ask(market, renter, path)
                assert (ended["status"], ended["outcome"]) == ("ended", "cancelled")
                assert ended["endpoint"] == "/v1/chat/completions"
                counts = TokenCounts.of(prompt=agent.runs[0].prompt_tokens, cached=0, output=3)
                gross = price(counts, RATES, 0).gross_nano
                assert ended["usage"]["completion_tokens"] == 3
                assert round(float(ended["cost"]) * 1e9) == gross == market.books.receipts()[0].charge_nano
                assert ended["held"] == ended["cost"] == ended["usage"]["cost"]
                assert ended["settled"] is False
                assert (await market.call("GET", path, stranger)).status == 404
                assert (await market.call("GET", "/v1/usage/req_none", renter)).status == 404

        asyncio.run(story())

    def test_a_refused_and_a_failed_request_cost_nothing_and_say_so(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        body = {"model": MODEL_ID, "messages": CHAT}

        async def story() -> None:
            async with world(settings, session_factory) as market:
                refused = await market.call("POST", "/v1/chat/completions", renter, json=body)
                shown = await ask(market, renter, f"/v1/usage/{refused.headers['x-request-id']}")
                assert (shown["status"], shown["outcome"], shown["cost"]) == ("ended", "no_capacity", "0")
                assert shown["settled"] is True
                assert shown["model"] is None
                await market.connect(fails("engine_error"))
                failed = await market.call("POST", "/v1/chat/completions", renter, json=body)
                await market.settled()
                shown = await ask(market, renter, f"/v1/usage/{failed.headers['x-request-id']}")
                assert (shown["outcome"], shown["model"]) == ("node_failed", MODEL_ID)
                assert (shown["usage"], shown["cost"], shown["held"]) == (None, "0", "0")

        asyncio.run(story())


class TestTokenising:
    def test_counts_what_the_chat_and_the_completion_will(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                client = market.client(renter)
                await client.chat.completions.create(model=MODEL_ID, messages=CHAT)
                await client.completions.create(model=MODEL_ID, prompt="The fox")
                for sent, run in (({"messages": CHAT}, agent.runs[0]), ({"prompt": "The fox"}, agent.runs[1])):
                    counted = (await market.call("POST", "/v1/tokenize", renter, json={"model": MODEL_ID, **sent})).json
                    assert counted["count"] == run.prompt_tokens == len(counted["tokens"])
                short = await market.call(
                    "POST", "/v1/tokenize", renter, json={"model": MODEL_ID, "prompt": "hi", "return_tokens": False}
                )
                assert "tokens" not in short.json
                await market.settled()
                assert len(market.books.outcomes()) == 2

        asyncio.run(story())

    @pytest.mark.parametrize(
        ("sent", "param"),
        [
            ({}, "prompt"),
            ({"prompt": "x", "messages": CHAT}, "messages"),
            ({"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"prompt": "x", "add_special_tokens": True}, "add_special_tokens"),
            ({"messages": []}, "messages"),
        ],
    )
    def test_refuses_naming_the_field(
        self, settings: Settings, session_factory: SessionFactory, sent: dict[str, Any], param: str
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                reply = await market.call("POST", "/v1/tokenize", renter, json={"model": MODEL_ID, **sent})
                assert (reply.status, reply.param) == (400, param)

        asyncio.run(story())


class TestAQuote:
    def test_says_what_is_likely_from_the_renters_own_answers(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory, credit_nano=1_000_000)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers, prefill_tokens_per_s=1_000.0, decode_tokens_per_s=50.0)
                body = {"model": MODEL_ID, "messages": CHAT, "max_tokens": 100}
                first = (await market.call("POST", "/v1/quote", renter, json=body)).json
                assert first["cost"]["likely_output_tokens"] == 100
                assert first["cost"]["likely"] == first["cost"]["at_most"]
                assert first["balance"]["available"] == "0.001"
                affordable = first["balance"]["affordable_output_tokens"]
                assert 100 < affordable <= 2_048
                assert first["capacity"]["predicted_tokens_per_s"] == pytest.approx(50.0, rel=0.3)
                await market.client(renter).chat.completions.create(**body)  # type: ignore[call-overload]
                await market.settled()
                later = (await market.call("POST", "/v1/quote", renter, json=body)).json
                assert later["cost"]["likely_output_tokens"] == len(WORDS)
                assert float(later["cost"]["at_least"]) < float(later["cost"]["likely"])
                assert float(later["cost"]["likely"]) < float(later["cost"]["at_most"])
                spent = market.books.credit(renter).held_nano
                assert round(float(later["balance"]["available"]) * 1e9) == 1_000_000 - spent

        asyncio.run(story())

    def test_takes_a_text_completion_too(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(thinks)
                quoted = await market.call("POST", "/v1/quote", renter, json={"model": MODEL_ID, "prompt": "The fox"})
                counted = await market.call(
                    "POST", "/v1/tokenize", renter, json={"model": MODEL_ID, "prompt": "The fox"}
                )
                assert quoted.json["prompt_tokens"] == counted.json["count"]
                both = {"model": MODEL_ID, "prompt": "x", "messages": CHAT}
                assert (await market.call("POST", "/v1/quote", renter, json=both)).param == "prompt"
                assert (await market.call("POST", "/v1/quote", renter, data=b"{")).status == 400

        asyncio.run(story())


class TestModels:
    def test_say_what_a_slot_holds_and_how_fast_its_nodes_are(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers, prefill_tokens_per_s=None, decode_tokens_per_s=None)
                silent = (await ask(market, renter, "/v1/models"))["data"][0]
                assert silent["speed"] == {"prefill_tokens_per_s": None, "decode_tokens_per_s": None}
                for speed in (20.0, 60.0, 40.0):
                    await market.connect(answers, decode_tokens_per_s=speed, prefill_tokens_per_s=900.0)
                model = (await ask(market, renter, "/v1/models"))["data"][0]
                assert model["speed"] == {"prefill_tokens_per_s": 900.0, "decode_tokens_per_s": 40.0}
                assert model["nodes"] == 4
                assert model["slots"] == model["slots_free"] == sum(offer.slots for offer in market.offers())
                assert (model["quantisation"], model["context_length"]) == ("Q4_1", 2_048)

        asyncio.run(story())
