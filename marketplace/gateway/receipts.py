"""From what was delivered to what is billed: counts by class, the price, and the facts of the receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agent.protocol import Failed, Finished, Tokens
from marketplace.gateway.answer import Texts, gather
from marketplace.gateway.outcomes import Payer
from marketplace.jobs.hot import ReceiptFacts
from marketplace.matching.types import OfferView, Rates
from marketplace.metering.pricing import Priced, price
from marketplace.metering.tokens import TokenCounts, billable_cached, billable_output

OFFLOAD_CHARACTERS: Final = 2_000
"""Longer texts, some 500 tokens, are counted off the event loop."""


class TextCounter(Protocol):
    """What counting needs of a variant."""

    def count_text(self, text: str) -> int:
        """Tokens of a text, by the variant's own tokenizer."""
        ...


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens of one attempt, as they may be billed."""

    tokens: TokenCounts
    accepted: int
    """Output tokens accepted from the node: never less than what is billed."""


async def count(
    variant: TextCounter,
    pieces: Sequence[Tokens],
    *,
    accepted_tokens: int,
    prompt_tokens: int,
    max_output_tokens: int,
    report: Finished | Failed | None,
    proven_prefix: int,
) -> Counted:
    """Count delivered `pieces` by the published rules. A report's claim of cached tokens only ever lowers the price."""
    texts = gather(pieces)
    if len(texts.visible) + len(texts.reasoning) + len(texts.called) > OFFLOAD_CHARACTERS:
        visible, reasoning = await asyncio.to_thread(_recount, variant, texts)
    else:
        visible, reasoning = _recount(variant, texts)
    output = billable_output(_claimed(texts), visible + reasoning, max_output_tokens)
    reported = report.usage.cached_tokens if report is not None else None
    tokens = TokenCounts.of(
        prompt=prompt_tokens,
        cached=billable_cached(reported, proven_prefix, prompt_tokens),
        output=output,
        reasoning=min(reasoning, output),
    )
    return Counted(tokens, max(accepted_tokens, output))


def _recount(variant: TextCounter, texts: Texts) -> tuple[int, int]:
    visible, reasoning, called = (
        variant.count_text(text) if text else 0 for text in (texts.visible, texts.reasoning, texts.called)
    )
    return visible + called, reasoning


def _claimed(texts: Texts) -> int | None:
    """How many ids came, if all of the text came with ids. Those of tool calls cannot be held against a text."""
    if texts.called:
        return None
    parts = ((texts.visible, texts.visible_ids), (texts.reasoning, texts.reasoning_ids))
    if any(text and ids is None for text, ids in parts):
        return None
    return sum(len(ids) for _, ids in parts if ids is not None)


def price_of(tokens: TokenCounts, rates: Rates, fee_basis_points: int, payer: Payer) -> Priced | None:
    """What the tokens cost, or None where nobody pays."""
    return price(tokens, rates, fee_basis_points) if payer is not Payer.NOBODY else None


def facts(
    offer: OfferView, tokens: TokenCounts, priced: Priced, payer: Payer, node_signature: bytes | None
) -> ReceiptFacts:
    """The receipt's figures. Where the platform pays, the same gross comes from the loss account."""
    by_renter = payer is Payer.RENTER
    return ReceiptFacts(
        owner_organisation_id=offer.owner_organisation_id,
        device_id=offer.device_id,
        simulated=offer.simulated,
        input_uncached_tokens=tokens.input_uncached,
        input_cached_tokens=tokens.input_cached,
        output_visible_tokens=tokens.output_visible,
        output_reasoning_tokens=tokens.output_reasoning,
        input_uncached_nano=priced.input_uncached_nano,
        input_cached_nano=priced.input_cached_nano,
        output_visible_nano=priced.output_visible_nano,
        output_reasoning_nano=priced.output_reasoning_nano,
        charge_nano=priced.gross_nano if by_renter else 0,
        fee_nano=priced.fee_nano,
        owner_nano=priced.owner_nano,
        loss_nano=0 if by_renter else priced.gross_nano,
        node_signature=node_signature,
    )
