"""What a node may send as vectors, and what the client reads of them."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.engines.embed_wire import little_endian, unit
from agent.protocol import Failed, Finished, Tokens, UsageReport, Vectors
from marketplace.gateway.attempt import AttemptRun
from marketplace.gateway.embeddings.vectors import Embedding, EmbeddingRun
from marketplace.gateway.outcomes import Ending
from marketplace.metering.tokens import TokenCounts
from tests.fleet_world import offer_view

DIMENSIONS = 3
INPUTS = (5, 7, 9)
VECTORS = [little_endian(unit(vector)) for vector in ((1.0, 0.0, 0.0), (1.0, 2.0, 3.0), (0.0, -1.0, 1.0))]


def due(encoding: Any = "float") -> Embedding:
    return Embedding(INPUTS, DIMENSIONS, encoding)


def frame(data: bytes, first: int = 0, *, sequence: int = 0, dimensions: int = DIMENSIONS) -> Vectors:
    return Vectors(b"a", 1, sequence, first, dimensions, data)


def finished(reason: str = "stop") -> Finished:
    return Finished(b"a", 1, 1, reason, UsageReport(), 0.0, None, 1.0)


def running(embedding: Embedding, scene: Any) -> AttemptRun:
    async def play() -> AttemptRun:
        run = EmbeddingRun(offer_view(), b"a", 1, embedding)
        scene(run)
        return run

    return asyncio.run(play())


class TestVectorsOfANode:
    @pytest.mark.parametrize(
        "wrong",
        [
            frame(VECTORS[0], 1),
            frame(b"".join(VECTORS) + VECTORS[0]),
            frame(b""),
            frame(VECTORS[0][:-1]),
            frame(VECTORS[0], dimensions=6),
            frame(struct.pack("<3f", 1.0, 1.0, 1.0)),
            frame(struct.pack("<3f", 0.0, 0.0, 0.0)),
            frame(struct.pack("<3f", math.nan, 0.0, 1.0)),
            frame(struct.pack("<3f", math.inf, 0.0, 0.0)),
        ],
        ids=["skipped", "too many", "none", "odd", "dimensions", "long", "zero", "nan", "inf"],
    )
    def test_are_refused_unless_they_are_what_is_due(self, wrong: Vectors) -> None:
        embedding = due()
        run = running(embedding, lambda run: run.on_frame(wrong))
        assert run.ending is Ending.NODE
        assert (embedding.received, embedding.accepted_tokens, embedding.data) == (0, 0, b"")

    def test_twice_the_same_are_refused_and_the_first_stay(self) -> None:
        embedding = due()
        assert embedding.take(frame(VECTORS[0]))
        assert not embedding.take(frame(VECTORS[0]))
        assert embedding.take(frame(VECTORS[1] + VECTORS[2], 1))
        assert embedding.complete
        assert embedding.data == b"".join(VECTORS)

    def test_count_the_tokens_of_their_inputs(self) -> None:
        embedding = due()
        assert embedding.take(frame(VECTORS[0] + VECTORS[1]))
        assert embedding.accepted_tokens == 12
        assert not embedding.complete
        embedding.begin()
        assert (embedding.accepted_tokens, embedding.longest_input_tokens) == (0, 9)


class TestAnAttempt:
    def test_ends_in_order_only_with_every_vector(self) -> None:
        def whole(run: EmbeddingRun) -> None:
            run.on_frame(frame(b"".join(VECTORS)))
            run.on_frame(finished())

        def short(run: EmbeddingRun) -> None:
            run.on_frame(frame(VECTORS[0]))
            run.on_frame(finished())

        done, cut = running(due(), whole), running(due(), short)
        assert (done.ending, done.produced, done.vectors) == (Ending.FINISHED, True, b"".join(VECTORS))
        assert (cut.ending, cut.reported) == (Ending.NODE, True)

    def test_that_failed_ends_as_the_node_says(self) -> None:
        said = Failed(b"a", 1, 0, "owner_preempted", "", UsageReport())
        assert running(due(), lambda run: run.on_frame(said)).ending is Ending.OWNER

    def test_takes_nothing_after_its_end(self) -> None:
        embedding = due()

        def late(run: EmbeddingRun) -> None:
            run.stop(Ending.CANCELLED)
            run.on_frame(frame(VECTORS[0]))
            run.on_frame(finished("cancelled"))

        run = running(embedding, late)
        assert (run.ending, run.reported, embedding.received) == (Ending.CANCELLED, True, 0)

    def test_at_vectors_gets_no_text_and_one_at_text_no_vectors(self) -> None:
        text = Tokens(b"a", 1, 0, "text")
        assert running(due(), lambda run: run.on_frame(text)).ending is Ending.NODE

        async def chat() -> AttemptRun:
            run = AttemptRun(offer_view(), b"a", 1, 16)
            run.on_frame(frame(VECTORS[0]))
            return run

        assert asyncio.run(chat()).ending is Ending.NODE


class TestTheAnswer:
    @given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=8))
    def test_holds_the_very_floats_in_both_encodings(self, rows: list[list[float]]) -> None:
        vectors = [unit(row) for row in rows if any(abs(value) > 1e-3 for value in row)]
        if not vectors:
            return
        found = {}
        for encoding in ("float", "base64"):
            embedding = Embedding((1,) * len(vectors), DIMENSIONS, encoding)  # type: ignore[arg-type]
            assert embedding.take(frame(b"".join(map(little_endian, vectors))))
            asyncio.run(embedding.write())
            answer = embedding.answer(model="m", tokens=TokenCounts(len(vectors), 0, 0, 0), priced=None)
            found[encoding] = msgspec.json.decode(msgspec.json.encode(answer))
        numbers = [each["embedding"] for each in found["float"]["data"]]
        packed = [base64.b64decode(each["embedding"]) for each in found["base64"]["data"]]
        assert [array("f", vector).tolist() for vector in packed] == numbers == [vector.tolist() for vector in vectors]
        assert [each["index"] for each in found["float"]["data"]] == list(range(len(vectors)))
        assert found["float"]["usage"] == {
            "prompt_tokens": len(vectors), "total_tokens": len(vectors), "cost": "0"
        }  # fmt: skip
