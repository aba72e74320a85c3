"""Minor units of the currencies: how Stripe counts them, and which amounts it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fakes.stripe.errors import invalid

ZERO_DECIMAL = frozenset(
    {"bif", "clp", "djf", "gnf", "jpy", "kmf", "krw", "mga", "pyg", "rwf", "vnd", "vuv", "xaf", "xof", "xpf"}
)
THREE_DECIMAL = frozenset({"bhd", "jod", "kwd", "omr", "tnd"})
# Written with two decimals that must be 00, though the money itself has none.
WHOLE_CHARGES = frozenset({"isk", "ugx"})
WHOLE_PAYOUTS = frozenset({"huf", "isk", "twd", "ugx"})
TWO_DECIMAL = frozenset(
    {
        "aed", "aud", "bgn", "brl", "cad", "chf", "cny", "czk", "dkk", "eur", "gbp", "hkd", "huf", "idr", "ils", "inr",
        "isk", "mxn", "myr", "nok", "nzd", "php", "pln", "ron", "sek", "sgd", "thb", "try", "twd", "ugx", "usd", "zar",
    }
)  # fmt: skip
KNOWN = ZERO_DECIMAL | THREE_DECIMAL | TWO_DECIMAL

MINIMUM_CHARGES = {
    "aed": 200, "aud": 50, "brl": 50, "cad": 50, "chf": 50, "czk": 1500, "dkk": 250, "eur": 50, "gbp": 30,
    "hkd": 400, "huf": 17500, "inr": 50, "jpy": 50, "mxn": 1000, "myr": 200, "nok": 300, "nzd": 50, "pln": 200,
    "ron": 200, "sek": 300, "sgd": 50, "thb": 1000, "usd": 50,
}  # fmt: skip
LARGEST_AMOUNT = 99_999_999


@dataclass(frozen=True)
class FeeRule:
    """What the processor keeps: a share of a charge in basis points, and fixed parts in minor units of two decimals."""

    basis_points: int = 290
    fixed: int = 30
    dispute: int = 1500

    def of_charge(self, amount: int, currency: str) -> int:
        """Fee of a charge in the currency's own minor unit, rounded half up."""
        return (amount * self.basis_points + 5_000) // 10_000 + scale(self.fixed, currency)

    def of_dispute(self, currency: str) -> int:
        return scale(self.dispute, currency)


def scale(two_decimal_amount: int, currency: str) -> int:
    """The same figure in a currency of another number of decimals; no exchange rate is meant."""
    if currency in ZERO_DECIMAL:
        return two_decimal_amount // 100
    if currency in THREE_DECIMAL:
        return two_decimal_amount * 10
    return two_decimal_amount


def check_currency(currency: str) -> str:
    """The currency in lower case; refuses what Stripe does not know."""
    folded = currency.lower()
    if folded not in KNOWN:
        raise invalid(
            f"Invalid currency: {folded}. Stripe currently supports these currencies: {', '.join(sorted(KNOWN))}",
            param="currency",
        )
    return folded


def check_charge(amount: int, currency: str) -> None:
    """Refuses an amount that cannot be charged in this currency."""
    if amount > LARGEST_AMOUNT:
        raise invalid("Amount must be no more than 99999999.", param="amount", code="amount_too_large")
    minimum = MINIMUM_CHARGES.get(currency, 1)
    if amount < minimum:
        raise invalid(
            f"Amount must be at least {minimum} in the smallest unit of {currency}.",
            param="amount",
            code="amount_too_small",
        )
    _check_step(amount, currency, _charge_step(currency))


def check_payout(amount: int, currency: str) -> None:
    """Refuses an amount that no bank could be paid in this currency."""
    _check_step(amount, currency, 100 if currency in WHOLE_PAYOUTS else _charge_step(currency))


def _charge_step(currency: str) -> int:
    if currency in THREE_DECIMAL:
        return 10
    return 100 if currency in WHOLE_CHARGES else 1


def _check_step(amount: int, currency: str, step: int) -> None:
    if amount % step:
        raise invalid(f"Invalid amount. Amounts in {currency} must be evenly divisible by {step}.", param="amount")
