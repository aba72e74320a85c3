"""Minor units: what can leave the platform, exactly."""

from __future__ import annotations

from decimal import Decimal

import pytest

from ledger import parse_nano
from marketplace.billing.payments.minor import (
    InexactAmount,
    decimals,
    from_minor,
    nano_per_minor,
    payout_split,
    to_minor,
)
from tests.fakes.stripe.currencies import KNOWN, THREE_DECIMAL, WHOLE_CHARGES, WHOLE_PAYOUTS, ZERO_DECIMAL

NANO = 10**9


class TestCents:
    def test_each_of_ten_thousand_prices_passes_exactly(self) -> None:
        for cents in range(1, 10_001):
            text = f"{Decimal(cents) / 100:.2f}"
            assert to_minor(parse_nano(text), "usd") == cents
            assert from_minor(cents, "usd") == parse_nano(text)

    def test_19_99_is_1999_cents_and_not_1998(self) -> None:
        assert to_minor(parse_nano("19.99"), "usd") == 1_999

    @pytest.mark.parametrize("nano", [1, NANO // 100 + 1, NANO - 1])
    def test_parts_of_a_cent_are_never_charged(self, nano: int) -> None:
        with pytest.raises(InexactAmount):
            to_minor(nano, "usd")


class TestTables:
    def test_agree_with_the_processors(self) -> None:
        for currency in KNOWN:
            wanted = 0 if currency in ZERO_DECIMAL else 3 if currency in THREE_DECIMAL else 2
            assert decimals(currency) == decimals(currency.upper()) == wanted

    @pytest.mark.parametrize("currency", sorted(WHOLE_CHARGES))
    def test_some_are_charged_in_whole_units(self, currency: str) -> None:
        assert to_minor(5 * NANO, currency) == 500
        with pytest.raises(InexactAmount):
            to_minor(5 * NANO + NANO // 100, currency)

    @pytest.mark.parametrize("currency", sorted(WHOLE_PAYOUTS))
    def test_some_are_paid_out_in_whole_units(self, currency: str) -> None:
        split = payout_split(12 * NANO + 34 * NANO // 100, currency)
        assert (split.minor, split.left_nano) == (1_200, 34 * NANO // 100)


class TestPayouts:
    @pytest.mark.parametrize("currency", ["usd", "jpy", "kwd", "huf", "ugx"])
    @pytest.mark.parametrize("nano", [0, 1, NANO // 1_000, NANO - 1, NANO, 14_284_449_990, 2**53 + 1])
    def test_split_without_losing_a_nano(self, currency: str, nano: int) -> None:
        split = payout_split(nano, currency)
        assert from_minor(split.minor, currency) + split.left_nano == nano
        assert 0 <= split.left_nano < nano_per_minor(currency) * 100

    def test_nothing_comes_of_a_debt(self) -> None:
        assert payout_split(-5 * NANO, "usd").minor == 0
        assert payout_split(-5 * NANO, "usd").left_nano == -5 * NANO
