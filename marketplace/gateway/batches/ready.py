"""Which waiting lines of a batch somebody offers to run now, and what each may cost there. No database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marketplace.catalog.service import Catalog, PromptCount, VariantView
from marketplace.core.errors import FallowError
from marketplace.gateway.batches.lines import parse_request
from marketplace.gateway.batches.models import BatchLine
from marketplace.gateway.choice import candidates, choice_of
from marketplace.gateway.embeddings.request import MAX_STORED_VECTOR_BYTES, EmbeddingRequest, require_size
from marketplace.gateway.parse import Inference
from marketplace.gateway.quote import bound_of
from marketplace.matching.choice import Choice
from marketplace.matching.types import OfferView, Rates

Failed = list[tuple[BatchLine, FallowError]]
"""Lines that are wrong, and how."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a batch says of all its lines."""

    endpoint: str
    routing: Mapping[str, Any] | None
    """Their default `provider`."""
    price_basis_points: int
    may_use: Callable[[str], bool]
    """Whether the batch's key may use a model."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A line as a job that may be admitted."""

    line: BatchLine
    variant: VariantView
    request: Inference
    counted: PromptCount
    max_output_tokens: int
    choice: Choice
    ceiling: Rates

    @property
    def prompt_tokens(self) -> int:
        return self.counted.tokens

    def body(self, bound: int) -> str:
        """JSON for the job that waits, and for the engine that runs it."""
        if isinstance(self.request, EmbeddingRequest):
            return self.request.stored_body(self.counted.inputs).decode()
        return self.request.engine_body(bound).decode()


@dataclass(frozen=True, slots=True)
class _Offered:
    line: BatchLine
    request: Inference
    variant: VariantView
    choice: Choice
    offers: Sequence[OfferView]
    """Of the variant, within the choice."""


def prepare(
    lines: Sequence[BatchLine], offers: Sequence[OfferView], catalog: Catalog, terms: Terms, *, room: int
) -> tuple[list[Ready], Failed]:
    """The first lines, up to `room`, that somebody offers to run, their prompts counted; and those that are wrong.

    A line for which nobody has an offer now keeps waiting, holds up none behind it, and is in neither list.
    """
    ready: list[Ready] = []
    offered, failed = _offered(lines, offers, catalog, terms, room)
    counts = asyncio.run(_count_prompts(offered))
    for one, counted in zip(offered, counts, strict=True):
        try:
            ready.append(_ready(one, counted, terms))
        except FallowError as error:
            failed.append((one.line, error))
    return ready, failed


def _offered(
    lines: Sequence[BatchLine], offers: Sequence[OfferView], catalog: Catalog, terms: Terms, room: int
) -> tuple[list[_Offered], Failed]:
    found: list[_Offered] = []
    failed: Failed = []
    for line in lines:
        if len(found) + len(failed) >= room:
            break
        try:
            request = parse_request((line.body or "").encode(), terms.endpoint)
            choice = choice_of(request.provider, terms.routing)
            variants = candidates(catalog, request, choice, terms.may_use)
        except FallowError as error:
            failed.append((line, error))
            continue
        for variant in variants:
            own = [offer for offer in offers if offer.variant_id == variant.id and choice.allows(offer)]
            if own:
                found.append(_Offered(line, request, variant, choice, own))
                break
    return found, failed


async def _count_prompts(offered: Sequence[_Offered]) -> list[PromptCount | FallowError]:
    counts: list[PromptCount | FallowError] = []
    for one in offered:
        try:
            counts.append(await one.request.count(one.variant))
        except FallowError as error:
            counts.append(error)
    return counts


def _ready(one: _Offered, counted: PromptCount | FallowError, terms: Terms) -> Ready:
    """Raises FallowError for a line that fits no slot which may run it."""
    if isinstance(counted, FallowError):
        raise counted
    context = max(offer.context_per_slot for offer in one.offers)
    bound = bound_of(one.request, one.variant.default_max_output, counted, context)
    if isinstance(one.request, EmbeddingRequest):
        require_size(len(one.request.inputs), one.variant, MAX_STORED_VECTOR_BYTES)
    dearest = one.choice.dearest(one.offers)
    assert dearest is not None
    ceiling = dearest.at_share(terms.price_basis_points)
    return Ready(one.line, one.variant, one.request, counted, bound, one.choice, ceiling)
