"""What an operator reads at /metrics after requests of which the end is known."""

from __future__ import annotations

import asyncio

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.gateway_world import CHAT, MODEL_ID, World, add_renter, answers, world


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

        asyncio.run(story())
