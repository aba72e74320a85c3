"""Money that goes back to cardholders."""

from __future__ import annotations

from typing import Any

import pytest
import stripe

from tests.fakes.stripe import StandInStripe
from tests.integration.fakes.stripe.conftest import Charging


@pytest.fixture
def paid(charge: Charging, standin: StandInStripe) -> stripe.PaymentIntent:
    """100.00, its money available."""
    standin.top_up(100_000)
    return charge(10_000, card="pm_card_bypassPending")


def types(standin: StandInStripe, start: str) -> list[str]:
    return [event["type"] for event in standin.events() if event["type"].startswith(start)]


class TestRefunds:
    def test_two_partial_ones_add_up(
        self, client: stripe.StripeClient, standin: StandInStripe, paid: stripe.PaymentIntent
    ) -> None:
        before = standin.balance()[0]
        for amount in (3_000, 2_000):
            refund = client.v1.refunds.create({"payment_intent": paid.id, "amount": amount, "metadata": {"n": "1"}})
            assert refund.status == "succeeded"
        charge = client.v1.charges.retrieve(str(paid.latest_charge), {"expand": ["refunds"]})
        assert (charge.amount_refunded, charge.refunded) == (5_000, False)
        assert charge.refunds is not None
        assert len(charge.refunds.data) == 2
        assert standin.balance()[0] == before - 5_000
        assert [each.amount for each in client.v1.refunds.list({"payment_intent": paid.id}).data] == [2_000, 3_000]

    def test_more_than_is_left_is_refused(self, client: stripe.StripeClient, paid: stripe.PaymentIntent) -> None:
        client.v1.refunds.create({"payment_intent": paid.id, "amount": 9_000})
        with pytest.raises(stripe.InvalidRequestError, match="greater than unrefunded"):
            client.v1.refunds.create({"payment_intent": paid.id, "amount": 1_001})
        client.v1.refunds.create({"charge": str(paid.latest_charge)})
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.refunds.create({"payment_intent": paid.id})
        assert caught.value.code == "charge_already_refunded"

    def test_one_without_money_waits_for_it(
        self, client: stripe.StripeClient, standin: StandInStripe, charge: Charging
    ) -> None:
        intent = charge(10_000)
        refund = client.v1.refunds.create({"payment_intent": intent.id})
        assert (refund.status, refund.pending_reason) == ("pending", "insufficient_funds")
        standin.top_up(5_000)
        standin.clock.advance(days=3)
        assert client.v1.refunds.retrieve(refund.id).status == "succeeded"
        assert types(standin, "refund") == ["refund.created", "refund.updated"]

    def test_one_that_fails_later_brings_its_money_back(
        self, client: stripe.StripeClient, standin: StandInStripe, charge: Charging
    ) -> None:
        standin.top_up(100_000)
        intent = charge(10_000, card="pm_card_refundFail")
        before = standin.balance()
        refund = client.v1.refunds.create({"payment_intent": intent.id, "amount": 4_000})
        assert refund.status == "succeeded"
        failed = client.v1.refunds.retrieve(refund.id)
        assert (failed.status, failed.failure_reason) == ("failed", "lost_or_stolen_card")
        assert failed.failure_balance_transaction is not None
        assert standin.balance() == before
        assert client.v1.charges.retrieve(str(intent.latest_charge)).amount_refunded == 0
        assert "refund.failed" in types(standin, "refund")

    def test_one_that_is_processing_completes(
        self, client: stripe.StripeClient, standin: StandInStripe, charge: Charging
    ) -> None:
        standin.top_up(100_000)
        refund = client.v1.refunds.create({"payment_intent": charge(10_000, card="pm_card_pendingRefund").id})
        assert (refund.status, refund.pending_reason) == ("pending", "processing")
        assert standin.complete_refund(refund.id)["status"] == "succeeded"

    def test_what_is_wrong_is_refused(self, client: stripe.StripeClient, paid: stripe.PaymentIntent) -> None:
        open_intent = client.v1.payment_intents.create({"amount": 100, "currency": "usd"})
        wrong: list[tuple[Any, str]] = [
            ({}, "exactly one"),
            ({"payment_intent": open_intent.id}, "does not have a successful charge"),
            ({"payment_intent": "pi_none"}, "No such payment_intent"),
            ({"payment_intent": paid.id, "amount": 0}, "greater than or equal"),
            ({"payment_intent": paid.id, "reason": "mood"}, "Invalid reason"),
        ]
        for params, message in wrong:
            with pytest.raises(stripe.InvalidRequestError, match=message):
                client.v1.refunds.create(params)
        assert client.v1.refunds.list().data == []


