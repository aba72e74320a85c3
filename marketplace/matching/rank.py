"""Filters, ties and chance: what refuses an offer, and which of those that are left comes first. Pure.

The same functions serve the index (see index), which looks at a part of a large fleet, and `rank`, which looks at all
of a list. Nothing here reads a clock, a store or a source of chance of its own.

The best is the one of least cost. What costs about as much is tied with it: a first token within a band of its own, and
a price within a band of its price, so that neither a millisecond nor a cent of undercut takes all traffic. Of tied ones
the emptiest comes first (for work that waits: the fullest warm engine), then chance decides, in proportion to free room
and against the square of the price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Final
from uuid import UUID

from marketplace.matching.cells import lacks_memory, weighted_median
from marketplace.matching.cost import Want, cost_of, want
from marketplace.matching.guard import Found, allowed_s, idle_read_s, timely, too_late
from marketplace.matching.live import Live
from marketplace.matching.rules import DEFAULT_RULES, Rules
from marketplace.matching.types import CURABLE, Demand, Filter, OfferView, Ranked, Rates, Refusal
from marketplace.metering.pricing import worst_case

__all__ = [
    "DEFAULT_RULES",
    "Found",
    "Rules",
    "arrange",
    "could_run",
    "pick_place",
    "rank",
    "refusal_of",
    "refusals",
    "refusals_of",
    "tied_places",
    "with_pick",
    "worst_nano",
]

TTFT_BAND_S: Final = 0.1
"""Offers whose first token comes within this of the best one's, and..."""
TTFT_BAND_RATIO: Final = 0.25
"""...this share of it, are equally fast to a person."""
PRICE_BAND_RATIO: Final = 0.1
"""Offers that cost at most this share more than the best are equally cheap."""
END_BAND_RATIO: Final = 0.5
"""The same for the end of a job that can wait."""

_NOBODY: Final[frozenset[UUID]] = frozenset()


# --- filters ----------------------------------------------------------------------------------------------------------


def refusal_of(
    offer: OfferView, demand: Demand, rules: Rules = DEFAULT_RULES, resting: frozenset[UUID] = _NOBODY
) -> Filter | None:
    """The first filter that refuses the offer, or None. Those that waiting cannot cure come first."""
    return next((name for hit, name in _checks(offer, demand, rules, resting) if hit), None)


def refusals_of(
    offer: OfferView, demand: Demand, rules: Rules = DEFAULT_RULES, resting: frozenset[UUID] = _NOBODY
) -> tuple[Filter, ...]:
    """Every filter that refuses the offer. One alone: without it, the offer would have run the demand."""
    return tuple(name for hit, name in _checks(offer, demand, rules, resting) if hit)


def _checks(
    offer: OfferView, demand: Demand, rules: Rules, resting: frozenset[UUID]
) -> tuple[tuple[bool, Filter], ...]:
    needed = demand.slot_tokens
    most = demand.most_nano
    return (
        (offer.variant_id != demand.variant_id, Filter.VARIANT),
        (offer.simulated and not rules.allow_simulated, Filter.SIMULATED),
        (offer.context_per_slot < needed, Filter.CONTEXT),
        (demand.ceiling is not None and not offer.rates.within(demand.ceiling), Filter.PRICE),
        (most is not None and worst_nano(offer.rates, demand) > most, Filter.BALANCE),
        (bool(demand.regions) and not {offer.region, offer.data.country} & demand.regions, Filter.REGION),
        (demand.private_only and not offer.data.private, Filter.DATA),
        (demand.proven_only and offer.probation, Filter.UNPROVEN),
        (demand.choices > 1 and not offer.gives_choices, Filter.ONE_ANSWER),
        (offer.node_id in demand.excluded_nodes, Filter.EXCLUDED),
        (not offer.available, Filter.UNAVAILABLE),
        (lacks_memory(offer), Filter.MEMORY),
        (offer.sampled_age_s > rules.stale_limit_s, Filter.STALE),
        (offer.node_id in resting, Filter.BREAKER),
        (offer.slots_busy >= offer.slots, Filter.FULL),
        (offer.probation and offer.slots_busy >= rules.probation_slots, Filter.PROBATION),
    )


