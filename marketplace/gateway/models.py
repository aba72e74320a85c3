"""Models as OpenAI's clients list them, with what a renter of this marketplace wants to know beside."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any
from uuid import UUID

from agent.sizing.variants import EMBED
from marketplace.catalog.service import VariantView
from marketplace.core.amounts import usd
from marketplace.gateway.services import Services
from marketplace.gateway.surface import SURFACES
from marketplace.matching.types import Rates


def model_name(services: Services, variant_id: UUID | None) -> str | None:
    """The name by which a variant is asked for; None where it is not known any more."""
    variant = services.catalog.by_id(variant_id) if variant_id is not None else None
    return _name(services, variant) if variant is not None else None


def _name(services: Services, variant: VariantView) -> str:
    oldest = services.catalog.resolve(variant.model_id)
    return variant.model_id if oldest.id == variant.id else f"{variant.model_id}:{variant.quantisation.lower()}"


def _pricing(rates: Rates | None) -> dict[str, str] | None:
    if rates is None:
        return None
    return {"input": usd(rates.input), "cached_input": usd(rates.cached_input), "output": usd(rates.output)}


def _middle(speeds: Iterable[float | None]) -> float | None:
    """The median of what was measured; None where nothing was."""
    known = [speed for speed in speeds if speed is not None]
    return round(median(known), 1) if known else None


def model_object(services: Services, variant: VariantView) -> dict[str, Any]:
    """One variant. `task` says what it is for, `endpoints` where it is asked. `pricing` is the lowest live ask, in USD
    per million tokens, null while nobody offers it, and `flex_pricing` the same for `service_tier: "flex"`; `speed` is
    the median of what its nodes measured, null where none did; `context_length` is that of its largest slot."""
    offers = [
        offer
        for offer in services.fleet.view.offers(variant.id)
        if services.fleet.rules.allow_simulated or not offer.simulated
    ]
    best = min((offer.rates for offer in offers), key=lambda rates: (rates.input, rates.output), default=None)
    return {
        "id": _name(services, variant),
        "object": "model",
        "created": int(variant.created_at.timestamp()),
        "owned_by": "fallow",
        "name": variant.display_name,
        "task": variant.task,
        "endpoints": [surface.endpoint for surface in SURFACES.values() if surface.task == variant.task],
        "embedding": {"dimensions": variant.dimensions, "pooling": variant.pooling} if variant.task == EMBED else None,
        "quantisation": variant.quantisation,
        "variant_sha256": variant.sha256,
        "weights_sha256": variant.weights_sha256,
        "context_length": max((offer.context_per_slot for offer in offers), default=variant.training_context),
        "supports_tools": variant.supports_tools,
        "nodes": len({offer.node_id for offer in offers}),
        "slots": sum(offer.slots for offer in offers),
        "slots_free": sum(max(offer.slots - offer.slots_busy, 0) for offer in offers if offer.available),
        "speed": {
            "prefill_tokens_per_s": _middle(offer.prefill_tokens_per_s for offer in offers),
            "decode_tokens_per_s": _middle(offer.decode_tokens_per_s for offer in offers),
        },
        "data": {
            "private_nodes": len({offer.node_id for offer in offers if offer.data.private}),
            "regions": sorted({offer.region for offer in offers if offer.region}),
            "countries": sorted({offer.data.country for offer in offers if offer.data.country}),
        },
        "simulated": bool(offers) and all(offer.simulated for offer in offers),
        "pricing": _pricing(best),
        "flex_pricing": _pricing(
            best.at_share(services.settings.flex_price_basis_points) if best is not None else None
        ),
    }
