"""The bundled model sold for its vectors too, and agents that answer with some."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any, Final
from uuid import UUID

import msgspec

from agent import protocol
from agent.engines.embed_wire import little_endian
from agent.engines.simulated_vectors import embed
from agent.protocol import Accepted, Finished, Run, UsageReport, Vectors
from agent.sizing.variants import variant_sha256
from marketplace.catalog.models import Model, Variant
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.ids import new_id
from marketplace.core.settings import Settings
from tests.gateway_world import Behaviour, ScriptedAgent, World, sell_smollm2, sold_columns, world

EMBED_MODEL: Final = "smollm2-135m-embed"
DIMENSIONS: Final = 576
RATE_NANO: Final = 100_000_000
"""What the scripted agents ask for a million tokens of input."""


def sell_embeddings(factory: SessionFactory) -> UUID:
    """The bundled file as an embedding model, beside its chat model. Returns the variant that embeds."""
    sell_smollm2(factory)
    with transaction(factory) as session:
        session.add(Model(id=EMBED_MODEL, display_name="SmolLM2 vectors"))
        session.flush()
        variant = Variant(**{**sold_columns(), **embedding_columns()})
        session.add(variant)
        session.flush()
        return variant.id


def embedding_columns() -> dict[str, Any]:
    """What differs from the chat variant."""
    return {
        "id": new_id(),
        "model_id": EMBED_MODEL,
        "sha256": embedding_sha256(),
        "weights_sha256": sold_columns()["sha256"],
        "task": "embed",
        "dimensions": DIMENSIONS,
        "pooling": "mean",
        "chat_template": "",
    }


def embedding_sha256() -> str:
    return variant_sha256(sold_columns()["sha256"], "embed", "mean")


@contextlib.asynccontextmanager
async def embedding_world(settings: Settings, factory: SessionFactory, **changes: Any) -> AsyncIterator[World]:
    """A gateway whose catalogue has both."""
    async with world(settings, factory, variant_id=sell_embeddings(factory), **changes) as market:
        yield market


async def connect(market: World, behaviour: Behaviour, **offer: Any) -> ScriptedAgent:
    """A node goes live that offers vectors."""
    asked = {"variant_sha256": embedding_sha256(), "output_nano_usd_per_mtok": 0, **offer}
    return await market.connect(behaviour, **asked)


def vectors_of(run: Run) -> list[bytes]:
    """What the simulated engine would answer."""
    inputs = msgspec.json.decode(run.body)["input"]
    return [little_endian(embed(each, DIMENSIONS)) for each in inputs]


async def finish(agent: ScriptedAgent, run: Run, sequence: int, data: bytes, reason: str = "stop") -> None:
    """The report, signed over the vectors."""
    usage = UsageReport(run.prompt_tokens, 0, 0, 0)
    payload = protocol.receipt_payload(run.attempt, run.epoch, sequence, reason, usage, hashlib.sha256(data).digest())
    signature = agent.node.key.sign(payload)
    await agent.say(Finished(run.attempt, run.epoch, sequence, reason, usage, 0.0, 1.0, 5.0, signature))


async def embeds(agent: ScriptedAgent, run: Run) -> None:
    """Every vector, two a frame."""
    await agent.say(Accepted(run.attempt, run.epoch))
    vectors = vectors_of(run)
    frames = [
        Vectors(run.attempt, run.epoch, sequence, 2 * sequence, DIMENSIONS, b"".join(vectors[2 * sequence :][:2]))
        for sequence in range((len(vectors) + 1) // 2)
    ]
    await agent.say(*frames)
    await finish(agent, run, len(frames), b"".join(vectors))


def embeds_some(count: int, reason: str = "stop") -> Behaviour:
    """The first so many, and an end as if that were all."""

    async def behave(agent: ScriptedAgent, run: Run) -> None:
        await agent.say(Accepted(run.attempt, run.epoch))
        data = b"".join(vectors_of(run)[:count])
        if count:
            await agent.say(Vectors(run.attempt, run.epoch, 0, 0, DIMENSIONS, data))
        await finish(agent, run, 1 if count else 0, data, reason)

    return behave


def embeds_then_waits(count: int) -> Behaviour:
    """The first so many, then nothing until it is cancelled."""

    async def behave(agent: ScriptedAgent, run: Run) -> None:
        await agent.say(Accepted(run.attempt, run.epoch))
        data = b"".join(vectors_of(run)[:count])
        await agent.say(Vectors(run.attempt, run.epoch, 0, 0, DIMENSIONS, data))
        await agent.cancelled(run)
        await finish(agent, run, 1, data, "cancelled")

    return behave


def lies(frame: dict[str, Any]) -> Behaviour:
    """One frame that is not what is due, and an end."""

    async def behave(agent: ScriptedAgent, run: Run) -> None:
        honest = {"first_index": 0, "dimensions": DIMENSIONS, "data": b"".join(vectors_of(run))}
        told = honest | frame
        await agent.say(Vectors(run.attempt, run.epoch, 0, told["first_index"], told["dimensions"], told["data"]))
        await finish(agent, run, 1, told["data"])

    return behave
