"""The live view: every offer that this gateway knows, its own nodes' first-hand and other gateways' by their snapshots.

In memory, one event loop, no I/O: whoever serves a request reads it between two awaits. Without Valkey it keeps the
gateway's own nodes. What can be reached stands in the matcher's index, which every change keeps up offer by offer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final
from uuid import UUID

from marketplace.fleet.occupancy import Occupancy
from marketplace.fleet.snapshot import GatewaySnapshot, PublishedOffer
from marketplace.matching.index import FleetIndex, Reservation
from marketplace.matching.rules import DEFAULT_RULES, Rules
from marketplace.matching.types import Demand, OfferView, Ranked

REMOTE_GRACE_S: Final = 6.0
"""A gateway that is missing from Valkey for this long is gone; less may be a restart of Valkey."""
RANK_LIMIT: Final = 64
"""Offers of one ranking: as many as a reservation tries."""
MAX_WEIGHED: Final = 100_000
"""Attempts of this gateway whose prompts are counted where they run."""
NOBODY: Final[frozenset[UUID]] = frozenset()


@dataclass(slots=True)
class _Entry:
    """An offer as one gateway has it, with the instant of its figures."""

    offer: OfferView
    sampled_at_s: float
    connected_at_us: int


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
        rules: Rules = DEFAULT_RULES,
    ) -> None:
        self._gateway_id = gateway_id
        self._occupancy = occupancy
        self._linked = linked
        self._clock = clock
        self._local: dict[UUID, dict[UUID, _Entry]] = {}
        self._remote: dict[str, _Gateway] = {}
        self._claims: dict[UUID, dict[str, _Entry]] = {}
        """By offer and gateway: of two gateways that claim a node, the later connection is right."""
        self._by_variant: dict[UUID, dict[UUID, _Entry]] = {}
        self._home: dict[UUID, str] = {}
        self._reached: set[str] = set()
        """Other gateways whose offers stand in the index."""
        self._revision = 0
        self._weighed: dict[UUID, Reservation] = {}
        self.index = FleetIndex(rules)
        occupancy.watch(self._count_moved, self._attempt_ended)

    # --- picking --------------------------------------------------------------------------------------------------

    def rank(self, demand: Demand, rng: Random, *, resting: frozenset[UUID] = NOBODY) -> Ranked:
        """Offers that can run the demand now, best first, out of the index: in a large fleet the best few."""
        self._follow_links()
        return self.index.rank(demand, self._clock(), rng, resting=resting, limit=RANK_LIMIT)

    def full(self, demand: Demand) -> list[UUID]:
        """Offers that would run the demand but for their slots, which are taken."""
        self._follow_links()
        return self.index.full(demand, self._clock())

    def weigh(self, attempt_id: UUID, offer_id: UUID, demand: Demand) -> None:
        """An attempt of this gateway goes there: its prompt counts from now on, until its reservation is dropped."""
        if len(self._weighed) >= MAX_WEIGHED or attempt_id in self._weighed:
            return
        reservation = self.index.dispatched(offer_id, demand, self._clock())
        if reservation is not None:
            self._weighed[attempt_id] = reservation

    def first_token(self, attempt: bytes) -> None:
        """An attempt's prompt is read."""
        reservation = self._weighed.get(UUID(bytes=attempt))
        if reservation is not None:
            self.index.started(reservation, self._clock())

    def wrote(self, attempt_id: UUID, tokens: int) -> None:
        """An attempt's answer ended of itself after so many tokens."""
        reservation = self._weighed.get(attempt_id)
        if reservation is not None:
            self.index.wrote(reservation, tokens)

    def largest_context(self, variant_id: UUID) -> int:
        """Tokens of the largest slot that serves a variant, whatever its state; 0 for none."""
        return self.index.largest_context(variant_id)

    # --- reading --------------------------------------------------------------------------------------------------

    def offers(self, variant_id: UUID) -> list[OfferView]:
        """What is offered of a variant now, available or not; in time that grows with their number."""
        return self._current(self._by_variant.get(variant_id, {}).values())

    def all_offers(self) -> list[OfferView]:
        """What is offered now of everything."""
        return [offer for entries in self._by_variant.values() for offer in self._current(entries.values())]

    def offer(self, offer_id: UUID) -> OfferView | None:
        """One offer as it is now, or None."""
        claims = self._claims.get(offer_id)
        current = self._current([_latest(claims)]) if claims else []
        return current[0] if current else None

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
        before = self._local.get(node_id, {})
        entries = {offer.offer_id: _Entry(offer, sampled_at_s, connected_at_us) for offer in offers}
        self._local[node_id] = entries
        self._home.setdefault(node_id, self._gateway_id)
        self._revision += 1
        self._claim(self._gateway_id, entries, before)

    def touch_local(
        self, node_id: UUID, *, available: bool, reason: str, memory_free_bytes: dict[str, int | None]
    ) -> None:
        """Fresh telemetry of a connected node; free memory by device."""
        now = self._clock()
        for offer_id, entry in self._local.get(node_id, {}).items():
            entry.sampled_at_s = now
            offer = entry.offer
            free = memory_free_bytes.get(offer.device_id)
            if (offer.available, offer.unavailable_reason, offer.memory_free_bytes) != (available, reason, free):
                entry.offer = replace(offer, available=available, unavailable_reason=reason, memory_free_bytes=free)
                self._revision += 1
                self._settle(offer_id)
            else:
                self.index.heard(offer_id, now)

    def drop_local(self, node_id: UUID) -> None:
        """The node's socket is gone."""
        entries = self._local.pop(node_id, None)
        if entries is not None:
            self._revision += 1
            self._claim(self._gateway_id, {}, entries)
            self._rehome({node_id})

    # --- other gateways' nodes ------------------------------------------------------------------------------------

    def put_remote(self, snapshot: GatewaySnapshot, version: str, elapsed_s: float) -> None:
        """Another gateway's snapshot, `elapsed_s` after it was published."""
        if snapshot.gateway_id == self._gateway_id:
            return
        now = self._clock()
        gateway = _Gateway(snapshot.url, version, now)
        for published in snapshot.offers:
            offer = published.view(snapshot.gateway_id, elapsed_s)
            gateway.entries[offer.offer_id] = _Entry(offer, now - offer.sampled_age_s, published.connected_at_us)
            self._occupancy.published(offer.offer_id, offer.slots_busy)
        before = self._remote.get(snapshot.gateway_id)
        self._remote[snapshot.gateway_id] = gateway
        if self._linked(snapshot.gateway_id):
            self._reached.add(snapshot.gateway_id)
        self._withdraw(snapshot.gateway_id, before, gateway)

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
            self._reached.discard(gateway_id)
            self._withdraw(gateway_id, gateway, None)

    def superseded(self) -> list[UUID]:
        """Own nodes that a later connection holds elsewhere: their sockets here are dead."""
        lost: list[UUID] = []
        for node_id, entries in self._local.items():
            for offer_id, entry in entries.items():
                claims = self._claims[offer_id]
                if len(claims) > 1 and _latest(claims).connected_at_us > entry.connected_at_us:
                    lost.append(node_id)
                    break
        return lost

    # --- inside ---------------------------------------------------------------------------------------------------

    def _current(self, entries: Iterable[_Entry]) -> list[OfferView]:
        now = self._clock()
        busy_of = self._occupancy.busy
        return [
            replace(
                entry.offer,
                slots_busy=busy_of(entry.offer.offer_id),
                sampled_age_s=max(0.0, now - entry.sampled_at_s),
            )
            for entry in entries
            if entry.offer.gateway_id == self._gateway_id or self._linked(entry.offer.gateway_id)
        ]

    def _claim(self, gateway_id: str, now: dict[UUID, _Entry], before: dict[UUID, _Entry]) -> None:
        """A gateway's claim on offers changed from one list to another."""
        for offer_id, entry in now.items():
            self._claims.setdefault(offer_id, {})[gateway_id] = entry
            self._settle(offer_id)
        for offer_id in before.keys() - now.keys():
            claims = self._claims[offer_id]
            del claims[gateway_id]
            if not claims:
                del self._claims[offer_id]
            self._settle(offer_id, before[offer_id].offer.variant_id)

    def _withdraw(self, gateway_id: str, before: _Gateway | None, now: _Gateway | None) -> None:
        old = before.entries if before is not None else {}
        new = now.entries if now is not None else {}
        for offer_id in old.keys() - new.keys():
            self._occupancy.published(offer_id, 0)
        self._claim(gateway_id, new, old)
        kept = {entry.offer.node_id for entry in new.values()}
        self._rehome({entry.offer.node_id for entry in old.values()} - kept)

    def _settle(self, offer_id: UUID, variant_id: UUID | None = None) -> None:
        """Bring the lists and the index in line with the claims on an offer."""
        claims = self._claims.get(offer_id)
        if claims is None:
            if variant_id is not None:
                variant = self._by_variant.get(variant_id, {})
                variant.pop(offer_id, None)
                if not variant:
                    self._by_variant.pop(variant_id, None)
            self.index.remove(offer_id)
            return
        entry = _latest(claims)
        offer = entry.offer
        self._by_variant.setdefault(offer.variant_id, {})[offer_id] = entry
        self._home[offer.node_id] = offer.gateway_id
        if offer.gateway_id != self._gateway_id and offer.gateway_id not in self._reached:
            self.index.remove(offer_id)
            return
        now = self._clock()
        busy, age_s = self._occupancy.busy(offer_id), max(0.0, now - entry.sampled_at_s)
        if busy != offer.slots_busy or age_s != offer.sampled_age_s:
            offer = replace(offer, slots_busy=busy, sampled_age_s=age_s)
        self.index.put(offer, now)

    def _rehome(self, node_ids: set[UUID]) -> None:
        """Who has these nodes' sockets, by what is claimed now."""
        latest: dict[UUID, tuple[int, str]] = {}
        for node_id in node_ids:
            self._home.pop(node_id, None)
            if node_id in self._local:
                mine = max((entry.connected_at_us for entry in self._local[node_id].values()), default=0)
                latest[node_id] = (mine, self._gateway_id)
        for gateway_id, gateway in self._remote.items():
            for entry in gateway.entries.values():
                node_id = entry.offer.node_id
                if node_id in node_ids and entry.connected_at_us > latest.get(node_id, (-1, ""))[0]:
                    latest[node_id] = (entry.connected_at_us, gateway_id)
        for node_id, (_, gateway_id) in latest.items():
            self._home[node_id] = gateway_id

    def _follow_links(self) -> None:
        """Take gateways whose link opened into the index, and those whose link broke out of it."""
        reached = {gateway_id for gateway_id in self._remote if self._linked(gateway_id)}
        if reached == self._reached:
            return
        changed = reached ^ self._reached
        self._reached = reached
        for gateway_id in changed:
            for offer_id in self._remote[gateway_id].entries if gateway_id in self._remote else ():
                self._settle(offer_id)

    def _count_moved(self, offer_id: UUID) -> None:
        if offer_id in self.index:
            self.index.set_busy(offer_id, self._occupancy.busy(offer_id), self._clock())

    def _attempt_ended(self, attempt_id: UUID) -> None:
        reservation = self._weighed.pop(attempt_id, None)
        if reservation is not None:
            self.index.release(reservation, self._clock(), slot=False)


def _latest(claims: dict[str, _Entry]) -> _Entry:
    return max(claims.values(), key=lambda entry: entry.connected_at_us)
