"""POST /v1/explain: where a request would go now, and why, as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from marketplace.core.amounts import usd
from marketplace.core.ids import show
from marketplace.gateway.quote import Measured
from marketplace.gateway.services import Services
from marketplace.matching.explain import Candidate, Explanation, explain
from marketplace.matching.types import Demand


def explain_request(services: Services, measured: Measured, demand: Demand) -> dict[str, Any]:
    """Look at every offer of the model. A price order or a list of providers in the request is not looked at: it
    chooses among what is told here."""
    told = explain(services.fleet.view.index, demand, services.now(), resting=services.fleet.resting(demand.variant_id))
    return {
        "object": "explanation",
        "model": measured.chat.model,
        "service": demand.service.value,
        "sort": demand.sort.value,
        "why": told.sentence(),
        "nodes": told.nodes,
        "fitting": told.fitting,
        "late": {"predicted_ttft_s": round(told.late.soonest_s, 3), "useful_ttft_s": round(told.late.useful_s, 3)}
        if told.late is not None
        else None,
        "refused": {reason.value: count for reason, count in told.refusal.refused.items()},
        "tied": told.tied,
        "best": _best(told),
    }


def _best(told: Explanation) -> list[dict[str, Any]]:
    return [_candidate(candidate) for candidate in told.best]


def _candidate(candidate: Candidate) -> dict[str, Any]:
    offer = candidate.offer
    return {
        "offer": show("offer", offer.offer_id),
        "region": offer.region or None,
        "probation": offer.probation,
        "rates_per_million_tokens": {
            "input": usd(offer.rates.input),
            "cached_input": usd(offer.rates.cached_input),
            "output": usd(offer.rates.output),
        },
        "slots": offer.slots,
        "slots_busy": offer.slots_busy,
        "cached_tokens": candidate.cached_tokens,
        "predicted_ttft_s": round(candidate.ttft_s, 3),
        "predicted_s_per_token": round(candidate.tpot_s, 4),
        "cost_s": {name: round(value, 4) for name, value in asdict(candidate.split).items()},
    }
