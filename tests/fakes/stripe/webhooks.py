"""Events, and their signed delivery to endpoints: platform and Connect apart, in the order that a test wants."""

from __future__ import annotations

import copy
import hashlib
import hmac
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal
from urllib.parse import urlsplit

from tests.fakes.stripe.clock import Clock
from tests.fakes.stripe.errors import Json
from tests.fakes.stripe.ids import Ids

Order = Literal["created", "reversed", "shuffled"]
POST_TIMEOUT_S = 30.0
# Stripe tries for up to three days, ever more slowly.
RETRY_AFTER_S = (60, 300, 1_800, 7_200, 18_000, 36_000, 43_200, 43_200, 43_200, 43_200)
SENDERS = 16


@dataclass(frozen=True)
class Endpoint:
    """A URL that is told of events: the platform's own, or (`connect`) those of connected accounts."""

    id: str
    url: str
    secret: str
    connect: bool
    enabled_events: tuple[str, ...]
    enabled: bool = True

    def wants(self, event: Json) -> bool:
        """Whether this endpoint is told of an event."""
        if not self.enabled or self.connect != ("account" in event):
            return False
        return "*" in self.enabled_events or event["type"] in self.enabled_events


@dataclass(eq=False)
class Delivery:
    """One event on its way to one endpoint."""

    event: Json
    endpoint: Endpoint
    due_at: int
    attempts: int = 0


@dataclass(frozen=True)
class Answer:
    """What an endpoint said to one attempt; status 0 when it could not be reached."""

    event_id: str
    event_type: str
    endpoint_id: str
    status: int

    @property
    def accepted(self) -> bool:
        return 200 <= self.status < 300


def signature(payload: bytes, secret: str, timestamp_s: int) -> str:
    """The `Stripe-Signature` header: `t=` and an HMAC-SHA256 `v1=`; a `v0=` stands beside it, as for test events."""
    signed = b"%d." % timestamp_s + payload
    mac = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    decoy = hmac.new(secret.encode(), signed, hashlib.sha1).hexdigest()
    return f"t={timestamp_s},v1={mac},v0={decoy}"


def encode(event: Json) -> bytes:
    """The body as Stripe sends it: indented JSON."""
    return json.dumps(event, indent=2).encode()


