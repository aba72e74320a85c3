"""Chunks are written from a prefix, and read back as what they mean."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from marketplace.gateway.sse import ChunkWriter, error_event, json_text


def writer(*, include_usage: bool = False) -> ChunkWriter:
    return ChunkWriter(completion_id="chatcmpl-1", created=7, model='a "model"', include_usage=include_usage)


def read(chunk: bytes) -> Any:
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n") == 2
    return json.loads(chunk[6:])


class TestAChunk:
    def test_says_who_speaks_only_first(self) -> None:
        chunks = writer()
        assert read(chunks.text("a")) == {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 7,
            "model": 'a "model"',
            "choices": [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": "a"},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
        }
        assert read(chunks.text("b"))["choices"][0]["delta"] == {"content": "b"}
        assert read(chunks.reasoning("c"))["choices"][0]["delta"] == {"reasoning_content": "c"}

    def test_of_the_end_has_a_reason_and_an_empty_delta(self) -> None:
        chunks = writer()
        chunks.text("a")
        choice = read(chunks.finish("stop"))["choices"][0]
        assert (choice["delta"], choice["finish_reason"]) == ({}, "stop")

    def test_of_an_end_without_text_still_says_who_spoke(self) -> None:
        assert read(writer().finish("stop"))["choices"][0]["delta"] == {"role": "assistant", "content": ""}

    def test_with_usage_comes_last_and_the_others_say_null(self) -> None:
        chunks = writer(include_usage=True)
        assert read(chunks.text("a"))["usage"] is None
        assert read(chunks.finish("stop"))["usage"] is None
        last = read(chunks.usage({"total_tokens": 3}))
        assert (last["choices"], last["usage"]) == ([], {"total_tokens": 3})

    def test_may_carry_other_members_and_log_probabilities(self) -> None:
        choice = read(writer().delta({"tool_calls": [{"index": 0}]}, {"content": []}))["choices"][0]
        assert choice["delta"] == {"role": "assistant", "tool_calls": [{"index": 0}]}
        assert choice["logprobs"] == {"content": []}

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_gives_any_text_back_on_one_line(self, text: str) -> None:
        chunk = writer().text(text)
        assert read(chunk)["choices"][0]["delta"]["content"] == text
        assert len(chunk.decode().splitlines()) == 2


class TestText:
    def test_that_some_clients_split_lines_at_is_escaped(self) -> None:
        assert json_text("a\u2028b\u2029") == b'"a\\u2028b\\u2029"'

    def test_that_only_looks_like_it_is_left_alone(self) -> None:
        assert json_text("\u2027\u202a") == '"\u2027\u202a"'.encode()


class TestAnError:
    def test_is_one_event_with_an_error_member(self) -> None:
        assert read(error_event({"error": {"code": "x"}})) == {"error": {"code": "x"}}
