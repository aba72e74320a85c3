"""Invoices from the database: days of a zone, keys, conversations; and what the gateway notes for them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from marketplace.core.database import SessionFactory
from marketplace.core.ids import new_id
from marketplace.finance import invoicing, reports, service
from marketplace.finance.heldback import Limit
from marketplace.finance.period import Period
from marketplace.gateway.demand import MAX_CONVERSATIONS, DemandNotes
from marketplace.jobs.demand import NO_NODE, JobConversation, RefusedMinute, add_conversations
from marketplace.matching.rank import Rules
from marketplace.matching.types import Demand, OfferView, Rates
from marketplace.metering.models import Receipt
from tests.integration.finance.conftest import World

MARCH = Period.named("2026-03", "Europe/Berlin")
NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def converse(session: Session, receipt_id: UUID, conversation: int) -> None:
    receipt = session.get_one(Receipt, receipt_id)
    add_conversations(session, {receipt.job_id: conversation})


class TestInvoice:
    def test_its_lines_are_days_of_the_zone_and_add_up(self, session: Session, world: World) -> None:
        world.receipt(session, datetime(2026, 2, 28, 23, 30, tzinfo=UTC), 100)
        world.receipt(session, datetime(2026, 3, 29, 22, 30, tzinfo=UTC), 200)
        world.receipt(session, datetime(2026, 3, 31, 22, 0, tzinfo=UTC), 400)
        invoice = invoicing.make_invoice(session, world.renter, MARCH)
        assert [(line.day.isoformat(), line.amounts.total_nano) for line in invoice.lines] == [
            ("2026-03-01", 100),
            ("2026-03-30", 200),
        ]
        assert sum(line.amounts.total_nano for line in invoice.lines) == invoice.bill.total_nano

    def test_it_is_compared_with_the_month_before(self, session: Session, world: World) -> None:
        world.receipt(session, NOON - timedelta(days=30), 100)
        world.receipt(session, NOON, 300)
        growth = invoicing.make_invoice(session, world.renter, MARCH).growth
        assert (growth.before_nano, growth.now_nano) == (100, 300)
        assert growth.before.startswith("2026-02-01 00:00:00 to 2026-03-01 00:00:00")

    def test_re_sent_input_is_what_the_call_before_had_sent_and_received(self, session: Session, world: World) -> None:
        first = world.receipt(session, NOON, 100, tokens=(100, 0, 50, 0))
        second = world.receipt(session, NOON + HOUR, 100, tokens=(140, 60, 10, 0))
        other = world.receipt(session, NOON + HOUR, 100, tokens=(30, 0, 10, 0))
        world.receipt(session, NOON + HOUR, 100, tokens=(7, 0, 10, 0))
        converse(session, first, 1)
        converse(session, second, 1)
        converse(session, other, 2)
        resent = invoicing.make_invoice(session, world.renter, MARCH).resent
        assert (resent.new_tokens, resent.resent_tokens, resent.unknown_tokens) == (100 + 50 + 30, 150, 7)
        assert resent.resent_uncached_tokens == 90

    def test_a_conversation_that_began_the_day_before_goes_on(self, session: Session, world: World) -> None:
        first = world.receipt(session, MARCH.start - HOUR, 100, tokens=(100, 0, 50, 0))
        second = world.receipt(session, MARCH.start + HOUR, 100, tokens=(200, 0, 10, 0))
        converse(session, first, 1)
        converse(session, second, 1)
        resent = invoicing.make_invoice(session, world.renter, MARCH).resent
        assert (resent.new_tokens, resent.resent_tokens, resent.new_before_tokens) == (50, 150, 100)

    def test_an_invoice_without_a_request_is_empty(self, session: Session, world: World) -> None:
        invoice = invoicing.make_invoice(session, world.renter, MARCH)
        assert (invoice.lines, invoice.bill.total_nano, invoice.growth.mix_nano) == ((), 0, 0)


def offer(world: World, **changes: object) -> OfferView:
    facts: dict[str, object] = {
        "offer_id": world.offer,
        "node_id": world.node,
        "owner_organisation_id": world.owner,
        "device_id": "gpu-0",
        "variant_id": world.variant,
        "gateway_id": "gw",
        "price_id": world.price,
        "rates": Rates(100_000_000, 25_000_000, 400_000_000),
        "slots": 2,
        "slots_busy": 2,
        "context_per_slot": 1_024,
        "available": True,
        "warm": True,
        "simulated": False,
        "prefix_cache_s": 0.0,
        "sampled_age_s": 0.0,
        "prefill_tokens_per_s": None,
        "decode_tokens_per_s": None,
        "memory_free_bytes": None,
    }
    return OfferView(**{**facts, **changes})  # type: ignore[arg-type]


def demand(world: World, variant: UUID | None = None) -> Demand:
    return Demand(variant or world.variant, 100, 200, None, world.renter)


@pytest.fixture
def notes(session_factory: SessionFactory) -> DemandNotes:
    return DemandNotes(session_factory, b"secret")


class TestNotes:
    def test_refusals_of_a_minute_become_one_row_a_node_and_filter(
        self, notes: DemandNotes, session: Session, world: World
    ) -> None:
        for _ in range(3):
            notes.refused(demand(world), [offer(world)], rules=Rules())
        notes.refused(demand(world), [], rules=Rules())
        notes.refused(demand(world), [offer(world, context_per_slot=10)], rules=Rules())
        asyncio.run(notes.flush())
        notes.refused(demand(world), [offer(world)], rules=Rules())
        asyncio.run(notes.flush())
        totals: dict[tuple[UUID, str], tuple[int, int]] = {}
        for row in session.scalars(select(RefusedMinute)):
            requests, tokens = totals.get((row.node_id, row.filter), (0, 0))
            totals[row.node_id, row.filter] = (requests + row.requests, tokens + row.prompt_tokens)
        assert totals == {
            (world.node, "FULL"): (4, 400),
            (NO_NODE, "VARIANT"): (1, 100),
            # Full and too small: relaxing one alone would not have helped.
            (world.node, "SEVERAL"): (1, 100),
        }

    def test_they_show_on_the_statement_as_what_held_it_back(
        self, notes: DemandNotes, session: Session, world: World
    ) -> None:
        now = datetime.now(UTC)
        world.offered(session, now - HOUR, now)
        session.commit()
        notes.refused(demand(world), [offer(world)], rules=Rules())
        notes.refused(demand(world), [], rules=Rules())
        asyncio.run(notes.flush())
        statement = service.yield_statement(session, world.owner, now - HOUR, now + HOUR)
        held = {row.limit: row for row in reports.held_back_of(session, statement)}
        assert held[Limit.SLOTS_SET].requests == 1
        assert held[Limit.SLOTS_SET].at_most_nano == 100 * 100 + 200 * 400
        assert held[Limit.POWER].requests is None

    def test_a_conversation_is_known_by_what_each_call_repeats(
        self, notes: DemandNotes, session: Session, world: World
    ) -> None:
        start = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
        longer = [*start, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
        jobs = [session.get_one(Receipt, world.receipt(session, NOON, 10)).job_id for _ in range(4)]
        session.commit()
        notes.conversation(jobs[0], world.renter, start)
        notes.conversation(jobs[1], world.renter, longer)
        notes.conversation(jobs[2], world.renter, [{"role": "user", "content": "Hello"}])
        notes.conversation(jobs[3], world.owner, start)
        notes.conversation(new_id(), world.renter, start)
        asyncio.run(notes.flush())
        found = {row.job_id: row.conversation for row in session.scalars(select(JobConversation))}
        assert found.keys() == set(jobs)
        assert found[jobs[0]] == found[jobs[1]]
        assert len(set(found.values())) == 3

    def test_what_the_database_does_not_take_is_kept_for_later_within_a_bound(
        self, world: World, session: Session, session_factory: SessionFactory
    ) -> None:
        def away() -> Session:
            raise OSError("the database is away")

        notes = DemandNotes(away, b"secret")  # type: ignore[arg-type]
        job = session.get_one(Receipt, world.receipt(session, NOON, 10)).job_id
        session.commit()
        notes.conversation(job, world.renter, [])
        notes.refused(demand(world), [offer(world)], rules=Rules())
        asyncio.run(notes.flush())
        for _ in range(MAX_CONVERSATIONS + 10):
            notes.conversation(new_id(), world.renter, [])
        notes._session_factory = session_factory
        asyncio.run(notes.flush())
        assert session.scalars(select(JobConversation.job_id)).all() == [job]
        assert session.scalars(select(RefusedMinute.requests)).all() == [1]
