"""Customers, cards, payment intents, Checkout: with the official client."""

from __future__ import annotations

from typing import Any

import pytest
import stripe

from tests.fakes.stripe import StandInStripe, StripeError
from tests.integration.fakes.stripe.conftest import Charging


def session_params(**more: Any) -> Any:
    return {
        "mode": "payment",
        "success_url": "http://127.0.0.1/paid?session={CHECKOUT_SESSION_ID}",
        "line_items": [
            {
                "quantity": 2,
                "price_data": {"currency": "usd", "unit_amount": 2_500, "product_data": {"name": "Credit"}},
            }
        ],
        **more,
    }


def types(standin: StandInStripe) -> list[str]:
    return [event["type"] for event in standin.events()]


class TestCustomers:
    def test_made_read_changed_listed_and_deleted(self, client: stripe.StripeClient, customer: stripe.Customer) -> None:
        client.v1.customers.update(customer.id, {"name": "Ada", "metadata": {"organisation": "", "tier": "a"}})
        read = client.v1.customers.retrieve(customer.id)
        assert (read.name, read.email, read.to_dict()["metadata"]) == ("Ada", "ada@example.com", {"tier": "a"})
        assert [each.id for each in client.v1.customers.list({"email": "ada@example.com"}).data] == [customer.id]
        assert client.v1.customers.delete(customer.id).deleted
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.customers.retrieve(customer.id)
        assert (caught.value.code, caught.value.http_status) == ("resource_missing", 404)

    def test_a_default_card_must_be_theirs(
        self, client: stripe.StripeClient, customer: stripe.Customer, saved_card: stripe.PaymentMethod
    ) -> None:
        other = client.v1.customers.create({})
        settings: Any = {"invoice_settings": {"default_payment_method": saved_card.id}}
        updated = client.v1.customers.update(customer.id, settings)
        assert updated.invoice_settings is not None
        assert updated.invoice_settings.default_payment_method == saved_card.id
        with pytest.raises(stripe.InvalidRequestError, match="No such PaymentMethod"):
            client.v1.customers.update(other.id, settings)


class TestPaymentMethods:
    def test_saved_listed_and_detached(
        self, client: stripe.StripeClient, customer: stripe.Customer, saved_card: stripe.PaymentMethod
    ) -> None:
        assert saved_card.card is not None
        assert (saved_card.card.brand, saved_card.card.last4) == ("visa", "4242")
        listed = client.v1.customers.payment_methods.list(customer.id, {"type": "card"})
        assert [each.id for each in listed.data] == [saved_card.id]
        client.v1.payment_methods.detach(saved_card.id)
        assert client.v1.customers.payment_methods.list(customer.id).data == []

    def test_a_card_that_declines_cannot_be_saved(self, client: stripe.StripeClient, customer: stripe.Customer) -> None:
        with pytest.raises(stripe.CardError) as caught:
            client.v1.payment_methods.attach("pm_card_chargeDeclined", {"customer": customer.id})
        assert caught.value.code == "card_declined"

    def test_made_from_a_number(self, client: stripe.StripeClient) -> None:
        method = client.v1.payment_methods.create(
            {"type": "card", "card": {"number": "5555555555554444", "exp_month": 1, "exp_year": 2030, "cvc": "123"}}
        )
        assert method.card is not None
        assert method.card.brand == "mastercard"


