"""Bodies of POST /v1/embeddings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.gateway.embeddings.request import InputTooLong, parse_embedding, require_room
from marketplace.gateway.strict import InvalidBody


def parsed(**fields: Any) -> Any:
    return parse_embedding(msgspec.json.encode({"model": "m", "input": "text", **fields}))


@pytest.mark.parametrize(
    ("given_", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_an_input_comes_in_four_shapes(given_: Any, inputs: Any) -> None:
    assert parsed(input=given_).inputs == inputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "\0"}, None),
        ({"input": [-1]}, "input[0]"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": [True]}, "input[0]"),
        ({"input": [1, "a"]}, "input[0]"),
        ({"input": [["a"]]}, "input[0][0]"),
        ({"input": None}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_whatever_else_is_a_refusal_that_names_the_field(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidBody) as caught:
        parsed(**fields)
    if param is not None:
        assert (caught.value.param or "").startswith(param.partition("[")[0])


@given(st.lists(st.integers(1, 400), min_size=1, max_size=50).map(tuple), st.integers(1, 400))
def test_each_input_must_fit_a_slot_and_the_first_that_does_not_is_named(inputs: tuple[int, ...], context: int) -> None:
    over = [index for index, tokens in enumerate(inputs) if tokens > context]
    if not over:
        require_room(inputs, context)
        return
    with pytest.raises(InputTooLong) as caught:
        require_room(inputs, context)
    assert caught.value.param == f"input[{over[0]}]"


def test_all_of_them_have_a_bound_together() -> None:
    with pytest.raises(InputTooLong, match="300000"):
        require_room((1_000,) * 301, 1_000)


def test_what_waits_says_what_its_slot_must_hold() -> None:
    request = parsed(input=["a", "b"], encoding_format="base64")
    stored = msgspec.json.decode(request.stored_body((3, 8)))
    assert stored == {"input": ["a", "b"], "encoding_format": "base64", "longest_input_tokens": 8}
    assert msgspec.json.decode(request.engine_body(0)) == {"input": ["a", "b"]}
