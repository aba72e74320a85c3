"""Vectors: what official clients rely on, request by request and chunk by chunk."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.embedding_world import EMBED_MODEL, embedding_world
from tests.gateway_world import CHAT, MODEL_ID, World, add_renter, answers, world

VECTORS = Path(__file__).parent / "vectors"
CHAT_TEXT = f'"model": "{MODEL_ID}", "messages": [{{"role": "user", "content": "hi"}}]'


def vectors(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text())
    return found


def filled(body: str | None) -> bytes | None:
    """CHAT, MODEL and EMBEDDER stand for a sound request and for models; a lone surrogate stays as its escape."""
    if body is None:
        return None
    return body.replace("CHAT", CHAT_TEXT).replace("MODEL", MODEL_ID).replace("EMBEDDER", EMBED_MODEL).encode()


async def refusal(session: aiohttp.ClientSession, market: World, secret: str, vector: dict[str, Any]) -> list[str]:
    """What differs from the vector."""
    key = vector.get("key", secret)
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    url = market.url + vector["path"]
    async with session.request(vector["method"], url, data=filled(vector.get("body")), headers=headers) as response:
        body = await response.json()
        error = body["error"]
        found = (response.status, error["code"], error["param"])
        wanted = (vector["status"], vector["code"], vector["param"])
        shape = (
            response.headers["content-type"] == "application/json"
            and response.headers["x-request-id"].startswith("req_")
            and response.headers["x-should-retry"] == "false"
            and {"message", "type", "param", "code"} <= set(error)
        )
    return [] if found == wanted and shape else [f"{vector['name']}: {found} is not {wanted} ({error['message']})"]


async def events(session: aiohttp.ClientSession, market: World, secret: str, vector: dict[str, Any]) -> list[str]:
    body = {"model": MODEL_ID, "messages": CHAT, **vector["body"]}
    headers = {"authorization": f"Bearer {secret}"}
    async with session.post(market.url + vector["path"], json=body, headers=headers) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        raw = (await response.read()).decode()
    assert raw.endswith("\n\n")
    return [event for event in raw.split("\n\n") if event and not event.startswith(":")]


def bare(chunk: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from answer to answer."""
    kept = {name: value for name, value in chunk.items() if name not in ("id", "created", "model", "provider")}
    if kept.get("usage"):
        kept["usage"] = "counts"
    return kept


class TestVectors:
    def test_each_refusal_is_the_error_that_clients_expect(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with embedding_world(settings, session_factory) as market, aiohttp.ClientSession() as session:
                await market.connect(answers)
                found = [await refusal(session, market, renter.secret, vector) for vector in vectors("refusals")]
                assert [difference for each in found for difference in each] == []
                assert market.books.receipts() == []

        asyncio.run(story())

    def test_each_stream_has_its_chunks_in_their_order_and_one_end(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, aiohttp.ClientSession() as session:
                await market.connect(answers)
                for vector in vectors("streams"):
                    found = await events(session, market, renter.secret, vector)
                    assert found[-1] == "data: [DONE]"
                    chunks = [json.loads(event.removeprefix("data: ")) for event in found[:-1]]
                    assert [bare(chunk) for chunk in chunks] == vector["chunks"], vector["name"]
                    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1

        asyncio.run(story())
