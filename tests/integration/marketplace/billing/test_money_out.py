"""Money out: onboarding, runs, transfers, payouts, and everything that comes back."""

from __future__ import annotations

import threading
from datetime import timedelta
from uuid import UUID

import pytest

import ledger
from marketplace.billing import clawback, disputes, driving, outgoing, owners, payouts
from marketplace.billing.models import OutgoingCall
from marketplace.billing.payments import port
from marketplace.core.database import transaction
from tests.fakes.stripe import FaultKind
from tests.money_world import MoneyWorld

USD = 1_000_000_000


def fund(world: MoneyWorld, cents: int = 1_000_000) -> None:
    """Money of the platform at the processor, as owners' earnings would leave it there."""
    world.standin.top_up(cents)


class TestARun:
    def test_pays_what_is_past_its_hold_less_the_reserve_of_a_new_owner(self, world: MoneyWorld) -> None:
        fund(world)
        account = world.onboard()
        world.earn(100 * USD + 7)
        world.days(13)
        (plan,) = world.run()
        assert (plan.amount_minor, plan.blocked) == (0, "below the minimum: carried over")
        world.days(2)
        (plan,) = world.run()
        assert (plan.amount_minor, plan.due.reserved_nano) == (9_000, 10 * USD)
        # 0.1 of the odd 7 nanos is kept, rounded down: the rest stays payable.
        assert world.owner() == owners.OwnerBalances(0, 7, 10 * USD, 90 * USD, 0)
        world.days(3)
        world.listen()
        (payout,) = world.payouts()
        assert (payout.state, world.owner().transit_nano) == ("paid", 0)
        assert payout.statement["amounts"]["earnings_released"] == "100.000000007"
        assert payout.statement["amounts"]["carried_over"] == "0.000000007"
        assert world.standin.balance(account=account) == (0, 0)
        world.days(30)
        world.run()
        world.days(3)
        world.listen()
        assert [each.amount_minor for each in world.payouts()] == [9_000, 1_000]
        assert world.reconcile().clean

    def test_of_one_week_happens_once_whoever_starts_it(self, world: MoneyWorld) -> None:
        fund(world)
        world.onboard()
        world.earn(100 * USD)
        world.days(15)
        threads = [threading.Thread(target=world.run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(world.payouts()) == 1
        assert len(world.standin.every("transfer")) == 1

    def test_waits_for_an_account_that_may_be_paid(self, world: MoneyWorld) -> None:
        fund(world)
        world.earn(100 * USD)
        world.days(15)
        (plan,) = world.run("a")
        assert plan.blocked == "has no account at the payment processor"
        account = world.onboard()
        world.standin.require(account, "individual.verification.document")
        world.listen()
        (plan,) = world.run("b")
        assert plan.blocked == "the account is restricted"
        world.standin.verify(account)
        world.listen()
        (plan,) = world.run("c")
        assert plan.blocked is None
        assert [each.amount_minor for each in world.payouts()] == [9_000]

    def test_of_an_account_on_stripes_own_schedule_would_not_be_ours(self, world: MoneyWorld) -> None:
        account = world.onboard()
        schedule = world.standin.get(account)["settings"]["payouts"]["schedule"]
        assert schedule["interval"] == "manual"

    def test_stops_when_more_is_owed_than_the_processor_holds(self, world: MoneyWorld) -> None:
        fund(world, 5_000)
        world.onboard()
        world.earn(100 * USD)
        world.days(15)
        with pytest.raises(payouts.PayoutsStopped):
            world.run()
        assert not world.reconcile().totals.covered
        fund(world, 10_000)
        assert world.reconcile().totals.covered
        assert len(world.run()) == 1

    def test_leaves_a_preview_unchanged(self, world: MoneyWorld) -> None:
        fund(world)
        world.onboard()
        world.earn(100 * USD)
        world.days(15)
        with transaction(world.factory) as session:
            before = payouts.preview(session, world.now(), world.settings)
        assert world.owner().pending_nano == 100 * USD
        assert world.run() == before


class TestApproval:
    def test_above_the_limit_takes_two_people(self, world: MoneyWorld) -> None:
        payout_id = self.large(world)
        assert world.standin.every("transfer") == []
        for person in ("anna", "anna"):
            with transaction(world.factory) as session:
                assert payouts.approve(session, payout_id, person, world.now()).state == "awaiting_approval"
        with transaction(world.factory) as session:
            assert payouts.approve(session, payout_id, "bert", world.now()).state == "scheduled"
        world.drive()
        assert len(world.standin.every("transfer")) == 1

    def test_and_cancelling_leave_one_winner(self, world: MoneyWorld) -> None:
        payout_id = self.large(world)
        with transaction(world.factory) as session:
            payouts.approve(session, payout_id, "anna", world.now())
            payouts.approve(session, payout_id, "bert", world.now())
        barrier = threading.Barrier(2)
        outcomes: list[str] = []

        def cancel() -> None:
            barrier.wait()
            try:
                with transaction(world.factory) as session:
                    payouts.cancel(session, payout_id, "carl", world.now())
                outcomes.append("cancelled")
            except payouts.PayoutConflict:
                outcomes.append("too late")

        def trigger() -> None:
            barrier.wait()
            world.drive()

        threads = [threading.Thread(target=cancel), threading.Thread(target=trigger)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent = len(world.standin.every("transfer"))
        assert (outcomes, sent) in ((["cancelled"], 0), (["too late"], 1))
        world.days(3)
        world.settle_down()
        assert world.payouts()[0].state == ("paid" if sent else "cancelled")
        assert world.owner().available_nano == (0 if sent else 18_000 * USD)

    def large(self, world: MoneyWorld) -> UUID:
        fund(world, 10_000_000)
        world.onboard()
        world.earn(20_000 * USD)
        world.days(15)
        world.run()
        (payout,) = world.payouts()
        assert payout.state == "awaiting_approval"
        return payout.id


class TestFaults:
    @pytest.mark.parametrize("kind", list(FaultKind))
    @pytest.mark.parametrize("path", ["/v1/transfers", "/v1/payouts"])
    def test_of_any_kind_pay_once(self, world: MoneyWorld, kind: FaultKind, path: str) -> None:
        if kind in (FaultKind.PAUSED, FaultKind.PAUSED_ANSWER):
            pytest.skip("a pause without an end is a lost answer")
        fund(world)
        world.onboard()
        world.earn(100 * USD)
        world.days(15)
        world.standin.faults.add(kind, path, delay_s=0.01)
        world.run()
        for _ in range(10):
            world.standin.clock.advance(hours=7)
            world.settle_down()
        state, owed = world.payouts()[0].state, world.owner()
        declined = kind is FaultKind.DECLINED_BALANCE
        assert state == ("returned" if declined else "paid")
        assert owed.available_nano + owed.transit_nano == (90 * USD if declined else 0)
        assert sum(each["amount"] - each["amount_reversed"] for each in world.standin.every("transfer")) == (
            0 if declined else 9_000
        )
        assert world.reconcile().clean

    def test_429_and_the_retry_with_the_same_key_pay_and_debit_once(self, world: MoneyWorld) -> None:
        fund(world)
        world.onboard()
        world.earn(100 * USD)
        world.days(15)
        world.standin.faults.add(FaultKind.RATE_LIMITED, "/v1/transfers", times=3)
        world.run()
        (payout,) = world.payouts()
        assert (payout.state, world.owner().transit_nano) == ("scheduled", 90 * USD)
        for _ in range(5):
            world.standin.clock.advance(hours=1)
            world.drive()
        assert len(world.standin.every("transfer")) == 1
        assert world.journals("payout_started") == world.journals("payout_transferred") == 1

    def test_429_then_cancelled_credits_the_owner_and_is_never_sent(self, world: MoneyWorld) -> None:
        fund(world)
        world.onboard()
        world.earn(100 * USD)
        world.days(15)
        world.standin.faults.add(FaultKind.RATE_LIMITED, "/v1/transfers")
        world.run()
        (payout,) = world.payouts()
        with transaction(world.factory) as session:
            payouts.cancel(session, payout.id, "anna", world.now())
        world.standin.clock.advance(hours=1)
        world.drive()
        assert (world.standin.every("transfer"), world.owner().available_nano) == ([], 90 * USD)

    def test_a_lost_answer_blocks_the_owner_until_a_look_up(self, world: MoneyWorld) -> None:
        fund(world)
        world.onboard()
        world.earn(100 * USD)
        world.days(15)
        world.standin.faults.add(FaultKind.LOST, "/v1/transfers")
        world.run()
        world.earn(100 * USD)
        (plan,) = world.run("another")
        assert plan.blocked == "an earlier call's outcome is unknown"
        # Stripe forgets keys after a day; the look-up finds the transfer all the same.
        world.days(3)
        world.drive()
        assert len(world.standin.every("transfer")) == 1
        with world.factory() as session:
            assert not outgoing.in_doubt(session, world.market.node.owner_organisation_id)

    def test_an_intent_keeps_its_key_also_after_a_day(self, world: MoneyWorld) -> None:
        fund(world)
        world.onboard()
        world.earn(100 * USD)
        world.days(15)
        world.standin.faults.add(FaultKind.ERROR_BEFORE, "/v1/transfers")
        world.run()
        world.standin.clock.advance(hours=2)
        world.drive()
        assert world.standin.every("transfer") == []
        world.days(2)
        world.drive()
        (transfer,) = world.standin.every("transfer")
        with world.factory() as session:
            call = outgoing.of_subject(session, port.TransferWish, world.payouts()[0].id)
            assert call is not None
            assert (call.number, call.state, call.attempts) == (1, "done", 3)
            assert session.query(OutgoingCall).filter_by(kind="TransferWish").count() == 1
        event = world.standin.events("transfer.created")[0]
        assert event["request"]["idempotency_key"] == call.idempotency_key
        assert transfer["metadata"]["fallow_reference"] == call.subject_id.hex


class TestComingBack:
    def test_paid_then_failed_gives_the_payable_back_and_shows_both(self, world: MoneyWorld) -> None:
        account = self.paid(world)
        (payout,) = world.payouts()
        assert payout.payout_id is not None
        world.standin.fail_payout(payout.payout_id)
        world.settle_down()
        (payout,) = world.payouts()
        assert (payout.state, payout.arrived, payout.failure) == ("returned", True, "account_closed")
        assert world.owner().available_nano == 90 * USD
        assert world.standin.balance(account=account) == (0, 0)
        assert (
            world.journals("payout_paid") == world.journals("payout_failed") == world.journals("payout_returned") == 1
        )
        assert world.reconcile().clean
        world.standin.add_bank(account)
        world.listen()
        (plan,) = world.run("again")
        assert plan.amount_minor == 9_000

    def test_a_negative_account_is_asked_again_each_day(self, world: MoneyWorld) -> None:
        account = self.paid(world)
        (payout,) = world.payouts()
        assert payout.payout_id is not None
        world.standin.adjust(-5_000, account=account)
        world.standin.fail_payout(payout.payout_id)
        world.settle_down()
        assert world.payouts()[0].state == "returning"
        assert {each.kind for each in world.reconcile().breaks} == {"connected_total", "line_unmatched"}
        world.standin.adjust(5_000, account=account)
        world.days(2)
        world.settle_down()
        assert (world.payouts()[0].state, world.owner().available_nano) == ("returned", 90 * USD)

    def test_failed_told_before_paid_ends_the_same(self, world: MoneyWorld) -> None:
        fund(world)
        world.onboard()
        world.earn(100 * USD)
        world.days(15)
        world.run()
        (payout,) = world.payouts()
        assert payout.payout_id is not None
        world.days(3)
        world.standin.fail_payout(payout.payout_id)
        world.listen(order="reversed", copies=2)
        world.settle_down()
        assert (world.payouts()[0].state, world.owner().available_nano) == ("returned", 90 * USD)

    def test_a_refused_payout_takes_its_transfer_back(self, world: MoneyWorld) -> None:
        fund(world)
        account = world.onboard()
        world.earn(100 * USD)
        world.days(15)
        world.standin.require(account, "individual.verification.document")
        # We were not told yet: the transfer is refused, and the owner's money stays payable.
        world.run()
        assert (world.payouts()[0].state, world.owner().available_nano) == ("returned", 90 * USD)

    def paid(self, world: MoneyWorld) -> str:
        fund(world)
        account = world.onboard()
        world.earn(100 * USD)
        world.days(15)
        world.run()
        world.days(3)
        world.listen()
        assert world.payouts()[0].state == "paid"
        return account


class TestClawback:
    def test_of_a_lost_dispute_takes_what_the_credit_was_spent_on(self, world: MoneyWorld) -> None:
        payment = world.top_up(500)
        assert payment.payment_id is not None
        charged = world.spend(jobs=3)
        earned = world.owner().pending_nano
        fees = world.balance(ledger.FEES)
        dispute = world.standin.dispute(payment.payment_id)
        world.standin.close_dispute(dispute["id"], won=False)
        world.listen()
        assert (world.credit_nano(), world.owner().pending_nano, world.balance(ledger.FEES)) == (0, 0, 0)
        assert earned + fees == charged
        assert world.balance(ledger.BAD_DEBT) == 0
        assert world.spend() == 0
        with transaction(world.factory) as session:
            disputes.accept(session, dispute["id"], world.now())
        world.top_up(500)
        assert world.spend() > 0

    def test_after_a_payout_is_a_debt_that_earnings_pay_off(self, world: MoneyWorld) -> None:
        fund(world)
        world.onboard()
        world.top_up(10_000)
        world.spend()
        earned = world.owner().pending_nano
        world.earn(100 * USD - earned)
        world.days(15)
        world.run()
        world.days(31)
        world.run("reserve")
        world.days(3)
        world.listen()
        before = world.owner()
        assert before.pending_nano + before.available_nano + before.reserve_nano < 10_000_000
        with transaction(world.factory) as session:
            receipt = session.execute(ledger_text("select id, charge_nano from receipts")).one()
            clawback.refund_usage(session, receipt.id, None, "a wrong answer", key="r1", by="anna")
        after = world.owner()
        taken = before.available_nano + before.pending_nano + before.reserve_nano
        assert after == owners.OwnerBalances(0, 0, 0, 0, max(0, earned - taken))
        world.earn(50 * USD)
        world.days(15)
        (plan,) = world.run("netting")
        assert plan.due.netted_nano == after.receivable_nano
        assert world.owner().receivable_nano == 0

    def test_written_off_with_a_reason(self, world: MoneyWorld) -> None:
        owner = world.market.node.owner_organisation_id
        with transaction(world.factory) as session:
            loss = ledger.open_accounts(session, [ledger.charted(ledger.LOSS)])[ledger.LOSS]
            lines = (ledger.credit(loss, 5 * USD), *owners.taken_from(session, owner, 5 * USD))
            ledger.post(session, ledger.JournalDraft("debt", "refund_usage", "tests", "debt", lines))
        with transaction(world.factory) as session, pytest.raises(owners.InvalidWriteOff):
            owners.write_off(session, owner, 5 * USD, " ", key="w", by="anna")
        for _ in range(2):
            with transaction(world.factory) as session:
                owners.write_off(session, owner, 5 * USD, "the owner is gone", key="w", by="anna")
        assert (world.owner().receivable_nano, world.balance(ledger.BAD_DEBT)) == (0, 5 * USD)

    def test_of_usage_in_steps_follows_the_totals(self, world: MoneyWorld) -> None:
        world.top_up(500)
        charged = world.spend()
        fee = world.balance(ledger.FEES)
        for step, nano in enumerate((charged // 3, charged // 5, None)):
            with transaction(world.factory) as session:
                receipt = session.execute(ledger_text("select id from receipts")).one()
                clawback.refund_usage(session, receipt.id, nano, "a wrong answer", key=f"s{step}", by="anna")
            left = charged * USD
            assert left > 0
        assert fee > 0
        assert (world.credit_nano(), world.balance(ledger.FEES), world.owner().pending_nano) == (5 * USD, 0, 0)


class TestCalls:
    def test_due_at_once_are_driven_by_one_worker_each(self, world: MoneyWorld) -> None:
        payment_ids = [world.checkout(1_000).id for _ in range(2)]
        with world.factory() as session:
            calls = [outgoing.of_subject(session, port.CheckoutWish, each) for each in payment_ids]
        assert all(call is not None and call.state == "done" for call in calls)
        for call in calls:
            assert call is not None
            assert driving.drive(world.factory, world.payments, call.id, world.now()) == "waits"

    def test_that_fail_are_tried_ever_later(self) -> None:
        from datetime import UTC, datetime

        now = datetime(2026, 1, 1, tzinfo=UTC)
        waits = [outgoing.retry_at(now, attempts) - now for attempts in (1, 2, 3, 50)]
        assert waits == [timedelta(minutes=1), timedelta(minutes=2), timedelta(minutes=4), timedelta(hours=6)]


def ledger_text(query: str):  # type: ignore[no-untyped-def]
    from sqlalchemy import text

    return text(query)
