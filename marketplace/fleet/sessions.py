"""One agent's open socket: what is known of its node, its routes, and the carrier of its frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

from agent.protocol import RESUME_S, DeviceReport, GatewayFrame, Goodbye, Inventory, PlanAnswer
from agent.sizing.shape import ModelShape
from marketplace.core.clock import utcnow
from marketplace.fleet import claims
from marketplace.fleet.claims import Claim, RefusedClaim
from marketplace.fleet.energy import EnergyMeter
from marketplace.fleet.links import GoneReason, Links, Route
from marketplace.fleet.plans import Ability
from marketplace.fleet.repository import Listed, NodeIdentity
from marketplace.fleet.sender import FrameSender
from marketplace.fleet.view import FleetView
from marketplace.matching.fit import figures
from marketplace.matching.standing import Standing
from marketplace.matching.types import UNDECLARED, OfferView

VOID_EVERY_S: Final = 1.0
"""How often a node is told about one attempt that it should forget."""
MAX_VOIDS: Final = 1_024
BARRED: Final = "barred after failures; its owner can appeal"


def _unknown_shape(_: UUID) -> ModelShape | None:
    """Nobody knows the shapes of models."""
    return None


@dataclass(slots=True)
class Allowance:
    """A token bucket. Pure but for the clock that its caller brings."""

    per_s: float
    burst: float
    left: float = field(init=False)
    at_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.burst

    def take(self, now_s: float) -> bool:
        """True if one more is within bounds."""
        self.left = min(self.burst, self.left + max(0.0, now_s - self.at_s) * self.per_s)
        self.at_s = now_s
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


class NodeSession:
    """A connected node. Also the carrier of its attempts."""

    def __init__(
        self, node: NodeIdentity, connected_at_us: int, sender: FrameSender, database_lock: asyncio.Lock
    ) -> None:
        self.node = node
        self.connected_at_us = connected_at_us
        self.sender = sender
        self.routes: dict[bytes, Route] = {}
        self.heard_at_s = time.monotonic()
        self.devices: list[DeviceReport] = []
        self.available = True
        self.unavailable_reason = ""
        self.inventory: Inventory | None = None
        self.claims: list[Claim] = []
        """What of the last inventory may be offered."""
        self.listed: dict[tuple[UUID, str], Listed] = {}
        """What of it is stored."""
        self.refused: list[RefusedClaim] = []
        """What of the last inventory may not be offered; the catalogue may know it later."""
        self.dirty = asyncio.Event()
        """The database is behind: see the service's sync."""
        self.database_lock = database_lock
        """Shared by all sessions of one node: held while a thread writes about it."""
        self.sync_task: asyncio.Task[None] | None = None
        self.meter = EnergyMeter()
        self.control = Allowance(per_s=10.0, burst=60.0)
        self.stray = Allowance(per_s=200.0, burst=2_000.0)
        self.resumes = False
        """The agent takes answers up again after a break."""
        self.gives_choices = False
        """The agent gives several answers to one request."""
        self.region, self.data = "", UNDECLARED
        """As the owner declares them with the last inventory."""
        self.plans = False
        """The agent understands advice."""
        self.ability: Ability | None = None
        """What could run there, where the database does not know it yet."""
        self.answers: list[PlanAnswer] = []
        """To advice; not stored yet."""
        self._voided: dict[bytes, float] = {}

    # --- carrier --------------------------------------------------------------------------------------------------

    def send(self, node_id: UUID, frame: GatewayFrame) -> bool:
        """Queue a frame for this node."""
        return node_id == self.node.node_id and self.sender.put(frame)

    def opened(self, route: Route) -> None:
        """A route uses this socket."""
        self.routes[route.attempt] = route

    def closed(self, route: Route) -> None:
        """A route no longer does."""
        self.routes.pop(route.attempt, None)

    # --- state ----------------------------------------------------------------------------------------------------

    def hear_devices(self, reports: list[DeviceReport], *, available: bool, reason: str) -> bool:
        """Fresh telemetry. True if the database should know at once: availability or the set of devices changed."""
        devices = claims.check_devices(reports)
        known = {(device.device_id, device.name, device.memory_total_bytes) for device in self.devices}
        news = {(device.device_id, device.name, device.memory_total_bytes) for device in devices}
        reason = claims.words(reason)
        said = (available, reason if not available else "")
        changed = said != (self.available, self.unavailable_reason if not self.available else "") or known != news
        self.devices = devices
        self.available = available
        self.unavailable_reason = reason
        self.meter.sample(devices, utcnow())
        return changed

    @property
    def serves(self) -> bool:
        """True if it may be given work: its owner leaves it to us, and its standing allows it."""
        return self.available and self.node.standing != Standing.BARRED

    @property
    def why_not(self) -> str:
        """Why it may not."""
        return BARRED if self.node.standing == Standing.BARRED else self.unavailable_reason

    def show(
        self, view: FleetView, gateway_id: str, shape_of: Callable[[UUID], ModelShape | None] = _unknown_shape
    ) -> None:
        """Put into the view what is offered and stored; what is not stored yet follows with the next sync."""
        devices = {device.device_id: device for device in self.devices}
        offers = [
            self._offer(claim, self.listed[claim.key], gateway_id, devices.get(claim.device_id), shape_of)
            for claim in self.claims
            if claim.key in self.listed and self.listed[claim.key].claim.rates == claim.rates
        ]
        view.put_local(self.node.node_id, offers, self.connected_at_us, self.heard_at_s)

    def should_void(self, attempt: bytes, now_s: float) -> bool:
        """True if the node should be told (again) that it holds no lease on this attempt."""
        if now_s < self._voided.get(attempt, 0.0):
            return False
        if len(self._voided) >= MAX_VOIDS:
            self._voided.clear()
        self._voided[attempt] = now_s + VOID_EVERY_S
        return True

    def end(self, links: Links, reason: GoneReason, goodbye: Goodbye | None, *, resumable: bool = False) -> None:
        """Lose all routes, say why, and let the socket close. Ending twice does nothing more. `resumable`: the socket
        only broke, so answers that have begun wait a moment for the node to come back."""
        until = time.monotonic() + RESUME_S
        for route in list(self.routes.values()):
            if not (resumable and self.resumes and links.park(route, until)):
                links.lose(route, reason)
        if goodbye is not None:
            self.sender.put(goodbye)
        self.sender.close()

    def _offer(
        self,
        claim: Claim,
        listed: Listed,
        gateway_id: str,
        device: DeviceReport | None,
        shape_of: Callable[[UUID], ModelShape | None],
    ) -> OfferView:
        known = figures(
            shape_of(claim.variant_id),
            slots=claim.slots,
            context_per_slot=claim.context_per_slot,
            engine=claim.engine,
            device_name=device.name if device else "",
            gpu=device is not None and device.kind == "gpu",
            total_bytes=device.memory_total_bytes if device else None,
            power_limit_mw=device.power_limit_mw if device else None,
        )
        return OfferView(
            offer_id=listed.offer_id,
            node_id=self.node.node_id,
            owner_organisation_id=self.node.organisation_id,
            device_id=claim.device_id,
            variant_id=claim.variant_id,
            gateway_id=gateway_id,
            price_id=listed.price_id,
            rates=claim.rates,
            slots=claim.slots,
            slots_busy=0,
            context_per_slot=claim.context_per_slot,
            available=self.serves,
            warm=claim.warm,
            simulated=claim.simulated,
            prefix_cache_s=claim.prefix_cache_s,
            sampled_age_s=0.0,
            prefill_tokens_per_s=claim.prefill_tokens_per_s,
            decode_tokens_per_s=claim.decode_tokens_per_s,
            memory_free_bytes=claims.free_memory_bytes([device])[claim.device_id] if device else None,
            unavailable_reason=self.why_not,
            region=self.node.region or self.region,
            data=replace(self.data, attested=self.node.attested),
            probation=self.node.standing == Standing.PROBATION,
            memory_needed_bytes=known.memory_needed_bytes,
            kv_step_s_per_token=known.kv_step_s_per_token,
            power_fraction=known.power_fraction,
            headroom=known.headroom,
            gives_choices=self.gives_choices,
        )
