"""A leased attempt of the queue, as whoever runs it here needs it: its offer at the pinned price, and its length."""

from __future__ import annotations

from dataclasses import replace

from marketplace.gateway.outcomes import FAULTS, Ending
from marketplace.gateway.parse import choices_of
from marketplace.gateway.services import Services
from marketplace.jobs.repository import Dispatch
from marketplace.matching.choice import Choice
from marketplace.matching.live import UNKNOWN_DECODE_TOKENS_PER_S, UNKNOWN_PREFILL_TOKENS_PER_S
from marketplace.matching.types import Demand, OfferView, Service


def runs_s(offer: OfferView, dispatch: Dispatch) -> float:
    """How long it will run, should its answer use all of its bound."""
    reads_s = dispatch.prompt_tokens / (offer.prefill_tokens_per_s or UNKNOWN_PREFILL_TOKENS_PER_S)
    writes = dispatch.max_output_tokens * choices_of(dispatch.body or {})
    return reads_s + writes / (offer.decode_tokens_per_s or UNKNOWN_DECODE_TOKENS_PER_S)


def demand_of(dispatch: Dispatch) -> Demand:
    """The matcher's view of it."""
    return Demand(
        variant_id=dispatch.variant_id,
        prompt_tokens=dispatch.prompt_tokens,
        max_output_tokens=dispatch.max_output_tokens,
        ceiling=dispatch.ceiling,
        organisation_id=dispatch.organisation_id,
        service=Service.FLEX,
        choices=choices_of(dispatch.body or {}),
        longest_input_tokens=(dispatch.body or {}).get("longest_input_tokens"),
    )


def ends_with(choice: Choice, ending: Ending) -> bool:
    """True if a job of that choice ends with an attempt that ended so: its first pick failed, and nobody else may take
    over. What is not the node's fault waits for that node again."""
    return choice.first_only and FAULTS.get(ending) == "node"


def offer_of(services: Services, dispatch: Dispatch) -> OfferView:
    """The offer as the view knows it, at the price that the lease pinned; if it left the view, what the row says."""
    offer = services.fleet.view.offer(dispatch.offer_id)
    if offer is not None:
        return replace(offer, price_id=dispatch.price_id, rates=dispatch.rates)
    return OfferView(
        offer_id=dispatch.offer_id,
        node_id=dispatch.node_id,
        owner_organisation_id=dispatch.owner_organisation_id,
        device_id=dispatch.device_id,
        variant_id=dispatch.variant_id,
        gateway_id=dispatch.gateway_id,
        price_id=dispatch.price_id,
        rates=dispatch.rates,
        slots=1,
        slots_busy=1,
        context_per_slot=dispatch.prompt_tokens + dispatch.max_output_tokens,
        available=False,
        warm=False,
        simulated=dispatch.simulated,
        prefix_cache_s=0.0,
        sampled_age_s=0.0,
        prefill_tokens_per_s=None,
        decode_tokens_per_s=None,
        memory_free_bytes=None,
    )
