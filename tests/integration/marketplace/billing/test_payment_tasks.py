"""What the clock does with payments: sends, applies, tops up, pays weekly, reconciles daily."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ledger
from marketplace.billing import owners, payouts, reconciliation, tasks, topups
from marketplace.billing.models import OwnerAccount, Payment
from marketplace.billing.payments.factory import make_payments
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from tests.market import Market, make_market

USD = 1_000_000_000


@pytest.fixture
def market(settings: Settings, session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Market]:
    """A worker's process on the test's database, in the sandbox, without holds and on any day."""
    values = {"payout_hold_days": 0, "payout_hold_days_new": 0, "payout_weekday": 0}
    eased = Settings(_env_file=None, **{**settings.model_dump(), **values})  # type: ignore[call-arg]
    monkeypatch.setattr(tasks, "get_settings", lambda: eased)
    monkeypatch.setattr(tasks, "session_factory", lambda: session_factory)
    tasks._payments.cache_clear()
    with transaction(session_factory) as session:
        made = make_market(session, credit_nano=0)
    yield made
    tasks._payments.cache_clear()
    with session_factory() as session:
        assert ledger.check(session) == []


class TestTheClock:
    def test_sends_what_was_written_down(
        self, market: Market, settings: Settings, session_factory: SessionFactory
    ) -> None:
        self.saved_card(market, settings, session_factory)
        with session_factory() as session:
            states = [each.state for each in session.query(Payment)]
        assert states == ["succeeded"]
        assert tasks.drive_payments() == 0

    def test_tops_up_below_the_threshold(
        self, market: Market, settings: Settings, session_factory: SessionFactory
    ) -> None:
        self.saved_card(market, settings, session_factory)
        with transaction(session_factory) as session:
            topups.set_plan(
                session,
                market.renter.organisation_id,
                enabled=True,
                threshold_nano=20 * USD,
                amount_minor=1_000,
                monthly_cap_minor=5_000,
                low_balance_nano=0,
                settings=settings,
            )
        assert tasks.top_up_automatically() == 1
        assert tasks.top_up_automatically() == 0
        tasks.drive_payments()
        assert tasks.top_up_automatically() == 0
        with session_factory() as session:
            assert ledger.available(session, market.renter.credit_account_id).posted_nano == 20 * USD

    def test_pays_once_a_week_and_reconciles_once_a_day(
        self, market: Market, settings: Settings, session_factory: SessionFactory
    ) -> None:
        self.saved_card(market, settings, session_factory, cents=50_000)
        owner = market.node.owner_organisation_id
        payments = make_payments(settings, session_factory)
        with transaction(session_factory) as session:
            owners.grant_bonus(session, owner, 100 * USD, "a gift", key="gift", by="tests")
            session.add(OwnerAccount(organisation_id=owner, account_id="sandbox_account", state="active"))
            session.flush()
            session.get_one(OwnerAccount, owner).payouts_enabled = True
        assert tasks.pay_out() == 1
        assert tasks.pay_out() == 0
        tasks.drive_payments()
        with session_factory() as session:
            assert [each.state for each in payouts.status(session)] == ["paid"]
        assert payments.funds("sandbox_account").total == 0
        assert (tasks.reconcile(), tasks.reconcile()) == (0, 0)
        with session_factory() as session:
            newest = reconciliation.newest(session)
            assert newest is not None
            assert newest.covered

    def test_does_not_pay_what_nobody_holds(self, market: Market, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            owner = market.node.owner_organisation_id
            owners.grant_bonus(session, owner, 100 * USD, "a gift", key="gift", by="tests")
        assert tasks.pay_out() == 0
        with session_factory() as session:
            assert payouts.status(session) == []

    def saved_card(
        self, market: Market, settings: Settings, session_factory: SessionFactory, *, cents: int = 1_000
    ) -> None:
        with transaction(session_factory) as session:
            topups.start_checkout(
                session, market.renter.organisation_id, cents, save_card=True, now=utcnow(), settings=settings
            )
        assert tasks.drive_payments() == 1
