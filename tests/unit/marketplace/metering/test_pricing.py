"""Prices of token classes, exact to the nano."""

from __future__ import annotations

from fractions import Fraction

import pytest

from marketplace.metering.pricing import (
    MAX_AFFORDABLE_TOKENS,
    Rates,
    affordable_output,
    divide_half_even,
    price,
    worst_case,
)
from marketplace.metering.tokens import TokenCounts


def rates(input_usd: str, cached_usd: str, output_usd: str) -> Rates:
    """Rates from USD per million tokens."""
    nano = [Fraction(text) * 10**9 for text in (input_usd, cached_usd, output_usd)]
    assert all(value.denominator == 1 for value in nano)
    return Rates(*(int(value) for value in nano))


class TestTokenClassesArePricedOnce:
    @pytest.mark.parametrize(
        ("prompt", "cached", "output", "reasoning", "asks", "nano"),
        [
            (262_960, 257_955, 1_744, 0, ("1.25", "0.625", "10"), 184_918_125),
            (27_147, 27_146, 351, 0, ("1.4", "0.26", "4.4"), 8_603_760),
            (14_746, 0, 1_944, 1_360, ("30", "30", "180"), 792_300_000),
        ],
    )
    def test_cached_is_part_of_the_prompt_and_reasoning_part_of_the_output(
        self, prompt: int, cached: int, output: int, reasoning: int, asks: tuple[str, str, str], nano: int
    ) -> None:
        counts = TokenCounts.of(prompt=prompt, cached=cached, output=output, reasoning=reasoning)
        assert price(counts, rates(*asks), 2_000).gross_nano == nano

    def test_a_free_model_costs_nothing_and_pays_nothing(self) -> None:
        priced = price(TokenCounts(1_000, 10, 500, 5), Rates(0, 0, 0), 2_000)
        assert (priced.gross_nano, priced.fee_nano, priced.owner_nano) == (0, 0, 0)


class TestRounding:
    @pytest.mark.parametrize(("numerator", "expected"), [(5, 0), (15, 2), (25, 2), (35, 4), (24, 2), (26, 3), (0, 0)])
    def test_a_tie_goes_to_the_even_side(self, numerator: int, expected: int) -> None:
        assert divide_half_even(numerator, 10) == expected

    def test_a_receipt_is_rounded_once_and_not_class_by_class(self) -> None:
        # Four classes of 0.4 nano each: 1.6 rounds to 2, while class by class all would vanish.
        priced = price(TokenCounts(1, 1, 1, 1), Rates(400_000, 400_000, 400_000), 0)
        assert priced.gross_nano == 2
        classes = (
            priced.input_uncached_nano,
            priced.input_cached_nano,
            priced.output_visible_nano,
            priced.output_reasoning_nano,
        )
        assert classes == (1, 1, 0, 0)

    def test_the_odd_nano_goes_to_the_class_with_the_largest_remainder(self) -> None:
        priced = price(TokenCounts(1, 0, 1, 0), Rates(300_000, 0, 700_000), 0)
        assert (priced.gross_nano, priced.input_uncached_nano, priced.output_visible_nano) == (1, 0, 1)

    def test_the_fee_is_rounded_half_to_even_and_the_owner_gets_the_rest(self) -> None:
        priced = price(TokenCounts(0, 0, 1, 0), Rates(0, 0, 5_000_000), 5_000)
        assert (priced.gross_nano, priced.fee_nano, priced.owner_nano) == (5, 2, 3)


class TestImpossibleInputsAreRefused:
    @pytest.mark.parametrize("fee", [-1, 10_001])
    def test_a_fee_outside_nothing_to_everything(self, fee: int) -> None:
        with pytest.raises(ValueError, match="basis points"):
            price(TokenCounts(1, 0, 1, 0), Rates(1, 1, 1), fee)

    def test_a_negative_rate(self) -> None:
        with pytest.raises(ValueError, match="negative"):
            price(TokenCounts(1, 0, 1, 0), Rates(1, -1, 1), 0)

    def test_a_negative_count(self) -> None:
        with pytest.raises(ValueError, match="negative"):
            TokenCounts(0, 0, -1, 0)


class TestAffordableOutput:
    def test_a_small_balance_gets_a_shorter_answer(self) -> None:
        asks = rates("0.5", "0.25", "1.5")
        tokens = affordable_output(asks, 2, 20_000)
        assert tokens == 12
        assert worst_case(asks, 2, tokens) <= 20_000 < worst_case(asks, 2, tokens + 1)

    def test_a_free_model_is_affordable_on_an_empty_balance(self) -> None:
        assert affordable_output(Rates(0, 0, 0), 100, 0) == MAX_AFFORDABLE_TOKENS

    def test_a_prompt_that_the_balance_does_not_cover_affords_nothing(self) -> None:
        assert affordable_output(rates("1", "1", "1"), 1_000, 10) == 0

    def test_a_negative_balance_affords_nothing_even_where_all_is_free(self) -> None:
        assert affordable_output(Rates(0, 0, 0), 1, -1) == 0

    def test_a_cached_rate_above_the_input_rate_counts_as_the_worst_case(self) -> None:
        assert worst_case(Rates(1_000_000, 3_000_000, 0), 10, 0) == 30
