"""Money: a whole number of nanos (1e-9) of a currency. No float ever touches it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from ledger.errors import CurrencyMismatch, InvalidAmount

NANO = 1_000_000_000
NANO_PER_CENT = NANO // 100
MAX_NANO = 2**63 - 1
"""What a BIGINT holds: some 9.2 billion units of a currency."""
_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)
_DECIMAL = re.compile(r"(?P<sign>[+-]?)(?P<whole>[0-9]{1,12})(?:\.(?P<fraction>[0-9]{1,9}))?", re.ASCII)


def whole_nano(nano: int) -> int:
    """The same number, if it is one that can be stored. Raises InvalidAmount for a float, a bool, or one too large."""
    if type(nano) is not int:
        raise InvalidAmount(f"{nano!r} is not a whole number of nanos.")
    if not -MAX_NANO <= nano <= MAX_NANO:
        raise InvalidAmount(f"{nano} nano is more than can be stored.")
    return nano


def positive_nano(nano: int) -> int:
    """The same number, if it is an amount to be moved. Raises InvalidAmount for zero, less, and no whole number."""
    if whole_nano(nano) <= 0:
        raise InvalidAmount(f"{nano} nano is no amount to move: it must be positive.")
    return nano


def parse_nano(text: str) -> int:
    """`"1.25"` -> 1,250,000,000. A plain decimal with at most nine places; raises InvalidAmount for all else.

    No exponents, no separators, no rounding: what cannot be meant exactly is refused.
    """
    match = _DECIMAL.fullmatch(text.strip())
    if match is None:
        raise InvalidAmount(f"{text[:40]!r} is not a plain decimal with at most nine places.")
    nano = int(match["whole"]) * NANO + int((match["fraction"] or "").ljust(9, "0"))
    if nano > MAX_NANO:
        raise InvalidAmount(f"{text[:40]!r} is too large.")
    return -nano if match["sign"] == "-" else nano


def format_nano(nano: int, *, min_places: int = 2) -> str:
    """1,250,000,000 -> `"1.25"`: exact, with `min_places` (0 to 9) decimals or more, no exponent, no separator."""
    whole, fraction = divmod(abs(nano), NANO)
    digits = f"{fraction:09d}".rstrip("0").ljust(min_places, "0")
    return f"{'-' if nano < 0 else ''}{whole}{'.' if digits else ''}{digits}"


def divide_half_even(numerator: int, denominator: int) -> int:
    """numerator / denominator to the nearest whole number, ties to the even one. denominator > 0."""
    quotient, remainder = divmod(numerator, denominator)
    twice = 2 * remainder
    return quotient + (twice > denominator or (twice == denominator and quotient % 2 == 1))


def split_nano(nano: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Split an amount in proportion, without losing a nano: largest remainder, ties to the earlier weight.

    Weights are whole, not negative, and not all zero. A negative amount splits as its opposite does.
    """
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise InvalidAmount("Weights must not be negative, and one of them must be positive.")
    if nano < 0:
        return tuple(-part for part in split_nano(-nano, weights))
    parts = [nano * weight // total for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(nano * weights[i] % total), i))
    for i in order[: nano - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


@dataclass(frozen=True, slots=True, order=False)
class Money:
    """An amount of one currency. Arithmetic over two currencies raises CurrencyMismatch."""

    nano: int
    currency: str = "USD"

    def __post_init__(self) -> None:
        whole_nano(self.nano)
        if _CURRENCY.fullmatch(self.currency) is None:
            raise InvalidAmount(f"{self.currency!r} is not a currency's three letters.")

    @classmethod
    def parse(cls, text: str, currency: str = "USD") -> Money:
        """From a plain decimal string. Raises InvalidAmount."""
        return cls(parse_nano(text), currency)

    def __str__(self) -> str:
        return f"{format_nano(self.nano)} {self.currency}"

    def __add__(self, other: Money) -> Money:
        return Money(self.nano + self._nano_of(other), self.currency)

    def __sub__(self, other: Money) -> Money:
        return Money(self.nano - self._nano_of(other), self.currency)

    def __neg__(self) -> Money:
        return Money(-self.nano, self.currency)

    def __lt__(self, other: Money) -> bool:
        return self.nano < self._nano_of(other)

    def __le__(self, other: Money) -> bool:
        return self.nano <= self._nano_of(other)

    def decimal(self) -> Decimal:
        """The same amount as a Decimal, exactly."""
        return Decimal(self.nano).scaleb(-9)

    def share(self, numerator: int, denominator: int) -> Money:
        """numerator / denominator of it, rounded half even to the nano."""
        return Money(divide_half_even(self.nano * numerator, denominator), self.currency)

    def split(self, weights: Sequence[int]) -> tuple[Money, ...]:
        """Parts in proportion to the weights; they sum to the whole (see split_nano)."""
        return tuple(Money(part, self.currency) for part in split_nano(self.nano, weights))

    def cents(self) -> tuple[int, Money]:
        """Whole cents, towards zero, and what remains: only the cents may leave the platform."""
        cents = abs(self.nano) // NANO_PER_CENT * (1 if self.nano >= 0 else -1)
        return cents, Money(self.nano - cents * NANO_PER_CENT, self.currency)

    def _nano_of(self, other: Money) -> int:
        if other.currency != self.currency:
            raise CurrencyMismatch(f"{self} and {other} are of two currencies.")
        return other.nano
