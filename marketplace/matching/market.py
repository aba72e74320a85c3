"""What the market pays for a variant, for owners who look for a price: asks, spread, room, and what a price would mean.

Pure. Prices are nano-USD per million tokens. Work goes to cheaper offers first, and within a band in proportion to the
square of the price's inverse; so a price's place in the line, and its share of work while all have room, are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from marketplace.matching.rank import PRICE_BAND_RATIO
from marketplace.matching.types import OfferView
from marketplace.metering.pricing import Rates


@dataclass(frozen=True, slots=True)
class Spread:
    """Asks of one class of token, by number of offers."""

    lowest: int
    lower_quarter: int
    median: int
    upper_quarter: int
    highest: int


@dataclass(frozen=True, slots=True)
class Paid:
    """What renters paid lately, by receipts."""

    input_nano_per_mtok: int | None
    output_nano_per_mtok: int | None
    """None: nothing was sold."""
    requests: int
    hours: float


@dataclass(frozen=True, slots=True)
class Market:
    """One variant in one place, now."""

    offers: int
    nodes: int
    owners: int
    input: Spread | None
    """None: nobody offers it."""
    output: Spread | None
    slots: int
    slots_busy: int
    paid: Paid | None = None

    @property
    def busy_part(self) -> float:
        """Of all slots."""
        return self.slots_busy / self.slots if self.slots else 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """What an ask would mean in a market."""

    cheaper: int
    """Offers that ask less, beyond the band within which prices count as equal."""
    level: int
    """Offers within the band."""
    dearer: int
    share: float
    """Of the work that goes to offers of about this price, were all of them as large."""

    def sentence(self) -> str:
        """For the owner."""
        return (
            f"{self.cheaper} offers ask less and get work first, {self.level} ask about as much "
            f"(you would get about {self.share:.0%} of theirs), {self.dearer} ask more."
        )


QUARTERS: Final = (0.25, 0.5, 0.75)


def market(offers: Iterable[OfferView], *, region: str | None = None, paid: Paid | None = None) -> Market:
    """Sum up what is offered; simulated engines do not count."""
    known = [offer for offer in offers if not offer.simulated and region in (None, offer.region)]
    return Market(
        offers=len(known),
        nodes=len({offer.node_id for offer in known}),
        owners=len({offer.owner_organisation_id for offer in known}),
        input=_spread([offer.rates.input for offer in known]),
        output=_spread([offer.rates.output for offer in known]),
        slots=sum(offer.slots for offer in known),
        slots_busy=sum(min(offer.slots_busy, offer.slots) for offer in known),
        paid=paid,
    )


def place(offers: Iterable[OfferView], ask: Rates, *, floor: Rates | None = None) -> Place:
    """Where an ask would stand, judged by a job of as many tokens in as out. Raises ValueError for an ask under its
    owner's own floor."""
    if floor is not None and not floor.within(ask):
        raise ValueError("the ask is under the owner's floor")
    mine = ask.input + ask.output
    costs = [offer.rates.input + offer.rates.output for offer in offers if not offer.simulated]
    band = 1.0 + PRICE_BAND_RATIO
    level = [cost for cost in costs if cost <= mine * band and mine <= cost * band]
    weights = [(mine / cost) ** 2 if cost else 1.0 for cost in level]
    return Place(
        cheaper=sum(1 for cost in costs if mine > cost * band),
        level=len(level),
        dearer=sum(1 for cost in costs if cost > mine * band),
        share=1.0 / (1.0 + sum(weights)),
    )


def _spread(asks: Sequence[int]) -> Spread | None:
    if not asks:
        return None
    ordered = sorted(asks)
    last = len(ordered) - 1
    lower, median, upper = (ordered[round(part * last)] for part in QUARTERS)
    return Spread(ordered[0], lower, median, upper, ordered[-1])
