"""From what was delivered and what it costs to the receipt that closes an attempt."""

from __future__ import annotations

from uuid import UUID

from marketplace.jobs.hot import ReceiptFacts
from marketplace.metering.pricing import Priced
from marketplace.metering.tokens import TokenCounts


def receipt_facts(
    tokens: TokenCounts,
    priced: Priced,
    *,
    owner_organisation_id: UUID,
    device_id: str,
    simulated: bool,
    node_signature: bytes | None,
    paid_by_platform: bool = False,
) -> ReceiptFacts:
    """A receipt. `paid_by_platform`: the renter pays nothing and the owner is paid from our loss account."""
    return ReceiptFacts(
        owner_organisation_id=owner_organisation_id,
        device_id=device_id,
        simulated=simulated,
        input_uncached_tokens=tokens.input_uncached,
        input_cached_tokens=tokens.input_cached,
        output_visible_tokens=tokens.output_visible,
        output_reasoning_tokens=tokens.output_reasoning,
        input_uncached_nano=priced.input_uncached_nano,
        input_cached_nano=priced.input_cached_nano,
        output_visible_nano=priced.output_visible_nano,
        output_reasoning_nano=priced.output_reasoning_nano,
        charge_nano=0 if paid_by_platform else priced.gross_nano,
        fee_nano=priced.fee_nano,
        owner_nano=priced.owner_nano,
        loss_nano=priced.gross_nano if paid_by_platform else 0,
        node_signature=node_signature,
    )
