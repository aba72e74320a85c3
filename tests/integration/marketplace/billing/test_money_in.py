"""Money in through Checkout, saved cards and automatic top-ups."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta

import pytest

import ledger
from marketplace.billing import inbox, refunds, service, topups
from marketplace.billing.models import InboxEvent
from marketplace.core.database import transaction
from tests.money_world import MoneyWorld

USD = 1_000_000_000


class TestOnePayment:
    @pytest.mark.parametrize("copies", [1, 2, 50])
    def test_told_by_two_events_each_delivered_often_is_one_credit(self, world: MoneyWorld, copies: int) -> None:
        payment = world.checkout(2_500)
        assert payment.session_id is not None
        world.standin.pay(payment.session_id)
        world.listen(order="shuffled", copies=copies, at_once=copies > 2)
        paid = world.payment(payment.id)
        assert (paid.state, world.credit_nano(), world.journals("top_up")) == ("succeeded", 25 * USD, 1)
        assert paid.receipt_url is not None

    def test_applied_by_several_workers_at_once_is_one_credit(self, world: MoneyWorld) -> None:
        payment = world.checkout(2_500)
        assert payment.session_id is not None
        world.standin.pay(payment.session_id)
        world.standin.deliver()
        threads = [
            threading.Thread(target=inbox.process_due, args=(world.factory, world.payments, world.now()))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (world.credit_nano(), world.journals("top_up")) == (25 * USD, 1)

    def test_whose_event_outruns_our_commit_is_applied_later_and_not_dropped(self, world: MoneyWorld) -> None:
        # The intent was committed, the answer to the call was not: the event finds our row by its reference.
        with transaction(world.factory) as session:
            renter = world.market.renter.organisation_id
            payment = topups.start_checkout(
                session, renter, 2_500, save_card=False, now=world.now(), settings=world.settings
            )
            wish_id = payment.id
            stripe_session = world.standin.client().v1.checkout.sessions.create(
                {
                    "mode": "payment",
                    "line_items": [
                        {
                            "quantity": 1,
                            "price_data": {"currency": "usd", "unit_amount": 2_500, "product_data": {"name": "x"}},
                        }
                    ],
                    "success_url": "http://localhost/",
                    "metadata": {"fallow_reference": payment.id.hex},
                    "payment_intent_data": {"metadata": {"fallow_reference": payment.id.hex}},
                }
            )
            world.standin.pay(stripe_session.id)
            world.listen()
            with world.factory() as other:
                states = {event.state for event in inbox.read_events(other) if event.kind is not None}
            assert states == {"waiting"}
        world.standin.clock.advance(120)
        world.listen()
        assert (world.payment(wish_id).state, world.credit_nano()) == ("succeeded", 25 * USD)

    def test_whose_events_are_all_lost_is_credited_by_the_reconciliation(self, world: MoneyWorld) -> None:
        payment = world.checkout(2_500)
        assert payment.session_id is not None
        world.standin.pay(payment.session_id)
        world.standin.drop("*")
        world.standin.clock.advance(hours=2)
        report = world.reconcile()
        assert world.credit_nano() == 25 * USD
        assert [each.story for each in report.breaks] == []

    def test_that_nobody_makes_expires(self, world: MoneyWorld) -> None:
        payment = world.checkout(2_500)
        world.days(2)
        world.listen()
        assert (world.payment(payment.id).state, world.credit_nano()) == ("expired", 0)


class TestSavedCards:
    def test_a_card_saved_once_tops_up_by_itself_up_to_the_months_cap(self, world: MoneyWorld) -> None:
        renter = world.market.renter.organisation_id
        world.top_up(500, save_card=True)
        self.plan(world, threshold_nano=100 * USD, amount_minor=2_000, cap=4_000)
        for _ in range(4):
            self.tick(world)
        assert world.credit_nano(renter) == 45 * USD
        with world.factory() as session:
            from marketplace.billing.notices import read

            assert {notice.kind for notice in read(session, renter)} == {"cap_reached", "low_balance"}

    def test_a_declined_card_stops_the_plan_and_says_so(self, world: MoneyWorld) -> None:
        renter = world.market.renter.organisation_id
        world.top_up(500, save_card=True)
        with world.factory() as session:
            plan = topups.find_plan(session, renter)
            assert plan is not None
            assert plan.payment_method is not None
        world.standin.change_card(plan.payment_method, "pm_card_chargeCustomerFail")
        self.plan(world, threshold_nano=100 * USD, amount_minor=2_000, cap=4_000)
        self.tick(world)
        world.listen()
        with world.factory() as session:
            stopped = topups.find_plan(session, renter)
            assert stopped is not None
            assert (stopped.enabled, stopped.stopped_because) == (False, "generic_decline: Your card was declined.")
        assert world.credit_nano() == 5 * USD

    def plan(self, world: MoneyWorld, *, threshold_nano: int, amount_minor: int, cap: int) -> None:
        with transaction(world.factory) as session:
            topups.set_plan(
                session,
                world.market.renter.organisation_id,
                enabled=True,
                threshold_nano=threshold_nano,
                amount_minor=amount_minor,
                monthly_cap_minor=cap,
                low_balance_nano=50 * USD,
                settings=world.settings,
            )

    def tick(self, world: MoneyWorld) -> None:
        with world.factory() as session:
            low = topups.low_on_credit(session)
        for organisation_id, available_nano in low:
            with transaction(world.factory) as session:
                topups.act_on_plan(session, organisation_id, available_nano, now=world.now(), settings=world.settings)
        world.drive()


class TestRefunds:
    def test_partial_ones_add_up_and_leave_what_was_spent(self, world: MoneyWorld) -> None:
        payment = world.top_up(10_000)
        self.ask(world, 3_000, "a")
        self.ask(world, 2_000, "b")
        assert (world.payment(payment.id).refunded_minor, world.credit_nano()) == (5_000, 50 * USD)
        assert sum(refund["amount"] for refund in world.standin.every("refund")) == 5_000
        world.spend()
        self.ask(world, None, "rest")
        assert 0 <= world.credit_nano() < USD // 100
        with pytest.raises(refunds.NotRefundable):
            self.ask(world, 1, "more")

    def test_the_same_key_gives_back_once(self, world: MoneyWorld) -> None:
        world.top_up(10_000)
        for _ in range(3):
            self.ask(world, 4_000, "a")
        assert len(world.standin.every("refund")) == 1
        assert world.credit_nano() == 60 * USD

    def test_promotional_credit_is_spent_first_and_never_given_back(self, world: MoneyWorld) -> None:
        renter = world.market.renter.organisation_id
        world.top_up(1_000)
        with transaction(world.factory) as session:
            service.grant_promotion(session, renter, 20_000, "welcome", "a welcome")
        charged = world.spend()
        assert charged > 20_000
        assert world.credit_nano() == 10 * USD - (charged - 20_000)
        with transaction(world.factory) as session:
            service.grant_promotion(session, renter, 5 * USD, "again", "once more")
        with world.factory() as session:
            credit = service.balance(session, renter)
        assert credit.available_nano == credit.posted_nano + 5 * USD
        with pytest.raises(refunds.NotRefundable):
            self.ask(world, 1_001, "a")
        self.ask(world, 999, "b")
        with world.factory() as session:
            assert service.balance(session, renter).promotional_nano == 5 * USD

    def test_one_that_the_bank_sends_back_is_credit_again(self, world: MoneyWorld) -> None:
        world.top_up(1_000, card="pm_card_refundFail")
        self.ask(world, 1_000, "a")
        world.listen()
        assert world.credit_nano() == 10 * USD
        world.standin.clock.advance(hours=2)
        assert world.reconcile().clean

    def ask(self, world: MoneyWorld, cents: int | None, key: str) -> None:
        with transaction(world.factory) as session:
            refunds.request_refund(session, world.market.renter.organisation_id, cents, key, world.now())
        world.drive()


class TestDisputes:
    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    @pytest.mark.parametrize("won", [True, False])
    def test_three_events_in_any_order_are_one_dispute(
        self, world: MoneyWorld, order: tuple[int, ...], won: bool
    ) -> None:
        payment = world.top_up(1_000)
        assert payment.payment_id is not None
        dispute = world.standin.dispute(payment.payment_id)
        events = [each for each in world.standin.events() if each["type"] == "charge.dispute.created"]
        world.standin.close_dispute(dispute["id"], won=won)
        kinds = ("charge.dispute.updated", "charge.dispute.closed")
        events += [each for kind in kinds for each in world.standin.events(kind)]
        world.standin.drop("*")
        for number in order:
            world.standin.redeliver(events[number]["id"])
            inbox.process_due(world.factory, world.payments, world.now())
        assert (world.journals("dispute_opened"), world.journals("dispute_won"), world.journals("dispute_lost")) == (
            1,
            int(won),
            int(not won),
        )
        assert world.credit_nano() == (10 * USD if won else 0)
        assert world.balance(ledger.renter_disputed(world.market.renter.organisation_id.hex)) == 0

    def test_an_open_one_freezes_the_balance_and_a_won_one_thaws_it(self, world: MoneyWorld) -> None:
        payment = world.top_up(1_000)
        assert payment.payment_id is not None
        dispute = world.standin.dispute(payment.payment_id)
        world.listen()
        assert world.spend() == 0
        world.standin.close_dispute(dispute["id"], won=True)
        world.listen()
        assert world.spend() > 0

    def test_an_inquiry_freezes_nothing_until_it_escalates(self, world: MoneyWorld) -> None:
        payment = world.top_up(1_000)
        assert payment.payment_id is not None
        inquiry = world.standin.dispute(payment.payment_id, inquiry=True)
        world.listen()
        assert world.spend() > 0
        world.standin.escalate(inquiry["id"])
        world.listen()
        assert world.spend() == 0
        assert world.journals("dispute_opened") == 1


class TestWebhooks:
    def test_forged_old_and_foreign_ones_are_refused_and_not_kept(self, world: MoneyWorld) -> None:
        platform, connect = world.endpoints["platform"], world.endpoints["connect"]
        event = world.standin.events()[0] if world.standin.events() else None
        world.checkout(1_000)
        world.top_up(1_000)
        event = event or world.standin.events()[0]
        with world.factory() as session:
            before = len(inbox.read_events(session))
        assert world.standin.forge(platform, event) == 400
        assert world.standin.forge(platform, event, secret=platform.secret, age_s=3_600) == 400
        assert world.standin.tamper(platform, event["id"], amount=1) == 400
        assert world.standin.forge(connect, event, secret=connect.secret) == 400
        live = {**event, "id": "evt_live", "livemode": True}
        assert world.standin.forge(platform, live, secret=platform.secret) == 400
        with world.factory() as session:
            assert len(inbox.read_events(session)) == before

    def test_the_raw_body_is_kept_and_can_be_replayed(self, world: MoneyWorld) -> None:
        world.top_up(1_000)
        with transaction(world.factory) as session:
            event = next(each for each in inbox.read_events(session) if each.state == "applied")
            assert event.body.startswith(b"{")
            inbox.replay(session, event.id, world.now())
        inbox.process_due(world.factory, world.payments, world.now())
        with world.factory() as session:
            assert session.get_one(InboxEvent, event.id).state == "applied"
        assert world.credit_nano() == 10 * USD

    def test_what_never_fits_is_quarantined(self, world: MoneyWorld) -> None:
        world.standin.client().v1.payment_intents.create(
            {
                "amount": 700,
                "currency": "usd",
                "payment_method": "pm_card_visa",
                "confirm": True,
                "off_session": True,
            }
        )
        for _ in range(14):
            world.listen()
            world.standin.clock.advance(hours=7)
        with world.factory() as session:
            assert {event.type for event in inbox.read_events(session, "quarantined")} >= {"payment_intent.succeeded"}
        report = world.reconcile()
        assert {each.kind for each in report.breaks} == {"line_unmatched", "platform_total", "webhook_quarantined"}
        assert min(each.opened_at for each in report.breaks) <= world.now() + timedelta(seconds=1)