class Webhooks:
    """The outbox. Nothing leaves before `deliver`, or the background sender of local work, takes it."""

    def __init__(self, clock: Clock, ids: Ids) -> None:
        self._clock = clock
        self._ids = ids
        self._lock = threading.RLock()
        self._endpoints: dict[str, Endpoint] = {}
        self._waiting: list[Delivery] = []
        self._held: tuple[str, ...] = ()
        self.signing_time: Callable[[], int] = lambda: int(time.time())
        """Signatures carry the wall's time, which receivers compare with theirs."""

    # Endpoints

    def add(self, url: str, *, connect: bool = False, events: Iterable[str] = ("*",)) -> Endpoint:
        """Register a receiver; its `secret` signs what it gets."""
        with self._lock:
            endpoint = Endpoint(
                id=self._ids.new("we"),
                url=url,
                secret=self._ids.new("whsec"),
                connect=connect,
                enabled_events=tuple(events),
            )
            self._endpoints[endpoint.id] = endpoint
            return endpoint

    def replace(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._endpoints[endpoint.id] = endpoint

    def get(self, identifier: str) -> Endpoint:
        return self._endpoints[identifier]

    def remove(self, identifier: str) -> None:
        with self._lock:
            self._endpoints.pop(identifier, None)
            self._waiting = [delivery for delivery in self._waiting if delivery.endpoint.id != identifier]

    # The outbox

    def enqueue(self, event: Json) -> int:
        """Queue a new event for each endpoint that wants it; returns how many do."""
        with self._lock:
            wanting = [endpoint for endpoint in self._endpoints.values() if endpoint.wants(event)]
            self._waiting += [Delivery(event, endpoint, self._clock.now()) for endpoint in wanting]
            return len(wanting)

    def hold(self, *patterns: str) -> None:
        """Keep events whose type matches (`payout.*`) until `release`."""
        with self._lock:
            self._held = (*self._held, *patterns)

    def release(self) -> None:
        """Hold nothing any more; what was held leaves with the next delivery."""
        with self._lock:
            self._held = ()

    def delay(self, pattern: str, seconds: int) -> None:
        """Let events that wait now and match leave only when the clock has moved on."""
        with self._lock:
            for delivery in self._waiting:
                if fnmatch(delivery.event["type"], pattern):
                    delivery.due_at = self._clock.now() + seconds

    def drop(self, pattern: str) -> int:
        """Lose events that wait and match, as an endpoint that was down for three days would; returns how many."""
        with self._lock:
            kept = [delivery for delivery in self._waiting if not fnmatch(delivery.event["type"], pattern)]
            lost = len(self._waiting) - len(kept)
            self._waiting = kept
            return lost

    def waiting(self) -> list[Delivery]:
        """What has not been accepted yet, oldest first."""
        with self._lock:
            return list(self._waiting)

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
        """Send what is due and not held; a 2xx settles it, else it waits for its retry.

        `copies` sends each that many times, `at_once` sends all at the same time from several threads.
        """
        batch = self._ordered(self._take(pattern, account), order)[:limit]
        attempts = [delivery for delivery in batch for _ in range(copies)]
        if at_once and attempts:
            with ThreadPoolExecutor(min(SENDERS, len(attempts))) as pool:
                answers = list(pool.map(self._attempt, attempts))
        else:
            answers = [self._attempt(delivery) for delivery in attempts]
        self._settle(batch, answers)
        return answers

    def _take(self, pattern: str, account: str | None) -> list[Delivery]:
        now = self._clock.now()
        with self._lock:
            return [
                delivery
                for delivery in self._waiting
                if delivery.due_at <= now
                and fnmatch(delivery.event["type"], pattern)
                and (account is None or delivery.event.get("account") == account)
                and not any(fnmatch(delivery.event["type"], held) for held in self._held)
            ]

    def _ordered(self, batch: list[Delivery], order: Order) -> list[Delivery]:
        if order == "reversed":
            return batch[::-1]
        if order == "shuffled":
            return self._ids.shuffled(batch)
        return batch

    def _attempt(self, delivery: Delivery) -> Answer:
        payload = encode(delivery.event)
        endpoint = self._endpoints.get(delivery.endpoint.id, delivery.endpoint)
        status = post(endpoint.url, payload, signature(payload, endpoint.secret, self.signing_time()))
        return Answer(delivery.event["id"], delivery.event["type"], endpoint.id, status)

    def _settle(self, batch: list[Delivery], answers: list[Answer]) -> None:
        accepted = {(answer.event_id, answer.endpoint_id) for answer in answers if answer.accepted}
        with self._lock:
            for delivery in batch:
                delivery.attempts += 1
                if (delivery.event["id"], delivery.endpoint.id) in accepted:
                    delivery.event["pending_webhooks"] = max(0, delivery.event["pending_webhooks"] - 1)
                elif delivery.attempts <= len(RETRY_AFTER_S):
                    delivery.due_at = self._clock.now() + RETRY_AFTER_S[delivery.attempts - 1]
                    continue
                if delivery in self._waiting:
                    self._waiting.remove(delivery)

    def redeliver(self, event: Json, *, copies: int = 1) -> list[Answer]:
        """Send an event again to each endpoint that wants it, whatever happened before."""
        deliveries = [Delivery(event, each, 0) for each in list(self._endpoints.values()) if each.wants(event)]
        return [self._attempt(delivery) for delivery in deliveries for _ in range(copies)]

    def forge(self, endpoint: Endpoint, event: Json, *, secret: str = "whsec_forged", age_s: int = 0) -> int:
        """Send a body signed with a secret and age of the test's choice; returns the receiver's status."""
        payload = encode(copy.deepcopy(event))
        return post(endpoint.url, payload, signature(payload, secret, self.signing_time() - age_s))

    def tamper(self, endpoint: Endpoint, event: Json, change: Callable[[Json], None]) -> int:
        """Send a body that was changed after it had been signed; returns the receiver's status."""
        changed = copy.deepcopy(event)
        header = signature(encode(event), endpoint.secret, self.signing_time())
        change(changed)
        return post(endpoint.url, encode(changed), header)


def post(url: str, payload: bytes, header: str) -> int:
    """One attempt; the status, or 0 when the receiver could not be reached."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=POST_TIMEOUT_S)
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    headers = {
        "Content-Type": "application/json; charset=utf-8",
        "User-Agent": "Stripe/1.0 (+https://stripe.com/docs/webhooks)",
        "Stripe-Signature": header,
    }
    try:
        connection.request("POST", target, payload, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
