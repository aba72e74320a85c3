"""Rank offers for a demand: hard filters, then a score by class of demand. Pure: a snapshot in, an order out.

The same code serves the gateway, the worker, the simulator and the tests, so nothing here reads a clock, a store or a
source of chance of its own.

An order is lexicographic, each level a tie that the next one breaks:

- interactive: predicted time to the first token in bands, price in bands, load, chance;
- queued: price in bands, predicted end in bands, fullest warm engine first, chance.

Bands keep a millisecond, or one cent of undercut, from taking all traffic. Chance is weighted by capacity and price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, NamedTuple
from uuid import UUID

from marketplace.matching import speed
from marketplace.matching.types import Demand, Filter, OfferView, Ranked, Refusal

TTFT_BAND_S: Final = 0.1
"""Offers whose first token comes within this of the fastest, and..."""
TTFT_BAND_RATIO: Final = 0.25
"""...this share of it, are equally fast to a person."""
PRICE_BAND_RATIO: Final = 0.1
"""Offers that cost at most this share more than the cheapest are equally cheap."""
END_BAND_RATIO: Final = 0.5
"""The same for the end of a job that can wait."""
PRICE_EXPONENT: Final = 2
"""Within a band, chance falls with the square of the price."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator decides about matching."""

    allow_simulated: bool = False
    """True only in an environment of benches and tests."""
    stale_after_s: float = 30.0
    """A node silent for longer gets nothing new."""
    telemetry_every_s: float = 10.0
    """How often a quiet node speaks."""

    @property
    def stale_limit_s(self) -> float:
        """The limit in force: never under one and a half times the telemetry's own period, or every quiet node would be
        refused most of the time and all traffic pressed onto the few that happened to speak last."""
        return max(self.stale_after_s, 1.5 * self.telemetry_every_s)

    def contradiction(self) -> str | None:
        """A warning if the settings cannot both be meant, else None."""
        if self.stale_after_s >= self.stale_limit_s:
            return None
        return (
            f"Telemetry counts as stale after {self.stale_after_s:g} s but is only sent every "
            f"{self.telemetry_every_s:g} s; {self.stale_limit_s:g} s is used instead."
        )


DEFAULT_RULES: Final = Rules()
_NOBODY: Final[frozenset[UUID]] = frozenset()


class _Candidate(NamedTuple):
    offer: OfferView
    ttft_s: float
    end_s: float
    cost: int
    """Of the whole bound, in 1e-6 nano-USD: only compared, never charged."""


def refusal_of(
    offer: OfferView, demand: Demand, rules: Rules = DEFAULT_RULES, resting: frozenset[UUID] = _NOBODY
) -> Filter | None:
    """The first filter that refuses the offer, or None. Those that waiting cannot cure come first."""
    needed = demand.prompt_tokens + demand.max_output_tokens
    checks = (
        (offer.variant_id != demand.variant_id, Filter.VARIANT),
        (offer.simulated and not rules.allow_simulated, Filter.SIMULATED),
        (offer.context_per_slot < needed, Filter.CONTEXT),
        (demand.ceiling is not None and not offer.rates.within(demand.ceiling), Filter.PRICE),
        (offer.node_id in demand.excluded_nodes, Filter.EXCLUDED),
        (not offer.available, Filter.UNAVAILABLE),
        (offer.sampled_age_s > rules.stale_limit_s, Filter.STALE),
        (offer.node_id in resting, Filter.BREAKER),
        (offer.slots_busy >= offer.slots, Filter.FULL),
    )
    return next((name for hit, name in checks if hit), None)


def rank(
    offers: Iterable[OfferView],
    demand: Demand,
    rng: Random,
    *,
    rules: Rules = DEFAULT_RULES,
    resting: frozenset[UUID] = _NOBODY,
) -> Ranked:
    """Offers that can run the demand, best first.

    `resting` names nodes whose breaker is open for this variant (see breakers). `rng` breaks ties; the caller owns it,
    so a seed reproduces an order. The first `Ranked.tied` offers are equally good but for their load: whoever reserves
    may take the emptiest of them by fresher counts.
    """
    candidates: list[_Candidate] = []
    refused: dict[UUID, Filter] = {}
    for offer in offers:
        reason = refusal_of(offer, demand, rules, resting)
        if reason is None:
            candidates.append(_predict(offer, demand))
        else:
            refused[offer.node_id] = _milder(refused.get(offer.node_id), reason)
    for candidate in candidates:
        refused.pop(candidate.offer.node_id, None)
    ordered, tied = _order(candidates, demand, rng)
    return Ranked(
        offers=tuple(candidate.offer for candidate in ordered),
        ttft_s=tuple(candidate.ttft_s for candidate in ordered),
        refusal=_count(refused.values()),
        tied=tied,
        end_s=tuple(candidate.end_s for candidate in ordered),
    )


