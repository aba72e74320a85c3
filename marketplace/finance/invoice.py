"""A renter's invoice: lines by key, model and day, why the bill changed, what would make it smaller. Pure, integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from typing import Final
from uuid import UUID

import ledger
from marketplace.finance.bill import PricedUse, RenterBill
from marketplace.finance.statement import Amounts, Tokens
from marketplace.metering.pricing import Rates

TOKENS_PER_RATE: Final = 1_000_000
NOTHING: Final = Fraction(0)


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """What one key spent on one model in one day of the period's zone."""

    day: date
    key_id: UUID
    key_name: str
    model_id: str
    jobs: int
    tokens: Tokens
    amounts: Amounts

    @property
    def output_nano(self) -> int:
        """Visible and reasoning output."""
        return self.amounts.output_visible_nano + self.amounts.output_reasoning_nano


@dataclass(frozen=True, slots=True)
class Growth:
    """Why the bill changed from the period before: four parts that add up to the change, to the nano."""

    before: str
    """The period before."""
    before_nano: int
    now_nano: int
    input_nano: int
    output_nano: int
    price_nano: int
    mix_nano: int


@dataclass(frozen=True, slots=True)
class Resent:
    """Input tokens, by whether the same conversation had sent or received them in its call before."""

    new_tokens: int = 0
    resent_tokens: int = 0
    unknown_tokens: int = 0
    """Of requests whose conversation was not recorded."""
    resent_uncached_tokens: int = 0
    """Re-sent, and paid at the full rate since no cache had them."""
    new_before_tokens: int = 0
    resent_before_tokens: int = 0
    unknown_before_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Hint:
    """Something that would have saved money in this period, all else equal."""

    name: str
    saves_nano: int | None
    """None: not known."""
    sentence: str


@dataclass(frozen=True, slots=True)
class Invoice:
    """Everything that stands on a renter's invoice."""

    bill: RenterBill
    lines: tuple[InvoiceLine, ...]
    growth: Growth
    resent: Resent
    hints: tuple[Hint, ...]


@dataclass(slots=True)
class _Model:
    """One model in one period, exact."""

    input_tokens: int = 0
    output_tokens: int = 0
    input_nano: int = 0
    output_nano: int = 0

    @property
    def input_price(self) -> Fraction:
        """Paid for an input token on average, cached ones among them."""
        return Fraction(self.input_nano, self.input_tokens) if self.input_tokens else NOTHING

    @property
    def output_price(self) -> Fraction:
        return Fraction(self.output_nano, self.output_tokens) if self.output_tokens else NOTHING


def growth(now: Sequence[PricedUse], before: Sequence[PricedUse], before_name: str) -> Growth:
    """Split the change of a bill.

    Input and output: the change of all tokens of that direction, at the average price before. Price: of each model
    that was used in both periods, what today's tokens cost more than at its own price before. Mix: the rest, which
    comes from using other models than before, or the same ones in other parts.
    """
    after, earlier = _by_model(now), _by_model(before)
    total_after, total_earlier = _sum(after), _sum(earlier)
    change = (total_after.input_nano + total_after.output_nano) - (total_earlier.input_nano + total_earlier.output_nano)
    input_part = (total_after.input_tokens - total_earlier.input_tokens) * _anchor(
        total_earlier.input_price, total_after.input_price, total_earlier.input_tokens
    )
    output_part = (total_after.output_tokens - total_earlier.output_tokens) * _anchor(
        total_earlier.output_price, total_after.output_price, total_earlier.output_tokens
    )
    price_part = NOTHING
    for model_id, used in after.items():
        known = earlier.get(model_id)
        if known is None:
            continue
        if known.input_tokens:
            price_part += used.input_tokens * (used.input_price - known.input_price)
        if known.output_tokens:
            price_part += used.output_tokens * (used.output_price - known.output_price)
    parts = [_whole(part) for part in (input_part, output_part, price_part)]
    return Growth(
        before=before_name,
        before_nano=total_earlier.input_nano + total_earlier.output_nano,
        now_nano=total_after.input_nano + total_after.output_nano,
        input_nano=parts[0],
        output_nano=parts[1],
        price_nano=parts[2],
        mix_nano=change - sum(parts),
    )


