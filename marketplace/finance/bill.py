"""A renter's bill: three levers (input tokens, output tokens, the price of each), and what they came to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from uuid import UUID

from marketplace.finance.period import Period
from marketplace.finance.statement import Tokens
from marketplace.matching.types import Rates


@dataclass(frozen=True, slots=True)
class Amounts:
    """What each class of tokens cost, in nano-USD. Reasoning tokens cost what visible output costs."""

    input_uncached_nano: int = 0
    input_cached_nano: int = 0
    output_visible_nano: int = 0
    output_reasoning_nano: int = 0

    @property
    def total_nano(self) -> int:
        return self.input_uncached_nano + self.input_cached_nano + self.output_visible_nano + self.output_reasoning_nano

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.input_uncached_nano + other.input_uncached_nano,
            self.input_cached_nano + other.input_cached_nano,
            self.output_visible_nano + other.output_visible_nano,
            self.output_reasoning_nano + other.output_reasoning_nano,
        )


@dataclass(frozen=True, slots=True)
class BillLine:
    """Jobs of one model at one price."""

    model_id: str
    price_id: int
    rates: Rates
    jobs: int
    tokens: Tokens
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class RenterBill:
    """Everything that one renter was charged in one period."""

    organisation_id: UUID
    organisation_name: str
    period: Period
    lines: tuple[BillLine, ...]
    outcomes: Mapping[str, int]
    """How requests ended, free ones and refusals among them: outcome -> count."""
    waived_jobs: int
    waived_nano: int
    """Delivered in part before the platform failed: the owner was paid, the renter was not charged."""
    opening_nano: int
    added_nano: int
    """Top-ups and corrections."""
    settled_nano: int
    """Charges posted in the period; the last seconds' charges follow in the next."""
    closing_nano: int

    @property
    def tokens(self) -> Tokens:
        return reduce(add, (line.tokens for line in self.lines), Tokens())

    @property
    def amounts(self) -> Amounts:
        return reduce(add, (line.amounts for line in self.lines), Amounts())

    @property
    def jobs(self) -> int:
        return sum(line.jobs for line in self.lines)

    @property
    def charge_nano(self) -> int:
        return self.amounts.total_nano
