"""What is asked of an engine's /v1/embeddings, and what of its answer is believed."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.engines import embed_wire
from agent.engines.port import EngineError, EngineRequest


def answer(*vectors: Any, indexes: list[int] | None = None, **more: Any) -> bytes:
    data = [{"index": at, "embedding": each} for at, each in zip(indexes or range(len(vectors)), vectors, strict=True)]
    return msgspec.json.encode({"object": "list", "data": data, **more})


class TestGroups:
    @given(st.lists(st.text(min_size=1, max_size=20), max_size=60), st.integers(1, 40))
    def test_hold_every_input_once_in_order(self, inputs: list[str], at_once: int) -> None:
        parts = list(embed_wire.groups(inputs, at_once))
        assert [each for _, part in parts for each in part] == inputs
        assert all(inputs[start : start + len(part)] == list(part) for start, part in parts)
        assert all(1 <= len(part) <= at_once for _, part in parts)

    def test_are_short_where_inputs_are_long(self) -> None:
        inputs = ["x" * embed_wire.GROUP_SIZE, "y", "z"]
        assert [len(part) for _, part in embed_wire.groups(inputs, 32)] == [1, 2]


class TestAnAnswer:
    def test_is_put_in_order_and_made_unit_length(self) -> None:
        body = answer([0.0, 2.0], [3.0, 4.0], indexes=[1, 0], usage={"prompt_tokens": 7})
        vectors, usage = embed_wire.read_answer(body, 5, 2)
        assert (vectors.first_index, vectors.dimensions, usage.prompt_tokens) == (5, 2, 7)
        assert array("f", vectors.data).tolist() == pytest.approx([0.6, 0.8, 0.0, 1.0])

    def test_may_be_base64(self) -> None:
        packed = base64.b64encode(array("f", [3.0, 4.0]).tobytes()).decode()
        assert array("f", embed_wire.read_answer(answer(packed), 0, 1)[0].data).tolist() == pytest.approx([0.6, 0.8])

    @pytest.mark.parametrize(
        "body",
        [
            answer([1.0]),
            answer([1.0], [1.0], [1.0]),
            answer([1.0], [1.0], indexes=[0, 0]),
            answer([1.0], [1.0, 2.0]),
            answer([0.0], [1.0]),
            answer([], []),
            answer("?", "?"),
            answer("YQ==", "YQ=="),
            b'{"data":[{"index":0,"embedding":[1e999]}]}',
            b"nonsense",
        ],
    )
    def test_that_is_none_is_the_engines_fault(self, body: bytes) -> None:
        with pytest.raises(EngineError) as caught:
            embed_wire.read_answer(body, 0, 2)
        assert caught.value.code == "engine_error"


def test_a_request_without_a_list_is_rejected() -> None:
    with pytest.raises(EngineError) as caught:
        embed_wire.inputs_of(EngineRequest({"input": {"a": 1}}, 0, "", 1.0))
    assert caught.value.code == "engine_rejected"
