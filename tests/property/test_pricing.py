"""Pricing, whatever the counts, the asks and the fee."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from marketplace.metering.pricing import (
    MAX_AFFORDABLE_TOKENS,
    Priced,
    Rates,
    affordable_output,
    price,
    worst_case,
)
from marketplace.metering.tokens import TokenCounts, billable_cached, billable_output

token_numbers = st.integers(0, 2_000_000)
rate_numbers = st.one_of(st.integers(0, 10**12), st.integers(0, 100), st.sampled_from([500_000, 1_500_000, 2_500_000]))
rates = st.builds(Rates, rate_numbers, rate_numbers, rate_numbers)
counts = st.builds(TokenCounts, token_numbers, token_numbers, token_numbers, token_numbers)
fees = st.integers(0, 10_000)


def classes(priced: Priced) -> tuple[int, ...]:
    return (
        priced.input_uncached_nano,
        priced.input_cached_nano,
        priced.output_visible_nano,
        priced.output_reasoning_nano,
    )


@given(counts, rates, fees)
def test_parts_add_up_to_the_whole(tokens: TokenCounts, asks: Rates, fee: int) -> None:
    priced = price(tokens, asks, fee)
    assert sum(classes(priced)) == priced.gross_nano == priced.fee_nano + priced.owner_nano
    assert min(*classes(priced), priced.fee_nano, priced.owner_nano) >= 0


@given(counts, rates, fees)
def test_each_part_is_within_one_nano_of_its_exact_value(tokens: TokenCounts, asks: Rates, fee: int) -> None:
    priced = price(tokens, asks, fee)
    exact = [
        Fraction(number * rate, 1_000_000)
        for number, rate in (
            (tokens.input_uncached, asks.input),
            (tokens.input_cached, asks.cached_input),
            (tokens.output_visible, asks.output),
            (tokens.output_reasoning, asks.output),
        )
    ]
    assert abs(priced.gross_nano - sum(exact)) <= Fraction(1, 2)
    assert all(abs(part - value) < 1 for part, value in zip(classes(priced), exact, strict=True))
    assert abs(priced.fee_nano - Fraction(priced.gross_nano * fee, 10_000)) <= Fraction(1, 2)


@given(counts, rates, st.sampled_from(["input_uncached", "input_cached", "output_visible", "output_reasoning"]))
def test_one_more_token_never_costs_less(tokens: TokenCounts, asks: Rates, name: str) -> None:
    more = replace(tokens, **{name: getattr(tokens, name) + 1})
    assert price(more, asks, 0).gross_nano >= price(tokens, asks, 0).gross_nano


@given(counts, rates)
def test_no_receipt_costs_more_than_the_worst_case_of_its_totals(tokens: TokenCounts, asks: Rates) -> None:
    assert price(tokens, asks, 0).gross_nano <= worst_case(asks, tokens.input, tokens.output)


@given(rates, token_numbers, st.integers(0, 10**15))
def test_the_affordable_output_is_the_largest_that_fits(asks: Rates, prompt: int, balance: int) -> None:
    tokens = affordable_output(asks, prompt, balance)
    assert 0 <= tokens <= MAX_AFFORDABLE_TOKENS
    if tokens:
        assert worst_case(asks, prompt, tokens) <= balance
    if tokens < MAX_AFFORDABLE_TOKENS:
        assert worst_case(asks, prompt, tokens + 1) > balance


@given(st.none() | st.integers(-5, 10**7), st.integers(0, 10**6), st.integers(0, 10**6))
def test_billed_output_is_bounded_by_request_and_recount(claimed: int | None, recount: int, max_tokens: int) -> None:
    billed = billable_output(claimed, recount, max_tokens)
    assert 0 <= billed <= max_tokens
    assert billed <= recount + recount // 50 + 2
    if claimed is not None:
        assert billed <= max(claimed, 0)


@given(st.none() | st.integers(-5, 10**7), st.integers(0, 10**6), st.integers(0, 10**6), token_numbers)
def test_classes_are_disjoint_and_cover_the_totals(reported: int | None, proven: int, prompt: int, output: int) -> None:
    cached = billable_cached(reported, proven, prompt)
    tokens = TokenCounts.of(prompt=prompt, cached=cached, output=output, reasoning=proven)
    assert tokens.input == prompt
    assert tokens.output == output
    assert tokens.input_cached == cached <= prompt
    assert tokens.output_reasoning <= output


@given(rates, rates, st.integers(1, 10_000))
def test_a_ceiling_before_a_share_lets_in_exactly_what_the_share_brings_within_it(
    asks: Rates, ceiling: Rates, share: int
) -> None:
    assert asks.within(ceiling.before_share(share)) == asks.at_share(share).within(ceiling)
