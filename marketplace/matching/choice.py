"""Where a renter lets a request run: which owners and nodes, in which order, where, at which price. Pure.

The gateway makes a Choice of a request's `provider`; whatever matches keeps to it, at once or when a queued job has its
turn. A job's row keeps it as JSON (`to_row`), with ids as text, so that the queue's own SQL can filter by it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final
from uuid import UUID

from marketplace.matching.rank import DEFAULT_RULES, Rules, rank, worst_nano
from marketplace.matching.types import Demand, Filter, OfferView, Ranked, Rates, Sort

NO_LIMIT: Final = 10**15
"""Nano-USD per million tokens: the ceiling of a class whose price was left open."""
CLASSES: Final = {"int4": ("q4", "iq4", "awq", "gptq", "mxfp4"), "int8": ("q8",), "fp16": ("f16",), "fp32": ("f32",)}
"""OpenRouter's names of precision, by the beginnings of the formats that have it."""
_NOBODY: Final[frozenset[UUID]] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """A checked `provider` object."""

    only: frozenset[UUID] = frozenset()
    """Owners and nodes; none: all."""
    ignored: frozenset[UUID] = frozenset()
    order: tuple[UUID, ...] = ()
    """These first, in this order."""
    fallbacks: bool = True
    """False: nobody but those of `order`; without it, nobody but the first pick."""
    quantisations: tuple[str, ...] = ()
    sort: Sort = Sort.BALANCED
    by_speed: bool = False
    """Sorted by tokens a second."""
    ceiling: Rates | None = None
    """The most that a node may ask, before any share of it."""
    regions: frozenset[str] = frozenset()
    proven_only: bool = False
    private_only: bool = False

    @property
    def lists(self) -> bool:
        """True if offers must be looked at one by one."""
        return bool(self.only or self.ignored or self.order or self.strictly_sorted)

    @property
    def strictly_sorted(self) -> bool:
        """True if price or speed alone decides, and no load: as the renter's word says."""
        return self.by_speed or self.sort is Sort.PRICE

    @property
    def first_only(self) -> bool:
        """True if nobody may take over from the first pick."""
        return not self.fallbacks and not self.order

    @property
    def whole_ceiling(self) -> Rates | None:
        """The ceiling, if it leaves no class open."""
        ceiling = self.ceiling
        return ceiling if ceiling is not None and max(ceiling.input, ceiling.output) < NO_LIMIT else None

    def admits(self, offer: OfferView) -> bool:
        """True unless the lists keep the offer out."""
        names = {offer.node_id, offer.owner_organisation_id}
        if names & self.ignored or (self.only and not names & self.only):
            return False
        return self.fallbacks or not self.order or bool(names & set(self.order))

    def allows(self, offer: OfferView) -> bool:
        """True unless anything but the price keeps the offer out: what repository's SQL says of a job's row."""
        return (
            self.admits(offer)
            and (not self.regions or bool({offer.region, offer.data.country} & self.regions))
            and (not self.private_only or offer.data.private)
            and not (self.proven_only and offer.probation)
        )

    def quantised(self, quantisation: str) -> bool:
        """True if the precision is one of those asked for."""
        if not self.quantisations:
            return True
        own = quantisation.lower()
        return any(own == name or own.startswith(CLASSES.get(name, ("\0",))) for name in self.quantisations)

    def narrow(self, demand: Demand) -> Demand:
        """The demand within this choice. A tighter ceiling that it has already stays."""
        return replace(
            demand,
            ceiling=demand.ceiling or self.ceiling,
            regions=self.regions,
            proven_only=self.proven_only,
            private_only=self.private_only,
            sort=self.sort,
        )

    def capped(self, rates: Rates) -> Rates:
        """These rates, or its own maximum where that is lower."""
        return rates if self.ceiling is None else rates.at_most(self.ceiling)

    def dearest(self, offers: Sequence[OfferView]) -> Rates | None:
        """The highest that the offers within it ask, class by class, up to its own maximum: the ceiling of work that
        waits. None where there is no such offer."""
        rates = [offer.rates for offer in offers if self.allows(offer)]
        if not rates:
            return None
        return self.capped(
            Rates(
                input=max(each.input for each in rates),
                cached_input=max(each.cached_input for each in rates),
                output=max(each.output for each in rates),
            )
        )

    def after(self, node_id: UUID | None) -> Choice:
        """What is left of it once the request had an attempt on that node; None: it had none yet."""
        return replace(self, only=frozenset({node_id})) if self.first_only and node_id is not None else self

    # --- as a job's row keeps it ----------------------------------------------------------------------------------

    def to_row(self) -> dict[str, Any] | None:
        """JSON of all that counts when a job has its turn; None: anywhere. Precision and price are left out: variant
        and ceiling were pinned by them when the job was accepted. What says nothing has no member. Names are the keys
        of objects, in which PostgreSQL finds one without reading all."""
        members: dict[str, Any] = {
            "only": dict.fromkeys(sorted(map(str, self.only)), 0),
            "ignored": dict.fromkeys(sorted(map(str, self.ignored)), 0),
            "order": {str(name): place for place, name in enumerate(self.order)},
            "sort": self.sort.value if self.sort is not Sort.BALANCED else None,
            "by_speed": self.by_speed,
            "regions": sorted(self.regions),
            "proven_only": self.proven_only,
            "private_only": self.private_only,
        }
        row = {name: value for name, value in members.items() if value}
        return (row if self.fallbacks else {**row, "fallbacks": False}) or None

    @classmethod
    def from_row(cls, row: Mapping[str, Any] | None) -> Choice:
        """What `to_row` wrote."""
        if not row:
            return ANY
        order = row.get("order", {})
        return cls(
            only=frozenset(map(UUID, row.get("only", ()))),
            ignored=frozenset(map(UUID, row.get("ignored", ()))),
            order=tuple(map(UUID, sorted(order, key=order.__getitem__))),
            fallbacks=row.get("fallbacks", True),
            sort=Sort(row.get("sort", Sort.BALANCED)),
            by_speed=row.get("by_speed", False),
            regions=frozenset(row.get("regions", ())),
            proven_only=row.get("proven_only", False),
            private_only=row.get("private_only", False),
        )


