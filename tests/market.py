"""A small marketplace in the database: one renter with credit, one owner with a node that serves one variant.

Plain functions that make rows and records, for tests that need real ones.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from marketplace.accounts.models import ApiKey, Organisation
from marketplace.billing.service import ensure_credit_account, top_up
from marketplace.catalog.models import Model, Price, Variant
from marketplace.core.ids import new_id
from marketplace.fleet.models import Node, Offer
from marketplace.jobs.hot import Admit, AttemptLease, Close, Lease, ReceiptFacts
from marketplace.jobs.receipts import receipt_facts
from marketplace.matching.types import Rates
from marketplace.metering.pricing import price, worst_case
from marketplace.metering.tokens import TokenCounts

RATES = Rates(input=100_000_000, cached_input=25_000_000, output=400_000_000)
"""0.10, 0.025 and 0.40 USD a million tokens."""
FEE_BASIS_POINTS = 2_000
PROMPT_TOKENS = 100
MAX_OUTPUT_TOKENS = 200


@dataclass(frozen=True)
class Renter:
    organisation_id: UUID
    key_id: UUID
    credit_account_id: int


@dataclass(frozen=True)
class OneNode:
    """A node with one offer."""

    node_id: UUID
    offer_id: UUID
    price_id: int
    owner_organisation_id: UUID
    device_id: str = "cpu"


@dataclass(frozen=True)
class Market:
    variant_id: UUID
    renter: Renter
    node: OneNode
    rates: Rates = field(default=RATES)

    def lease(self, node: OneNode | None = None, *, lease_s: float = 15.0, rates: Rates | None = None) -> AttemptLease:
        node = node or self.node
        return AttemptLease(
            attempt_id=new_id(),
            node_id=node.node_id,
            offer_id=node.offer_id,
            price_id=node.price_id,
            rates=rates or self.rates,
            gateway_id="gw-test",
            lease_s=lease_s,
        )

    def admit(self, *, renter: Renter | None = None, queued: bool = False, **changes: Any) -> Admit:
        """An admission of PROMPT_TOKENS and MAX_OUTPUT_TOKENS at this market's rates."""
        renter = renter or self.renter
        job_id = new_id()
        record = Admit(
            job_id=job_id,
            organisation_id=renter.organisation_id,
            key_id=renter.key_id,
            credit_account_id=renter.credit_account_id,
            request_id=f"req_{job_id.hex}",
            kind="queued" if queued else "interactive",
            variant_id=self.variant_id,
            body='{"messages":[{"role":"user","content":"hi"}]}' if queued else None,
            prompt_tokens=PROMPT_TOKENS,
            max_output_tokens=MAX_OUTPUT_TOKENS,
            ceiling=self.rates,
            hold_nano=worst_case(self.rates, PROMPT_TOKENS, MAX_OUTPUT_TOKENS),
            hold_margin_s=900.0,
            gateway_id=None if queued else "gw-test",
            deadline_s=600.0,
            attempt=None if queued else self.lease(),
        )
        return replace(record, **changes)

    def receipt(self, output: int, *, node: OneNode | None = None, by_platform: bool = False) -> ReceiptFacts:
        counts = TokenCounts.of(prompt=PROMPT_TOKENS, cached=40, output=output)
        node = node or self.node
        return receipt_facts(
            counts,
            price(counts, self.rates, FEE_BASIS_POINTS),
            owner_organisation_id=node.owner_organisation_id,
            device_id=node.device_id,
            simulated=False,
            node_signature=b"signed",
            paid_by_platform=by_platform,
        )

    def delivered(self, job: Admit, *, output: int = 50, **changes: Any) -> Close:
        """The end of an answered job, after `output` tokens."""
        assert job.attempt is not None
        record = Close(
            job_id=job.job_id,
            attempt_id=job.attempt.attempt_id,
            epoch=1,
            job_state="delivered",
            outcome="complete",
            end_code="delivered",
            fault=None,
            accepted_tokens=output,
            busy_ms=5,
            first_token=True,
            receipt=self.receipt(output),
        )
        return replace(record, **changes)

    def voided(self, job: Admit, **changes: Any) -> Close:
        """The end of a job that delivered nothing."""
        record = Close(
            job_id=job.job_id,
            attempt_id=job.attempt.attempt_id if job.attempt else None,
            epoch=1,
            job_state="voided",
            outcome="node_failed",
            end_code="engine_died",
            fault="node",
            accepted_tokens=0,
            busy_ms=None,
            first_token=False,
        )
        return replace(record, **changes)

    def move(self, job: Admit, node: OneNode | None = None) -> Lease:
        return Lease(job_id=job.job_id, attempt=self.lease(node))


def make_market(session: Session, *, credit_nano: int = 1_000_000_000) -> Market:
    """Rows of a whole small marketplace; the renter starts with that credit. The caller commits."""
    session.add(Model(id=f"tiny-{secrets.token_hex(4)}", display_name="Tiny"))
    session.flush()
    model = session.query(Model).order_by(Model.created_at.desc()).first()
    assert model is not None
    variant = Variant(
        model_id=model.id,
        sha256=secrets.token_hex(32),
        size_bytes=1,
        quantisation="Q4_1",
        training_context=2_048,
        default_max_output=256,
        shape={},
        tokenizer_kind="fast",
        tokenizer=b"",
        chat_template="",
        special_tokens={},
    )
    session.add(variant)
    session.flush()
    return Market(
        variant_id=variant.id,
        renter=make_renter(session, credit_nano=credit_nano),
        node=make_node(session, variant.id),
    )


def make_renter(session: Session, *, credit_nano: int = 1_000_000_000) -> Renter:
    """A renter with a key and that much credit."""
    organisation = Organisation(name=f"renter-{secrets.token_hex(4)}")
    session.add(organisation)
    session.flush()
    key = ApiKey(
        organisation_id=organisation.id,
        name="default",
        shown_prefix="sk-fallow-",
        sha256=secrets.token_bytes(32),
        roles=["renter"],
        requests_per_minute=10_000,
        parallel_requests=1_000,
    )
    session.add(key)
    account_id = ensure_credit_account(session, organisation)
    if credit_nano:
        top_up(session, organisation.id, credit_nano, key=f"start-{organisation.id.hex}")
    session.flush()
    return Renter(organisation.id, key.id, account_id)


def make_node(session: Session, variant_id: UUID, *, rates: Rates = RATES) -> OneNode:
    """An owner with one node and one offer of the variant."""
    owner = Organisation(name=f"owner-{secrets.token_hex(4)}")
    session.add(owner)
    session.flush()
    node = Node(organisation_id=owner.id, name="basement", public_key=secrets.token_bytes(32), agent_version="0")
    session.add(node)
    session.flush()
    ask = Price(
        variant_id=variant_id,
        seller_ref=node.id,
        input_nano_usd_per_mtok=rates.input,
        cached_input_nano_usd_per_mtok=rates.cached_input,
        output_nano_usd_per_mtok=rates.output,
    )
    session.add(ask)
    session.flush()
    offer = Offer(
        node_id=node.id,
        variant_id=variant_id,
        device_id="cpu",
        price_id=ask.id,
        slots=4,
        context_per_slot=1_024,
        engine="llama.cpp",
        engine_version="1",
        simulated=False,
    )
    session.add(offer)
    session.flush()
    return OneNode(node.id, offer.id, ask.id, owner.id)
