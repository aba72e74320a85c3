"""From what was delivered to what is billed: counts by class, and their price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.protocol import Failed, Finished, Tokens
from marketplace.gateway.answer import Texts, by_choice, gather
from marketplace.gateway.outcomes import Payer
from marketplace.metering.pricing import Priced, Rates, price
from marketplace.metering.tokens import TokenCounts, billable_cached, billable_output


class TextCounter(Protocol):
    """What counting needs of a variant."""

    async def count_text_async(self, text: str) -> int:
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
    choices: int = 1,
) -> Counted:
    """Count delivered `pieces` by the published rules. A report's claim of cached tokens only ever lowers the price.

    `max_output_tokens` bounds each of the `choices`; the prompt is counted once for all of them."""
    counts = [await _count_output(variant, own, max_output_tokens) for own in by_choice(pieces, choices)]
    output = sum(output for output, _ in counts)
    reported = report.usage.cached_tokens if report is not None else None
    tokens = TokenCounts.of(
        prompt=prompt_tokens,
        cached=billable_cached(reported, proven_prefix, prompt_tokens),
        output=output,
        reasoning=sum(reasoning for _, reasoning in counts),
    )
    return Counted(tokens, max(accepted_tokens, output))


async def _count_output(variant: TextCounter, pieces: Sequence[Tokens], max_output_tokens: int) -> tuple[int, int]:
    """Billable tokens of one answer, and those of them that were reasoning."""
    texts = gather(pieces)
    visible = await _recount(variant, texts.visible) + await _recount(variant, texts.called)
    reasoning = await _recount(variant, texts.reasoning)
    recount = visible + reasoning
    output = billable_output(_claimed(texts, recount), recount, max_output_tokens)
    return output, min(reasoning, output)


async def _recount(variant: TextCounter, text: str) -> int:
    return await variant.count_text_async(text) if text else 0


def _claimed(texts: Texts, recount: int) -> int | None:
    """How many ids came, where they can lower the bill.

    Ids beyond the recount would have to decode to the text to count, and that is not checked here: the recount counts
    then, which bills less. Ids of tool calls cannot be held against a text at all.
    """
    if texts.called:
        return None
    parts = ((texts.visible, texts.visible_ids), (texts.reasoning, texts.reasoning_ids))
    if any(text and ids is None for text, ids in parts):
        return None
    ids = sum(len(ids) for _, ids in parts if ids is not None)
    return ids if ids <= recount else None


def price_of(tokens: TokenCounts, rates: Rates, fee_basis_points: int, payer: Payer) -> Priced | None:
    """What the tokens cost, or None where nobody pays."""
    return price(tokens, rates, fee_basis_points) if payer is not Payer.NOBODY else None