def with_pick(offers: Sequence[OfferView], offer_id: UUID) -> list[OfferView]:
    """The snapshot with one more slot of an offer taken: what makes a pick visible to the next one."""
    return [
        replace(offer, slots_busy=offer.slots_busy + 1) if offer.offer_id == offer_id else offer for offer in offers
    ]


def _predict(offer: OfferView, demand: Demand) -> _Candidate:
    first = speed.ttft_s(offer, demand)
    rates = offer.rates
    cost = demand.prompt_tokens * rates.input + demand.max_output_tokens * rates.output
    return _Candidate(offer, first, first + speed.decode_s(offer, demand), cost)


_CURABLE: Final = frozenset({Filter.UNAVAILABLE, Filter.STALE, Filter.BREAKER, Filter.FULL, Filter.RESERVED})


def _milder(known: Filter | None, found: Filter) -> Filter:
    # A node with two offers counts once, by the refusal that is nearest to running.
    if known is None:
        return found
    ranks = list(Filter)
    if (known in _CURABLE) != (found in _CURABLE):
        return known if known in _CURABLE else found
    return max(known, found, key=ranks.index)


def _count(reasons: Iterable[Filter]) -> Refusal:
    counts: dict[Filter, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    return Refusal(counts)


def _order(candidates: list[_Candidate], demand: Demand, rng: Random) -> tuple[list[_Candidate], int]:
    """The candidates in order, and how many of the first are tied but for load and chance."""
    if not candidates:
        return [], 0
    keyed = _keyed_interactive(candidates, rng) if demand.interactive else _keyed_queued(candidates, rng)
    keyed.sort(key=lambda item: item[0])
    best = keyed[0][0][:2]
    # A job that can wait wants the fullest engine, which the order already says.
    tied = sum(1 for key, _ in keyed if key[:2] == best) if demand.interactive else 1
    return [candidate for _, candidate in keyed], tied


_Key = tuple[int, int, float, float]


def _keyed_interactive(candidates: list[_Candidate], rng: Random) -> list[tuple[_Key, _Candidate]]:
    fastest = min(candidate.ttft_s for candidate in candidates)
    width = TTFT_BAND_S + TTFT_BAND_RATIO * fastest
    tiers: dict[int, list[_Candidate]] = {}
    for candidate in candidates:
        tiers.setdefault(int((candidate.ttft_s - fastest) / width), []).append(candidate)
    keyed: list[tuple[_Key, _Candidate]] = []
    for tier, members in tiers.items():
        cheapest = min(candidate.cost for candidate in members)
        for candidate in members:
            load = candidate.offer.slots_busy / candidate.offer.slots
            key = (tier, _price_band(candidate.cost, cheapest), load, _draw(candidate, cheapest, rng))
            keyed.append((key, candidate))
    return keyed


def _keyed_queued(candidates: list[_Candidate], rng: Random) -> list[tuple[_Key, _Candidate]]:
    cheapest = min(candidate.cost for candidate in candidates)
    soonest = min(candidate.end_s for candidate in candidates)
    keyed: list[tuple[_Key, _Candidate]] = []
    for candidate in candidates:
        offer = candidate.offer
        late = _band(candidate.end_s / soonest, END_BAND_RATIO)
        filled = offer.slots_busy / offer.slots if offer.warm else 0.0
        key = (_price_band(candidate.cost, cheapest), late, -filled, _draw(candidate, cheapest, rng))
        keyed.append((key, candidate))
    return keyed


def _price_band(cost: int, cheapest: int) -> int:
    if cheapest == 0:
        # Free is a band of its own; there is no ratio to zero.
        return 0 if cost == 0 else 1 + cost.bit_length()
    return _band(cost / cheapest, PRICE_BAND_RATIO)


def _band(ratio: float, width: float) -> int:
    """Geometric bands: 0 up to 1 + width, 1 up to (1 + width)**2, and so on."""
    if ratio <= 1.0 + width:
        return 0
    return math.ceil(math.log(ratio) / math.log1p(width)) - 1


def _draw(candidate: _Candidate, cheapest: int, rng: Random) -> float:
    """An exponential draw: the smallest of several belongs to each with probability in proportion to its weight."""
    offer = candidate.offer
    discount = (cheapest / candidate.cost) ** PRICE_EXPONENT if candidate.cost else 1.0
    weight = (offer.slots - offer.slots_busy) * max(discount, 1e-9)
    return rng.expovariate(1.0) / weight
