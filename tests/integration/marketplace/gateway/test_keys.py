"""What a key may do: budgets, models, networks, tokens a minute; and that a refused call costs no quota."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy import text

from marketplace.accounts import service
from marketplace.accounts.service import Budget
from marketplace.core.amounts import usd
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from tests.gateway_world import CHAT, MODEL_ID, Renter, World, add_renter, answers, fails, stalls, until, world

RATES = {"input": 100_000_000, "output": 400_000_000}


async def ask(market: World, renter: Renter, **changes: Any) -> Any:
    return await market.client(renter).chat.completions.create(
        **{"model": MODEL_ID, "messages": CHAT, "max_tokens": 10, **changes}
    )


async def refusal(market: World, renter: Renter) -> openai.APIStatusError | None:
    try:
        await ask(market, renter)
    except openai.APIStatusError as error:
        return error
    return None


async def refused(market: World, renter: Renter, **changes: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(market, renter, **changes)
    return caught.value


async def raw(market: World, renter: Renter, path: str = "/v1/key", **headers: str) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {renter.secret}", **headers}
    async with aiohttp.ClientSession() as session, session.get(market.url + path, headers=headers) as response:
        return response.status, await response.json()


def charge_of(market: World) -> int:
    return market.books.receipts()[0].charge_nano


class TestABudget:
    def test_bounds_what_a_key_spends_whatever_the_balance(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory, budget=Budget(20_000, "total"))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                served = 0
                while served < 20 and (error := await refusal(market, renter)) is None:
                    served += 1
                assert error is not None
                assert (error.status_code, error.code) == (402, "key_budget_exceeded")
                spent = sum(receipt.charge_nano for receipt in market.books.receipts())
                assert 0 < served < 20
                assert spent <= 20_000
                _, key = await raw(market, renter)
                assert key["budget"]["limit"] == "0.00002"
                assert key["budget"]["held"] == "0"
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_holds_with_twenty_at_once_through_two_gateways(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with (
                world(settings, session_factory, gateway_id="gw-one") as one,
                world(settings, session_factory, variant_id=one.variant_id, gateway_id="gw-two") as two,
            ):
                for market in (one, two):
                    await market.connect(answers, slots=16)
                await ask(one, renter)
                charge = charge_of(one)
                with transaction(session_factory) as session:
                    service.set_budget(session, renter.key_id, Budget(charge * 3 + 1, "total"))
                found = await asyncio.gather(
                    *(ask((one, two)[i % 2], renter) for i in range(20)), return_exceptions=True
                )
                assert sum(not isinstance(answer, Exception) for answer in found) == 3
                assert {error.code for error in found if isinstance(error, openai.APIStatusError)} == {
                    "key_budget_exceeded"
                }
                assert one.books.broken_rules() == []

        asyncio.run(story())

    def test_begins_again_with_its_period(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                await ask(market, renter)
                with transaction(session_factory) as session:
                    service.set_budget(session, renter.key_id, Budget(charge_of(market), "day"))
                await ask(market, renter)
                assert (await refused(market, renter)).code == "key_budget_exceeded"
                with transaction(session_factory) as session:
                    session.execute(
                        text("update key_budgets set period_started_at = period_started_at - interval '1 day'")
                    )
                await ask(market, renter)

        asyncio.run(story())

    def test_caps_an_answer_that_was_not_bounded(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory, budget=Budget(7_000, "month"))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                answer = await market.client(renter).chat.completions.with_raw_response.create(
                    model=MODEL_ID, messages=CHAT
                )
                assert int(answer.headers["x-fallow-max-tokens"]) < 20
                assert answer.parse().choices[0].finish_reason in ("stop", "length")

        asyncio.run(story())

    def test_frees_what_a_failed_request_held(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory, budget=Budget(10_000_000, "month"))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(fails("engine_died"))
                await refused(market, renter)
                agent.behaviour = stalls
                market.gateway.services.fleet.breakers.forgive(agent.node.node_id, market.variant_id)
                stream = await ask(market, renter, stream=True)
                _, key = await raw(market, renter)
                assert key["budget"]["held"] != "0"
                await stream.close()
                await market.settled()
                _, key = await raw(market, renter)
                assert key["budget"]["held"] == "0"
                assert key["budget"]["spent"] == usd(charge_of(market))

        asyncio.run(story())

    def test_counts_what_ran_before_it_was_set(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(stalls)
                stream = await ask(market, renter, stream=True)
                await until(lambda: agent.runs)
                with transaction(session_factory) as session:
                    service.set_budget(session, renter.key_id, Budget(1_000_000, "day"))
                    state = service.budget_of(session, renter.key_id)
                assert state is not None
                assert state.held_nano == market.books.jobs()[0].hold_nano
                await stream.close()
                await market.settled()
                with session_factory() as session:
                    after = service.budget_of(session, renter.key_id)
                assert after is not None
                assert (after.held_nano, after.spent_nano) == (0, sum(r.charge_nano for r in market.books.receipts()))

        asyncio.run(story())


class TestModelsAndNetworks:
    def test_a_key_uses_the_models_of_its_list_only(self, settings: Settings, session_factory: SessionFactory) -> None:
        allowed = add_renter(session_factory, models=[MODEL_ID])
        other = add_renter(session_factory, models=["another"])

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                await ask(market, allowed)
                error = await refused(market, other)
                assert (error.status_code, error.code, error.param) == (403, "model_not_allowed", "model")
                assert [model["id"] for model in (await raw(market, allowed, "/v1/models"))[1]["data"]] == [MODEL_ID]
                assert (await raw(market, other, "/v1/models"))[1]["data"] == []

        asyncio.run(story())

    @pytest.mark.parametrize(
        ("networks", "trusted", "forwarded", "status"),
        [
            (["127.0.0.0/8"], "", "", 200),
            (["10.0.0.0/8"], "", "", 403),
            (["10.0.0.0/8"], "", "10.1.2.3", 403),
            (["10.0.0.0/8"], "127.0.0.1/32", "10.1.2.3", 200),
            (["10.0.0.0/8"], "127.0.0.1/32", "10.1.2.3, 192.0.2.1", 403),
            (["2001:db8::/32"], "127.0.0.1/32", "2001:db8::5", 200),
            (["10.0.0.0/8"], "127.0.0.1/32", "nonsense", 403),
        ],
    )
    def test_a_key_comes_from_its_networks_only(
        self,
        settings: Settings,
        session_factory: SessionFactory,
        networks: list[str],
        trusted: str,
        forwarded: str,
        status: int,
    ) -> None:
        renter = add_renter(session_factory, networks=networks)

        async def story() -> None:
            async with world(settings, session_factory, trusted_proxies=trusted) as market:
                headers = {"x-forwarded-for": forwarded} if forwarded else {}
                assert (await raw(market, renter, **headers))[0] == status

        asyncio.run(story())


class TestTokensAMinute:
    def test_are_counted_given_back_where_unused_and_told(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory, tokens_per_minute=1_000)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                first = await market.client(renter).chat.completions.with_raw_response.create(
                    model=MODEL_ID, messages=CHAT, max_tokens=500
                )
                used = first.parse().usage.total_tokens
                assert first.headers["x-ratelimit-limit-tokens"] == "1000"
                assert int(first.headers["x-ratelimit-remaining-tokens"]) < 500
                await market.settled()
                again = await market.client(renter).chat.completions.with_raw_response.create(
                    model=MODEL_ID, messages=CHAT, max_tokens=10
                )
                left = int(again.headers["x-ratelimit-remaining-tokens"])
                assert left >= 1_000 - used - used - 20
                error = await refused(market, renter, max_tokens=960)
                assert (error.status_code, error.code) == (429, "rate_limit_exceeded")
                assert int(error.response.headers["retry-after"]) >= 1
                never = await refused(market, renter, max_tokens=5_000)
                assert (never.status_code, never.code) == (400, "context_length_exceeded")
                large = await refused(market, renter, max_tokens=1_500)
                assert (large.status_code, large.code) == (429, "tokens_limit_too_small")
                assert large.response.headers["x-should-retry"] == "false"

        asyncio.run(story())


class TestARefusedCall:
    def test_costs_no_quota(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory, requests_per_minute=2, tokens_per_minute=1_000)
        poor = add_renter(session_factory, requests_per_minute=2, credit_nano=0)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                for _ in range(3):
                    assert (await refused(market, renter)).status_code == 503
                    await market.gateway.services.settle_background(5.0)
                await market.connect(answers)
                for changes, status in (
                    ({"model": "nothing"}, 404),
                    ({"max_tokens": 100_000}, 400),
                    ({"model": "nothing"}, 404),
                ):
                    assert (await refused(market, renter, **changes)).status_code == status
                    await market.gateway.services.settle_background(5.0)
                for _ in range(3):
                    assert (await refused(market, poor)).status_code == 402
                    await market.gateway.services.settle_background(5.0)
                await ask(market, renter)
                await ask(market, renter)
                assert (await refused(market, renter)).status_code == 429

        asyncio.run(story())
