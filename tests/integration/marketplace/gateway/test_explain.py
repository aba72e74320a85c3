"""POST /v1/explain over a real gateway: the parts add up, and nothing is held."""

from __future__ import annotations

import asyncio

import pytest

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.gateway_world import CHAT, MODEL_ID, add_renter, world


def test_an_explanation_tells_who_fits_and_what_each_part_costs(
    settings: Settings, session_factory: SessionFactory
) -> None:
    renter = add_renter(session_factory)
    body = {"model": MODEL_ID, "messages": CHAT, "max_tokens": 20}

    async def story() -> None:
        async with world(settings, session_factory) as market:
            empty = (await market.call("POST", "/v1/explain", renter, json=body)).json
            assert empty["why"] == "Nothing fits: no node is connected."
            await market.connect()
            await market.connect(context_per_slot=8)
            told = (await market.call("POST", "/v1/explain", renter, json=body)).json
            assert told["nodes"] == told["fitting"] + sum(told["refused"].values()) == 2
            assert told["refused"] == {"context per slot too small": 1}
            parts = told["best"][0]["cost_s"]
            total = parts.pop("total_s")
            assert sum(parts.values()) == pytest.approx(total, abs=1e-3)
            assert "1 of 2 nodes fit" in told["why"]
            assert market.books.outcomes() == []
            assert market.books.credit(renter).held_nano == 0

    asyncio.run(story())
