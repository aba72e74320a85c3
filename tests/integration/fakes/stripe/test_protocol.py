"""The surface itself: keys, versions, idempotency, pages, expansion, faults."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import stripe

from tests.fakes.stripe import FaultKind, StandInStripe, Terms
from tests.integration.fakes.stripe.conftest import Charging

TRANSFER: Any = {"amount": 1_000, "currency": "usd"}


class TestAuthentication:
    @pytest.mark.parametrize("key", ["sk_test_wrong", "sk_live_whatever", "pk_test_1"])
    def test_a_wrong_key_is_a_401_that_masks_it(self, standin: StandInStripe, key: str) -> None:
        client = stripe.StripeClient(key, base_addresses={"api": standin.url})
        with pytest.raises(stripe.AuthenticationError, match="Invalid API Key") as caught:
            client.v1.balance.retrieve()
        assert key not in str(caught.value) or len(key) < 12

    def test_live_objects_say_so(self) -> None:
        with StandInStripe(terms=Terms(livemode=True)) as live:
            assert live.secret_key.startswith("sk_live_")
            assert live.client().v1.balance.retrieve().livemode


class TestVersions:
    def test_the_asked_version_is_echoed_and_nonsense_refused(self, standin: StandInStripe) -> None:
        answered = standin.client().v1.balance.retrieve().last_response
        assert answered is not None
        assert answered.headers["Stripe-Version"] == stripe.api_version
        with pytest.raises(stripe.InvalidRequestError, match="Invalid Stripe API version"):
            standin.client(stripe_version="latest").v1.balance.retrieve()

    def test_an_unknown_path_is_a_404_in_stripes_shape(self, client: stripe.StripeClient) -> None:
        with pytest.raises(stripe.InvalidRequestError, match="Unrecognized request URL"):
            client.v1.coupons.list()


class TestIdempotency:
    def test_the_same_request_has_its_effect_once(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.top_up(10_000)
        params: Any = {**TRANSFER, "destination": owner}
        first, second = (client.v1.transfers.create(params, {"idempotency_key": "run 1"}) for _ in range(2))
        assert first.id == second.id
        assert second.last_response is not None
        assert second.last_response.headers["Idempotent-Replayed"] == "true"
        assert standin.balance(account=owner)[0] == 1_000

    def test_another_body_is_an_error_that_changes_nothing(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.top_up(10_000)
        client.v1.transfers.create({**TRANSFER, "destination": owner}, {"idempotency_key": "run 1"})
        with pytest.raises(stripe.IdempotencyError) as caught:
            client.v1.transfers.create(
                {**TRANSFER, "destination": owner, "amount": 2_000}, {"idempotency_key": "run 1"}
            )
        assert caught.value.http_status == 400
        assert standin.balance(account=owner)[0] == 1_000

    def test_a_refusal_is_replayed_though_things_have_changed(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        params: Any = {**TRANSFER, "destination": owner}
        for _ in range(2):
            with pytest.raises(stripe.InvalidRequestError) as caught:
                client.v1.transfers.create(params, {"idempotency_key": "run 1"})
            assert caught.value.code == "balance_insufficient"
            standin.top_up(10_000)
        assert client.v1.transfers.create(params, {"idempotency_key": "run 2"}).amount == 1_000

    def test_what_failed_validation_leaves_the_key_free(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.top_up(10_000)
        with pytest.raises(stripe.InvalidRequestError):
            client.v1.transfers.create({**TRANSFER, "destination": owner, "amount": -1}, {"idempotency_key": "k"})
        assert client.v1.transfers.create({**TRANSFER, "destination": owner}, {"idempotency_key": "k"}).amount == 1_000

    @pytest.mark.parametrize(("kind", "effects"), [(FaultKind.ERROR_BEFORE, 0), (FaultKind.ERROR_AFTER, 1)])
    def test_a_500_is_replayed_and_tells_nothing_of_the_effect(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str, kind: FaultKind, effects: int
    ) -> None:
        standin.top_up(10_000)
        standin.faults.add(kind, "/v1/transfers")
        for _ in range(2):
            with pytest.raises(stripe.APIError) as caught:
                client.v1.transfers.create({**TRANSFER, "destination": owner}, {"idempotency_key": "k"})
            assert caught.value.http_status == 500
        assert len(client.v1.transfers.list().data) == effects

    def test_a_key_is_pruned_after_24_hours_and_then_pays_again(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.top_up(10_000)
        params: Any = {**TRANSFER, "destination": owner}
        client.v1.transfers.create(params, {"idempotency_key": "k"})
        standin.clock.advance(hours=24)
        client.v1.transfers.create(params, {"idempotency_key": "k"})
        assert len(client.v1.transfers.list().data) == 2

    def test_concurrent_use_is_a_conflict_and_the_first_one_counts(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.top_up(10_000)
        params: Any = {**TRANSFER, "destination": owner}
        pause = standin.faults.add(FaultKind.PAUSED, "/v1/transfers")
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(client.v1.transfers.create, params, {"idempotency_key": "k"})
            assert pause.entered.wait(5)
            with pytest.raises(stripe.APIError) as caught:
                client.v1.transfers.create(params, {"idempotency_key": "k"})
            assert caught.value.http_status == 409
            assert caught.value.json_body["error"]["code"] == "idempotency_key_in_use"
            pause.resume()
            transfer = first.result(5)
        assert client.v1.transfers.create(params, {"idempotency_key": "k"}).id == transfer.id


class TestFaults:
    def create(self, client: stripe.StripeClient, owner: str, key: str = "k") -> stripe.Transfer:
        return client.v1.transfers.create({**TRANSFER, "destination": owner}, {"idempotency_key": key})

    @pytest.fixture(autouse=True)
    def _funded(self, standin: StandInStripe) -> None:
        standin.top_up(10_000)

    @pytest.mark.parametrize(
        ("kind", "error", "effects"),
        [
            (FaultKind.RATE_LIMITED, stripe.RateLimitError, 0),
            (FaultKind.UNAVAILABLE, stripe.APIError, 0),
            (FaultKind.REFUSED, stripe.APIConnectionError, 0),
            (FaultKind.CONFLICT, stripe.APIError, 0),
            (FaultKind.LOST, stripe.APIConnectionError, 1),
            (FaultKind.CUT, stripe.APIConnectionError, 1),
        ],
    )
    def test_after_it_the_same_key_pays_once(
        self,
        client: stripe.StripeClient,
        standin: StandInStripe,
        owner: str,
        kind: FaultKind,
        error: type[Exception],
        effects: int,
    ) -> None:
        fault = standin.faults.add(kind, "/v1/transfers")
        with pytest.raises(error):
            self.create(client, owner)
        assert fault.struck == 1
        assert len(client.v1.transfers.list().data) == effects
        assert self.create(client, owner).amount == 1_000
        assert len(client.v1.transfers.list().data) == 1

    def test_the_clients_own_retries_get_over_a_lost_answer(self, standin: StandInStripe, owner: str) -> None:
        standin.faults.add(FaultKind.LOST, "/v1/transfers")
        assert self.create(standin.client(max_network_retries=1), owner).amount == 1_000
        assert standin.balance(account=owner)[0] == 1_000

    def test_a_balance_that_is_said_not_to_suffice(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.faults.add(FaultKind.DECLINED_BALANCE, "/v1/transfers")
        with pytest.raises(stripe.InvalidRequestError) as caught:
            self.create(client, owner)
        assert caught.value.code == "balance_insufficient"
        assert self.create(client, owner, "another").amount == 1_000

    @pytest.mark.parametrize("kind", [FaultKind.SLOW, FaultKind.SLOW_ANSWER])
    def test_a_slow_call_holds_up_nobody_else(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str, kind: FaultKind
    ) -> None:
        standin.faults.add(kind, "/v1/transfers", delay_s=0.3)
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(self.create, client, owner)
            client.v1.balance.retrieve()
            assert not slow.done()
            assert slow.result(5).amount == 1_000

    def test_a_webhook_can_overtake_its_answer(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        pause = standin.faults.add(FaultKind.PAUSED_ANSWER, "/v1/transfers")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.create, client, owner)
            assert pause.entered.wait(5)
            assert [event["type"] for event in standin.events("transfer.created")] == ["transfer.created"]
            assert not waiting.done()
            pause.resume()
            waiting.result(5)

    def test_at_random_they_follow_a_seed(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.faults.at_random(5, {FaultKind.RATE_LIMITED: 0.5})
        outcomes = []
        for index in range(12):
            try:
                client.v1.customers.create({}, {"idempotency_key": str(index)})
                outcomes.append("ok")
            except stripe.RateLimitError:
                outcomes.append("limited")
        assert {"ok", "limited"} == set(outcomes)
        standin.faults.clear()
        assert len(client.v1.customers.list({"limit": 100}).data) == outcomes.count("ok")


class TestLists:
    def test_pages_go_from_new_to_old_in_both_directions(self, client: stripe.StripeClient) -> None:
        made = [client.v1.customers.create({"name": str(index)}).id for index in range(7)][::-1]
        first = client.v1.customers.list({"limit": 3})
        assert ([each.id for each in first.data], first.has_more) == (made[:3], True)
        second = client.v1.customers.list({"limit": 3, "starting_after": made[2]})
        assert [each.id for each in second.data] == made[3:6]
        back = client.v1.customers.list({"limit": 2, "ending_before": made[4]})
        assert ([each.id for each in back.data], back.has_more) == (made[2:4], True)
        assert [each.id for each in client.v1.customers.list({"limit": 2}).auto_paging_iter()] == made

    @pytest.mark.parametrize(
        "params", [{"limit": 0}, {"limit": 101}, {"starting_after": "cus_none"}, {"created": {"near": 1}}]
    )
    def test_what_is_wrong_is_refused(self, client: stripe.StripeClient, params: Any) -> None:
        with pytest.raises(stripe.InvalidRequestError):
            client.v1.customers.list(params)

    def test_filtered_by_time(self, client: stripe.StripeClient, standin: StandInStripe) -> None:
        early = client.v1.customers.create({})
        standin.clock.advance(100)
        late = client.v1.customers.create({})
        assert [each.id for each in client.v1.customers.list({"created": {"lt": late.created}}).data] == [early.id]
        assert [each.id for each in client.v1.customers.list({"created": late.created}).data] == [late.id]
        both: Any = {"created": {"gte": early.created, "lte": late.created}}
        assert len(client.v1.customers.list(both).data) == 2


class TestExpansion:
    def test_inside_lists_and_over_several_levels(self, client: stripe.StripeClient, charge: Charging) -> None:
        intent = charge(1_000)
        [line] = client.v1.balance_transactions.list({"expand": ["data.source.payment_intent"]}).data
        assert isinstance(line.source, stripe.Charge)
        assert isinstance(line.source.payment_intent, stripe.PaymentIntent)
        assert line.source.payment_intent.id == intent.id

    @pytest.mark.parametrize("path", ["nothing", "status", "a.b.c.d.e"])
    def test_what_cannot_be_expanded_is_refused(self, client: stripe.StripeClient, charge: Charging, path: str) -> None:
        intent = charge(1_000)
        with pytest.raises(stripe.InvalidRequestError, match="expand"):
            client.v1.payment_intents.retrieve(intent.id, {"expand": [path]})


def test_many_clients_at_once_leave_the_books_right(standin: StandInStripe, owner: str) -> None:
    standin.top_up(1_000)
    barrier = threading.Barrier(8)

    def pay(number: int) -> bool:
        client = standin.client()
        barrier.wait(5)
        try:
            client.v1.transfers.create(
                {"amount": 300, "currency": "usd", "destination": owner}, {"idempotency_key": str(number)}
            )
        except stripe.InvalidRequestError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(pay, range(8))) == 3
    assert standin.balance(account=owner)[0] == 900
