"""The stand-in as a program of its own, and its hosted pages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import stripe

from tests.fakes.stripe import StandInStripe
from tests.integration.fakes.stripe.conftest import Receiver

SESSION: Any = {
    "mode": "payment",
    "cancel_url": "http://127.0.0.1/cancelled",
    "line_items": [
        {"quantity": 1, "price_data": {"currency": "usd", "unit_amount": 2_500, "product_data": {"name": "<Credit>"}}}
    ],
}


def submit(url: str, body: bytes) -> tuple[int, str, str]:
    """(status, where it led, what it showed)."""
    try:
        with urlopen(Request(url, data=body, method="POST")) as answer:
            return answer.status, answer.url, answer.read().decode()
    except HTTPError as error:
        return error.code, error.url or "", error.read().decode()


class TestPages:
    def test_a_customer_pays_on_the_page_and_comes_back(
        self, client: stripe.StripeClient, standin: StandInStripe
    ) -> None:
        back = f"{standin.url}/v1/back?session={{CHECKOUT_SESSION_ID}}"
        session = client.v1.checkout.sessions.create({**SESSION, "success_url": back})
        assert session.url is not None
        with urlopen(session.url) as page:
            assert "Pay 2500 usd" in page.read().decode()
        status, url, shown = submit(session.url, b"card=pm_card_chargeDeclined")
        assert (status, url) == (200, session.url)
        assert "declined" in shown
        _, url, _ = submit(session.url, b"card=pm_card_visa")
        assert url == f"{standin.url}/v1/back?session={session.id}"
        assert client.v1.checkout.sessions.retrieve(session.id).payment_status == "paid"

    def test_what_is_unknown_is_not_found(self, standin: StandInStripe) -> None:
        assert submit(f"{standin.url}/c/pay/cs_test_none", b"")[0] == 404
        assert submit(f"{standin.url}/elsewhere", b"")[0] == 404


class TestProgram:
    @pytest.fixture
    def told(self, receiver: Receiver) -> Iterator[dict[str, Any]]:
        command = [sys.executable, "-m", "tests.fakes.stripe", "--port", "0", "--webhook", receiver.url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.stdout.close()
            process.wait(10)

    def test_it_says_where_it_is_and_sends_events_by_itself(self, told: dict[str, Any], receiver: Receiver) -> None:
        client = stripe.StripeClient(told["secret_key"], base_addresses={"api": told["url"]})
        customer = client.v1.customers.create({"email": "ada@example.com"})
        assert abs(customer.created - time.time()) < 60
        deadline = time.monotonic() + 10
        while not receiver.bodies and time.monotonic() < deadline:
            time.sleep(0.02)
        [event] = receiver.events(told["webhook_secrets"][receiver.url])
        assert event.type == "customer.created"


class TestBadInput:
    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [
            ("/v1/customers", b"\xff\xfe=%ff&metadata", 400),
            ("/v1/customers", b"metadata[a][b]=1", 400),
            ("/v1/customers", b"email=a&email[b]=c", 400),
            ("/v1/customers", b"&".join(b"k%d=1" % number for number in range(2_000)), 400),
            ("/v1/customers/", b"", 404),
            ("/v1/transfers", b"amount=1&currency[x]=usd&destination=acct_1", 400),
        ],
    )
    def test_it_is_refused_in_stripes_shape(self, standin: StandInStripe, path: str, body: bytes, status: int) -> None:
        headers = {"Authorization": f"Bearer {standin.secret_key}"}
        with pytest.raises(HTTPError) as caught:
            urlopen(Request(f"{standin.url}{path}", data=body, method="POST", headers=headers))
        assert caught.value.code == status
        assert json.loads(caught.value.read())["error"]["type"] == "invalid_request_error"
        caught.value.close()
