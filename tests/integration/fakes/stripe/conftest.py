"""A stand-in for each test, its books checked at the end, and a receiver of webhooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import stripe

from tests.fakes.stripe import StandInStripe


@pytest.fixture
def standin() -> Iterator[StandInStripe]:
    with StandInStripe() as running:
        yield running
        assert running.invariants() == []


@pytest.fixture
def client(standin: StandInStripe) -> stripe.StripeClient:
    return standin.client()


@dataclass
class Receiver:
    """What arrived at a webhook's URL, and what it answers."""

    url: str
    bodies: list[tuple[bytes, str]] = field(default_factory=list)
    status: int = 200
    on_event: Callable[[], None] = lambda: None

    def events(self, secret: str) -> list[stripe.Event]:
        """Verified by the official client."""
        return [stripe.Webhook.construct_event(body, header, secret) for body, header in self.bodies]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.bodies.append((body, self.headers["Stripe-Signature"]))
            received.on_event()
            self.send_response(received.status)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    received = Receiver(f"http://127.0.0.1:{server.server_address[1]}/hook")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield received
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def customer(client: stripe.StripeClient) -> stripe.Customer:
    return client.v1.customers.create({"email": "ada@example.com", "metadata": {"organisation": "42"}})


@pytest.fixture
def saved_card(client: stripe.StripeClient, customer: stripe.Customer) -> stripe.PaymentMethod:
    return client.v1.payment_methods.attach("pm_card_visa", {"customer": customer.id})


Charging = Callable[..., stripe.PaymentIntent]


@pytest.fixture
def charge(client: stripe.StripeClient) -> Charging:
    """Takes money off-session: `charge(5_000, card="pm_card_bypassPending")`."""

    def take(amount: int, *, card: str = "pm_card_visa", currency: str = "usd") -> stripe.PaymentIntent:
        return client.v1.payment_intents.create(
            {"amount": amount, "currency": currency, "payment_method": card, "confirm": True, "off_session": True}
        )

    return take


@pytest.fixture
def owner(client: stripe.StripeClient, standin: StandInStripe) -> str:
    """A connected account that may receive transfers; its payouts are manual."""
    account = client.v1.accounts.create(
        {
            "type": "express",
            "country": "US",
            "capabilities": {"transfers": {"requested": True}},
            "settings": {"payouts": {"schedule": {"interval": "manual"}}},
        }
    )
    standin.onboard(account.id)
    return account.id