ANY: Final = Choice()


def rank_within(
    offers: Sequence[OfferView],
    demand: Demand,
    choice: Choice,
    rng: Random,
    *,
    rules: Rules = DEFAULT_RULES,
    resting: frozenset[UUID] = _NOBODY,
) -> Ranked:
    """Offers that can run the demand within the choice, best first, in the order that it asks for. The demand is
    narrowed by the choice already."""
    if not choice.lists:
        return rank(offers, demand, rng, rules=rules, resting=resting)
    admitted = [offer for offer in offers if choice.admits(offer)]
    ranked = rank(admitted, demand, rng, rules=rules, resting=resting)
    kept_out = len({offer.node_id for offer in offers} - {offer.node_id for offer in admitted})
    refusal = replace(ranked.refusal, refused={**ranked.refusal.refused, Filter.CHOICE: kept_out})
    places = sorted(range(len(ranked.offers)), key=lambda at: (*_preference(ranked.offers[at], demand, choice), at))
    return replace(
        ranked,
        offers=tuple(ranked.offers[place] for place in places),
        ttft_s=tuple(ranked.ttft_s[place] for place in places),
        end_s=tuple(ranked.end_s[place] for place in places) if ranked.end_s else (),
        refusal=refusal if kept_out else ranked.refusal,
        # Where the renter says who comes first, no emptier one may be taken instead.
        tied=1 if choice.order or choice.strictly_sorted else ranked.tied,
    )


def _preference(offer: OfferView, demand: Demand, choice: Choice) -> tuple[int, float]:
    names = (offer.node_id, offer.owner_organisation_id)
    place = min((choice.order.index(name) for name in names if name in choice.order), default=len(choice.order))
    if choice.by_speed:
        return place, -(offer.decode_tokens_per_s or 0.0)
    return place, worst_nano(offer.rates, demand) if choice.sort is Sort.PRICE else 0
