"""The control handle: a stand-in Stripe on loopback, and everything that a test does to it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import stripe
from tests.fakes.stripe.balances import ADJUSTMENT, TOPUP
from tests.fakes.stripe.cards import CARDS, Card
from tests.fakes.stripe.clock import DEFAULT_START_S, Clock
from tests.fakes.stripe.errors import Json
from tests.fakes.stripe.faults import Faults
from tests.fakes.stripe.invariants import breaches
from tests.fakes.stripe.resources import (
    accounts,
    checkout,
    disputes,
    payment_intents,
    payouts,
    refunds,
    webhook_endpoints,
)
from tests.fakes.stripe.server import Server
from tests.fakes.stripe.webhooks import Answer, Delivery, Endpoint, Order
from tests.fakes.stripe.world import Terms, World

SENDER_PERIOD_S = 0.05


class StandInStripe:
    """A processor of one platform. Use it as a context manager; `url` is where the client is pointed.

    What customers, banks and Stripe itself would do is a method here. Objects that come back are copies.
    """

    def __init__(
        self,
        *,
        seed: int = 1,
        start_s: int = DEFAULT_START_S,
        follows_wall: bool = False,
        port: int = 0,
        terms: Terms | None = None,
    ) -> None:
        clock = Clock(start_s, follows_wall=follows_wall)
        self._world = World(seed=seed, clock=clock, terms=terms or Terms())
        self._server = Server(self._world, port)
        self._world.pages_url = self._server.url
        self._sender: threading.Thread | None = None
        self._ending = threading.Event()
        self.url = self._server.url
        self.secret_key = self._world.secret_key
        self.account_id = self._world.platform
        self.clock: Clock = clock
        self.faults: Faults = self._world.faults

    def __enter__(self) -> StandInStripe:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        if self._sender is not None:
            self._sender.join(5)
        self.faults.clear()
        self._server.stop()

    def client(self, **options: Any) -> stripe.StripeClient:
        """The official client, pointed here; no retries of its own unless asked."""
        settings = {"max_network_retries": 0, **options}
        return stripe.StripeClient(self.secret_key, base_addresses={"api": self.url}, **settings)

    @contextmanager
    def _looking(self) -> Iterator[World]:
        with self._world.lock:
            self._world.run_due()
            yield self._world

    def _owner(self, identifier: str) -> tuple[str, Json]:
        record = self._world.store.find(identifier)
        if record is None:
            raise KeyError(identifier)
        return record.owner, record.data

    # Looking

    def get(self, identifier: str) -> Json:
        """A copy of any object, of whichever account."""
        with self._looking():
            return copy.deepcopy(self._owner(identifier)[1])

    def every(self, kind: str, account: str | None = None) -> list[Json]:
        """Copies of all objects of one kind (`transfer`, `payout`), oldest first."""
        with self._looking() as world:
            return [copy.deepcopy(each) for each in world.store.every(account or world.platform, kind)]

    def events(self, kind: str | None = None, account: str | None = None) -> list[Json]:
        """Events of the platform, or of one connected account, oldest first."""
        return [each for each in self.every("event", account) if kind in (None, each["type"])]

    def balance(self, currency: str = "usd", account: str | None = None) -> tuple[int, int]:
        """(available, pending) in minor units; may be negative."""
        with self._looking() as world:
            owner = account or world.platform
            return world.balances.available(owner, currency), world.balances.pending(owner, currency)

    def invariants(self) -> list[str]:
        """Breaches of the stand-in's own books; empty when all is well."""
        with self._looking() as world:
            return breaches(world)

    # Webhooks

    def add_endpoint(self, url: str, *, connect: bool = False, events: Iterable[str] = ("*",)) -> Endpoint:
        """Register a receiver: of the platform's events, or with `connect` of the connected accounts'."""
        with self._looking() as world:
            endpoint = world.webhooks.add(url, connect=connect, events=events)
            webhook_endpoints.register(world, world.platform, endpoint)
            return endpoint

    def deliver(
        self,
        pattern: str = "*",
        *,
        order: Order = "created",
        copies: int = 1,
        at_once: bool = False,
        limit: int | None = None,
        account: str | None = None,
    ) -> list[Answer]:
        """Send waiting events; what is refused waits until the clock reaches its retry."""
        with self._looking() as world:
            webhooks = world.webhooks
        return webhooks.deliver(pattern, order=order, copies=copies, at_once=at_once, limit=limit, account=account)

    def waiting(self) -> list[Delivery]:
        """Deliveries that no endpoint has accepted yet."""
        with self._looking() as world:
            return world.webhooks.waiting()

    def hold(self, *patterns: str) -> None:
        """Keep events back whose type matches (`payout.*`) until `release`."""
        self._world.webhooks.hold(*patterns)

    def release(self) -> None:
        """Let held events leave with the next delivery."""
        self._world.webhooks.release()

    def delay(self, pattern: str, seconds: int) -> None:
        """Waiting events that match leave only once the clock has moved on."""
        with self._looking() as world:
            world.webhooks.delay(pattern, seconds)

    def drop(self, pattern: str) -> int:
        """Lose waiting events that match; returns how many."""
        with self._looking() as world:
            return world.webhooks.drop(pattern)

    def redeliver(self, event_id: str, *, copies: int = 1) -> list[Answer]:
        """Send an event again, though it was accepted."""
        return self._world.webhooks.redeliver(self.get(event_id), copies=copies)

    def forge(self, endpoint: Endpoint, event: Json, *, secret: str = "whsec_forged", age_s: int = 0) -> int:
        """Send a made-up event, signed with a wrong secret or (with the right one) too long ago; returns the status."""
        return self._world.webhooks.forge(endpoint, event, secret=secret, age_s=age_s)

    def tamper(self, endpoint: Endpoint, event_id: str, **changes: object) -> int:
        """Send an event whose object was changed after signing; returns the status."""
        event = self.get(event_id)
        return self._world.webhooks.tamper(endpoint, event, lambda copy: copy["data"]["object"].update(changes))

    def sign_with_clock(self) -> None:
        """Let signatures carry the stand-in's time, for receivers whose clock is moved as well."""
        self._world.webhooks.signing_time = self.clock.now

    def send_in_background(self) -> None:
        """For local work: events leave by themselves, some 50 ms after they happen."""
        self._sender = threading.Thread(target=self._send_on, name="stand-in-stripe-sender", daemon=True)
        self._sender.start()

    def _send_on(self) -> None:
        while not self._ending.wait(SENDER_PERIOD_S):
            self.deliver()

    # What customers do

    def pay(
        self,
        session_id: str,
        card: str | Card = "pm_card_visa",
        *,
        email: str | None = None,
        authenticates: bool = True,
    ) -> Json:
        """The customer completes a Checkout session, with a card by name or one saved; a decline raises StripeError."""
        with self._looking() as world:
            _, session = self._owner(session_id)
            return copy.deepcopy(checkout.complete(world, session, card=card, email=email, authenticates=authenticates))

    def authenticate(self, intent_id: str, *, succeeds: bool = True) -> Json:
        """The customer comes back from their bank's page."""
        with self._looking() as world:
            owner, intent = self._owner(intent_id)
            return copy.deepcopy(payment_intents.finish_authentication(world, owner, intent, succeeds=succeeds))

    def settle_debit(self, intent_id: str, *, succeeds: bool = True) -> Json:
        """The bank answers a debit that is processing."""
        with self._looking() as world:
            owner, intent = self._owner(intent_id)
            payment_intents.finish_debit(world, owner, intent, succeeds=succeeds)
            checkout.settle_delayed(world, owner, intent)
            return copy.deepcopy(intent)

    def change_card(self, payment_method_id: str, card: str | Card) -> None:
        """From now on a saved card behaves as another one: it expires, is blocked, asks for authentication."""
        with self._looking() as world:
            world.cards[payment_method_id] = CARDS[card] if isinstance(card, str) else card

    # What banks do

    def dispute(
        self, identifier: str, *, amount: int | None = None, reason: str = "fraudulent", inquiry: bool = False
    ) -> Json:
        """Dispute a charge, or the charge of a payment intent."""
        with self._looking() as world:
            owner, data = self._owner(identifier)
            if data["object"] == "payment_intent":
                data = world.store.get(owner, "charge", data["latest_charge"])
            opened = disputes.open_dispute(world, owner, data, amount=amount, reason=reason, inquiry=inquiry)
            return copy.deepcopy(opened)

    def escalate(self, dispute_id: str) -> Json:
        """An inquiry becomes a dispute."""
        with self._looking() as world:
            owner, dispute = self._owner(dispute_id)
            disputes.escalate(world, owner, dispute)
            return copy.deepcopy(dispute)

    def close_dispute(self, dispute_id: str, *, won: bool, fee_returned: bool = False) -> Json:
        """The bank decides."""
        with self._looking() as world:
            owner, dispute = self._owner(dispute_id)
            disputes.close(world, owner, dispute, won=won, fee_returned=fee_returned)
            return copy.deepcopy(dispute)

    def fail_refund(self, refund_id: str, reason: str = "lost_or_stolen_card") -> Json:
        """The bank sends a refund back."""
        with self._looking() as world:
            owner, refund = self._owner(refund_id)
            refunds.fail(world, owner, refund, reason)
            return copy.deepcopy(refund)

    def complete_refund(self, refund_id: str) -> Json:
        """A pending refund goes through."""
        with self._looking() as world:
            owner, refund = self._owner(refund_id)
            refunds.succeed(world, owner, refund)
            return copy.deepcopy(refund)

    def arrive(self, payout_id: str) -> Json:
        """A payout is paid before its day."""
        with self._looking() as world:
            owner, payout = self._owner(payout_id)
            payouts.arrive(world, owner, payout)
            return copy.deepcopy(payout)

    def fail_payout(self, payout_id: str, code: str = "account_closed", *, disables_bank: bool = True) -> Json:
        """The bank sends a payout back, also after it was paid."""
        with self._looking() as world:
            owner, payout = self._owner(payout_id)
            payouts.fail(world, owner, payout, code, disables_bank=disables_bank)
            return copy.deepcopy(payout)

    # What Stripe does

    def onboard(self, account_id: str, *, verified: bool = True) -> Json:
        """The owner fills in the onboarding form; unverified, `verify` follows."""
        with self._looking() as world:
            return copy.deepcopy(accounts.submit(world, account_id, verified=verified))

    def verify(self, account_id: str) -> Json:
        """Verification ends well."""
        with self._looking() as world:
            return copy.deepcopy(accounts.verify(world, account_id))

    def require(self, account_id: str, *due: str, past: bool = True) -> Json:
        """Stripe asks for more; `past` disables the account until `verify`."""
        with self._looking() as world:
            return copy.deepcopy(accounts.require(world, account_id, list(due), past=past))

    def reject(self, account_id: str, reason: str = "fraud") -> Json:
        """Stripe closes an account."""
        with self._looking() as world:
            account = accounts.get(world, account_id)
            accounts.close(world, account, reason)
            return copy.deepcopy(account)

    def add_bank(self, account_id: str, *, currency: str | None = None) -> Json:
        """The owner enters another bank account."""
        with self._looking() as world:
            account = accounts.get(world, account_id)
            bank = accounts.add_bank(world, account, currency=currency)
            accounts.repair_bank(world, account)
            return copy.deepcopy(bank)

    def adjust(
        self, amount: int, *, currency: str = "usd", account: str | None = None, why: str = "adjustment"
    ) -> Json:
        """Book something on a balance, as Stripe does for its own reasons; may take it below zero."""
        with self._looking() as world:
            owner = account or world.platform
            return copy.deepcopy(world.balances.post(owner, ADJUSTMENT, amount, currency, source=None, description=why))

    def top_up(self, amount: int, *, currency: str = "usd") -> Json:
        """The platform adds money from its own bank, available at once."""
        with self._looking() as world:
            topup = world.new("tu", "topup", world.platform, amount=amount, currency=currency, status="succeeded")
            line = world.balances.post(world.platform, TOPUP, amount, currency, source=topup["id"])
            topup["balance_transaction"] = line["id"]
            world.emit("topup.succeeded", topup, world.platform)
            return copy.deepcopy(topup)
