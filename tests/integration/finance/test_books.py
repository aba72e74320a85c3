"""Every state of an owner's money, and every line that moves it, from the ledger's own journals."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.orm import Session

import ledger
from marketplace.billing import service as billing
from marketplace.core.clock import utcnow
from marketplace.finance import service
from marketplace.finance.statement import AccountMovement, State
from tests.integration.finance.conftest import World

HOUR = timedelta(hours=1)


def move(session: Session, world: World, kind: str, amounts: dict[str, int]) -> int:
    """A journal of this kind: last part of an account's code, or a whole code -> debit in nanos."""
    codes = {name if ":" in name else f"owner:{world.owner.hex}:{name}": nano for name, nano in amounts.items()}
    accounts = ledger.open_accounts(session, [ledger.charted(code) for code in codes])
    lines = tuple(ledger.Line(accounts[code], ledger.Money(nano)) for code, nano in codes.items())
    key = f"{kind}:{utcnow().isoformat()}"
    return ledger.post(session, ledger.JournalDraft(key, kind, "test", key, lines)).journal_id


def account(session: Session, world: World) -> AccountMovement:
    return service.yield_statement(session, world.owner, utcnow() - HOUR, utcnow() + HOUR).account


def closing(movement: AccountMovement) -> dict[State, int]:
    return {row.state: row.closing_nano for row in movement.states if row.closing_nano}


class TestStates:
    def test_states_that_nothing_reached_are_zero(self, session: Session, world: World) -> None:
        movement = account(session, world)
        assert [row.state for row in movement.states] == list(State)
        assert closing(movement) == {}
        assert [line.name for line in movement.lines] == [
            "earnings settled",
            "refunds",
            "disputes",
            "reserve",
            "payouts",
        ]

    def test_money_walks_from_pending_to_paid_and_is_in_one_state_at_a_time(
        self, session: Session, world: World
    ) -> None:
        world.receipt(session, utcnow(), 1_000)
        billing.settle(session, 100)
        assert closing(account(session, world)) == {State.PENDING: 800}
        move(session, world, "earnings_released", {"pending": 800, "available": -700, "reserve": -100})
        assert closing(account(session, world)) == {State.AVAILABLE: 700, State.RESERVED: 100}
        move(session, world, "payout_started", {"available": 500, "transit": -500})
        assert closing(account(session, world)) == {State.AVAILABLE: 200, State.RESERVED: 100, State.IN_TRANSIT: 500}
        move(session, world, "payout_arrived", {"transit": 500, ledger.CLEARING: -500})
        movement = account(session, world)
        assert closing(movement) == {State.AVAILABLE: 200, State.RESERVED: 100, State.PAID: 500}
        assert (movement.closing_nano, movement.other_nano) == (300, -500)

    def test_a_payout_that_failed_after_it_had_arrived_shows_both(self, session: Session, world: World) -> None:
        world.receipt(session, utcnow(), 1_000)
        billing.settle(session, 100)
        move(session, world, "payout_arrived", {"pending": 500, ledger.CLEARING: -500})
        move(session, world, "payout_failed", {ledger.CLEARING: 500, "available": -500})
        movement = account(session, world)
        assert closing(movement) == {State.PENDING: 300, State.AVAILABLE: 500}
        assert [(line.kind, line.nano) for line in movement.lines if line.name == "payouts"] == [
            ("payout_arrived", -500),
            ("payout_failed", 500),
        ]

    def test_what_an_owner_owes_counts_against_the_rest(self, session: Session, world: World) -> None:
        world.receipt(session, utcnow(), 1_000)
        billing.settle(session, 100)
        move(session, world, "dispute_lost", {"receivable": 150, ledger.CLEARING: -150})
        movement = account(session, world)
        assert (movement.closing_nano, movement.opening_nano) == (650, 0)
        assert closing(movement) == {State.PENDING: 800, State.OWED: 150}
        assert [line.nano for line in movement.lines if line.name == "disputes"] == [-150]


class TestLines:
    def test_opening_and_lines_are_closing(self, session: Session, world: World) -> None:
        world.receipt(session, utcnow(), 1_000)
        billing.settle(session, 100)
        move(session, world, "refund_settled", {"pending": 30, ledger.CLEARING: -30})
        reversed_ = move(session, world, "goodwill", {ledger.LOSS: 20, "pending": -20})
        ledger.reverse(session, reversed_, idempotency_key="back", source="test", outside_id="back")
        movement = account(session, world)
        assert movement.opening_nano + sum(line.nano for line in movement.lines) == movement.closing_nano == 770
        statement = service.yield_statement(session, world.owner, utcnow() - HOUR, utcnow() + HOUR)
        assert statement.problems == []
