"""Decimal strings outside, whole nanos inside."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.core.amounts import MAX_USD_PER_MTOK, nano_per_mtok, usd


class TestReading:
    @pytest.mark.parametrize(
        ("text", "nano"),
        [("0", 0), ("0.05", 50_000_000), ("12", 12 * 10**9), ("0.000000001", 1), ("1000000", 10**15)],
    )
    def test_a_plain_decimal_is_exact(self, text: str, nano: int) -> None:
        assert nano_per_mtok(text) == nano

    @pytest.mark.parametrize(
        "text",
        [
            "",
            ".5",
            "5.",
            "-1",
            "+1",
            "1e3",
            "NaN",
            "Infinity",
            "0.0000000001",
            "1000000.1",
            "9999999",
            " 1",
            "1 ",
            "١",
            "1_0",
        ],
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"decimal string|at most"):
            nano_per_mtok(text)

    def test_every_cent_up_to_a_hundred_dollars_passes_exactly(self) -> None:
        for cents in range(1, 10_001):
            assert nano_per_mtok(f"{cents // 100}.{cents % 100:02d}") == cents * 10**7


class TestWriting:
    @pytest.mark.parametrize(
        ("nano", "text"),
        [(0, "0"), (1_500_000, "0.0015"), (10**9, "1"), (-1, "-0.000000001"), (2**53 + 1, "9007199.254740993")],
    )
    def test_no_digit_is_lost_or_added(self, nano: int, text: str) -> None:
        assert usd(nano) == text

    @given(st.integers(-(10**18), 10**18))
    def test_a_decimal_reader_finds_the_same_amount(self, nano: int) -> None:
        assert Decimal(usd(nano)) * 10**9 == nano

    @given(st.integers(0, MAX_USD_PER_MTOK * 10**9))
    def test_a_price_survives_the_way_out_and_in(self, nano: int) -> None:
        assert nano_per_mtok(usd(nano)) == nano
