from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import CurrencyMismatch, InvalidAmount, Money, divide_half_even, format_nano, parse_nano, split_nano

NANOS = st.integers(min_value=-(2**62), max_value=2**62)


class TestParsing:
    def test_each_price_from_one_cent_to_a_hundred_passes_exactly(self) -> None:
        for cents in range(1, 10_001):
            assert parse_nano(f"{cents // 100}.{cents % 100:02d}") == cents * 10_000_000

    @pytest.mark.parametrize(
        "text",
        ["", ".", "1.", ".5", "1e3", "NaN", "Infinity", "0x10", "1,000.00", "1 000", "--1", "0.0000000001", "٣", "1_0"],
    )
    def test_what_cannot_be_meant_exactly_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidAmount):
            parse_nano(text)

    def test_more_than_a_bigint_is_refused(self) -> None:
        assert parse_nano("9223372036.854775807") == 2**63 - 1
        with pytest.raises(InvalidAmount):
            parse_nano("9223372036.854775808")

    @given(NANOS)
    def test_an_amount_survives_its_own_text(self, nano: int) -> None:
        assert parse_nano(format_nano(nano)) == nano
        assert Decimal(format_nano(nano, min_places=9)) == Decimal(nano) / 10**9


class TestFormatting:
    @pytest.mark.parametrize(
        ("nano", "text"),
        [
            (0, "0.00"),
            (1, "0.000000001"),
            (-1, "-0.000000001"),
            (10_000_000, "0.01"),
            (184_918_125, "0.184918125"),
            (2**53 + 1, "9007199.254740993"),
        ],
    )
    def test_every_digit_that_counts_is_shown(self, nano: int, text: str) -> None:
        assert format_nano(nano) == text

    def test_a_column_can_have_one_width_of_decimals(self) -> None:
        assert format_nano(1_500_000_000, min_places=9) == "1.500000000"


class TestRounding:
    @pytest.mark.parametrize(
        ("numerator", "denominator", "expected"),
        [(5, 10, 0), (15, 10, 2), (25, 10, 2), (-5, 10, 0), (-15, 10, -2), (26, 10, 3), (24, 10, 2), (-26, 10, -3)],
    )
    def test_ties_go_to_the_even_neighbour(self, numerator: int, denominator: int, expected: int) -> None:
        assert divide_half_even(numerator, denominator) == expected

    @given(NANOS, st.integers(min_value=1, max_value=10**12))
    def test_it_agrees_with_exact_fractions(self, numerator: int, denominator: int) -> None:
        assert divide_half_even(numerator, denominator) == round(Fraction(numerator, denominator))


class TestSplitting:
    @given(NANOS, st.lists(st.integers(min_value=0, max_value=10**9), min_size=1, max_size=8).filter(any))
    def test_no_nano_is_lost_and_each_part_is_within_one_of_its_share(self, nano: int, weights: list[int]) -> None:
        parts = split_nano(nano, weights)
        assert sum(parts) == nano
        total = sum(weights)
        for part, weight in zip(parts, weights, strict=True):
            assert abs(part * total - nano * weight) < total
            assert weight or part == 0

    def test_the_largest_remainders_take_what_is_left(self) -> None:
        assert split_nano(100, [1, 1, 1]) == (34, 33, 33)
        assert split_nano(10, [6, 1, 3]) == (6, 1, 3)
        assert split_nano(-100, [1, 1, 1]) == (-34, -33, -33)

    @pytest.mark.parametrize("weights", [[0, 0], [], [2, -1]])
    def test_weights_that_mean_nothing_are_refused(self, weights: list[int]) -> None:
        with pytest.raises(InvalidAmount):
            split_nano(1, weights)


class TestMoney:
    def test_two_currencies_never_meet(self) -> None:
        with pytest.raises(CurrencyMismatch):
            Money(1, "USD") + Money(1, "EUR")
        with pytest.raises(CurrencyMismatch):
            assert Money(1, "USD") < Money(1, "EUR")

    def test_only_whole_cents_leave_and_the_rest_is_named(self) -> None:
        assert Money.parse("14.28444999").cents() == (1428, Money(4_449_990))
        assert Money.parse("-0.019").cents() == (-1, Money(-9_000_000))

    def test_a_share_is_rounded_once(self) -> None:
        assert Money(5).share(2_000, 10_000) == Money(1)
        assert Money(184_918_125).share(2_000, 10_000) == Money(36_983_625)

    def test_an_amount_beyond_a_bigint_is_refused(self) -> None:
        with pytest.raises(InvalidAmount):
            Money(2**63)
