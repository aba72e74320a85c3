"""Minor units as Stripe counts them."""

from __future__ import annotations

import pytest

from tests.fakes.stripe.currencies import FeeRule, check_charge, check_currency, check_payout, scale
from tests.fakes.stripe.errors import StripeError


class TestAmounts:
    @pytest.mark.parametrize(
        ("amount", "currency"), [(50, "usd"), (50, "jpy"), (51, "jpy"), (5_120, "kwd"), (500, "isk"), (17_500, "huf")]
    )
    def test_chargeable(self, amount: int, currency: str) -> None:
        check_charge(amount, currency)

    @pytest.mark.parametrize(
        ("amount", "currency", "code"),
        [
            (49, "usd", "amount_too_small"),
            (100_000_000, "usd", "amount_too_large"),
            (5_124, "kwd", None),
            (550, "isk", None),
            (1_050, "ugx", None),
        ],
    )
    def test_not_chargeable(self, amount: int, currency: str, code: str | None) -> None:
        with pytest.raises(StripeError) as caught:
            check_charge(amount, currency)
        assert caught.value.body["error"].get("code") == code
        assert caught.value.body["error"]["param"] == "amount"

    @pytest.mark.parametrize("currency", ["huf", "twd", "isk", "ugx"])
    def test_some_payouts_are_whole_hundreds(self, currency: str) -> None:
        check_payout(10_000, currency)
        with pytest.raises(StripeError, match="divisible by 100"):
            check_payout(10_050, currency)

    def test_other_payouts_may_end_in_any_cent(self) -> None:
        check_payout(10_051, "usd")
        check_payout(10_051, "jpy")

    def test_currencies_are_read_in_any_case_and_unknown_ones_refused(self) -> None:
        assert check_currency("EUR") == "eur"
        with pytest.raises(StripeError, match="Invalid currency"):
            check_currency("xyz")


class TestFees:
    @pytest.mark.parametrize(
        ("amount", "currency", "fee"),
        [(10_000, "usd", 320), (50, "usd", 31), (10_000, "jpy", 290), (10_000, "kwd", 590), (1_017, "usd", 59)],
    )
    def test_share_and_fixed_part_in_the_currencys_own_unit(self, amount: int, currency: str, fee: int) -> None:
        assert FeeRule().of_charge(amount, currency) == fee

    def test_scaling_keeps_the_figure(self) -> None:
        assert [scale(1_500, currency) for currency in ("usd", "jpy", "bhd")] == [1_500, 15, 15_000]