class TestPaymentIntents:
    def test_off_session_charge_of_a_saved_card(
        self,
        client: stripe.StripeClient,
        standin: StandInStripe,
        customer: stripe.Customer,
        saved_card: stripe.PaymentMethod,
    ) -> None:
        intent = client.v1.payment_intents.create(
            {
                "amount": 5_000,
                "currency": "usd",
                "customer": customer.id,
                "payment_method": saved_card.id,
                "confirm": True,
                "off_session": True,
                "metadata": {"top_up": "9"},
                "expand": ["latest_charge"],
            }
        )
        assert (intent.status, intent.amount_received) == ("succeeded", 5_000)
        assert isinstance(intent.latest_charge, stripe.Charge)
        assert intent.latest_charge.balance_transaction is None, "capture is asynchronous"
        read = client.v1.payment_intents.retrieve(intent.id, {"expand": ["latest_charge.balance_transaction"]})
        assert isinstance(read.latest_charge, stripe.Charge)
        booked = read.latest_charge.balance_transaction
        assert isinstance(booked, stripe.BalanceTransaction)
        assert (booked.amount, booked.fee, booked.net, booked.status) == (5_000, 175, 4_825, "pending")
        assert types(standin)[2:] == [
            "payment_intent.created",
            "charge.succeeded",
            "payment_intent.succeeded",
            "charge.updated",
        ]
        assert [each.id for each in client.v1.payment_intents.list({"customer": customer.id}).data] == [intent.id]

    @pytest.mark.parametrize(
        ("card", "code", "decline_code"),
        [
            ("pm_card_chargeDeclined", "card_declined", "generic_decline"),
            ("pm_card_chargeDeclinedInsufficientFunds", "card_declined", "insufficient_funds"),
            ("pm_card_chargeDeclinedExpiredCard", "expired_card", "expired_card"),
            ("pm_card_authenticationRequired", "authentication_required", "authentication_required"),
            ("pm_card_authenticationRequiredOnSetup", "authentication_required", "authentication_required"),
        ],
    )
    def test_a_decline_is_a_402_that_carries_the_intent(
        self,
        client: stripe.StripeClient,
        standin: StandInStripe,
        charge: Charging,
        card: str,
        code: str,
        decline_code: str,
    ) -> None:
        with pytest.raises(stripe.CardError) as caught:
            charge(5_000, card=card)
        error = caught.value.error
        assert (caught.value.http_status, caught.value.code, error.decline_code) == (402, code, decline_code)
        intent = client.v1.payment_intents.retrieve(error.payment_intent.id)
        assert intent.status == "requires_payment_method"
        assert intent.last_payment_error is not None
        assert intent.last_payment_error.code == code
        assert types(standin) == ["payment_intent.created", "charge.failed", "payment_intent.payment_failed"]
        assert standin.balance() == (0, 0)

    def test_on_session_the_holder_is_asked(self, client: stripe.StripeClient, standin: StandInStripe) -> None:
        params: Any = {
            "amount": 900,
            "currency": "eur",
            "payment_method": "pm_card_authenticationRequired",
            "confirm": True,
            "return_url": "http://127.0.0.1/back",
        }
        intent = client.v1.payment_intents.create(params)
        assert intent.status == "requires_action"
        assert intent.next_action is not None
        assert intent.next_action.redirect_to_url is not None
        standin.authenticate(intent.id)
        assert client.v1.payment_intents.retrieve(intent.id).status == "succeeded"
        refused = client.v1.payment_intents.create(params)
        standin.authenticate(refused.id, succeeds=False)
        failed = client.v1.payment_intents.retrieve(refused.id)
        assert failed.status == "requires_payment_method"
        assert failed.last_payment_error is not None
        assert failed.last_payment_error.code == "payment_intent_authentication_failure"

    def test_a_card_that_was_set_up_pays_without_its_holder(
        self, client: stripe.StripeClient, customer: stripe.Customer
    ) -> None:
        client.v1.setup_intents.create(
            {"customer": customer.id, "payment_method": "pm_card_authenticationRequiredOnSetup", "confirm": True}
        )
        [method] = client.v1.customers.payment_methods.list(customer.id).data
        intent = client.v1.payment_intents.create(
            {
                "amount": 700,
                "currency": "usd",
                "customer": customer.id,
                "payment_method": method.id,
                "confirm": True,
                "off_session": True,
            }
        )
        assert intent.status == "succeeded"

    def test_a_saved_card_can_go_bad(
        self,
        client: stripe.StripeClient,
        standin: StandInStripe,
        customer: stripe.Customer,
        saved_card: stripe.PaymentMethod,
    ) -> None:
        standin.change_card(saved_card.id, "pm_card_chargeDeclinedExpiredCard")
        with pytest.raises(stripe.CardError, match="expired"):
            client.v1.payment_intents.create(
                {
                    "amount": 700,
                    "currency": "usd",
                    "customer": customer.id,
                    "payment_method": saved_card.id,
                    "confirm": True,
                    "off_session": True,
                }
            )

    def test_nobody_pays_with_anothers_card(
        self, client: stripe.StripeClient, saved_card: stripe.PaymentMethod, charge: Charging
    ) -> None:
        with pytest.raises(stripe.InvalidRequestError, match="must be attached"):
            charge(700, card=saved_card.id)

    def test_confirmed_later_after_another_card(self, client: stripe.StripeClient, standin: StandInStripe) -> None:
        intent = client.v1.payment_intents.create({"amount": 700, "currency": "usd"})
        assert intent.status == "requires_payment_method"
        options: Any = {"return_url": "http://127.0.0.1/back"}
        with pytest.raises(stripe.CardError):
            client.v1.payment_intents.confirm(intent.id, {"payment_method": "pm_card_chargeDeclined", **options})
        confirmed = client.v1.payment_intents.confirm(intent.id, {"payment_method": "pm_card_visa", **options})
        assert confirmed.status == "succeeded"
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.payment_intents.cancel(intent.id)
        assert caught.value.code == "payment_intent_unexpected_state"
        assert types(standin).count("charge.succeeded") == 1

    def test_cancelled_before_it_is_paid(self, client: stripe.StripeClient) -> None:
        intent = client.v1.payment_intents.create({"amount": 700, "currency": "usd", "payment_method": "pm_card_visa"})
        assert intent.status == "requires_confirmation"
        cancelled = client.v1.payment_intents.cancel(intent.id, {"cancellation_reason": "abandoned"})
        assert (cancelled.status, cancelled.cancellation_reason) == ("canceled", "abandoned")

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"amount": 0, "currency": "usd"}, "at least 50"),
            ({"amount": -5, "currency": "usd"}, "greater than or equal"),
            ({"amount": 100, "currency": "xxx"}, "Invalid currency"),
            ({"amount": 100}, "Missing required param: currency"),
            ({"amount": 100, "currency": "usd", "amuont": 1}, "unknown parameter"),
            ({"amount": 100, "currency": "usd", "application_fee_amount": 1}, "does not model"),
            ({"amount": 100, "currency": "usd", "off_session": True}, "only be used when"),
            ({"amount": 100, "currency": "usd", "confirm": True}, "missing a payment method"),
            ({"amount": 100, "currency": "usd", "confirm": True, "payment_method": "pm_card_visa"}, "return_url"),
            ({"amount": 100, "currency": "usd", "customer": "cus_none"}, "No such customer"),
        ],
    )
    def test_what_is_wrong_is_refused_and_leaves_nothing(
        self, client: stripe.StripeClient, standin: StandInStripe, params: Any, message: str
    ) -> None:
        with pytest.raises(stripe.InvalidRequestError, match=message):
            client.v1.payment_intents.create(params)
        assert client.v1.payment_intents.list().data == []
        assert standin.events() == []


