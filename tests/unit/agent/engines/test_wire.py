"""Reading what engines send, and writing what they are sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.engines.chat_wire import ChatReader, Dialect, build_body, path_of, status_error
from agent.engines.port import Done, EngineError, EngineEvent, EngineRequest, Piece, Progress, Usage
from agent.engines.sse import SseDecoder, SseError

PLAIN = Dialect(name="plain")
IDS = Dialect(name="ids", ids_in_logprobs=True)


def request(max_tokens: int = 10, **body: object) -> EngineRequest:
    return EngineRequest({"messages": [{"role": "user", "content": "hi"}], **body}, max_tokens, "scope", 10.0)


def read(reader: ChatReader, *chunks: object) -> list[EngineEvent]:
    return [event for chunk in chunks for event in reader.feed(json.dumps(chunk).encode())]


def choice(delta: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, **more}]}


def logprob(token: str, token_id: int) -> dict[str, Any]:
    entry = {"token": token, "logprob": -0.5, "bytes": list(token.encode())}
    return {"id": token_id, **entry, "top_logprobs": [{"id": token_id, **entry}, {"id": 0, **entry}]}


def completion_request(**body: object) -> EngineRequest:
    return EngineRequest({"prompt": "Once upon", **body}, 10, "scope", 10.0)


class TestATextCompletion:
    def test_has_a_path_of_its_own_and_a_number_of_logprobs(self) -> None:
        asked = completion_request(logprobs=2)
        assert path_of(asked) == "/v1/completions"
        assert path_of(request()) == "/v1/chat/completions"
        body = json.loads(build_body(asked, IDS, "m", {}))
        assert (body["prompt"], body["logprobs"]) == ("Once upon", 2)
        assert "top_logprobs" not in body
        assert json.loads(build_body(completion_request(), IDS, "m", {}))["logprobs"] == 1

    def test_reads_text_and_its_own_shape_of_log_probabilities(self) -> None:
        legacy = {
            "tokens": [" a", " time"],
            "token_logprobs": [-0.5, -1.0],
            "top_logprobs": [{" a": -0.5, " the": -2.0}, None],
            "text_offset": [0, 2],
        }
        reader = ChatReader(completion_request(logprobs=1), PLAIN)
        events = read(
            reader, {"choices": [{"index": 0, "text": " a time", "logprobs": legacy, "finish_reason": "stop"}]}
        )
        (piece,) = events
        assert isinstance(piece, Piece)
        assert piece.text == " a time"
        first, second = json.loads(piece.extra)["logprobs"]["content"]
        assert first["top_logprobs"] == [{"token": " a", "logprob": -0.5, "bytes": None}]
        assert (second["token"], second["logprob"], second["top_logprobs"]) == (" time", -1.0, [])
        assert reader.done().finish_reason == "stop"

    def test_shows_no_log_probabilities_that_nobody_asked_for(self) -> None:
        reader = ChatReader(completion_request(), IDS)
        chunk = {"choices": [{"index": 0, "text": " a", "logprobs": {"content": [logprob(" a", 7)]}}]}
        assert read(reader, chunk) == [Piece(" a", (7,))]


class TestEvents:
    @given(
        st.lists(
            st.sampled_from([b"data: a\n\n", b": ping\n\n", b"data:b\r\n\r\n", b"event: x\ndata: c\ndata: d\n\n"])
        ),
        st.data(),
    )
    def test_the_cuts_of_the_network_change_nothing(self, parts: list[bytes], data: st.DataObject) -> None:
        stream = b"".join(parts)
        expected = SseDecoder().feed(stream)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
        decoder, got = SseDecoder(), []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            got += decoder.feed(stream[start:end])
        assert got == expected

    def test_several_data_lines_are_one_event_and_comments_are_none(self) -> None:
        assert SseDecoder().feed(b": keep-alive\n\ndata: a\ndata: b\n\ndata: [DONE]\n\n") == [b"a\nb", b"[DONE]"]

    @pytest.mark.parametrize("flood", [b"x" * 200, b"data: " + b"x" * 200, b"data: 1234567890\n" * 20])
    def test_an_endless_event_is_refused(self, flood: bytes) -> None:
        with pytest.raises(SseError, match="larger than 100 bytes"):
            SseDecoder(max_event_bytes=100).feed(flood)


class TestBody:
    def test_only_allowed_fields_reach_an_engine(self) -> None:
        sent = json.loads(
            build_body(
                request(temperature=0.5, lora=[1], id_slot=3, cache_prompt=True, grammar="x", n=5, stream=False),
                PLAIN,
                "model",
                {"id_slot": 1},
            )
        )
        assert sent == {
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0.5,
            "id_slot": 1,
            "model": "model",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 10,
        }

    def test_token_ids_are_asked_for_through_logprobs_except_with_tools(self) -> None:
        def asked(**body: object) -> tuple[object, object]:
            sent = json.loads(build_body(request(**body), IDS, "model", {}))  # type: ignore[arg-type]
            return sent.get("logprobs"), sent.get("top_logprobs")

        assert asked() == (True, 1)
        assert asked(logprobs=True, top_logprobs=5) == (True, 5)
        assert asked(logprobs=False, top_logprobs=5) == (True, 1)
        assert asked(tools=[{"type": "function"}]) == (None, None)


class TestChunks:
    def test_an_answer_becomes_progress_pieces_and_an_end(self) -> None:
        reader = ChatReader(request(), PLAIN)
        events = read(
            reader,
            {"choices": [], "prompt_progress": {"total": 37, "processed": 12, "cache": 0, "time_ms": 3}},
            choice({"role": "assistant", "content": None}),
            choice({"reasoning_content": "hm"}),
            choice({"content": "Hel"}),
            choice({"content": "lo"}, token_ids=[7, 8]),
            choice({}, finish_reason="stop"),
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 37,
                    "completion_tokens": 3,
                    "prompt_tokens_details": {"cached_tokens": 0},
                    "completion_tokens_details": {"reasoning_tokens": 1},
                },
            },
        )
        assert events == [
            Progress(12, 37),
            Piece("hm", reasoning=True),
            Piece("Hel"),
            Piece("lo", (7, 8)),
        ]
        assert reader.done() == Done("stop", Usage(37, 0, 3, 1))
        assert not reader.ended
        assert list(reader.feed(b"[DONE]")) == []
        assert reader.ended

    def test_what_the_engine_does_not_say_is_unknown_and_not_zero(self) -> None:
        reader = ChatReader(request(), PLAIN)
        assert read(reader, choice({"content": "x"}), choice({}, finish_reason="length")) == [Piece("x")]
        assert reader.done() == Done("length", Usage(None, None, None, None))

    def test_an_estimated_prompt_count_is_not_passed_on(self) -> None:
        reader = ChatReader(request(), Dialect(name="x", counts_prompt=False))
        read(reader, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 0}})
        assert reader.done().usage == Usage(None, None, 0, None)

    def test_ids_come_from_logprobs_which_stay_hidden_unless_asked_for(self) -> None:
        chunk = choice({"content": "I"}, logprobs={"content": [logprob("I", 57)]})
        assert read(ChatReader(request(), IDS), chunk) == [Piece("I", (57,))]
        [piece] = read(ChatReader(request(logprobs=True, top_logprobs=1), IDS), chunk)
        assert isinstance(piece, Piece)
        [entry] = json.loads(piece.extra)["logprobs"]["content"]
        assert "id" not in entry
        assert [top["token"] for top in entry["top_logprobs"]] == ["I"]
        [without] = read(ChatReader(request(logprobs=True), IDS), chunk)
        assert isinstance(without, Piece)
        assert json.loads(without.extra)["logprobs"]["content"][0]["top_logprobs"] == []

    def test_a_character_of_several_tokens_has_no_ids_rather_than_some(self) -> None:
        chunk = choice({"content": "🌟"}, logprobs={"content": [logprob("🌟", 249)]})
        assert read(ChatReader(request(), IDS), chunk) == [Piece("🌟")]

    def test_ids_of_an_empty_chunk_belong_to_the_next_text(self) -> None:
        reader = ChatReader(request(), IDS)
        first = choice({}, logprobs={"content": [logprob("a", 1)]})
        assert read(reader, first, choice({"content": "ab"}, logprobs={"content": [logprob("b", 2)]})) == [
            Piece("ab", (1, 2))
        ]

    def test_tool_calls_pass_as_they_are(self) -> None:
        calls = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        reader = ChatReader(request(), PLAIN)
        [piece] = read(
            reader, choice({"tool_calls": calls}), choice({"tool_calls": []}), choice({}, finish_reason="function_call")
        )
        assert isinstance(piece, Piece)
        assert json.loads(piece.extra) == {"tool_calls": calls}
        assert reader.done().finish_reason == "tool_calls"

    @pytest.mark.parametrize("reason", ["abort", "error", "", None])
    def test_an_unknown_finish_is_no_finish(self, reason: str | None) -> None:
        reader = ChatReader(request(), PLAIN)
        read(reader, choice({}, finish_reason=reason))
        assert not reader.finished

    def test_an_engine_that_does_not_stop_is_cut(self) -> None:
        reader = ChatReader(request(max_tokens=1), PLAIN)
        with pytest.raises(EngineError, match="does not stop") as caught:
            read(reader, *[choice({"content": "x"})] * 100)
        assert caught.value.code == "engine_error"

    @pytest.mark.parametrize(
        "payload", [b"{", b"[]", b'"x"', b'{"choices":3}', b"\xff", b'{"choices":[{"delta":{"content":5}}]}']
    )
    def test_garbage_is_an_engine_error(self, payload: bytes) -> None:
        with pytest.raises(EngineError) as caught:
            list(ChatReader(request(), PLAIN).feed(payload))
        assert caught.value.code == "engine_error"

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            ({"message": "out of memory", "code": 500}, "engine_error"),
            ("boom", "engine_error"),
            ({"message": "bad grammar", "code": 400}, "engine_rejected"),
            ([1], "engine_error"),
        ],
    )
    def test_an_error_event_says_whose_fault_it_is(self, error: object, code: str) -> None:
        with pytest.raises(EngineError) as caught:
            read(ChatReader(request(), PLAIN), {"error": error})
        assert caught.value.code == code


class TestStatus:
    @pytest.mark.parametrize(
        ("status", "body", "code"),
        [
            (
                400,
                b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}',
                "context_overflow",
            ),
            (400, b'{"message":"This model\'s maximum context length is 4096 tokens"}', "context_overflow"),
            (400, b'{"error":{"message":"Field temperature: must be number","type":"x"}}', "engine_rejected"),
            (422, b'{"error":"no"}', "engine_rejected"),
            (401, b"{}", "engine_error"),
            (429, b"{}", "engine_error"),
            (500, b"<html>", "engine_error"),
            (503, b"", "engine_error"),
        ],
    )
    def test_each_status_has_a_culprit(self, status: int, body: bytes, code: str) -> None:
        error = status_error(status, body)
        assert error.code == code
        assert error.message

    def test_messages_are_bounded(self) -> None:
        assert len(status_error(400, json.dumps({"error": {"message": "x" * 9999}}).encode()).message) == 300
