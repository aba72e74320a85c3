"""Events and their signed delivery, verified with the official client."""

from __future__ import annotations

from typing import Any

import pytest
import stripe

from tests.fakes.stripe import StandInStripe
from tests.integration.fakes.stripe.conftest import Charging, Receiver


def delivered(receiver: Receiver, secret: str) -> list[str]:
    return [event.type for event in receiver.events(secret)]


class TestDelivery:
    def test_events_are_signed_and_carry_their_object(
        self, standin: StandInStripe, receiver: Receiver, charge: Charging
    ) -> None:
        endpoint = standin.add_endpoint(receiver.url)
        intent = charge(1_000)
        answers = standin.deliver()
        assert all(answer.accepted for answer in answers)
        events = {event.type: event for event in receiver.events(endpoint.secret)}
        succeeded = events["payment_intent.succeeded"]
        assert succeeded.data.object["id"] == intent.id
        assert (succeeded.api_version, succeeded.livemode) == (stripe.api_version, False)
        assert standin.waiting() == []
        assert standin.deliver() == []

    def test_platform_and_connected_events_go_apart_with_secrets_of_their_own(
        self, client: stripe.StripeClient, standin: StandInStripe, receiver: Receiver, owner: str
    ) -> None:
        platform = standin.add_endpoint(receiver.url)
        connect = standin.add_endpoint(f"{receiver.url}/connect", connect=True)
        standin.top_up(1_000)
        client.v1.transfers.create({"amount": 100, "currency": "usd", "destination": owner})
        answers = standin.deliver()
        by_endpoint = {
            each.id: [answer.event_type for answer in answers if answer.endpoint_id == each.id]
            for each in (platform, connect)
        }
        assert by_endpoint == {platform.id: ["topup.succeeded", "transfer.created"], connect.id: ["payment.created"]}
        assert platform.secret != connect.secret
        with pytest.raises(stripe.SignatureVerificationError):
            receiver.events(platform.secret)

    def test_only_what_was_asked_for(self, standin: StandInStripe, receiver: Receiver, charge: Charging) -> None:
        endpoint = standin.add_endpoint(receiver.url, events=["payment_intent.succeeded"])
        charge(1_000)
        standin.deliver()
        assert delivered(receiver, endpoint.secret) == ["payment_intent.succeeded"]

    def test_a_refused_event_comes_again_when_its_time_has_come(
        self, standin: StandInStripe, receiver: Receiver, charge: Charging
    ) -> None:
        endpoint = standin.add_endpoint(receiver.url, events=["payment_intent.succeeded"])
        charge(1_000)
        receiver.status = 500
        assert [answer.status for answer in standin.deliver()] == [500]
        receiver.status = 200
        assert standin.deliver() == []
        standin.clock.advance(60)
        assert [answer.status for answer in standin.deliver()] == [200]
        first, second = receiver.events(endpoint.secret)
        assert first.id == second.id

    def test_an_endpoint_that_is_down_is_no_end_of_the_world(self, standin: StandInStripe, charge: Charging) -> None:
        standin.add_endpoint("http://127.0.0.1:9/nobody", events=["charge.succeeded"])
        charge(1_000)
        assert [answer.status for answer in standin.deliver()] == [0]

    def test_a_receiver_may_fetch_the_object_while_it_is_told(
        self, client: stripe.StripeClient, standin: StandInStripe, receiver: Receiver, charge: Charging
    ) -> None:
        standin.add_endpoint(receiver.url)
        statuses: list[str] = []
        intent = charge(1_000)
        receiver.on_event = lambda: statuses.append(client.v1.payment_intents.retrieve(intent.id).status)
        standin.deliver()
        assert set(statuses) == {"succeeded"}


