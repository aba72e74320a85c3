"""The live view: every offer that this gateway knows, its own nodes' first-hand and other gateways' by their snapshots.

In memory, one event loop, no I/O: whoever serves a request reads it between two awaits. Without Valkey it keeps the
gateway's own nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

from marketplace.fleet.occupancy import Occupancy
from marketplace.fleet.snapshot import GatewaySnapshot, PublishedOffer
from marketplace.matching.types import OfferView

REMOTE_GRACE_S: Final = 6.0
"""A gateway that is missing from Valkey for this long is gone; less may be a restart of Valkey."""
AGE_STEP_S: Final = 1.0
"""A view's age may lag by this much, which spares building it anew for each request."""


@dataclass(slots=True)
class _Entry:
    """An offer with the instant of its figures; `offer` is a cached view of it."""

    offer: OfferView
    sampled_at_s: float
    connected_at_us: int
    built_at_s: float


@dataclass(slots=True)
class _Gateway:
    url: str
    version: str
    seen_at_s: float
    entries: dict[UUID, _Entry] = field(default_factory=dict)


class FleetView:
    """Offers by variant. `occupancy` tells how many slots are taken, `linked` whether a gateway can be reached: what
    is behind one that cannot is not shown."""

    def __init__(
        self,
        gateway_id: str,
        occupancy: Occupancy,
        linked: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway_id = gateway_id
        self._occupancy = occupancy
        self._linked = linked
        self._clock = clock
        self._local: dict[UUID, dict[UUID, _Entry]] = {}
        self._remote: dict[str, _Gateway] = {}
        self._by_variant: dict[UUID, dict[UUID, _Entry]] = {}
        self._home: dict[UUID, str] = {}
        self._revision = 0

    # --- reading --------------------------------------------------------------------------------------------------

    def offers(self, variant_id: UUID) -> list[OfferView]:
        """What is offered of a variant now, available or not."""
        return self._current(self._by_variant.get(variant_id, {}).values())

    def all_offers(self) -> list[OfferView]:
        """What is offered now of everything."""
        return [offer for entries in self._by_variant.values() for offer in self._current(entries.values())]

    def home_of(self, node_id: UUID) -> str | None:
        """The gateway that has the node's socket, or None."""
        return self._home.get(node_id)

    def url_of(self, gateway_id: str) -> str | None:
        """Where another gateway can be reached."""
        gateway = self._remote.get(gateway_id)
        return gateway.url if gateway else None

    def gateways(self) -> dict[str, str]:
        """Other gateways and their URLs."""
        return {gateway_id: gateway.url for gateway_id, gateway in self._remote.items()}

    def known_versions(self) -> list[tuple[str, str]]:
        """Which snapshots are at hand."""
        return [(gateway_id, gateway.version) for gateway_id, gateway in self._remote.items()]

    @property
    def revision(self) -> int:
        """Moves whenever this gateway's own nodes change, taken slots apart."""
        return self._revision

    def published(self) -> list[PublishedOffer]:
        """This gateway's own offers, for the others."""
        return [
            PublishedOffer.of(offer, entry.connected_at_us)
            for entries in self._local.values()
            for entry, offer in zip(entries.values(), self._current(entries.values()), strict=True)
        ]

    # --- own nodes ------------------------------------------------------------------------------------------------

    def put_local(self, node_id: UUID, offers: Sequence[OfferView], connected_at_us: int, sampled_at_s: float) -> None:
        """The complete list of a connected node's offers, replacing the last one."""
        now = self._clock()
        self._local[node_id] = {
            offer.offer_id: _Entry(offer, sampled_at_s, connected_at_us, now - AGE_STEP_S) for offer in offers
        }
        self._rebuild()

    def touch_local(
        self, node_id: UUID, *, available: bool, reason: str, memory_free_bytes: dict[str, int | None]
    ) -> None:
        """Fresh telemetry of a connected node; free memory by device."""
        now = self._clock()
        for entry in self._local.get(node_id, {}).values():
            entry.sampled_at_s = now
            entry.built_at_s = now - AGE_STEP_S
            offer = entry.offer
            free = memory_free_bytes.get(offer.device_id)
            if (offer.available, offer.unavailable_reason, offer.memory_free_bytes) != (available, reason, free):
                entry.offer = replace(offer, available=available, unavailable_reason=reason, memory_free_bytes=free)
                self._revision += 1

    def drop_local(self, node_id: UUID) -> None:
        """The node's socket is gone."""
        if self._local.pop(node_id, None) is not None:
            self._rebuild()

    # --- other gateways' nodes ------------------------------------------------------------------------------------

    def put_remote(self, snapshot: GatewaySnapshot, version: str, elapsed_s: float) -> None:
        """Another gateway's snapshot, `elapsed_s` after it was published."""
        if snapshot.gateway_id == self._gateway_id:
            return
        now = self._clock()
        gateway = _Gateway(snapshot.url, version, now)
        for published in snapshot.offers:
            offer = published.view(snapshot.gateway_id, elapsed_s)
            sampled_at_s = now - offer.sampled_age_s
            gateway.entries[offer.offer_id] = _Entry(offer, sampled_at_s, published.connected_at_us, now)
            self._occupancy.published(offer.offer_id, offer.slots_busy)
        before = self._remote.get(snapshot.gateway_id)
        self._forget_counts(before, keep=gateway.entries.keys())
        self._remote[snapshot.gateway_id] = gateway
        self._rebuild()

    def keep_remote(self, gateway_id: str) -> None:
        """The gateway lives, and its snapshot is as it was."""
        gateway = self._remote.get(gateway_id)
        if gateway is not None:
            gateway.seen_at_s = self._clock()

    def expire_remote(self) -> None:
        """Drop gateways unseen for REMOTE_GRACE_S, save those whose link proves them alive."""
        limit = self._clock() - REMOTE_GRACE_S
        for gateway_id, gateway in list(self._remote.items()):
            if gateway.seen_at_s < limit and not self._linked(gateway_id):
                self.drop_remote(gateway_id)

    def drop_remote(self, gateway_id: str) -> None:
        """The gateway is gone."""
        gateway = self._remote.pop(gateway_id, None)
        if gateway is not None:
            self._forget_counts(gateway, keep=())
            self._rebuild()

    def superseded(self) -> list[UUID]:
        """Own nodes that a later connection holds elsewhere: their sockets here are dead."""
        lost: list[UUID] = []
        for node_id, entries in self._local.items():
            mine = max((entry.connected_at_us for entry in entries.values()), default=0)
            if any(
                entry.connected_at_us > mine and entry.offer.node_id == node_id
                for gateway in self._remote.values()
                for entry in gateway.entries.values()
            ):
                lost.append(node_id)
        return lost

    # --- inside ---------------------------------------------------------------------------------------------------

    def _current(self, entries: Iterable[_Entry]) -> list[OfferView]:
        now = self._clock()
        busy_of = self._occupancy.busy
        out: list[OfferView] = []
        for entry in entries:
            offer = entry.offer
            if offer.gateway_id != self._gateway_id and not self._linked(offer.gateway_id):
                continue
            busy = busy_of(offer.offer_id)
            if busy != offer.slots_busy or now - entry.built_at_s >= AGE_STEP_S:
                offer = replace(offer, slots_busy=busy, sampled_age_s=max(0.0, now - entry.sampled_at_s))
                entry.offer = offer
                entry.built_at_s = now
            out.append(offer)
        return out

    def _rebuild(self) -> None:
        self._revision += 1
        latest: dict[UUID, _Entry] = {}
        for entries in (*self._local.values(), *(gateway.entries for gateway in self._remote.values())):
            for offer_id, entry in entries.items():
                known = latest.get(offer_id)
                if known is None or entry.connected_at_us > known.connected_at_us:
                    latest[offer_id] = entry
        self._by_variant = {}
        self._home = dict.fromkeys(self._local, self._gateway_id)
        for offer_id, entry in latest.items():
            self._by_variant.setdefault(entry.offer.variant_id, {})[offer_id] = entry
            self._home[entry.offer.node_id] = entry.offer.gateway_id

    def _forget_counts(self, gateway: _Gateway | None, *, keep: Iterable[UUID]) -> None:
        kept = set(keep)
        for offer_id in gateway.entries if gateway else ():
            if offer_id not in kept:
                self._occupancy.published(offer_id, 0)
