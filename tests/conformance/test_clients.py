"""The official clients, unmodified: Python's, synchronous and asynchronous, and Node's where there is a Node."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from agent.engines.simulated_vectors import embed
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.embedding_world import DIMENSIONS, EMBED_MODEL, connect, embedding_world, embeds
from tests.gateway_world import CHAT, MODEL_ID, WORDS, Renter, World, add_renter, answers, world

ANSWER = "".join(WORDS)
PACKAGE = "openai@6"
INSTALL_WITHIN_S = 120
SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ apiKey: process.env.KEY, baseURL: process.env.URL + "/v1", maxRetries: 0 });
const ask = { model: process.env.MODEL, messages: [{ role: "user", content: "Say something about a fox." }] };
const whole = await client.chat.completions.create(ask);
const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
let text = "", usage = null, reason = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  reason = chunk.choices[0]?.finish_reason ?? reason;
  usage = chunk.usage ?? usage;
}
let refused = null;
try { await client.chat.completions.create({ ...ask, model: "nothing" }); }
catch (error) { refused = [error.constructor.name, error.status, error.code, error.param, !!error.requestID]; }
const vectors = await client.embeddings.create({ model: process.env.EMBED, input: ["A fox.", "A cat."] });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const old = await client.completions.create({ model: process.env.MODEL, prompt: "The" });
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, tokens: whole.usage.total_tokens, text, reason, usage: usage?.total_tokens,
  refused, models: models.sort(), old: old.choices[0].text, vectors: vectors.data.map((each) => each.embedding),
}));
"""


async def connect_both(market: World) -> None:
    """A node that chats, and one that embeds."""
    await connect(market, embeds)
    await market.connect(answers)


def told(market: World, renter: Renter) -> dict[str, str]:
    return {"KEY": renter.secret, "URL": market.url, "MODEL": MODEL_ID, "EMBED": EMBED_MODEL}


def python_story(market: World, renter: Renter) -> dict[str, Any]:
    """What the Node script does, with Python's synchronous client."""
    with openai.OpenAI(api_key=renter.secret, base_url=f"{market.url}/v1", max_retries=0, timeout=15.0) as client:
        whole = client.chat.completions.create(model=MODEL_ID, messages=CHAT)
        stream = client.chat.completions.create(
            model=MODEL_ID, messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="nothing", messages=CHAT)
        error = caught.value
        usage = chunks[-1].usage
        assert usage is not None
        assert whole.usage is not None
        return {
            "whole": whole.choices[0].message.content,
            "tokens": whole.usage.total_tokens,
            "text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "reason": chunks[-2].choices[0].finish_reason,
            "usage": usage.total_tokens,
            "refused": ["NotFoundError", error.status_code, error.code, error.param, bool(error.request_id)],
            "models": sorted(model.id for model in client.models.list()),
            "old": client.completions.create(model=MODEL_ID, prompt="The").choices[0].text,
            "vectors": [
                each.embedding for each in client.embeddings.create(model=EMBED_MODEL, input=["A fox.", "A cat."]).data
            ],
        }


def check(found: dict[str, Any]) -> None:
    assert found["whole"] == found["text"] == found["old"] == ANSWER
    assert found["reason"] == "stop"
    assert found["tokens"] == found["usage"] > len(WORDS)
    assert found["refused"] == ["NotFoundError", 404, "model_not_found", "model", True]
    assert found["models"] == sorted([MODEL_ID, EMBED_MODEL])
    assert found["vectors"] == [embed(text, DIMENSIONS).tolist() for text in ("A fox.", "A cat.")]


class TestOfficialClients:
    def test_pythons_synchronous_one(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with embedding_world(settings, session_factory) as market:
                await connect_both(market)
                check(await asyncio.to_thread(python_story, market, renter))
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_pythons_asynchronous_one_and_its_stream_helper(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                async with market.client(renter) as client:
                    async with client.chat.completions.stream(model=MODEL_ID, messages=CHAT) as stream:
                        final = await stream.get_final_completion()
                    assert final.choices[0].message.content == ANSWER
                    assert final.choices[0].finish_reason == "stop"

        asyncio.run(story())

    def test_nodes(self, settings: Settings, session_factory: SessionFactory, node_client: Path) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with embedding_world(settings, session_factory) as market:
                await connect_both(market)
                script = node_client / "story.mjs"
                script.write_text(SCRIPT)
                done = await asyncio.to_thread(
                    subprocess.run,
                    ["node", str(script)],
                    env={**os.environ, **told(market, renter)},
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert done.returncode == 0, done.stderr
                check(json.loads(done.stdout))

        asyncio.run(story())


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Node finds the official client."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no Node here")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), PACKAGE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_WITHIN_S, check=False, cwd=folder
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm could not install {PACKAGE} within {INSTALL_WITHIN_S} s")
    if done.returncode != 0:
        pytest.skip(f"npm could not install {PACKAGE}: {done.stderr.strip()[-200:]}")
    return folder
