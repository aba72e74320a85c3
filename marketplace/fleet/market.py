"""The market of a variant, for an owner: what is offered now, by the gateways, and what was paid, by receipts."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import redis
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from marketplace.core.valkey import ValkeyDownError
from marketplace.fleet.snapshot import read_fleet
from marketplace.matching.market import Market, Paid, market
from marketplace.matching.types import OfferView
from marketplace.metering.models import Receipt

HOURS: Final = 24.0
TOKENS_PER_RATE: Final = 1_000_000


def offered(client: redis.Redis, variant_id: UUID) -> list[OfferView]:
    """What is offered of a variant now; nothing while Valkey is away."""
    try:
        return [offer for offer in read_fleet(client) if offer.variant_id == variant_id]
    except ValkeyDownError:
        return []


def paid(session: Session, variant_id: UUID, *, hours: float = HOURS) -> Paid:
    """What renters paid for a variant lately, per million tokens."""
    row = session.execute(
        select(
            func.count(),
            func.sum(Receipt.input_uncached_tokens + Receipt.input_cached_tokens),
            func.sum(Receipt.input_uncached_nano + Receipt.input_cached_nano),
            func.sum(Receipt.output_visible_tokens + Receipt.output_reasoning_tokens),
            func.sum(Receipt.output_visible_nano + Receipt.output_reasoning_nano),
        ).where(
            Receipt.variant_id == variant_id,
            Receipt.charge_nano > 0,
            ~Receipt.simulated,
            Receipt.at > func.now() - text("make_interval(secs => :seconds)").bindparams(seconds=hours * 3600),
        )
    ).one()
    requests, input_tokens, input_nano, output_tokens, output_nano = (int(value or 0) for value in row)
    return Paid(
        input_nano_per_mtok=_rate(input_nano, input_tokens),
        output_nano_per_mtok=_rate(output_nano, output_tokens),
        requests=requests,
        hours=hours,
    )


def market_of(session: Session, client: redis.Redis, variant_id: UUID, *, region: str | None = None) -> Market:
    """Both together."""
    return market(offered(client, variant_id), region=region, paid=paid(session, variant_id))


def _rate(nano: int, tokens: int) -> int | None:
    return nano * TOKENS_PER_RATE // tokens if tokens else None