class TestDisorder:
    @pytest.fixture
    def secret(self, standin: StandInStripe, receiver: Receiver) -> str:
        return standin.add_endpoint(receiver.url).secret

    def test_duplicates_also_at_once(
        self, standin: StandInStripe, receiver: Receiver, charge: Charging, secret: str
    ) -> None:
        charge(1_000)
        standin.deliver("payment_intent.succeeded", copies=20, at_once=True)
        events = receiver.events(secret)
        assert (len(events), len({event.id for event in events})) == (20, 1)

    def test_reversed_and_shuffled(
        self, standin: StandInStripe, receiver: Receiver, charge: Charging, secret: str
    ) -> None:
        intent = charge(1_000)
        standin.get(intent.id)
        made = [event["type"] for event in standin.events()]
        standin.deliver(order="reversed")
        assert delivered(receiver, secret) == made[::-1]
        receiver.bodies.clear()
        charge(1_000)
        standin.deliver(order="shuffled")
        assert sorted(delivered(receiver, secret)) == sorted(made)

    def test_held_delayed_and_lost(
        self, standin: StandInStripe, receiver: Receiver, charge: Charging, secret: str
    ) -> None:
        standin.hold("payment_intent.*")
        charge(1_000)
        standin.events()
        standin.delay("charge.updated", 500)
        assert standin.drop("charge.succeeded") == 1
        assert standin.deliver() == []
        standin.release()
        assert [answer.event_type for answer in standin.deliver()] == [
            "payment_intent.created",
            "payment_intent.succeeded",
        ]
        standin.clock.advance(500)
        assert [answer.event_type for answer in standin.deliver()] == ["charge.updated"]
        assert len(delivered(receiver, secret)) == 3

    def test_one_by_one_in_any_order(
        self, standin: StandInStripe, receiver: Receiver, charge: Charging, secret: str
    ) -> None:
        charge(1_000)
        for kind in ("payment_intent.succeeded", "charge.succeeded", "payment_intent.created"):
            standin.deliver(kind, limit=1)
        assert delivered(receiver, secret) == [
            "payment_intent.succeeded",
            "charge.succeeded",
            "payment_intent.created",
        ]

    def test_sent_again_after_it_was_accepted(
        self, standin: StandInStripe, receiver: Receiver, charge: Charging, secret: str
    ) -> None:
        charge(1_000)
        standin.deliver()
        [event] = standin.events("charge.succeeded")
        standin.redeliver(event["id"], copies=2)
        assert delivered(receiver, secret)[-2:] == ["charge.succeeded"] * 2

    def test_forged_stale_and_tampered_ones_fail_verification(
        self, standin: StandInStripe, receiver: Receiver, charge: Charging
    ) -> None:
        endpoint = standin.add_endpoint(receiver.url)
        charge(1_000)
        [event] = standin.events("payment_intent.succeeded")
        standin.forge(endpoint, event)
        standin.forge(endpoint, event, secret=endpoint.secret, age_s=301)
        standin.tamper(endpoint, event["id"], amount_received=9_999_999)
        for body, header in receiver.bodies:
            with pytest.raises(stripe.SignatureVerificationError):
                stripe.Webhook.construct_event(body, header, endpoint.secret)
        assert len(receiver.bodies) == 3


class TestEvents:
    def test_listed_by_type_and_fetched(self, client: stripe.StripeClient, charge: Charging) -> None:
        charge(1_000)
        [event] = client.v1.events.list({"type": "payment_intent.succeeded"}).data
        assert client.v1.events.retrieve(event.id).data.object["status"] == "succeeded"
        assert event.request is not None
        assert event.request.idempotency_key
        several: Any = {"types": ["charge.succeeded", "charge.updated"]}
        assert [each.type for each in client.v1.events.list(several).data] == ["charge.updated", "charge.succeeded"]

    def test_snapshots_stay_as_they_were(self, client: stripe.StripeClient, charge: Charging) -> None:
        charge(1_000)
        [event] = client.v1.events.list({"type": "charge.succeeded"}).data
        assert event.data.object["balance_transaction"] is None
        [later] = client.v1.events.list({"type": "charge.updated"}).data
        assert later.data.to_dict()["previous_attributes"] == {"balance_transaction": None}

    def test_undelivered_ones_can_be_asked_for(
        self, client: stripe.StripeClient, standin: StandInStripe, receiver: Receiver, charge: Charging
    ) -> None:
        standin.add_endpoint(receiver.url, events=["charge.succeeded"])
        charge(1_000)
        assert [each.type for each in client.v1.events.list({"delivery_success": False}).data] == ["charge.succeeded"]
        standin.deliver()
        assert client.v1.events.list({"delivery_success": False}).data == []

    def test_kept_for_thirty_days(self, client: stripe.StripeClient, standin: StandInStripe) -> None:
        client.v1.customers.create({})
        standin.clock.advance(days=30)
        assert client.v1.events.list().data == []


class TestEndpointsOfTheApi:
    def test_made_changed_and_deleted(
        self, client: stripe.StripeClient, standin: StandInStripe, receiver: Receiver
    ) -> None:
        endpoint = client.v1.webhook_endpoints.create({"url": receiver.url, "enabled_events": ["customer.created"]})
        assert endpoint.secret is not None
        assert "secret" not in client.v1.webhook_endpoints.retrieve(endpoint.id).to_dict()
        client.v1.customers.create({})
        standin.deliver()
        assert delivered(receiver, endpoint.secret) == ["customer.created"]
        client.v1.webhook_endpoints.update(endpoint.id, {"disabled": True})
        client.v1.customers.create({})
        assert standin.waiting() == []
        client.v1.webhook_endpoints.delete(endpoint.id)
        assert client.v1.webhook_endpoints.list().data == []
