"""How long a demand would take on an offer: the formulas of first token and end, reduced to what a node reports.

All times are seconds. The full model (weights, bandwidth, compute) lives beside the engine, which turns it into the two
rates of an offer; here those rates are corrected for what else runs there.
"""

from __future__ import annotations

from marketplace.matching.types import Demand, OfferView

UNKNOWN_PREFILL_TOKENS_PER_S = 200.0
UNKNOWN_DECODE_TOKENS_PER_S = 20.0
"""What an offer that does not say is taken for: slow enough that saying so always pays."""
COLD_LOAD_S = 15.0
"""Loading weights into an engine that is not warm."""
OVERHEAD_S = 0.02
"""Network and scheduling, whatever the prompt."""
CACHED_SHARE = 0.9
"""Of a prompt whose prefix a node holds; the rest (the newest turn) is prefilled anyway."""
CONTENTION = 0.25
"""By how much each running neighbour lengthens a prefill: the share of its life that it spends in the same phase."""


def ttft_s(offer: OfferView, demand: Demand) -> float:
    """Predicted seconds from dispatch to the first token: cold load, neighbours, prefill of what is not cached."""
    uncached = float(demand.prompt_tokens)
    if offer.node_id in demand.warm_prefix_nodes and offer.warm:
        uncached *= 1.0 - CACHED_SHARE
    rate = offer.prefill_tokens_per_s or UNKNOWN_PREFILL_TOKENS_PER_S
    prefill = uncached / rate * (1.0 + CONTENTION * offer.slots_busy)
    return OVERHEAD_S + (0.0 if offer.warm else COLD_LOAD_S) + prefill


def decode_s(offer: OfferView, demand: Demand) -> float:
    """Predicted seconds from the first token to the last, should the answer use all of its bound."""
    return demand.max_output_tokens / (offer.decode_tokens_per_s or UNKNOWN_DECODE_TOKENS_PER_S)
