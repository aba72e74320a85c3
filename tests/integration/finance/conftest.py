"""A world with one owner, one renter and one device, written as the hot path would leave it behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

import ledger
from marketplace.accounts.models import ApiKey, Organisation
from marketplace.billing import service as billing
from marketplace.catalog.models import Model, Price, Variant
from marketplace.core.database import SessionFactory
from marketplace.core.ids import new_id
from marketplace.fleet.models import Device, EnergySample, Node, Offer, OfferedInterval
from marketplace.jobs.models import Attempt, Job, Outcome
from marketplace.metering.models import Receipt

FOREVER = timedelta(days=365_000)


@dataclass(frozen=True)
class World:
    """Ids of what every test needs."""

    owner: UUID
    renter: UUID
    key: UUID
    variant: UUID
    price: int
    node: UUID
    offer: UUID
    credit_account: int

    def offered(self, session: Session, start: datetime, end: datetime | None, seen: datetime | None = None) -> None:
        """The device was offered; `end` None leaves the stretch open, seen last at `seen`."""
        session.add(
            OfferedInterval(
                offer_id=self.offer,
                node_id=self.node,
                device_id="gpu-0",
                gateway_id="gw",
                started_at=start,
                seen_at=seen or end or start,
                ended_at=end,
            )
        )

    def attempt(
        self,
        session: Session,
        start: datetime,
        end: datetime | None,
        busy_ms: int | None = None,
        *,
        expires: datetime | None = None,
    ) -> UUID:
        """A job that held a lease on the device, and its attempt; returns the job's id."""
        job = self._job(session, start)
        session.add(
            Attempt(
                id=new_id(),
                job_id=job,
                epoch=1,
                node_id=self.node,
                offer_id=self.offer,
                gateway_id="gw",
                state="leased" if end is None else "ended",
                price_id=self.price,
                input_nano_usd_per_mtok=0,
                cached_input_nano_usd_per_mtok=0,
                output_nano_usd_per_mtok=0,
                lease_expires_at=expires or end or start,
                leased_at=start,
                ended_at=end,
                busy_ms=busy_ms,
            )
        )
        session.flush()
        return job

    def receipt(
        self,
        session: Session,
        at: datetime,
        nano: int,
        *,
        lost: bool = False,
        tokens: tuple[int, int, int, int] = (10, 0, 5, 0),
        outcome: str = "complete",
        simulated: bool = False,
    ) -> UUID:
        """Something delivered, not yet settled: 20% fee, or all paid by our loss account. Returns the receipt's id."""
        job = self._job(session, at)
        ended = "platform_failed" if lost else outcome
        row = session.get_one(Job, job)
        row.outcome = ended
        if not lost:
            ledger.reserve(session, job, self.credit_account, nano, at + FOREVER)
        fee = 0 if lost else ledger.divide_half_even(nano, 5)
        cached = nano // 4 if tokens[1] else 0
        receipt = Receipt(
            id=new_id(),
            job_id=job,
            renter_organisation_id=self.renter,
            key_id=self.key,
            owner_organisation_id=self.owner,
            node_id=self.node,
            device_id="gpu-0",
            variant_id=self.variant,
            price_id=self.price,
            outcome=outcome,
            input_uncached_tokens=tokens[0],
            input_cached_tokens=tokens[1],
            output_visible_tokens=tokens[2],
            output_reasoning_tokens=tokens[3],
            input_uncached_nano=0,
            input_cached_nano=cached,
            output_visible_nano=nano - cached,
            output_reasoning_nano=0,
            charge_nano=0 if lost else nano,
            fee_nano=fee,
            owner_nano=nano - fee,
            loss_nano=nano if lost else 0,
            simulated=simulated,
            at=at,
        )
        session.add(receipt)
        session.add(
            Outcome(
                request_id=row.request_id,
                organisation_id=self.renter,
                endpoint="chat",
                outcome=ended,
                job_id=job,
                at=at,
            )
        )
        session.flush()
        return receipt.id

    def energy(self, session: Session, start: datetime, end: datetime, energy_mj: int | None, source: str) -> None:
        session.add(
            EnergySample(
                node_id=self.node, device_id="gpu-0", started_at=start, ended_at=end, energy_mj=energy_mj, source=source
            )
        )

    def _job(self, session: Session, at: datetime) -> UUID:
        job = Job(
            id=new_id(),
            organisation_id=self.renter,
            key_id=self.key,
            request_id=new_id().hex,
            kind="interactive",
            state="delivered",
            variant_id=self.variant,
            prompt_tokens=10,
            max_output_tokens=10,
            max_input_nano_usd_per_mtok=0,
            max_cached_input_nano_usd_per_mtok=0,
            max_output_nano_usd_per_mtok=0,
            hold_nano=0,
            deadline_at=at + timedelta(minutes=10),
            created_at=at,
        )
        session.add(job)
        session.flush()
        return job.id


@pytest.fixture
def session(session_factory: SessionFactory) -> Iterator[Session]:
    with session_factory() as session:
        yield session


@pytest.fixture
def world(session_factory: SessionFactory) -> World:
    with session_factory() as session, session.begin():
        return _build(session)


def _build(session: Session) -> World:
    owner, renter = Organisation(id=new_id(), name="Olive's GPUs"), Organisation(id=new_id(), name="Rita")
    key = ApiKey(
        id=new_id(),
        organisation_id=renter.id,
        name="test",
        shown_prefix="sk-",
        sha256=b"k",
        roles=["renter"],
        requests_per_minute=1,
        parallel_requests=1,
    )
    variant = Variant(
        id=new_id(),
        model_id="tiny",
        sha256="0" * 64,
        size_bytes=1,
        quantisation="Q4",
        training_context=1,
        default_max_output=1,
        shape={},
        tokenizer_kind="fast",
        tokenizer=b"",
        chat_template="",
        special_tokens={},
    )
    session.add_all([owner, renter])
    session.add(Model(id="tiny", display_name="Tiny"))
    session.flush()
    session.add_all([key, variant])
    node = Node(id=new_id(), organisation_id=owner.id, name="attic", public_key=b"p", agent_version="1")
    session.add(node)
    session.flush()
    price = Price(
        variant_id=variant.id,
        seller_ref=node.id,
        input_nano_usd_per_mtok=100_000_000,
        cached_input_nano_usd_per_mtok=25_000_000,
        output_nano_usd_per_mtok=400_000_000,
    )
    session.add_all([price, Device(node_id=node.id, device_id="gpu-0", name="=GPU", kind="gpu")])
    session.flush()
    offer = Offer(
        id=new_id(),
        node_id=node.id,
        variant_id=variant.id,
        device_id="gpu-0",
        price_id=price.id,
        slots=2,
        context_per_slot=1_024,
        engine="llama.cpp",
        engine_version="1",
        simulated=False,
        decode_tokens_per_s=50.0,
    )
    session.add(offer)
    session.flush()
    credit_account = billing.ensure_credit_account(session, renter)
    billing.top_up(session, renter.id, 10_000_000_000, "start")
    return World(owner.id, renter.id, key.id, variant.id, price.id, node.id, offer.id, credit_account)
