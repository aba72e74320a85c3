"""Prices by version. Append-only: a changed ask is a new row, and its id is what attempts and receipts pin."""

from __future__ import annotations

from typing import Final, Protocol
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from marketplace.catalog.models import Price
from marketplace.core.errors import BadRequest, NotFound

MAX_NANO_USD_PER_MTOK: Final = 10**15
"""A million USD for a million tokens: beyond any honest ask, and far from what could overflow a bill."""


class InvalidPrice(BadRequest):
    code = "invalid_price"


class UnknownPrice(NotFound):
    code = "unknown_price"


class Ask(Protocol):
    """Rates in nano-USD per million tokens."""

    @property
    def input(self) -> int: ...
    @property
    def cached_input(self) -> int: ...
    @property
    def output(self) -> int: ...


def set_price(session: Session, variant_id: UUID, seller_ref: UUID, rates: Ask) -> int:
    """The id of the seller's price for a variant at these rates: the newest row if it says the same, else a new one.

    Raises InvalidPrice for a negative or absurd rate, or cached input that costs more than uncached.
    """
    _check(rates)
    # Two sockets of one node may report at once: one of them finds the row of the other.
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"price:{variant_id}:{seller_ref}", 0))))
    query = select(Price).where(Price.variant_id == variant_id, Price.seller_ref == seller_ref)
    newest = session.scalars(query.order_by(Price.id.desc()).limit(1)).one_or_none()
    if newest is not None and _same(newest, rates):
        return newest.id
    price = Price(
        variant_id=variant_id,
        seller_ref=seller_ref,
        input_nano_usd_per_mtok=rates.input,
        cached_input_nano_usd_per_mtok=rates.cached_input,
        output_nano_usd_per_mtok=rates.output,
    )
    session.add(price)
    session.flush()
    return price.id


def get_price(session: Session, price_id: int) -> Price:
    """One version. Raises UnknownPrice."""
    price = session.get(Price, price_id)
    if price is None:
        raise UnknownPrice(f"There is no price with the id {price_id}.")
    return price


def _check(rates: Ask) -> None:
    named = {"input": rates.input, "cached_input": rates.cached_input, "output": rates.output}
    for name, rate in named.items():
        if not 0 <= rate <= MAX_NANO_USD_PER_MTOK:
            limit = f"0 to {MAX_NANO_USD_PER_MTOK} nano-USD a million tokens"
            raise InvalidPrice(f"A rate is {limit}; {name} is {rate}.", param=name)
    if rates.cached_input > rates.input:
        raise InvalidPrice("Cached input may not cost more than uncached input.", param="cached_input")


def _same(price: Price, rates: Ask) -> bool:
    return (
        price.input_nano_usd_per_mtok == rates.input
        and price.cached_input_nano_usd_per_mtok == rates.cached_input
        and price.output_nano_usd_per_mtok == rates.output
    )
