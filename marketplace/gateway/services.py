"""What every part of the gateway is handed: built once by the composition root, alive as long as the process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID

from marketplace.accounts.auth import Authenticator, Principal
from marketplace.accounts.limits import Limiter, LimitState
from marketplace.catalog.service import Catalog
from marketplace.core.database import SessionFactory
from marketplace.core.errors import Unavailable
from marketplace.core.logs import get_logger, reason
from marketplace.core.pump import OutboxPump
from marketplace.core.settings import Settings
from marketplace.core.valkey import ValkeyPipe
from marketplace.fleet.service import Fleet
from marketplace.gateway.cancels import EarlyCancels
from marketplace.gateway.demand import DemandNotes
from marketplace.gateway.giveway import FlexRuns
from marketplace.gateway.http import Scope, client_address, header
from marketplace.gateway.load import Load
from marketplace.gateway.metrics import GatewayMetrics
from marketplace.gateway.prefixes import PrefixMemory
from marketplace.gateway.pulse import Pulse
from marketplace.gateway.schemas import SchemaChecker
from marketplace.gateway.signatures import ReceiptSignatures
from marketplace.gateway.traces import Traces
from marketplace.gateway.waiting import WaitingClients
from marketplace.gateway.webhooks.checks import AddressChecks
from marketplace.jobs.hot import Refused
from marketplace.jobs.service import QueueRoom
from marketplace.jobs.states import Outcome
from marketplace.jobs.writer import HotWriter

log = get_logger(__name__)
DRAINING_RETRY_S = 5


class Draining(Unavailable):
    """This gateway ends; another one will take the request."""

    code = "gateway_draining"


@dataclass(slots=True)
class Services:
    """One gateway's parts. Reached from FastAPI as `request.app.state.services`, from raw ASGI by construction.

    - `catalog` resolves models and counts tokens; `authenticator` and `limiter` decide who may ask, and how much;
    - `fleet` has the live view, the reservations, the links to nodes, and what feeds the pure matcher;
    - `writer` makes the four durable statements of the hot path; `session_factory` is for everything else, in threads;
    - `pulse` keeps the leases of running attempts, `waiting` those of clients that wait for their turn;
    - `load` turns away what is too much, work that can wait first;
    - `addresses` looks at webhooks before they are registered.
    """

    settings: Settings
    session_factory: SessionFactory
    pipe: ValkeyPipe
    catalog: Catalog
    authenticator: Authenticator
    limiter: Limiter
    fleet: Fleet
    writer: HotWriter
    cancels: EarlyCancels
    signatures: ReceiptSignatures
    pulse: Pulse
    waiting: WaitingClients
    load: Load
    addresses: AddressChecks
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    rng: Random = field(default_factory=Random)
    pump: OutboxPump | None = None
    """Sends committed nudges to the broker at once; without it the worker's timer does, a second later."""
    notes: DemandNotes | None = None
    """Keeps for statements what found no room; without it they say that it is unknown."""
    flex: FlexRuns = field(default_factory=lambda: FlexRuns(time.monotonic))
    """Queued jobs that run here, and give way."""
    schemas: SchemaChecker = field(default_factory=SchemaChecker)
    traces: Traces | None = None
    """Spans of requests, where an operator named a collector."""
    draining: bool = False
    _background: set[asyncio.Task[None]] = field(default_factory=set)
    _cache_scope_key: bytes = field(init=False, repr=False)
    _queue_room: QueueRoom = field(init=False, repr=False)

    def __post_init__(self) -> None:
        secret = self.settings.cluster_secret.get_secret_value().encode()
        self._cache_scope_key = hashlib.sha256(b"fallow-cache-scope\0" + secret).digest()
        self._queue_room = QueueRoom(
            self.session_factory,
            most=self.settings.queued_jobs,
            most_own=self.settings.queued_jobs_per_organisation,
        )

    async def authenticate(self, scope: Scope) -> Principal:
        """Who asks, by the key and by where it comes from. Raises Unauthenticated and AddressNotAllowed."""
        principal = await self.authenticator.authenticate(header(scope, b"authorization"))
        if principal.networks:
            principal.require_network(client_address(scope, self.settings.trusted_proxies))
        return principal

    @contextlib.asynccontextmanager
    async def limited(self, principal: Principal) -> AsyncIterator[LimitState]:
        """One request of this key, counted against its limits; what raises inside gives back all that it took."""
        limits = await self.limiter.acquire(principal)
        refused = True
        try:
            yield limits
            refused = False
        finally:
            used = limits.tokens.taken if limits.tokens is not None else 0
            self.in_background(self.limiter.release(limits, refused=refused, used_tokens=used))

    def require_open(self) -> None:
        """Raise Draining once the gateway takes no more work."""
        if self.draining:
            raise Draining(
                "This gateway is shutting down; send the request again.",
                headers={"retry-after": str(DRAINING_RETRY_S)},
            )

    def require_queue_room(self, organisation_id: UUID) -> None:
        """Raise QueueFull unless the queue takes one more job. Asks the database: not on the event loop."""
        self._queue_room.require(organisation_id)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what nobody waits for. Its failure is logged."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    async def settle_background(self, timeout_s: float) -> None:
        """Wait for such work, at most so long."""
        if self._background:
            await asyncio.wait(self._background, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("background_work_failed", error=reason(error))

    def now(self) -> float:
        """Monotonic seconds, for durations that this process measures."""
        return time.monotonic()

    def cache_scope(self, organisation_id: UUID, node_id: UUID) -> str:
        """An opaque name for one renter at one node: stable over gateways, and not comparable between nodes."""
        named = organisation_id.bytes + node_id.bytes
        return hashlib.blake2b(named, key=self._cache_scope_key, digest_size=12).hexdigest()

    async def record_refusal(
        self, *, request_id: str, organisation_id: UUID, endpoint: str, outcome: Outcome, code: str
    ) -> None:
        """Write the outcome row of a request that was never admitted. Raises Unavailable with the database away."""
        self.metrics.outcomes.labels(endpoint, outcome.value).inc()
        await self.writer.submit(
            Refused(
                request_id=request_id,
                organisation_id=organisation_id,
                endpoint=endpoint,
                outcome=outcome.value,
                code=code,
            )
        )
