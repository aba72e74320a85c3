from __future__ import annotations

from datetime import timedelta

from sqlalchemy.orm import Session

from marketplace.billing import service as billing
from marketplace.core.clock import utcnow
from marketplace.core.ids import new_id
from marketplace.finance import service
from marketplace.finance.bill import RenterBill
from marketplace.jobs.models import Outcome
from tests.integration.finance.conftest import World

HOUR = timedelta(hours=1)


def of(session: Session, world: World) -> RenterBill:
    session.flush()
    return service.renter_bill(session, world.renter, utcnow() - HOUR, utcnow() + HOUR)


class TestBill:
    def test_the_three_levers_stand_apart_and_cached_input_has_its_own(self, session: Session, world: World) -> None:
        world.receipt(session, utcnow(), 1_000, tokens=(60, 40, 20, 0))
        world.receipt(session, utcnow(), 400, tokens=(10, 0, 30, 0))
        bill = of(session, world)
        assert [(line.lever, line.tokens, line.rate_usd, line.amount_nano) for line in bill.lines] == [
            ("input", 70, "0.10", 0),
            ("input, cached", 40, "0.025", 250),
            ("output", 50, "0.40", 1_150),
        ]
        assert (bill.requests, bill.total_nano) == (2, 1_400)
        assert sum(line.amount_nano for line in bill.lines) == bill.total_nano

    def test_reasoning_is_part_of_output_and_shown_apart_where_there_was_any(
        self, session: Session, world: World
    ) -> None:
        world.receipt(session, utcnow(), 1_000, tokens=(60, 0, 20, 15))
        bill = of(session, world)
        assert [(line.lever, line.tokens) for line in bill.lines][2:] == [("output", 20), ("output, reasoning", 15)]
        assert bill.tokens.output == 35

    def test_credit_reconciles_with_what_was_charged(self, session: Session, world: World) -> None:
        world.receipt(session, utcnow(), 1_000)
        billing.settle(session, 100)
        bill = of(session, world)
        assert (bill.opening_nano, bill.added_nano, bill.settled_nano) == (0, 10_000_000_000, 1_000)
        assert bill.closing_nano == 10_000_000_000 - 1_000

    def test_our_own_failures_are_not_charged_and_every_outcome_is_counted(
        self, session: Session, world: World
    ) -> None:
        world.receipt(session, utcnow(), 700, lost=True)
        world.receipt(session, utcnow(), 100, outcome="cancelled")
        session.add(
            Outcome(request_id="r", organisation_id=world.renter, endpoint="chat", outcome="no_capacity", at=utcnow())
        )
        bill = of(session, world)
        assert (bill.total_nano, bill.waived_jobs, bill.waived_nano) == (100, 1, 700)
        assert bill.outcomes == {"cancelled": 1, "no_capacity": 1, "platform_failed": 1}

    def test_the_newest_receipt_of_an_outcome_can_be_found(self, session: Session, world: World) -> None:
        world.receipt(session, utcnow() - HOUR / 2, 100, outcome="cancelled")
        newest = world.receipt(session, utcnow(), 100, outcome="cancelled")
        world.receipt(session, utcnow(), 100)
        found = service.last_receipt(session, world.renter, outcome="cancelled")
        assert found is not None
        assert found.id == newest
        assert service.last_receipt(session, new_id()) is None


class TestBooks:
    def test_the_trial_balance_is_zero_and_the_checks_find_nothing(self, session: Session, world: World) -> None:
        world.receipt(session, utcnow(), 1_000)
        world.receipt(session, utcnow(), 700, lost=True)
        billing.settle(session, 100)
        trial = service.trial_balance(session)
        assert (trial.sum_nano, service.check(session)) == (0, [])
        balances = {row.code.split(":")[-1]: row.balance_nano for row in trial.rows}
        # Where paid-in money lies is billing's to say.
        assert balances.pop("bank", 0) + balances.pop("clearing", 0) == 10_000_000_000
        assert balances == {
            "credit": 9_999_999_000,
            "fees": 200,
            "loss": 700,
            "pending": 1_500,
        }
