"""A queue with a fleet: rows from `market`, offers published as a gateway publishes them. For tests of the queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from uuid import UUID

import psycopg
import redis
from sqlalchemy import select, text

from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.core.valkey import connect
from marketplace.fleet.snapshot import PUBLISH, GatewaySnapshot, PublishedOffer, publish_call
from marketplace.jobs.hot import Admit, Admitted
from marketplace.jobs.models import Attempt, Job
from marketplace.jobs.tasks import make_matcher
from marketplace.jobs.writer import Record, run_in_session
from marketplace.matching.types import OfferView
from tests.market import Market, OneNode, Renter, make_market, make_node, make_renter

GATEWAY = "gw-one"


@dataclass
class QueueWorld:
    """One variant's market, and what of it is connected."""

    settings: Settings
    factory: SessionFactory
    client: redis.Redis
    market: Market
    offers: list[OfferView] = field(default_factory=list)

    @classmethod
    def make(cls, settings: Settings, factory: SessionFactory, **market: Any) -> QueueWorld:
        with transaction(factory) as session:
            made = make_market(session, **market)
        return cls(settings, factory, connect(settings.valkey_url), made)

    def connect(self, node: OneNode | None = None, **changes: Any) -> OfferView:
        """A node's offer goes live at GATEWAY."""
        node = node or self.market.node
        offer = OfferView(
            offer_id=node.offer_id,
            node_id=node.node_id,
            owner_organisation_id=node.owner_organisation_id,
            device_id=node.device_id,
            variant_id=self.market.variant_id,
            gateway_id=GATEWAY,
            price_id=node.price_id,
            rates=self.market.rates,
            slots=4,
            slots_busy=0,
            context_per_slot=1_024,
            available=True,
            warm=True,
            simulated=False,
            prefix_cache_s=0.0,
            sampled_age_s=0.0,
            prefill_tokens_per_s=500.0,
            decode_tokens_per_s=50.0,
            memory_free_bytes=None,
        )
        offer = replace(offer, **changes)
        self.offers.append(offer)
        self.publish()
        return offer

    def publish(self) -> None:
        """Tell Valkey, as each gateway does every second or so."""
        for gateway_id in {offer.gateway_id for offer in self.offers}:
            offers = [PublishedOffer.of(offer, 1) for offer in self.offers if offer.gateway_id == gateway_id]
            snapshot = GatewaySnapshot(gateway_id, "http://127.0.0.1:1", offers)
            keys, args = publish_call(snapshot, str(time.monotonic_ns()))
            self.client.eval(PUBLISH.source, len(keys), *keys, *args)

    def another_node(self) -> OneNode:
        with transaction(self.factory) as session:
            return make_node(session, self.market.variant_id)

    def another_renter(self, **changes: Any) -> Renter:
        with transaction(self.factory) as session:
            return make_renter(session, **changes)

    def write(self, *records: Record) -> list[Any]:
        with transaction(self.factory) as session:
            return run_in_session(session, records)

    def admit(self, **changes: Any) -> Admit:
        """A queued job, admitted."""
        record = self.market.admit(queued=True, **changes)
        answer = self.write(record)[0]
        assert isinstance(answer, Admitted)
        assert answer.ok
        return record

    def matcher(self, seed: int = 1) -> Any:
        return replace(make_matcher(self.client, self.settings), rng=Random(seed))

    def job(self, job_id: UUID) -> Job:
        with self.factory() as session:
            return session.get_one(Job, job_id)

    def attempts(self, job_id: UUID) -> list[Attempt]:
        with self.factory() as session:
            return list(session.scalars(select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.epoch)))

    def held_nano(self, renter: Renter | None = None) -> int:
        account = (renter or self.market.renter).credit_account_id
        with self.factory() as session:
            return int(
                session.scalars(
                    text("select held_nano from ledger_balances where account_id = :id"), {"id": account}
                ).one()
            )

    def outcomes(self, job_id: UUID) -> list[str]:
        with self.factory() as session:
            return list(session.scalars(text("select outcome from outcomes where job_id = :id"), {"id": job_id}))

    def pass_time(self, seconds: float) -> None:
        """Move every date of the queue into the past, since only the database's clock decides."""
        with transaction(self.factory) as session:
            by = {"by": seconds}
            session.execute(
                text(
                    "update jobs set created_at = created_at - make_interval(secs => :by),"
                    " deadline_at = deadline_at - make_interval(secs => :by)"
                ),
                by,
            )
            session.execute(
                text(
                    "update attempts set lease_expires_at = lease_expires_at - make_interval(secs => :by),"
                    " ended_at = ended_at - make_interval(secs => :by)"
                ),
                by,
            )

    def dispatched(self, gateway_id: str = GATEWAY) -> list[UUID]:
        items: Any = self.client.lrange(f"fallow:dispatch:{gateway_id}", 0, -1)
        return [UUID(hex=item.decode()) for item in items]


def wait_until(check: Callable[[], bool], *, timeout_s: float = 15.0) -> bool:
    """Poll until true; False if it did not become so."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if check():
            return True
        time.sleep(0.05)
    return False


def has_row(database_url: str, statement: str) -> bool:
    with psycopg.connect(database_url) as connection:
        return connection.execute(statement).fetchone() is not None
