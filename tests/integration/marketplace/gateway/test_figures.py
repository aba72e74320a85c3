"""What an operator reads at /metrics after requests of which the end is known."""

from __future__ import annotations

import asyncio

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.fleet_world import telemetry
from tests.gateway_world import CHAT, MODEL_ID, World, add_renter, answers, stalls, until, world


async def figures(market: World) -> dict[str, float]:
    """Samples without their labels, summed; and those with one label by its value."""
    async with aiohttp.ClientSession() as session, session.get(f"{market.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            for name in (sample.name, *(f"{sample.name}:{value}" for value in sample.labels.values())):
                found[name] = found.get(name, 0.0) + sample.value
    return found


class TestFigures:
    def test_count_time_refusals_and_money(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                with pytest.raises(openai.InternalServerError):
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                agent = await market.connect(answers, context_per_slot=64)
                with pytest.raises(openai.BadRequestError):
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=1_000)
                await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=5)
                with pytest.raises(openai.InternalServerError):
                    await market.client(renter).chat.completions.create(
                        model=MODEL_ID,
                        messages=CHAT,
                        max_tokens=5,
                        extra_body={"provider": {"ignore": [f"node_{agent.node.node_id.hex}"]}},
                    )
                found = await figures(market)
                receipt = market.books.receipts()[0]
                assert found["fallow_ttft_seconds_count"] == 1
                assert found["fallow_tpot_seconds_count"] == 1
                assert found["fallow_admission_seconds_count"] == 1
                assert found["fallow_refusals_total:choice"] == 1
                assert found["fallow_http_errors_total:no_capacity"] == 2
                assert found["fallow_charged_nano_usd_total"] == receipt.charge_nano
                assert found["fallow_fees_nano_usd_total"] == receipt.fee_nano
                assert found["fallow_losses_nano_usd_total"] == 0
                assert found["fallow_waiting_records"] == 0
                assert found["fallow_database_up"] == 1
                assert found["fallow_unsettled_receipts"] == 1

        asyncio.run(story())

    def test_tell_the_fleet_and_what_waits(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(stalls, slots=3)
                body = {"request": {"model": MODEL_ID, "messages": CHAT, "max_tokens": 5}}
                assert (await market.call("POST", "/v1/jobs", renter, json=body)).status == 202
                asking = asyncio.create_task(
                    market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=5)
                )
                await until(lambda: agent.runs and market.offers()[0].slots_busy == 1)
                found = await figures(market)
                assert (found["fallow_fleet_nodes"], found["fallow_active_attempts"]) == (1, 1)
                assert (found["fallow_fleet_slots:busy"], found["fallow_fleet_slots:idle"]) == (1, 2)
                assert (found["fallow_jobs:queued"], found["fallow_jobs:running"]) == (1, 0)
                assert found["fallow_oldest_queued_job_seconds"] > 0
                await agent.say(telemetry(available=False))
                await until(lambda: not market.offers()[0].available)
                assert (await figures(market))["fallow_fleet_slots:withheld"] == 2
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

        asyncio.run(story())
