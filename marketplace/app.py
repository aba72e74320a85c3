"""Composition root of a gateway: settings in, one ASGI application out."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy.exc import OperationalError

from agent.protocol import SOCKET_PATH
from marketplace.accounts.auth import Authenticator
from marketplace.accounts.limits import Limiter
from marketplace.billing import endpoints as billing_endpoints
from marketplace.billing.payments.factory import claim_books, make_payments
from marketplace.billing.payments.port import Payments
from marketplace.catalog.service import Catalog
from marketplace.core.celery import make_celery, sender
from marketplace.core.database import make_engine, make_session_factory
from marketplace.core.logs import get_logger
from marketplace.core.pump import OutboxPump
from marketplace.core.settings import Settings
from marketplace.core.tracing import make_tracing
from marketplace.core.valkey import ValkeyPipe, connect_async
from marketplace.finance import endpoints as finance_endpoints
from marketplace.fleet.service import Fleet
from marketplace.fleet.wire import LINK_PATH
from marketplace.gateway import endpoints, key_endpoints, organisation_endpoints, queue_endpoints, usage_endpoints
from marketplace.gateway.api import Bounded, make_api
from marketplace.gateway.batches import endpoints as batch_endpoints
from marketplace.gateway.cancels import EarlyCancels
from marketplace.gateway.chat import ChatApp
from marketplace.gateway.demand import DemandNotes
from marketplace.gateway.http import Receive, Scope, Send, new_request_id, send_error
from marketplace.gateway.idempotency import Idempotent, Leases
from marketplace.gateway.load import Load, Overloaded
from marketplace.gateway.openapi import describe
from marketplace.gateway.outcomes import Ending
from marketplace.gateway.pulse import Pulse
from marketplace.gateway.queue_runner import QueueRunner
from marketplace.gateway.services import Services
from marketplace.gateway.signatures import ReceiptSignatures
from marketplace.gateway.surface import SURFACES
from marketplace.gateway.traces import Traces
from marketplace.gateway.waiting import WaitingClients
from marketplace.gateway.webhooks import endpoints as webhook_endpoints
from marketplace.gateway.webhooks.checks import AddressChecks
from marketplace.gateway.webhooks.service import warn_of_private
from marketplace.jobs.sweeping import BATCHES_ENDPOINT, JOBS_ENDPOINT
from marketplace.jobs.writer import HotWriter

log = get_logger(__name__)
COSTLY = frozenset({JOBS_ENDPOINT, BATCHES_ENDPOINT})
"""Paths of the API whose POST costs something: they take an Idempotency-Key."""
LAST_WORDS_S = 10.0
"""After draining, attempts that still run are ended as our failure; writing that may take so long."""


def create_app(settings: Settings) -> Gateway:
    """Build a gateway. Nothing is connected before its lifespan begins."""
    engine = make_engine(settings, application_name=f"fallow-{settings.gateway_id}")
    session_factory = make_session_factory(engine)
    pipe = ValkeyPipe(connect_async(settings.valkey_url))
    catalog = Catalog(session_factory)
    fleet = Fleet(settings, session_factory, catalog, pipe)
    writer = HotWriter(settings.database_url)
    tracing = make_tracing(settings, "fallow-gateway")
    services = Services(
        settings=settings,
        session_factory=session_factory,
        pipe=pipe,
        catalog=catalog,
        authenticator=Authenticator(session_factory),
        limiter=Limiter(pipe),
        fleet=fleet,
        writer=writer,
        cancels=EarlyCancels(pipe, free_per_hour=settings.free_prefill_cancels_per_hour),
        signatures=ReceiptSignatures(session_factory),
        pulse=Pulse(settings, writer, fleet.links, fleet.reservations),
        load=Load(lambda: writer.waiting, most_requests=settings.requests_at_once),
        addresses=AddressChecks(allow_private=settings.webhook_allow_private),
        waiting=WaitingClients(
            session_factory,
            lease_s=settings.lease_s,
            most=settings.flex_waiting,
            most_per_organisation=settings.flex_waiting_per_organisation,
        ),
        pump=OutboxPump(session_factory, sender(make_celery(settings))),
        notes=DemandNotes(session_factory, settings.cluster_secret.get_secret_value().encode()),
        traces=Traces(tracing, settings, session_factory) if tracing is not None else None,
    )
    return Gateway(services, make_payments(settings, session_factory))


class Gateway:
    """The ASGI application. Hot paths are raw ASGI, the rest is FastAPI."""

    def __init__(self, services: Services, payments: Payments) -> None:
        self.services = services
        self._payments = payments
        leases = Leases(services)
        self._hot = {
            path: Idempotent(services, leases, ChatApp(services, surface)) for path, surface in SURFACES.items()
        }
        routers = (
            endpoints.router,
            endpoints.operations,
            queue_endpoints.router,
            usage_endpoints.router,
            key_endpoints.router,
            organisation_endpoints.router,
            batch_endpoints.router,
            webhook_endpoints.router,
            billing_endpoints.router,
            finance_endpoints.router,
            services.fleet.router,
        )
        api = make_api(services, routers)
        describe(api)
        api.state.payments = payments
        uploads = {batch_endpoints.FILES_PATH: services.settings.file_limit_bytes + batch_endpoints.MULTIPART_BYTES}
        bounded = Bounded(api, services.settings.body_limit_bytes, uploads)
        self._api = Idempotent(services, leases, bounded, COSTLY)
        self._sockets: dict[str, Any] = {
            SOCKET_PATH: services.fleet.agent_socket,
            LINK_PATH: services.fleet.peer_socket,
        }
        self._queue: QueueRunner | None = None
        self._stopped = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            await self._serve(scope, receive, send)
        elif kind == "websocket":
            socket = self._sockets.get(scope["path"])
            if socket is None:
                await receive()
                await send({"type": "websocket.close", "code": 4404})
            else:
                await socket(scope, receive, send)
        elif kind == "lifespan":
            await self._lifespan(receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in endpoints.UNBOUNDED:
            await self._api(scope, receive, send)
            return
        try:
            with self.services.load.hold():
                await self._hot.get(path, self._api)(scope, receive, send)
        except Overloaded as error:
            self.services.metrics.http_errors.labels(error.code).inc()
            await send_error(send, error, [(b"x-request-id", new_request_id().encode())])

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and begin. Raises what the database raises if it is away."""
        services = self.services
        await asyncio.to_thread(claim_books, services.session_factory, self._payments)
        warn_of_private(services.settings)
        services.writer.start()
        await services.catalog.start()
        await services.fleet.start()
        services.pulse.start()
        services.load.start()
        if services.pump is not None:
            services.pump.start()
        if services.notes is not None:
            services.notes.start()
        if services.traces is not None:
            services.traces.start()
        self._queue = QueueRunner(services)
        self._queue.start()
        log.info("gateway_started", gateway=services.settings.gateway_id, models=len(services.catalog.all()))

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, and let what runs end, for at most so long."""
        services = self.services
        services.draining = True
        await services.fleet.drain()
        await services.waiting.send_away()
        if self._queue is not None:
            await self._queue.quiesce()
        await services.pulse.wait_idle(timeout_s)

    async def stop(self) -> None:
        """End what still runs as our failure, write what is left, and disconnect. Stopping twice does nothing more."""
        if self._stopped:
            return
        self._stopped = True
        services = self.services
        services.draining = True
        await services.waiting.send_away()
        if self._queue is not None:
            await self._queue.stop()
        services.pulse.stop_all(Ending.PLATFORM)
        await services.pulse.wait_idle(LAST_WORDS_S)
        await services.settle_background(LAST_WORDS_S)
        await services.schemas.close()
        services.addresses.close()
        await services.pulse.stop()
        await services.load.stop()
        if services.notes is not None:
            await services.notes.stop()
        if services.traces is not None:
            await services.traces.stop()
        await services.fleet.stop()
        await services.limiter.close()
        await services.catalog.stop()
        await asyncio.to_thread(services.writer.stop)
        if services.pump is not None:
            await asyncio.to_thread(services.pump.stop)
        await services.pipe.close()
        services.session_factory.kw["bind"].dispose()
        log.info("gateway_stopped", gateway=services.settings.gateway_id)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            try:
                if message["type"] == "lifespan.startup":
                    await self.start()
                    await send({"type": "lifespan.startup.complete"})
                else:
                    await self.stop()
                    await send({"type": "lifespan.shutdown.complete"})
                    return
            except OperationalError as error:
                reason = str(error.orig).strip().partition("\n")[0]
                await send({"type": f"{message['type']}.failed", "message": f"The database does not answer: {reason}"})
                return
            except Exception as error:
                # The edge of the process: the server must hear why it cannot go on.
                log.exception("lifespan_failed", phase=message["type"])
                await send({"type": f"{message['type']}.failed", "message": str(error)})
                return