def could_run(offer: OfferView, demand: Demand, rules: Rules = DEFAULT_RULES) -> bool:
    """True if the offer would run the demand once it has room: every filter passes that waiting cannot cure."""
    return all(name in CURABLE for name in refusals_of(offer, demand, rules))


def worst_nano(rates: Rates, demand: Demand) -> int:
    """What the demand could cost at most at these rates, in nano-USD: what would be held."""
    return worst_case(rates, demand.prompt_tokens, demand.all_output_tokens)


def refusals(reasons: Iterable[tuple[UUID, Filter | None]]) -> Refusal:
    """Count nodes by what refused them, given their offers: one with an offer that nothing refuses counts nowhere, one
    with several counts once, by the refusal that is nearest to running."""
    refused: dict[UUID, Filter] = {}
    serving: set[UUID] = set()
    for node_id, reason in reasons:
        if reason is None:
            serving.add(node_id)
        else:
            refused[node_id] = _milder(refused.get(node_id), reason)
    counts: dict[Filter, int] = {}
    for node_id, reason in refused.items():
        if node_id not in serving:
            counts[reason] = counts.get(reason, 0) + 1
    return Refusal(counts)


_RANKS: Final = {name: place for place, name in enumerate(Filter)}


def _milder(known: Filter | None, found: Filter) -> Filter:
    if known is None:
        return found
    if (known in CURABLE) != (found in CURABLE):
        return known if known in CURABLE else found
    return max(known, found, key=_RANKS.__getitem__)


# --- order ------------------------------------------------------------------------------------------------------------


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
    fitting: list[OfferView] = []
    reasons: list[tuple[UUID, Filter | None]] = []
    for offer in offers:
        reason = refusal_of(offer, demand, rules, resting)
        reasons.append((offer.node_id, reason))
        if reason is None:
            fitting.append(offer)
    wanted = want(demand, rules, usual_rates(fitting))
    lives = [Live(offer, 0.0) for offer in fitting]
    found = [(live, cost_of(live, wanted, 0.0, cached_at(live, demand)), 1.0) for live in lives]
    if rules.guarded and found:
        within_s = allowed_s(
            wanted, idle_read_s(wanted.prompt, ((live.cold_s, live.prefill_s, live.step_s) for live in lives))
        )
        in_time = timely(found, within_s)
        if not in_time:
            return Ranked((), (), too_late(found, within_s), tied=0)
        found = in_time
    ranked = arrange(found, wanted, rng, limit=len(found))
    return replace(ranked, refusal=refusals(reasons))


def usual_rates(offers: Sequence[OfferView]) -> Rates:
    """The median ask for input and for output, of those that ask anything."""
    return Rates(
        weighted_median((offer.rates.input, 1) for offer in offers),
        0,
        weighted_median((offer.rates.output, 1) for offer in offers),
    )


def cached_at(live: Live, demand: Demand) -> int:
    """Tokens of the prompt that the offer has in its cache."""
    if not demand.cached_tokens or not live.offer.warm:
        return 0
    return min(demand.cached_tokens.get(live.offer.node_id, 0), demand.prompt_tokens)


def arrange(found: Sequence[Found], wanted: Want, rng: Random, *, limit: int, hidden: float = 0.0) -> Ranked:
    """Put what was found in order: the pick, what is tied with it, then by cost. At most `limit` of them."""
    if not found:
        return Ranked((), (), Refusal(), tied=0)
    tied = tied_places(found, wanted)
    first = pick_place(found, wanted, rng, hidden, tied)
    # Work that waits wants the fullest engine, which the pick already says.
    if wanted.queued or first not in tied:
        tied = [first]
    chosen = set(tied)
    rest = sorted((place for place in range(len(found)) if place not in chosen), key=lambda at: found[at][1].total_s)
    tied = sorted(tied, key=lambda at: (at != first, _load(found[at][0])))
    order = [*tied, *rest][:limit]
    costs = [found[place][1] for place in order]
    return Ranked(
        offers=tuple(found[place][0].offer for place in order),
        ttft_s=tuple(cost.ttft_s for cost in costs),
        refusal=Refusal(),
        tied=min(len(tied), limit),
        end_s=tuple(cost.ttft_s + wanted.demand.all_output_tokens * cost.tpot_s for cost in costs),
    )


