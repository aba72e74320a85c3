"""A renter's bill: three levers (input tokens, output tokens, the price of each), and what they came to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from uuid import UUID

import ledger
from marketplace.finance.period import Period
from marketplace.finance.statement import Amounts, Tokens
from marketplace.matching.types import Rates


@dataclass(frozen=True, slots=True)
class BillLine:
    """One lever: tokens of one class, at one price. What is charged is rounded once a job, so amount is within half a
    nano a job of tokens x rate."""

    model_id: str
    lever: str
    tokens: int
    rate_nano_usd_per_mtok: int
    amount_nano: int

    def joined(self, other: BillLine) -> BillLine:
        """Both as one: the same lever of the same model at the same price."""
        return replace(self, tokens=self.tokens + other.tokens, amount_nano=self.amount_nano + other.amount_nano)

    @property
    def rate_usd(self) -> str:
        """USD per million tokens, a decimal string."""
        return ledger.format_nano(self.rate_nano_usd_per_mtok)


@dataclass(frozen=True, slots=True)
class PricedUse:
    """Jobs of one model at one version of its price."""

    model_id: str
    price_id: int
    rates: Rates
    jobs: int
    tokens: Tokens
    amounts: Amounts

    @property
    def lines(self) -> tuple[BillLine, ...]:
        """Input, cached input and output; reasoning apart where there was any."""
        tokens, amounts, rates = self.tokens, self.amounts, self.rates
        levers = [
            ("input", tokens.input_uncached, rates.input, amounts.input_uncached_nano),
            ("input, cached", tokens.input_cached, rates.cached_input, amounts.input_cached_nano),
            ("output", tokens.output_visible, rates.output, amounts.output_visible_nano),
        ]
        if tokens.output_reasoning:
            levers.append(("output, reasoning", tokens.output_reasoning, rates.output, amounts.output_reasoning_nano))
        return tuple(BillLine(self.model_id, *lever) for lever in levers)


@dataclass(frozen=True, slots=True)
class RenterBill:
    """Everything that one renter was charged in one period."""

    organisation_id: UUID
    organisation_name: str
    period: Period
    uses: tuple[PricedUse, ...]
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
    def lines(self) -> tuple[BillLine, ...]:
        """Every lever of every model, a line for each price. Owners who ask the same share a line."""
        lines: dict[tuple[str, str, int], BillLine] = {}
        for line in (line for use in self.uses for line in use.lines):
            key = (line.model_id, line.lever, line.rate_nano_usd_per_mtok)
            lines[key] = lines[key].joined(line) if key in lines else line
        return tuple(lines.values())

    @property
    def tokens(self) -> Tokens:
        return reduce(add, (use.tokens for use in self.uses), Tokens())

    @property
    def requests(self) -> int:
        """Requests that delivered something to charge."""
        return sum(use.jobs for use in self.uses)

    @property
    def total_nano(self) -> int:
        return sum(use.amounts.total_nano for use in self.uses)
