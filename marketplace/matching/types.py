"""What the matcher sees and says: frozen records over a snapshot, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

from marketplace.metering.pricing import Rates

__all__ = ["Demand", "Filter", "OfferView", "Ranked", "Rates", "Refusal"]


@dataclass(frozen=True, slots=True)
class OfferView:
    """One offer as the fleet view knows it now."""

    offer_id: UUID
    node_id: UUID
    owner_organisation_id: UUID
    device_id: str
    variant_id: UUID
    gateway_id: str
    """The gateway that has the node's socket."""
    price_id: int
    rates: Rates
    slots: int
    slots_busy: int
    context_per_slot: int
    available: bool
    """False while the owner has the machine, or the node drains."""
    warm: bool
    simulated: bool
    prefix_cache_s: float
    sampled_age_s: float
    """Age of the last telemetry. Stale telemetry ages; it does not vanish."""
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    memory_free_bytes: int | None
    """What the device reports as free now; None: it does not say."""
    unavailable_reason: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job needs."""

    variant_id: UUID
    prompt_tokens: int
    max_output_tokens: int
    ceiling: Rates | None
    """No offer above it, class by class. None: any posted price."""
    organisation_id: UUID
    excluded_nodes: frozenset[UUID] = frozenset()
    """Nodes that failed this job already."""
    interactive: bool = True
    warm_prefix_nodes: frozenset[UUID] = frozenset()
    """Nodes that hold a cached prefix of this prompt."""


class Filter(StrEnum):
    """Why an offer was refused. The value is what a renter reads."""

    VARIANT = "does not serve this variant"
    SIMULATED = "simulated engine"
    UNAVAILABLE = "owner is using the machine"
    STALE = "silent for too long"
    CONTEXT = "context per slot too small"
    PRICE = "price above the maximum"
    EXCLUDED = "already failed this job"
    FULL = "no free slot"
    RESERVED = "slot taken by a simultaneous request"
    BREAKER = "resting after failures"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing fits: how many nodes each filter refused, first filter that hit counted."""

    refused: dict[Filter, int] = field(default_factory=dict)

    @property
    def hopeless(self) -> bool:
        """True if waiting cannot help: no refused offer was merely full, taken, unavailable or resting."""
        waiting = {Filter.FULL, Filter.RESERVED, Filter.UNAVAILABLE, Filter.STALE, Filter.BREAKER}
        return not any(count for name, count in self.refused.items() if name in waiting)

    def sentence(self) -> str:
        """`3 nodes: no free slot; 1 node: price above the maximum`."""
        parts = [
            f"{count} {'node' if count == 1 else 'nodes'}: {name.value}"
            for name, count in sorted(self.refused.items(), key=lambda item: -item[1])
            if count
        ]
        return "; ".join(parts) or "no node is connected"


@dataclass(frozen=True, slots=True)
class Ranked:
    """Offers that can run the demand, best first, with the predicted seconds to the first token."""

    offers: tuple[OfferView, ...]
    ttft_s: tuple[float, ...]
    refusal: Refusal
    """Of the offers that were filtered out."""
    tied: int = 1
    """So many of the first are equally good but for their load."""
    end_s: tuple[float, ...] = ()
    """Predicted seconds to the last token, should the answer use all of its bound."""