def hints(
    uses: Sequence[PricedUse],
    resent: Resent,
    smaller: Mapping[str, tuple[str, Rates]],
) -> tuple[Hint, ...]:
    """What trimming, caching or a smaller model would have saved.

    `smaller`: model -> (a smaller model that is offered now, its rates).
    """
    found = [_trim(uses, resent), _cache(uses, resent)]
    for model_id in sorted(smaller):
        name, rates = smaller[model_id]
        saved = sum(_saved(use, rates) for use in uses if use.model_id == model_id)
        if saved > 0:
            sentence = f"The same tokens of {model_id} from {name}, which is smaller: try whether its answers do."
            found.append(Hint("a smaller model", saved, sentence))
    return tuple(found)


def _trim(uses: Sequence[PricedUse], resent: Resent) -> Hint:
    name = "trimming"
    if resent.unknown_tokens and not resent.resent_tokens:
        return Hint(name, None, "Not known: conversations were not recorded.")
    total = sum(use.tokens.input for use in uses)
    paid = sum(use.amounts.input_uncached_nano + use.amounts.input_cached_nano for use in uses)
    saved = _whole(Fraction(paid * resent.resent_tokens, 2 * total)) if total else 0
    sentence = f"Half of the {resent.resent_tokens:,} re-sent input tokens left out: summarise or cut old turns."
    return Hint(name, saved, sentence)


def _cache(uses: Sequence[PricedUse], resent: Resent) -> Hint:
    name = "caching"
    if resent.unknown_tokens and not resent.resent_tokens:
        return Hint(name, None, "Not known: conversations were not recorded.")
    uncached = sum(use.tokens.input_uncached for use in uses)
    gap = sum((use.rates.input - use.rates.cached_input) * use.tokens.input_uncached for use in uses)
    exact = Fraction(gap * resent.resent_uncached_tokens, uncached * TOKENS_PER_RATE) if uncached else NOTHING
    sentence = (
        f"{resent.resent_uncached_tokens:,} re-sent tokens were paid at the full rate: keep the beginning of the prompt"
        " unchanged and send the next turn soon, so that the node still has it."
    )
    return Hint(name, max(0, _whole(exact)), sentence)


def _saved(use: PricedUse, rates: Rates) -> int:
    tokens = use.tokens
    exact = (
        tokens.input_uncached * rates.input + tokens.input_cached * rates.cached_input + tokens.output * rates.output
    )
    return use.amounts.total_nano - ledger.divide_half_even(exact, TOKENS_PER_RATE)


def _by_model(uses: Sequence[PricedUse]) -> dict[str, _Model]:
    found: dict[str, _Model] = {}
    for use in uses:
        model = found.setdefault(use.model_id, _Model())
        model.input_tokens += use.tokens.input
        model.output_tokens += use.tokens.output
        model.input_nano += use.amounts.input_uncached_nano + use.amounts.input_cached_nano
        model.output_nano += use.amounts.output_visible_nano + use.amounts.output_reasoning_nano
    return found


def _sum(models: Mapping[str, _Model]) -> _Model:
    total = _Model()
    for model in models.values():
        total.input_tokens += model.input_tokens
        total.output_tokens += model.output_tokens
        total.input_nano += model.input_nano
        total.output_nano += model.output_nano
    return total


def _anchor(before: Fraction, now: Fraction, tokens_before: int) -> Fraction:
    """The price before; where nothing was bought before, today's: then all of it is growth of that lever."""
    return before if tokens_before else now


def _whole(exact: Fraction) -> int:
    return ledger.divide_half_even(exact.numerator, exact.denominator)
