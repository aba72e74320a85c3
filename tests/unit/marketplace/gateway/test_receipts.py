"""What was delivered becomes counts that may be billed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.protocol import Finished, Tokens, UsageReport
from marketplace.gateway import receipts
from marketplace.gateway.outcomes import Payer
from marketplace.gateway.receipts import Counted, price_of
from marketplace.metering.pricing import Rates
from marketplace.metering.tokens import TokenCounts

ATTEMPT = b"a" * 16


class Letters:
    """A tokenizer with one token a letter."""

    async def count_text_async(self, text: str) -> int:
        return len(text)


def piece(text: str, ids: int = 0, *, reasoning: bool = False, extra: bytes = b"", choice: int = 0) -> Tokens:
    return Tokens(ATTEMPT, 1, 0, text, [1] * ids, reasoning, extra, choice)


def report(cached: int | None) -> Finished:
    return Finished(ATTEMPT, 1, 0, "stop", UsageReport(cached_tokens=cached), 0.0, 1.0, 1.0)


def count(pieces: list[Tokens], **changes: Any) -> Counted:
    facts: dict[str, Any] = {
        "accepted_tokens": len(pieces),
        "prompt_tokens": 10,
        "max_output_tokens": 100,
        "report": None,
        "proven_prefix": 0,
    }
    return asyncio.run(receipts.count(Letters(), pieces, **{**facts, **changes}))


class TestOutput:
    def test_without_ids_is_our_recount(self) -> None:
        assert count([piece("abc"), piece("de")]).tokens.output == 5

    def test_is_lowered_by_fewer_ids_and_never_raised_by_more(self) -> None:
        assert count([piece("abc", 2)]).tokens.output == 2
        assert count([piece("abc", 50)]).tokens.output == 3

    def test_is_bounded_by_what_was_asked_for(self) -> None:
        assert count([piece("a" * 30)], max_output_tokens=20).tokens.output == 20

    def test_keeps_reasoning_a_class_of_its_own(self) -> None:
        tokens = count([piece("abcd", reasoning=True), piece("ef")]).tokens
        assert (tokens.output_reasoning, tokens.output_visible) == (4, 2)

    def test_counts_what_tools_are_called_with(self) -> None:
        extra = b'{"tool_calls":[{"index":0,"function":{"name":"look","arguments":"{}"}}]}'
        assert count([piece("", 40, extra=extra)]).tokens.output == 6

    def test_of_several_answers_is_counted_and_bounded_one_by_one(self) -> None:
        pieces = [piece("a" * 30), piece("b" * 3, choice=1), piece("c" * 9, 5, reasoning=True, choice=2)]
        tokens = count(pieces, max_output_tokens=20, choices=3).tokens
        assert (tokens.input, tokens.output_visible, tokens.output_reasoning) == (10, 20 + 3, 5)

    @given(
        st.lists(st.tuples(st.text("ab", max_size=9), st.integers(0, 9), st.booleans()), max_size=12),
        st.integers(1, 40),
    )
    def test_is_never_more_than_was_accepted_or_asked_for(self, parts: list[tuple[str, int, bool]], bound: int) -> None:
        pieces = [piece(text, ids, reasoning=reasoning) for text, ids, reasoning in parts]
        counted = count(pieces, max_output_tokens=bound)
        assert counted.tokens.output <= min(counted.accepted, bound, sum(len(text) for text, _, _ in parts))


class TestCachedInput:
    @pytest.mark.parametrize(
        ("reported", "proven", "cached"),
        [(None, 0, 0), (0, 0, 0), (4, 0, 4), (0, 6, 6), (None, 6, 6), (4, 6, 6), (8, 6, 8), (99, 0, 10), (-5, 0, 0)],
    )
    def test_is_the_larger_of_the_report_and_what_the_node_must_have(
        self, reported: int | None, proven: int, cached: int
    ) -> None:
        tokens = count([], report=report(reported), proven_prefix=proven).tokens
        assert (tokens.input_cached, tokens.input_uncached) == (cached, 10 - cached)


class TestThePrice:
    def test_is_nothing_where_nobody_pays(self) -> None:
        assert price_of(TokenCounts(1, 1, 1, 1), Rates(1, 1, 1), 0, Payer.NOBODY) is None

    def test_is_the_same_whoever_pays(self) -> None:
        rates = Rates(10**9, 10**8, 10**10)
        priced = [price_of(TokenCounts(5, 5, 5, 5), rates, 2_000, payer) for payer in (Payer.RENTER, Payer.PLATFORM)]
        assert priced[0] == priced[1] is not None
