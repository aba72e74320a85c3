"""Pieces become messages, and counts become usage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.protocol import Tokens
from marketplace.gateway.answer import BadExtraError, completion, gather, read_extra, usage_object
from marketplace.metering.pricing import Rates, price
from marketplace.metering.tokens import TokenCounts

ATTEMPT = b"a" * 16


def piece(
    text: str = "", ids: tuple[int, ...] = (), *, reasoning: bool = False, extra: Any = None, choice: int = 0
) -> Tokens:
    raw = json.dumps(extra).encode() if extra is not None else b""
    return Tokens(ATTEMPT, 1, 0, text, list(ids), reasoning, raw, choice)


class TestGathering:
    def test_keeps_reasoning_apart(self) -> None:
        texts = gather([piece("think", reasoning=True), piece("a"), piece("b")])
        assert (texts.visible, texts.reasoning) == ("ab", "think")

    def test_keeps_ids_only_where_every_piece_has_them(self) -> None:
        whole = gather([piece("a", (1,)), piece("bc", (2, 3)), piece("", ())])
        assert whole.visible_ids == [1, 2, 3]
        assert gather([piece("a", (1,)), piece("b"), piece("c", (3,))]).visible_ids is None

    def test_counts_what_tools_are_called_with_as_text(self) -> None:
        call = {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": "{}"}}]}
        assert gather([piece(extra=call)]).called == "look{}"

    def test_of_nothing_is_empty(self) -> None:
        texts = gather([])
        assert (texts.visible, texts.reasoning, texts.called, texts.visible_ids) == ("", "", "", None)


class TestExtras:
    @pytest.mark.parametrize(
        "raw", [b"", b"{", b"[]", b'{"tool_calls":{}}', b'{"tool_calls":[{"index":999}]}', b"{" * 9_000]
    )
    def test_that_are_no_part_of_an_answer_are_refused(self, raw: bytes) -> None:
        with pytest.raises(BadExtraError):
            read_extra(raw)

    def test_that_are_too_large_are_refused(self) -> None:
        with pytest.raises(BadExtraError):
            read_extra(b" " * (256 * 1024 + 1))


class TestACompletion:
    def test_has_a_choice_for_each_answer_also_for_an_empty_one(self) -> None:
        pieces = [piece("a"), piece("b"), piece("c", choice=2)]
        reasons = ["stop", "stop", "length"]
        answer = completion(completion_id="x", created=1, model="m", pieces=pieces, finish_reasons=reasons, usage={})
        found = [(one["index"], one["message"]["content"], one["finish_reason"]) for one in answer["choices"]]
        assert found == [(0, "ab", "stop"), (1, "", "stop"), (2, "c", "length")]

    def test_merges_the_parts_of_a_tool_call(self) -> None:
        pieces = [
            piece(extra={"tool_calls": [{"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"a"'}}]}),
            piece(extra={"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
        ]
        answer = completion(
            completion_id="x", created=1, model="m", pieces=pieces, finish_reasons=["tool_calls"], usage={}
        )
        message = answer["choices"][0]["message"]
        assert message["content"] is None
        assert message["tool_calls"] == [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
        ]

    def test_joins_log_probabilities(self) -> None:
        token = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
        answer = completion(
            completion_id="x",
            created=1,
            model="m",
            pieces=[piece("a", extra={"logprobs": {"content": [token]}})] * 2,
            finish_reasons=["stop"],
            usage={},
        )
        assert answer["choices"][0]["logprobs"] == {"content": [token, token]}


class TestUsage:
    def test_has_opposite_totals_of_the_same_classes_and_an_exact_cost(self) -> None:
        # The classes of a published case: 1.25, 0.625 and 10 USD a million.
        rates = Rates(1_250_000_000, 625_000_000, 10_000_000_000)
        counts = TokenCounts.of(prompt=262_960, cached=257_955, output=1_744)
        usage = usage_object(counts, price(counts, rates, 2_000))
        assert usage["cost"] == "0.184918125"
        assert usage["total_tokens"] == 264_704
        assert usage["prompt_tokens_details"] == {"cached_tokens": 257_955}
        parts = usage["cost_details"].values()
        assert sum(round(float(part) * 1e9) for part in parts) == 184_918_125

    def test_of_what_nobody_pays_costs_nothing(self) -> None:
        usage = usage_object(TokenCounts(0, 0, 0, 0), None)
        assert (usage["cost"], "cost_details" in usage) == ("0", False)