class TestDisputes:
    def test_lost(self, client: stripe.StripeClient, standin: StandInStripe, paid: stripe.PaymentIntent) -> None:
        before = standin.balance()[0]
        opened = standin.dispute(paid.id)
        assert opened["status"] == "needs_response"
        assert standin.balance()[0] == before - 10_000 - 1_500
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.refunds.create({"payment_intent": paid.id})
        assert caught.value.code == "charge_disputed"
        standin.close_dispute(opened["id"], won=False)
        assert client.v1.disputes.retrieve(opened["id"]).status == "lost"
        assert standin.balance()[0] == before - 11_500
        assert types(standin, "charge.dispute") == [
            "charge.dispute.created",
            "charge.dispute.funds_withdrawn",
            "charge.dispute.updated",
            "charge.dispute.closed",
        ]

    @pytest.mark.parametrize(("fee_returned", "cost"), [(False, 1_500), (True, 0)])
    def test_won(
        self,
        client: stripe.StripeClient,
        standin: StandInStripe,
        paid: stripe.PaymentIntent,
        fee_returned: bool,
        cost: int,
    ) -> None:
        before = standin.balance()[0]
        opened = standin.dispute(paid.id, amount=6_000)
        standin.close_dispute(opened["id"], won=True, fee_returned=fee_returned)
        dispute = client.v1.disputes.retrieve(opened["id"])
        assert dispute.status == "won"
        assert [line.amount for line in dispute.balance_transactions] == [-6_000, 6_000]
        assert [line.fee for line in dispute.balance_transactions] == [1_500, -1_500 if fee_returned else 0]
        assert standin.balance()[0] == before - cost
        assert types(standin, "charge.dispute")[-1] == "charge.dispute.funds_reinstated"

    @pytest.mark.parametrize(("evidence", "status"), [("winning_evidence", "won"), ("losing_evidence", "lost")])
    def test_contested(
        self,
        client: stripe.StripeClient,
        standin: StandInStripe,
        paid: stripe.PaymentIntent,
        evidence: str,
        status: str,
    ) -> None:
        opened = standin.dispute(paid.id)
        sent = client.v1.disputes.update(opened["id"], {"evidence": {"uncategorized_text": evidence}})
        assert sent.status == "under_review"
        assert client.v1.disputes.retrieve(opened["id"]).status == status

    def test_accepted_or_left_unanswered(
        self, client: stripe.StripeClient, standin: StandInStripe, charge: Charging
    ) -> None:
        standin.top_up(100_000)
        first, second = (standin.dispute(charge(5_000).id) for _ in range(2))
        assert client.v1.disputes.close(first["id"]).status == "lost"
        standin.clock.advance(days=10)
        late = client.v1.disputes.retrieve(second["id"])
        assert (late.status, late.evidence_details.past_due) == ("lost", True)
        assert len(client.v1.disputes.list().data) == 2

    def test_an_inquiry_takes_no_money_until_it_escalates(
        self, client: stripe.StripeClient, standin: StandInStripe, paid: stripe.PaymentIntent
    ) -> None:
        before = standin.balance()[0]
        asked = standin.dispute(paid.id, inquiry=True)
        assert asked["status"] == "warning_needs_response"
        assert standin.balance()[0] == before
        standin.escalate(asked["id"])
        assert standin.balance()[0] == before - 11_500

    def test_a_card_that_disputes_at_once(
        self, client: stripe.StripeClient, standin: StandInStripe, charge: Charging
    ) -> None:
        standin.top_up(100_000)
        intent = charge(5_000, card="pm_card_createDispute")
        [dispute] = client.v1.disputes.list({"payment_intent": intent.id}).data
        assert dispute.amount == 5_000
