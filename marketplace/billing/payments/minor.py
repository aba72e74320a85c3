"""Minor units: how processors count a currency, and the nano amounts that the books keep. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from marketplace.core.errors import BadRequest

NANO_DIGITS: Final = 9
ZERO_DECIMAL: Final = frozenset(
    {"bif", "clp", "djf", "gnf", "jpy", "kmf", "krw", "mga", "pyg", "rwf", "vnd", "vuv", "xaf", "xof", "xpf"}
)
THREE_DECIMAL: Final = frozenset({"bhd", "jod", "kwd", "omr", "tnd"})
WHOLE_CHARGES: Final = frozenset({"isk", "ugx"})
"""Counted with two decimals that must be 00."""
WHOLE_PAYOUTS: Final = frozenset({"huf", "isk", "twd", "ugx"})
"""Charged with decimals, paid out without: a payout is a multiple of 100 minor units."""


class InexactAmount(BadRequest):
    """An amount that the processor cannot count."""

    code = "inexact_amount"


@dataclass(frozen=True, slots=True)
class Split:
    """An amount as far as it can leave the platform, and what stays."""

    minor: int
    left_nano: int


def decimals(currency: str) -> int:
    """Decimal places of the processor's unit."""
    folded = currency.lower()
    return 0 if folded in ZERO_DECIMAL else 3 if folded in THREE_DECIMAL else 2


def nano_per_minor(currency: str) -> int:
    """Nanos in one minor unit."""
    return int(10 ** (NANO_DIGITS - decimals(currency)))


def from_minor(minor: int, currency: str) -> int:
    """Minor units as nanos, exact."""
    return minor * nano_per_minor(currency)


def to_minor(nano: int, currency: str) -> int:
    """Nanos as minor units to be charged. Raises InexactAmount for a part of one, or of a step of the currency."""
    minor, rest = divmod(nano, nano_per_minor(currency))
    if rest or (currency.lower() in WHOLE_CHARGES and minor % 100):
        raise InexactAmount(f"{currency.upper()} is charged in whole units of its smallest step.", param="amount")
    return minor


def payout_split(nano: int, currency: str) -> Split:
    """What of an amount can be paid out, and the remainder, which stays the owner's."""
    step = nano_per_minor(currency) * (100 if currency.lower() in WHOLE_PAYOUTS else 1)
    steps = max(0, nano) // step
    return Split(steps * step // nano_per_minor(currency), nano - steps * step)
