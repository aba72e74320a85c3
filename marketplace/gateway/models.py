"""Models as OpenAI's clients list them, with what a renter of this marketplace wants to know beside."""

from __future__ import annotations

from typing import Any

from marketplace.catalog.service import VariantView
from marketplace.core.amounts import usd
from marketplace.gateway.services import Services


def model_object(services: Services, variant: VariantView) -> dict[str, Any]:
    """One variant. `pricing` is the lowest live ask, in USD per million tokens; null while nobody offers it."""
    oldest = services.catalog.resolve(variant.model_id)
    offers = [
        offer
        for offer in services.fleet.view.offers(variant.id)
        if services.fleet.rules.allow_simulated or not offer.simulated
    ]
    best = min((offer.rates for offer in offers), key=lambda rates: (rates.input, rates.output), default=None)
    return {
        "id": variant.model_id if oldest.id == variant.id else f"{variant.model_id}:{variant.quantisation.lower()}",
        "object": "model",
        "created": int(variant.created_at.timestamp()),
        "owned_by": "fallow",
        "name": variant.display_name,
        "quantisation": variant.quantisation,
        "weights_sha256": variant.sha256,
        "context_length": max((offer.context_per_slot for offer in offers), default=variant.training_context),
        "supports_tools": variant.supports_tools,
        "nodes": len({offer.node_id for offer in offers}),
        "simulated": bool(offers) and all(offer.simulated for offer in offers),
        "pricing": {"input": usd(best.input), "cached_input": usd(best.cached_input), "output": usd(best.output)}
        if best is not None
        else None,
    }