def pick_place(
    found: Sequence[Found], wanted: Want, rng: Random, hidden: float = 0.0, tied: list[int] | None = None
) -> int:
    """Which of what was found is taken. `hidden` picks of others are under way unseen; many of them spread it wider.
    `tied` are the `tied_places`, where the caller has them."""
    if len(found) == 1:
        return 0
    if hidden >= 1.0 and not wanted.queued:
        return _spread(found, wanted, rng, hidden)
    if tied is None:
        tied = tied_places(found, wanted)
    if len(tied) == 1:
        return tied[0]
    if wanted.queued:
        fill = {place: _fill(found[place][0]) for place in tied}
        most = max(fill.values())
        alike = [place for place in tied if fill[place] >= most]
    else:
        load = {place: _load(found[place][0]) for place in tied}
        least = min(load.values())
        alike = [place for place in tied if load[place] <= least]
    return _draw(found, alike, rng)


def _load(live: Live) -> float:
    return live.busy / live.offer.slots


def _fill(live: Live) -> float:
    return live.busy / live.offer.slots if live.offer.warm else 0.0


def tied_places(found: Sequence[Found], wanted: Want) -> list[int]:
    """Places of those that are as good as the best."""
    best = min(found, key=lambda item: item[1].total_s)[1]
    most_money_s = best.money_s * (1.0 + PRICE_BAND_RATIO)
    if wanted.queued:
        end_s = best.ttft_s + wanted.output * best.tpot_s
        band_s = END_BAND_RATIO * wanted.weights.end * end_s
    else:
        band_s = TTFT_BAND_S + TTFT_BAND_RATIO * best.ttft_s
    rest_s = best.total_s - best.money_s + band_s
    return [
        place
        for place, (_, cost, _) in enumerate(found)
        if cost.total_s == best.total_s or (cost.money_s <= most_money_s and cost.total_s - cost.money_s <= rest_s)
    ]


def _draw(found: Sequence[Found], alike: Sequence[int], rng: Random) -> int:
    """One of them at random, in proportion to how many it stands for, its free room, and its price to the power -2."""
    if len(alike) == 1:
        return alike[0]
    cheapest_s = min(found[place][1].money_s for place in alike)
    weights: list[float] = []
    total = 0.0
    for place in alike:
        live, cost, stands_for = found[place]
        weight = stands_for * (live.offer.slots - live.busy)
        if cost.money_s > 0.0:
            discount = cheapest_s / cost.money_s
            weight *= discount * discount
        weights.append(weight)
        total += weight
    mark = rng.random() * total
    for place, weight in zip(alike, weights, strict=True):
        mark -= weight
        if mark < 0.0:
            return place
    return alike[-1]


def _spread(found: Sequence[Found], wanted: Want, rng: Random, hidden: float) -> int:
    """Fill the offers with the hidden picks as with water, each pick raising its offer's cost by what it takes there,
    and draw in proportion to what each took: processes with one old snapshot then do not all press on one node."""
    order = sorted(range(len(found)), key=lambda at: found[at][1].total_s)
    room = 0.0
    filled = 0.0
    surface = found[order[0]][1].total_s
    for place in order:
        _, cost, stands_for = found[place]
        level = cost.total_s
        if filled and (level - filled / room) * room >= hidden:
            break
        per_second = stands_for / max(cost.ttft_s, 1e-3)
        room += per_second
        filled += per_second * level
        surface = (hidden + filled) / room
    weights = [
        max(0.0, surface - found[place][1].total_s) * found[place][2] / max(found[place][1].ttft_s, 1e-3)
        for place in order
    ]
    return order[rng.choices(range(len(order)), weights)[0]] if sum(weights) > 0.0 else order[0]


# --- snapshots --------------------------------------------------------------------------------------------------------


def with_pick(offers: Sequence[OfferView], offer_id: UUID) -> list[OfferView]:
    """The snapshot with one more slot of an offer taken: what makes a pick visible to the next one."""
    return [
        replace(offer, slots_busy=offer.slots_busy + 1) if offer.offer_id == offer_id else offer for offer in offers
    ]
