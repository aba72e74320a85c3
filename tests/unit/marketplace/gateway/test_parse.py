"""Bodies are decoded once, strictly, and come out normalised."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.gateway.parse import ChatRequest, parse_chat
from marketplace.gateway.strict import MAX_DEPTH, InvalidBody, decode_strict

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def body(**changes: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **changes}).encode()


def refusal(raw: bytes) -> InvalidBody:
    with pytest.raises(InvalidBody) as caught:
        parse_chat(raw)
    return caught.value


class TestWhatPasses:
    def test_a_plain_chat_has_no_bound_and_does_not_stream(self) -> None:
        chat = parse_chat(body())
        assert chat == ChatRequest("m", [USER], None, False, False, None, {})

    def test_every_option_an_engine_takes_is_kept(self) -> None:
        options = {
            "temperature": 0.5,
            "top_p": 1,
            "min_p": 0.1,
            "top_k": 40,
            "presence_penalty": -1,
            "frequency_penalty": 2,
            "stop": ["a", "b"],
            "seed": -5,
            "logprobs": True,
            "top_logprobs": 3,
            "logit_bias": {"50": -100},
            "response_format": {"type": "json_object"},
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "parallel_tool_calls": False,
        }
        sent = json.loads(parse_chat(body(**options)).engine_body(7))
        assert sent == {"messages": [USER], "max_tokens": 7, **options}

    def test_what_is_not_the_engines_business_stays_here(self) -> None:
        chat = parse_chat(body(user="u", metadata={"a": "b"}, stream=True, n=1, store=False, service_tier="auto"))
        assert json.loads(chat.engine_body(1)) == {"messages": [USER], "max_tokens": 1}
        assert chat.stream

    def test_null_means_not_given(self) -> None:
        chat = parse_chat(
            body(temperature=None, max_tokens=None, stream=None, tools=None, stop=None, stream_options=None)
        )
        assert (chat.options, chat.max_tokens, chat.stream) == ({}, None, False)

    def test_null_asks_for_nothing_also_in_fields_that_are_not_taken(self) -> None:
        unset = ("reasoning_effort", "functions", "function_call", "verbosity", "prediction", "audio")
        assert parse_chat(body(**dict.fromkeys(unset))) == parse_chat(body())
        for name in unset:
            assert "not a field that is taken here" in refusal(body(**{name: "low"})).message

    def test_an_answer_comes_back_as_it_went_out(self) -> None:
        answer = {"role": "assistant", "content": "yes", "refusal": None, "reasoning_content": "hm"}
        elsewhere = {"annotations": [], "audio": None, "function_call": None, "tool_calls": None}
        chat = parse_chat(body(messages=[USER, {**answer, **elsewhere}, USER]))
        assert chat.messages[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}

    def test_parts_are_joined_and_developers_are_the_system(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        chat = parse_chat(body(messages=[{"role": "developer", "content": parts}, USER]))
        assert chat.messages == [{"role": "system", "content": "a\nb"}, USER]

    def test_tool_calls_and_their_results_keep_their_ids(self) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "a fox"},
        ]
        assert parse_chat(body(messages=messages, tools=[TOOL])).messages == [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "a fox"},
        ]

    @pytest.mark.parametrize(
        ("fields", "bound"),
        [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": 7, "max_completion_tokens": 7}, 7)],
    )
    def test_both_names_of_the_bound_count(self, fields: dict[str, int], bound: int) -> None:
        assert parse_chat(body(**fields)).max_tokens == bound

    @pytest.mark.parametrize(
        ("options", "wanted"), [({"include_usage": True}, True), ({"include_usage": False}, False), ({}, False)]
    )
    def test_usage_is_shown_to_who_asked(self, options: dict[str, bool], wanted: bool) -> None:
        assert parse_chat(body(stream=True, stream_options=options)).include_usage is wanted

    def test_a_text_that_spells_a_nul_out_is_no_nul(self) -> None:
        raw = b'{"model":"m","messages":[{"role":"user","content":"say \\\\u0000"}]}'
        assert parse_chat(raw).messages[0]["content"] == "say \\u0000"

    def test_brackets_within_text_are_no_depth(self) -> None:
        content = "[{" * 500
        assert parse_chat(body(messages=[{"role": "user", "content": content}])).messages[0]["content"] == content

    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
    def test_any_text_arrives_unchanged(self, text: str) -> None:
        chat = parse_chat(body(messages=[{"role": "user", "content": text}]))
        assert json.loads(chat.engine_body(1))["messages"][0]["content"] == text


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"colour": "blue"}, "colour"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
            ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
            ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"max_tokens": "5"}, "max_tokens"),
            ({"max_tokens": 1.5}, "max_tokens"),
            ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
            ({"n": 9}, "n"),
            ({"n": 0}, "n"),
            ({"n": True}, "n"),
            ({"temperature": 2.1}, "temperature"),
            ({"temperature": "hot"}, "temperature"),
            ({"top_p": -0.1}, "top_p"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"logit_bias": {"fox": 1}}, "logit_bias"),
            ({"stop": [""]}, "stop[0]"),
            ({"stream": "yes"}, "stream"),
            ({"store": True}, "store"),
            ({"service_tier": "priority"}, "service_tier"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"response_format": {"type": "xml"}}, "response_format.type"),
            ({"seed": 2**63}, "seed"),
        ],
    )
    def test_a_wrong_field_is_named(self, changes: dict[str, Any], param: str) -> None:
        error = refusal(body(**changes))
        assert (error.status, error.param) == (400, param)
        assert error.body()["error"]["type"] == "invalid_request_error"

    def test_a_missing_field_is_named(self) -> None:
        assert refusal(b'{"messages":[]}').param in ("model", "messages")
        assert refusal(b'{"model":"m"}').param == "messages"

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"{",
            b"null",
            b"[]",
            b'"text"',
            body() + b"x",
            b"\xef\xbb\xbf" + body(),
            body().replace(b'"hi"', b'"\xff"'),
            body().replace(b'"hi"', b'"\xed\xa0\x80"'),
            body().replace(b'"hi"', b'"\\ud800"'),
            body().replace(b'"hi"', b'"\\ud800x"'),
            body().replace(b'"hi"', b'"a\x00b"'),
            body().replace(b'"hi"', b'"a\\u0000b"'),
            body()[:-1] + b',"temperature":NaN}',
            body()[:-1] + b',"temperature":-Infinity}',
            body()[:-1] + b',"temperature":1e999}',
            body()[:-1] + b',"seed":' + b"9" * 6_000 + b"}",
            body()[:-1] + b',"model":"m"}',
            body()[:-1] + b',"metadata":{"a":"1","a":"1"}}',
            body()[:-1] + b',"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        ],
        ids=lambda raw: repr(raw[:40]),
    )
    def test_what_is_no_clean_json_is_400(self, raw: bytes) -> None:
        assert refusal(raw).status == 400

    def test_a_nul_within_a_key_is_refused_too(self) -> None:
        assert refusal(body()[:-1] + b',"metadata":{"a\\u0000":"1"}}').status == 400

    def test_nesting_is_bounded_where_anything_is_allowed(self) -> None:
        def nested(levels: int) -> bytes:
            schema: dict[str, Any] = {}
            for _ in range(levels):
                schema = {"properties": schema}
            return body(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])

        parse_chat(nested(MAX_DEPTH - 6))
        assert "nests deeper" in refusal(nested(MAX_DEPTH)).message

    @given(st.binary(max_size=200))
    def test_no_bytes_do_anything_but_pass_or_be_refused(self, raw: bytes) -> None:
        with contextlib.suppress(InvalidBody):
            assert isinstance(decode_strict(raw, dict[str, Any]), dict)
