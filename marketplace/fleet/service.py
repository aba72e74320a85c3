"""The fleet as a gateway uses it: nodes' sockets, the live view, reservations and links, composed.

fleet = Fleet(settings, session_factory, catalog, pipe)
await fleet.start()
ranked = fleet.rank(demand)
offer = await fleet.reservations.reserve_first(ranked, attempt_id, ttl_s)
fleet.links.open(offer, attempt_id, sink)
fleet.links.send(offer.node_id, Run(...))
...
fleet.links.send(offer.node_id, ReportAck(...)); fleet.links.close(attempt_id)
await fleet.reservations.release(offer, attempt_id)
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final, TypeVar
from uuid import UUID
from weakref import WeakValueDictionary

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from agent.protocol import HEARTBEAT_S, Abilities, Goodbye, Inventory, PlanAnswer, Telemetry
from agent.sizing.shape import ModelShape
from marketplace.catalog.prices import set_price
from marketplace.catalog.service import Catalog
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import FallowError, Unavailable
from marketplace.core.logs import get_logger, reason
from marketplace.core.settings import Settings
from marketplace.core.valkey import ValkeyDownError, ValkeyPipe
from marketplace.fleet import claims, energy, plans, repository, snapshot
from marketplace.fleet.endpoints import make_router
from marketplace.fleet.gossip import Gossip
from marketplace.fleet.links import Carrier, GoneReason, Links
from marketplace.fleet.occupancy import Occupancy
from marketplace.fleet.peers import ForeignCounts, Peers, PeerSocket
from marketplace.fleet.repository import Listed, NodeIdentity
from marketplace.fleet.reservations import Reservations
from marketplace.fleet.sender import FrameSender
from marketplace.fleet.sessions import NodeSession
from marketplace.fleet.socket import AgentSocket
from marketplace.fleet.view import FleetView
from marketplace.matching.fit import shape_from
from marketplace.matching.rules import Rules
from marketplace.matching.types import Demand, OfferView, Ranked

log = get_logger(__name__)

SILENT_S: Final = 3 * HEARTBEAT_S
"""An agent that says nothing for this long is gone."""
EXCHANGE_EVERY_S: Final = 0.25
"""How often the view is compared and exchanged with other gateways..."""
PUBLISH_AT_LEAST_S: Final = 2.0
"""...and published even if nothing changed."""
HOUSEKEEP_EVERY_S: Final = 1.0
STORE_EVERY_S: Final = 5.0
SYNC_PAUSE_S: Final = 0.2
"""Between two writes about one node: a node that changes its mind all the time writes five times a second."""
SYNC_RETRY_S: Final = 2.0
MAX_REFUSALS_TOLD: Final = 8
"""Of one inventory, a line each; the rest is a number."""
COMEBACK_S: Final = 0.5
"""What a leaving gateway tells its agents: come back, here or elsewhere, after this."""

T = TypeVar("T")


class Fleet:
    """Everything about nodes. One event loop; the database in threads."""

    def __init__(self, settings: Settings, session_factory: SessionFactory, catalog: Catalog, pipe: ValkeyPipe) -> None:
        secret = settings.cluster_secret.get_secret_value()
        self._settings = settings
        self._gateway_id = settings.gateway_id
        self._session_factory = session_factory
        self._catalog = catalog
        self._pipe = pipe
        self._occupancy = Occupancy()
        self._sessions: dict[UUID, NodeSession] = {}
        self._locks: WeakValueDictionary[UUID, asyncio.Lock] = WeakValueDictionary()
        self._peers = Peers(self._gateway_id, secret, lambda: self.links)
        self._tasks: list[asyncio.Task[None]] = []
        self._rng = Random(secrets.randbits(64))  # noqa: S311  # breaks ties; another's guess gains nothing
        self._draining = False
        self._published: tuple[object, float] = (None, 0.0)
        self._beat_at = 0.0
        self._version = 0
        self._version_prefix = secrets.token_hex(4)

        self.rules = replace(
            Rules.of(allow_simulated=settings.allow_simulated, stale_after_s=SILENT_S),
            guarded=settings.refuse_late,
            first_token_s=settings.first_token_s,
            first_token_tokens_per_s=settings.first_token_tokens_per_s,
        )
        self.view = FleetView(self._gateway_id, self._occupancy, self._peers.linked, rules=self.rules)
        self.links = Links(self._find_carrier, self._on_full, self.view.first_token)
        self.reservations = Reservations(pipe, self._occupancy, self.rules)
        self._gossip = Gossip(self._gateway_id)
        self.breakers = self._gossip.breakers
        self.retries = self._gossip.retries
        self.agent_socket = AgentSocket(self._gateway_id, self, self.links)
        """ASGI application for protocol.SOCKET_PATH."""
        self.peer_socket = PeerSocket(
            self._gateway_id, secret, self.links, ForeignCounts(self._occupancy), self._sessions.get
        )
        """ASGI application for wire.LINK_PATH."""
        self.router = make_router(session_factory)
        """HTTP endpoints: enrolment."""

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start exchanging views and keeping the books of the nodes. Waits for neither store."""
        contradiction = self.rules.contradiction()
        if contradiction is not None:
            log.warning("matching_settings_contradict", what=contradiction)
        self._tasks = [
            asyncio.create_task(_every(EXCHANGE_EVERY_S, self._exchange)),
            asyncio.create_task(_every(HOUSEKEEP_EVERY_S, self._housekeep)),
            asyncio.create_task(_every(STORE_EVERY_S, self._store)),
        ]

    async def drain(self) -> None:
        """Let other gateways choose this one's nodes no more; attempts that run go on."""
        self._draining = True
        with contextlib.suppress(ValkeyDownError):
            await self._publish()

    async def stop(self) -> None:
        """Say goodbye to agents and gateways, store what is left, and stop. Attempts that still run are lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        keys, args = snapshot.withdraw_call(self._gateway_id)
        with contextlib.suppress(ValkeyDownError):
            await self._pipe.run(snapshot.PUBLISH, keys, args)
        for session in list(self._sessions.values()):
            goodbye = Goodbye("restarting", "This gateway is stopping.", COMEBACK_S * self._rng.uniform(0.5, 1.5))
            session.end(self.links, GoneReason.STOPPING, goodbye)
        self.peer_socket.stop()
        await self._peers.stop()
        await asyncio.gather(*(self.farewell(session) for session in list(self._sessions.values())))

    # --- the gateway's questions ----------------------------------------------------------------------------------

    def rank(self, demand: Demand) -> Ranked:
        """Offers that can run the demand now, best first, by this gateway's view, breakers and rules."""
        return self.view.rank(demand, self._rng, resting=self.resting(demand.variant_id))

    def resting(self, variant_id: UUID) -> frozenset[UUID]:
        """Nodes whose breaker is open for this variant."""
        return self.breakers.resting(self.view.index.nodes(variant_id), variant_id, time.monotonic())

    def chosen(self, offer: OfferView, attempt_id: UUID, demand: Demand) -> None:
        """A slot is reserved for an attempt: its prompt weighs there from now on, and a node on trial gets no other."""
        self.view.weigh(attempt_id, offer.offer_id, demand)
        self.breakers.chosen(offer.node_id, offer.variant_id, time.monotonic())

    @property
    def nodes_connected(self) -> int:
        """Agents whose socket is here."""
        return len(self._sessions)

    # --- the agents' socket ---------------------------------------------------------------------------------------

    async def identify(self, node_id: UUID) -> NodeIdentity | None:
        """The node's key and state. Raises Unavailable."""
        return await self._in_database(lambda session: repository.find_node(session, node_id))

    async def welcome(self, node: NodeIdentity, agent_version: str, sender: FrameSender) -> NodeSession:
        """Register a node's socket; an older one of the same node ends. Raises Unavailable."""
        lock = self._locks.get(node.node_id)
        if lock is None:
            lock = self._locks[node.node_id] = asyncio.Lock()
        async with lock:
            connected_at_us = await self._in_database(
                lambda session: repository.connect_node(session, node.node_id, agent_version)
            )
            older = self._sessions.pop(node.node_id, None)
            if older is not None:
                goodbye = Goodbye("replaced", "A newer socket is open.", -1.0)
                older.end(self.links, GoneReason.REPLACED, goodbye, resumable=True)
                self.view.drop_local(node.node_id)
                with contextlib.suppress(Unavailable):
                    await self._write_energy(older)
            session = NodeSession(node, connected_at_us, sender, lock)
            self._sessions[node.node_id] = session
        session.sync_task = asyncio.create_task(self._keep_synced(session))
        log.info("node_connected", node=node.node_id.hex)
        return session

    async def farewell(self, session: NodeSession) -> None:
        """A node's socket is closed: its offers go at once, its rows as soon as the database takes it."""
        node_id = session.node.node_id
        if session.sync_task is not None:
            session.sync_task.cancel()
        if self._sessions.get(node_id) is not session:
            return
        del self._sessions[node_id]
        self.view.drop_local(node_id)
        silent_s = time.monotonic() - session.heard_at_s
        log.info("node_disconnected", node=node_id.hex, silent_s=round(silent_s, 1))
        if silent_s <= energy.MAX_GAP_S:
            session.meter.sample(session.devices, utcnow())
        with contextlib.suppress(Unavailable):
            # Else the interval ends where it was last seen, by the sweep.
            async with session.database_lock:
                await self._write_energy(session)
                if node_id not in self._sessions:
                    await self._in_database(
                        lambda db: repository.disconnect_node(db, node_id, self._gateway_id, silent_s)
                    )

    def on_telemetry(self, session: NodeSession, frame: Telemetry) -> None:
        """Fresh telemetry: the view at once, the database if something of lasting interest changed."""
        if session.hear_devices(frame.devices, available=frame.available, reason=frame.unavailable_reason):
            session.dirty.set()
        self.view.touch_local(
            session.node.node_id,
            available=session.serves,
            reason=session.why_not,
            memory_free_bytes=claims.free_memory_bytes(session.devices),
        )

    def on_inventory(self, session: NodeSession, frame: Inventory) -> None:
        """A new list of offers: what it lacks goes from the view at once, what is new comes once it is stored."""
        session.inventory = frame
        session.region, session.data = claims.check_data(frame.data)
        self._check_claims(session)
        session.show(self.view, self._gateway_id, self._shape_of)
        session.dirty.set()

    def on_plans(self, session: NodeSession, frame: Abilities | PlanAnswer) -> None:
        """What could run on a node, or its answer to advice: stored within STORE_EVERY_S."""
        if isinstance(frame, Abilities):
            session.ability = plans.check(
                frame, self._catalog.by_sha256, allow_simulated=self._settings.allow_simulated
            )
        elif len(session.answers) < plans.MAX_ANSWERS:
            session.answers.append(frame)

    # --- inside: carriers -----------------------------------------------------------------------------------------

    def _find_carrier(self, node_id: UUID, gateway_id: str) -> Carrier | None:
        session = self._sessions.get(node_id)
        if session is not None:
            return session
        return self._peers.get(self.view.home_of(node_id) or gateway_id)

    def _on_full(self, offer_id: UUID) -> None:
        # The agent knows best: until fresher news there is no room.
        self._occupancy.seen(offer_id, claims.MAX_SLOTS)

    # --- inside: a node's rows ------------------------------------------------------------------------------------

    def _check_claims(self, session: NodeSession) -> None:
        if session.inventory is None:
            return
        session.claims, refused = claims.check_inventory(
            session.inventory, self._catalog.by_sha256, allow_simulated=self._settings.allow_simulated
        )
        if refused != session.refused:
            for claim in refused[:MAX_REFUSALS_TOLD]:
                log.warning(
                    "offer_refused",
                    node=session.node.node_id.hex,
                    variant_sha256=claim.variant_sha256,
                    reason=claim.reason,
                )
            if len(refused) > MAX_REFUSALS_TOLD:
                log.warning("offers_refused", node=session.node.node_id.hex, count=len(refused))
        session.refused = refused

    async def _keep_synced(self, session: NodeSession) -> None:
        while True:
            await session.dirty.wait()
            session.dirty.clear()
            try:
                async with session.database_lock:
                    await self._sync(session)
            except FallowError as error:
                log.warning("node_sync_failed", node=session.node.node_id.hex, error=error.message)
                session.dirty.set()
                await asyncio.sleep(SYNC_RETRY_S)
            await asyncio.sleep(SYNC_PAUSE_S)

    async def _sync(self, session: NodeSession) -> None:
        if self._sessions.get(session.node.node_id) is not session:
            return
        inventory = session.inventory
        write: Callable[[Session], list[Listed]] = partial(
            repository.sync_node,
            node=session.node,
            gateway_id=self._gateway_id,
            claims=list(session.claims),
            devices=list(session.devices),
            available=session.available,
            reason=session.unavailable_reason,
            data=session.data if inventory is not None else None,
            declared_idle_mw=claims.declared_mw(inventory.declared_idle_watts if inventory else None),
            declared_load_mw=claims.declared_mw(inventory.declared_load_watts if inventory else None),
            set_price=set_price,
        )
        listed = await self._in_database(write)
        session.listed = {item.claim.key: item for item in listed}
        if self._sessions.get(session.node.node_id) is session:
            session.show(self.view, self._gateway_id, self._shape_of)

    async def _write_energy(self, session: NodeSession) -> None:
        due = session.meter.due()
        if not due:
            return
        node_id = session.node.node_id
        ids = await self._in_database(lambda db: repository.write_energy(db, node_id, due))
        for stretch, row_id in zip(due, ids, strict=True):
            stretch.row_id = row_id
            stretch.dirty = False

    # --- inside: timers -------------------------------------------------------------------------------------------

    async def _exchange(self) -> None:
        """Tell other gateways what is here, hear what is there."""
        with contextlib.suppress(ValkeyDownError):
            await self._publish()
            await self._poll()
            await self._gossip.exchange(self._pipe)

    async def _publish(self) -> None:
        offers = [] if self._draining else self.view.published()
        facts = (self.view.revision, tuple(offer.slots_busy for offer in offers))
        now = time.monotonic()
        if facts == self._published[0] and now - self._published[1] < PUBLISH_AT_LEAST_S:
            if now - self._beat_at >= snapshot.BEAT_S:
                self._beat_at = now
                await self._pipe.run(snapshot.BEAT, [snapshot.gateway_key(self._gateway_id)], [])
            return
        self._version += 1
        mine = snapshot.GatewaySnapshot(self._gateway_id, self._settings.own_url, offers)
        keys, args = snapshot.publish_call(mine, f"{self._version_prefix}-{self._version}")
        await self._pipe.run(snapshot.PUBLISH, keys, args)
        self._published, self._beat_at = (facts, now), now

    async def _poll(self) -> None:
        keys, args = snapshot.poll_call(self.view.known_versions())
        for row in await self._pipe.run(snapshot.POLL, keys, args):
            gateway_id, version, elapsed_s, received = snapshot.parse_row(row)
            if received is None:
                self.view.keep_remote(gateway_id)
            else:
                self.view.put_remote(received, version, elapsed_s)
        self._peers.follow(self.view.gateways())

    async def _housekeep(self) -> None:
        self.links.expire_parked(time.monotonic())
        self.view.index.rules = replace(self.rules, gateways=1 + len(self.view.gateways()))
        self._occupancy.sweep()
        self.view.expire_remote()
        self._peers.follow(self.view.gateways())
        for node_id in self.view.superseded():
            self._end(node_id, GoneReason.REPLACED, Goodbye("replaced", "A newer socket is open elsewhere.", -1.0))
        limit = time.monotonic() - SILENT_S
        for node_id, session in list(self._sessions.items()):
            if session.heard_at_s < limit:
                self._end(node_id, GoneReason.NODE_GONE, Goodbye("silent", "Nothing was heard of you.", COMEBACK_S))

    def _end(self, node_id: UUID, reason: GoneReason, goodbye: Goodbye) -> None:
        session = self._sessions.get(node_id)
        if session is not None:
            self.view.drop_local(node_id)
            session.end(self.links, reason, goodbye)

    async def _store(self) -> None:
        """Move intervals on, store energy, close what dead gateways left, look again at offers once refused."""
        with contextlib.suppress(Unavailable):
            connected = list(self._sessions)
            moved = await self._in_database(lambda db: repository.touch(db, self._gateway_id, connected))
            await self._in_database(repository.end_stale_intervals)
            await self._refresh_identities(connected)
            for session in list(self._sessions.values()):
                await self._store_session(session, moved.get(session.node.node_id))
            await self._advise()

    async def _advise(self) -> None:
        """Store what nodes said about plans, and pass on advice to those that are connected here."""
        willing = {node_id: session for node_id, session in self._sessions.items() if session.plans}
        if not willing:
            return
        said: list[plans.Said] = []
        for node_id, session in willing.items():
            if session.ability is not None or session.answers:
                said.append(plans.Said(node_id, session.ability, session.answers))
                session.ability, session.answers = None, []
        advice = await self._in_database(lambda db: plans.exchange(db, list(willing), said))
        for node_id, frame in advice:
            session_ = self._sessions.get(node_id)
            if session_ is not None:
                session_.sender.put(frame)

    async def _refresh_identities(self, connected: list[UUID]) -> None:
        """Standing and region may have changed in the database."""
        for node in await self._in_database(lambda db: repository.find_nodes(db, connected)):
            session = self._sessions.get(node.node_id)
            if session is not None and session.node != node:
                session.node = node
                session.show(self.view, self._gateway_id, self._shape_of)

    def _shape_of(self, variant_id: UUID) -> ModelShape | None:
        variant = self._catalog.by_id(variant_id)
        return shape_from(variant.shape) if variant is not None else None

    async def _store_session(self, session: NodeSession, moved: int | None) -> None:
        session.meter.sample(session.devices, utcnow())
        async with session.database_lock:
            await self._write_energy(session)
        if moved is not None and moved != (len(session.listed) if session.available else 0):
            # Somebody ended an interval of a node that lives: after a long outage of the database, say.
            session.dirty.set()
        if session.refused:
            self._check_claims(session)
            session.dirty.set()

    async def _in_database(self, work: Callable[[Session], T]) -> T:
        def run() -> T:
            with transaction(self._session_factory) as session:
                return work(session)

        try:
            return await asyncio.to_thread(run)
        except SQLAlchemyError as error:
            log.warning("fleet_database_failed", error=reason(error))
            raise Unavailable("The database did not answer.") from error


async def _every(period_s: float, tick: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await tick()
        except Exception:
            # A timer's edge: one failed tick is reported, and the next one comes.
            log.exception("fleet_tick_failed")
        await asyncio.sleep(period_s)
