"""What a renter chooses: owners, nodes, prices, order, precision; and what the answer says about who served it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy import text

from agent.protocol import DataPolicy
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.fleet.models import Node
from marketplace.fleet.repository import attest
from tests.fleet_world import enrol_node
from tests.gateway_world import (
    CHAT,
    MODEL_ID,
    Renter,
    ScriptedAgent,
    World,
    add_renter,
    answers,
    fails,
    world,
)

CHEAP = {
    "input_nano_usd_per_mtok": 10_000_000,
    "cached_input_nano_usd_per_mtok": 10_000_000,
    "output_nano_usd_per_mtok": 40_000_000,
}
DEAR = {"input_nano_usd_per_mtok": 200_000_000, "output_nano_usd_per_mtok": 800_000_000}


def node_of(agent: ScriptedAgent) -> str:
    return f"node_{agent.node.node_id.hex}"


async def served(
    market: World, renter: Renter, provider: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """The `provider` member of an answer."""
    body = {"provider": provider} if provider is not None else {}
    answer = await market.client(renter).chat.completions.create(
        **{"model": MODEL_ID, "messages": CHAT, "max_tokens": 5, "extra_body": body, **changes}
    )
    found: dict[str, Any] = answer.model_dump()["provider"]
    return found


async def refused(market: World, renter: Renter, provider: dict[str, Any], **changes: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await served(market, renter, provider, **changes)
    return caught.value


async def put(market: World, renter: Renter, body: Any) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {renter.secret}"}
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"{market.url}/v1/key/routing", json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


class TestProviders:
    def test_only_ignore_and_order_decide_who_serves(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                first, second = [await market.connect(answers) for _ in range(2)]
                for _ in range(3):
                    for agent, other in ((first, second), (second, first)):
                        name = node_of(agent)
                        assert (await served(market, renter, {"only": [name]}))["name"] == name
                        assert (await served(market, renter, {"ignore": [node_of(other)]}))["name"] == name
                        assert (await served(market, renter, {"order": [name, node_of(other)]}))["name"] == name
                owner = (await served(market, renter, {"only": [node_of(first)]}))["owner"]
                assert (await served(market, renter, {"only": [owner]}))["owner"] == owner
                both = [node_of(first), node_of(second)]
                error = await refused(market, renter, {"ignore": both})
                assert (error.status_code, error.code) == (503, "no_capacity")
                assert "2 nodes: not among the providers asked for" in error.message
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_without_fallbacks_nobody_else_takes_over(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                broken = await market.connect(fails("engine_died"))
                sound = await market.connect(answers)
                order = [node_of(broken)]
                assert (await served(market, renter, {"order": order}))["name"] == node_of(sound)
                market.gateway.services.fleet.breakers.forgive(broken.node.node_id, market.variant_id)
                error = await refused(market, renter, {"order": order, "allow_fallbacks": False})
                assert error.code == "node_failed"
                assert len(sound.runs) == 1

        asyncio.run(story())

    @pytest.mark.parametrize(
        ("provider", "field"),
        [
            ({"only": ["openai"]}, "provider.only"),
            ({"order": ["node_12"]}, "provider.order"),
            ({"sort": "beauty"}, "provider.sort"),
            ({"unknown": 1}, "provider.unknown"),
            ({"max_price": {"prompt": -1}}, "provider.max_price.prompt"),
            ({"max_price": {"completion": "much"}}, "provider.max_price.completion"),
            ({"quantizations": ["fp4"]}, "provider.quantizations"),
        ],
    )
    def test_what_cannot_be_is_refused_by_its_name(
        self, settings: Settings, session_factory: SessionFactory, provider: dict[str, Any], field: str
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                error = await refused(market, renter, provider)
                assert (error.status_code, error.param) == (400, field)

        asyncio.run(story())


class TestPrices:
    def test_the_cheapest_serves_where_price_is_what_counts(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                cheap, _ = await market.connect(answers, **CHEAP), await market.connect(answers, **DEAR)
                for _ in range(5):
                    assert (await served(market, renter, {"sort": "price"}))["name"] == node_of(cheap)
                    assert (await served(market, renter, model="fallow/cheapest"))["name"] == node_of(cheap)

        asyncio.run(story())

    def test_nobody_serves_above_the_maximum(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers, **DEAR)
                error = await refused(market, renter, {"max_price": {"prompt": 0.1, "completion": "0.5"}})
                assert error.status_code == 503
                assert "price above the maximum" in error.message
                found = await served(market, renter, {"max_price": {"prompt": "0.2", "completion": 0.8}})
                assert found["price"]["output"] == "0.8"

        asyncio.run(story())


class TestNames:
    @pytest.mark.parametrize("model", ["fallow/auto", "fallow/fastest", "Fallow/Cheapest"])
    def test_an_alias_stands_for_a_model_and_the_answer_says_which(
        self, settings: Settings, session_factory: SessionFactory, model: str
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                answer = await market.client(renter).chat.completions.create(model=model, messages=CHAT)
                assert answer.model == MODEL_ID

        asyncio.run(story())

    @pytest.mark.parametrize("names", [["int4"], ["q4_1"], ["fp16", "INT4"]])
    def test_a_precision_chooses_the_variant(
        self, settings: Settings, session_factory: SessionFactory, names: list[str]
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                assert (await served(market, renter, {"quantizations": names}))["quantization"] == "q4_1"

        asyncio.run(story())


class TestTheAnswer:
    def test_says_who_served_it_and_at_which_price(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                found = await market.client(renter).chat.completions.with_raw_response.create(
                    model=MODEL_ID, messages=CHAT
                )
                assert found.headers["x-fallow-node"] == node_of(agent)
                assert found.headers["x-fallow-variant"].startswith(f"{MODEL_ID}@")
                assert found.headers["x-fallow-price"] == "input=0.1, cached_input=0.05, output=0.4"
                member = json.loads(found.text)["provider"]
                assert member["name"] == node_of(agent)
                assert member["variant"] == found.headers["x-fallow-variant"]
                stream = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                chunks = [chunk.model_dump() async for chunk in stream]
                assert chunks[-1]["provider"]["name"] == node_of(agent)
                assert all("provider" not in chunk for chunk in chunks[:-1])

        asyncio.run(story())

    def test_after_a_failover_names_the_node_that_served(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                broken = await market.connect(fails("engine_died"))
                sound = await market.connect(answers)
                found = await market.client(renter).chat.completions.with_raw_response.create(
                    model=MODEL_ID, messages=CHAT, extra_body={"provider": {"order": [node_of(broken)]}}
                )
                assert found.headers["x-fallow-node"] == node_of(sound)

        asyncio.run(story())


class TestAKeysDefault:
    def test_holds_for_what_a_request_leaves_open(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                first, second = [await market.connect(answers) for _ in range(2)]
                status, key = await put(market, renter, {"only": [node_of(second)], "sort": "price"})
                assert status == 200
                assert key["provider"] == {"only": [node_of(second)], "sort": "price"}
                market.gateway.services.authenticator.forget()
                for _ in range(3):
                    assert (await served(market, renter))["name"] == node_of(second)
                    assert (await served(market, renter, {"sort": "latency"}))["name"] == node_of(second)
                    assert (await served(market, renter, {"only": [node_of(first)]}))["name"] == node_of(first)
                assert (await put(market, renter, {"only": ["x"]}))[0] == 400
                assert (await put(market, renter, {}))[1]["provider"] is None

        asyncio.run(story())

    def test_holds_for_jobs_which_say_what_they_wait_for(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory, routing={"regions": ["eu"], "max_price": {"completion": "0.3"}})
        chat = {"model": MODEL_ID, "messages": CHAT}

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers, data=DataPolicy("us"), **CHEAP)
                none = await market.call("POST", "/v1/jobs", renter, json={"request": chat})
                assert (none.status, none.code) == (400, "max_price_needed")
                priced = {"request": chat, "max_price": {"input": "0.2", "output": "0.5"}}
                job = await market.call("POST", "/v1/jobs", renter, json=priced)
                assert (job.status, job.json["max_price"]["output"]) == (202, "0.3")
                assert job.json["waiting_for"] == "1 node: outside the regions asked for"
                lists = {**priced, "request": {**chat, "provider": {"ignore": [node_of(agent)], "regions": []}}}
                job = await market.call("POST", "/v1/jobs", renter, json=lists)
                assert job.json["waiting_for"] == "1 node: not among the providers asked for"
                whole = {"regions": [], "max_price": {"prompt": "0.005", "completion": "0.3"}, "only": [node_of(agent)]}
                job = await market.call("POST", "/v1/jobs", renter, json={"request": {**chat, "provider": whole}})
                assert job.json["max_price"] == {"input": "0.005", "cached_input": "0.005", "output": "0.04"}
                assert job.json["waiting_for"] == "1 node: price above the maximum"
                wrong = {"request": {**chat, "provider": {"only": ["somebody"]}}}
                refused_ = await market.call("POST", "/v1/jobs", renter, json=wrong)
                assert (refused_.status, refused_.param) == (400, "provider.only")

        asyncio.run(story())


class TestADataPolicy:
    @pytest.mark.parametrize("of_the_key", [True, False])
    def test_is_a_hard_filter_with_a_reason(
        self, settings: Settings, session_factory: SessionFactory, of_the_key: bool
    ) -> None:
        deny = {"data_collection": "deny"}
        renter = add_renter(session_factory, **({"routing": deny} if of_the_key else {}))
        asked = {} if of_the_key else deny
        nodes = [enrol_node(session_factory, owner=f"owner-{number}", name="box") for number in range(2)]
        with transaction(session_factory) as session:
            session.execute(text("update node_standings set standing = 'proven'"))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers, node=nodes[0], data=DataPolicy(retention_days=30, trains=False))
                error = await refused(market, renter, asked)
                assert "does not declare that it keeps no data" in error.message
                policy = DataPolicy("eu-central", "DE", 0, False, "person")
                private = await market.connect(answers, node=nodes[1], data=policy, **DEAR)
                for _ in range(3):
                    found = await served(market, renter, asked)
                    assert found["name"] == node_of(private)
                declared = {"country": "DE", "retention_days": 0, "trains": False, "operator": "person"}
                assert found["data"] == {**declared, "attested": False}
                assert found["region"] == "eu-central"
                assert (await served(market, renter, {**asked, "regions": ["DE"]}))["name"] == node_of(private)
                (model,) = (await market.client(renter).models.list()).data
                told = (model.model_extra or {})["data"]
                assert told == {"private_nodes": 1, "regions": ["eu-central"], "countries": ["DE"]}

        asyncio.run(story())

    def test_may_be_attested_by_the_operator(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)
        node = enrol_node(session_factory, owner="owner", name="box")
        with transaction(session_factory) as session:
            attest(session, node.node_id, attested=True)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers, node=node, data=DataPolicy(retention_days=0, trains=False))
                assert (await served(market, renter))["data"]["attested"] is True

        asyncio.run(story())
        with session_factory() as session:
            stored = session.get(Node, node.node_id)
            assert stored is not None
            assert stored.data_terms is not None
            assert stored.data_terms["retention_days"] == 0
