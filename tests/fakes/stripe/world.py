"""The state of the stand-in: accounts' objects, money, events, and what is due at which time."""

from __future__ import annotations

import copy
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.fakes.stripe.balances import Balances
from tests.fakes.stripe.cards import Card
from tests.fakes.stripe.clock import DAY_S, Clock, midnight
from tests.fakes.stripe.currencies import FeeRule
from tests.fakes.stripe.errors import Json
from tests.fakes.stripe.faults import Faults
from tests.fakes.stripe.forms import Params
from tests.fakes.stripe.idempotency import IdempotencyKeys
from tests.fakes.stripe.ids import Ids
from tests.fakes.stripe.store import Store
from tests.fakes.stripe.webhooks import Webhooks

EVENTS_KEPT_S = 30 * DAY_S


@dataclass(frozen=True)
class Terms:
    """What the processor agreed with the platform."""

    fees: FeeRule = field(default_factory=FeeRule)
    settlement_days: int = 2
    """Days until a charge's money is available."""
    payout_days: int = 2
    """Days until a payout arrives at the bank."""
    api_version: str = "2026-10-28.endive"
    livemode: bool = False


@dataclass(frozen=True)
class Call:
    """One request, decoded: on whose behalf, with which parameters."""

    owner: str
    params: Params
    path_ids: tuple[str, ...] = ()
    url: str = ""
    request_id: str | None = None
    idempotency_key: str | None = None
    balance_declined: bool = False


class World:
    """Everything behind the HTTP surface. Callers hold `lock`."""

    def __init__(self, *, seed: int, clock: Clock, terms: Terms) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.terms = terms
        self.ids = Ids(seed, livemode=terms.livemode)
        self.store = Store()
        self.balances = Balances(self.store, self.ids, clock, lambda due: self.schedule(due, self._settle_balances))
        self.webhooks = Webhooks(clock, self.ids)
        self.faults = Faults()
        self.keys = IdempotencyKeys(clock)
        self.platform = self.ids.new("acct")
        mode = "live" if terms.livemode else "test"
        self.secret_key = f"sk_{mode}_{self.ids.letters(24)}"
        self.pages_url = ""
        """Where hosted pages (Checkout, onboarding) live; set by the server."""
        self.cards: dict[str, Card] = {}
        """How the card behind each payment method behaves."""
        self.authenticated: set[str] = set()
        """Payment methods whose holder agreed to later off-session use."""
        self.payout_lines: dict[str, list[Json]] = {}
        """The balance transactions that each automatic payout pays out."""
        self.scheduled: set[str] = set()
        """Connected accounts that the agenda looks at each midnight."""
        self.accidents: list[str] = []
        """Mistakes of the stand-in itself, told by its invariants."""
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._call: Call | None = None
        clock.walk = self._walk

    # Time

    def schedule(self, due: int, act: Callable[[], None]) -> None:
        """Let something happen at a time; what is due now happens before anybody looks next."""
        heapq.heappush(self._agenda, (due, next(self._numbers), act))

    def run_due(self) -> None:
        """Let happen what is due by now."""
        self._walk(self.clock.now())

    def _walk(self, target: int) -> None:
        with self.lock:
            while self._agenda and self._agenda[0][0] <= target:
                due, _, act = heapq.heappop(self._agenda)
                self.clock.set(due)
                act()
            self.clock.set(target)

    def later(self, days: int) -> int:
        """Midnight UTC, that many days from today; now for zero days."""
        now = self.clock.now()
        return midnight(now) + days * DAY_S if days else now

    def _settle_balances(self) -> None:
        for owner in sorted(self.balances.settle()):
            self.emit("balance.available", self.balance(owner), owner)

    # Requests and events

    @contextmanager
    def serving(self, call: Call) -> Iterator[None]:
        """Events name the request that caused them."""
        self._call = call
        try:
            yield
        finally:
            self._call = None

    def emit(self, kind: str, data: Json, owner: str, previous: Json | None = None) -> Json:
        """Record an event with a snapshot of its object, and queue it for the endpoints that want it."""
        content: Json = {"object": copy.deepcopy(data)}
        if previous is not None:
            content["previous_attributes"] = previous
        call = self._call
        event: Json = {
            "id": self.ids.new("evt"),
            "object": "event",
            "api_version": self.terms.api_version,
            "created": self.clock.now(),
            "data": content,
            "livemode": self.terms.livemode,
            "pending_webhooks": 0,
            "request": {
                "id": call.request_id if call else None,
                "idempotency_key": call.idempotency_key if call else None,
            },
            "type": kind,
        }
        if owner != self.platform:
            event["account"] = owner
        self.store.add(owner, event)
        event["pending_webhooks"] = self.webhooks.enqueue(event)
        self.schedule(self.clock.now() + EVENTS_KEPT_S, lambda: self.store.drop(event["id"]))
        return event

    def change(self, data: Json, **fields: object) -> Json:
        """Set fields and return what they were before, as `previous_attributes` tells."""
        previous = {name: copy.deepcopy(data.get(name)) for name, value in fields.items() if data.get(name) != value}
        data.update(fields)
        return previous

    def new(self, prefix: str, kind: str, owner: str, **fields: object) -> Json:
        """A new object with the fields that all have."""
        head: Json = {
            "id": self.ids.new(prefix),
            "object": kind,
            "created": self.clock.now(),
            "livemode": self.terms.livemode,
        }
        return self.store.add(owner, {**head, **fields})

    # Money

    def balance(self, owner: str) -> Json:
        """The balance object: available and pending by currency, and what the platform holds back for others."""
        currencies = self.balances.currencies(owner) or ["usd"]
        available = [self._amount(self.spendable(owner, currency), currency) for currency in currencies]
        pending = [self._amount(self.balances.pending(owner, currency), currency) for currency in currencies]
        shown: Json = {"object": "balance", "available": available, "livemode": self.terms.livemode, "pending": pending}
        if owner == self.platform:
            shown["connect_reserved"] = [self._amount(self.reserved(currency), currency) for currency in currencies]
        return shown

    @staticmethod
    def _amount(amount: int, currency: str) -> Json:
        return {"amount": amount, "currency": currency, "source_types": {"card": amount}}

    def reserved(self, currency: str) -> int:
        """What the platform's balance lacks because connected accounts are below zero."""
        return sum(
            -min(0, self.balances.available(owner, currency) + self.balances.pending(owner, currency))
            for owner in self.connected()
        )

    def spendable(self, owner: str, currency: str) -> int:
        """What can be transferred or paid out now."""
        available = self.balances.available(owner, currency)
        return available - self.reserved(currency) if owner == self.platform else available

    def connected(self) -> list[str]:
        return [account["id"] for account in self.store.every(self.platform, "account")]