class TestBankDebits:
    @pytest.mark.parametrize("succeeds", [True, False])
    def test_they_are_processing_until_the_bank_answers(
        self, client: stripe.StripeClient, standin: StandInStripe, succeeds: bool
    ) -> None:
        session = client.v1.checkout.sessions.create(session_params())
        done = standin.pay(session.id, "pm_usBankAccount")
        assert (done["status"], done["payment_status"]) == ("complete", "unpaid")
        assert standin.balance() == (0, 0)
        intent = client.v1.payment_intents.retrieve(done["payment_intent"])
        assert intent.status == "processing"
        standin.settle_debit(intent.id, succeeds=succeeds)
        outcome = "succeeded" if succeeds else "failed"
        assert types(standin)[-1] == f"checkout.session.async_payment_{outcome}"
        read = client.v1.checkout.sessions.retrieve(session.id)
        assert read.payment_status == ("paid" if succeeds else "unpaid")
        assert standin.balance()[1] == (4_825 if succeeds else 0)


class TestCheckout:
    def test_paid_by_the_customer(
        self, client: stripe.StripeClient, standin: StandInStripe, customer: stripe.Customer
    ) -> None:
        session = client.v1.checkout.sessions.create(
            session_params(
                customer=customer.id,
                client_reference_id="top-up 7",
                metadata={"top_up": "7"},
                payment_intent_data={"setup_future_usage": "off_session", "metadata": {"top_up": "7"}},
            )
        )
        assert (session.status, session.payment_status, session.payment_intent) == ("open", "unpaid", None)
        assert session.url is not None
        assert session.url.startswith(standin.url)
        standin.pay(session.id)
        paid = client.v1.checkout.sessions.retrieve(session.id, {"expand": ["payment_intent", "line_items"]})
        assert (paid.status, paid.payment_status, paid.amount_total) == ("complete", "paid", 5_000)
        assert isinstance(paid.payment_intent, stripe.PaymentIntent)
        assert paid.payment_intent.metadata.to_dict() == {"top_up": "7"}
        assert paid.line_items is not None
        assert paid.line_items.data[0].quantity == 2
        assert len(client.v1.customers.payment_methods.list(customer.id).data) == 1
        assert types(standin)[-2:] == ["checkout.session.completed", "charge.updated"]
        items = client.v1.checkout.sessions.line_items.list(session.id)
        assert items.data[0].amount_total == 5_000

    def test_a_declined_card_leaves_it_open_for_another(
        self, client: stripe.StripeClient, standin: StandInStripe
    ) -> None:
        session = client.v1.checkout.sessions.create(session_params(customer_creation="always"))
        with pytest.raises(StripeError, match="declined"):
            standin.pay(session.id, "pm_card_chargeDeclined", email="bob@example.com")
        assert client.v1.checkout.sessions.retrieve(session.id).status == "open"
        paid = standin.pay(session.id)
        assert client.v1.payment_intents.retrieve(paid["payment_intent"]).amount_received == 5_000
        assert client.v1.customers.retrieve(paid["customer"]).email == "bob@example.com"
        with pytest.raises(StripeError, match="complete"):
            standin.pay(session.id)

    def test_a_holder_who_fails_to_authenticate_has_not_paid(
        self, client: stripe.StripeClient, standin: StandInStripe
    ) -> None:
        session = client.v1.checkout.sessions.create(session_params())
        with pytest.raises(StripeError, match="authenticate"):
            standin.pay(session.id, "pm_card_authenticationRequired", authenticates=False)
        assert standin.pay(session.id, "pm_card_authenticationRequired")["payment_status"] == "paid"

    def test_it_expires_by_itself_or_on_request(self, client: stripe.StripeClient, standin: StandInStripe) -> None:
        slow = client.v1.checkout.sessions.create(session_params())
        quick = client.v1.checkout.sessions.create(session_params())
        assert client.v1.checkout.sessions.expire(quick.id).status == "expired"
        standin.clock.advance(hours=24)
        assert client.v1.checkout.sessions.retrieve(slow.id).status == "expired"
        assert types(standin) == ["checkout.session.expired"] * 2
        with pytest.raises(stripe.InvalidRequestError):
            client.v1.checkout.sessions.expire(slow.id)
        with pytest.raises(StripeError):
            standin.pay(slow.id)

    def test_setup_mode_saves_a_card(
        self, client: stripe.StripeClient, standin: StandInStripe, customer: stripe.Customer
    ) -> None:
        session = client.v1.checkout.sessions.create(
            {"mode": "setup", "currency": "usd", "customer": customer.id, "success_url": "http://127.0.0.1/saved"}
        )
        done = standin.pay(session.id)
        assert done["payment_status"] == "no_payment_required"
        intent = client.v1.setup_intents.retrieve(done["setup_intent"])
        assert intent.status == "succeeded"
        [method] = client.v1.customers.payment_methods.list(customer.id).data
        assert intent.payment_method == method.id

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"mode": "subscription"}, "Invalid mode"),
            ({"line_items": []}, "Missing required param: line_items"),
            ({"expires_at": 1}, "expires_at"),
            ({"success_url": ""}, "success_url"),
            ({"payment_intent_data": {"application_fee_amount": 1}}, "does not model"),
        ],
    )
    def test_what_is_wrong_is_refused(self, client: stripe.StripeClient, changes: Any, message: str) -> None:
        with pytest.raises(stripe.InvalidRequestError, match=message):
            client.v1.checkout.sessions.create(session_params(**changes))
        assert client.v1.checkout.sessions.list().data == []


class TestCurrencies:
    def test_amounts_are_in_the_currencys_own_minor_unit(self, standin: StandInStripe, charge: Charging) -> None:
        charge(5_000, currency="jpy")
        assert standin.balance("jpy") == (0, 5_000 - 145)
        with pytest.raises(stripe.InvalidRequestError, match="divisible by 10"):
            charge(5_001, currency="kwd")
