"""How many slots of each offer are taken, as far as this gateway knows now. In memory; one event loop.

Three sources, none complete: the gateway's own reservations (exact, visible to its next pick at once), what other
gateways run on the nodes connected here, and counts that came from Valkey or from the node's gateway (complete, but old
by a fraction of a second).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

FRESH_S: Final = 1.0
"""For how long a count from elsewhere overrides what is known here."""


class Occupancy:
    """Own reservations are leases: they end by themselves, should their holder forget them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._own: dict[UUID, dict[UUID, float]] = {}
        self._foreign: dict[UUID, int] = {}
        self._published: dict[UUID, int] = {}
        self._seen: dict[UUID, tuple[int, float]] = {}
        self._moved: Callable[[UUID], None] = _ignore
        self._ended: Callable[[UUID], None] = _ignore

    def watch(self, moved: Callable[[UUID], None], ended: Callable[[UUID], None]) -> None:
        """From now on `moved(offer_id)` hears that a count may have changed, `ended(attempt_id)` that a reservation of
        this gateway is over."""
        self._moved, self._ended = moved, ended

    def busy(self, offer_id: UUID) -> int:
        """Slots taken: never less than what is certain."""
        certain = len(self._own.get(offer_id, ())) + self._foreign.get(offer_id, 0)
        count = max(certain, self._published.get(offer_id, 0))
        seen = self._seen.get(offer_id)
        if seen is not None and seen[0] > count and self._clock() < seen[1]:
            return seen[0]
        return count

    def take(self, offer_id: UUID, attempt_id: UUID, ttl_s: float) -> None:
        """This gateway reserves a slot; taking it again renews it."""
        own = self._own.setdefault(offer_id, {})
        if attempt_id not in own:
            self._shift(offer_id, 1)
            own[attempt_id] = self._clock() + ttl_s
            self._moved(offer_id)
        else:
            own[attempt_id] = self._clock() + ttl_s

    def drop(self, offer_id: UUID, attempt_id: UUID) -> None:
        """The slot is free again. Dropping what is not held does nothing."""
        own = self._own.get(offer_id)
        if own is None or own.pop(attempt_id, None) is None:
            return
        if not own:
            del self._own[offer_id]
        self._shift(offer_id, -1)
        self._moved(offer_id)
        self._ended(attempt_id)

    def seen(self, offer_id: UUID, count: int) -> None:
        """A complete count, just read: trusted for FRESH_S."""
        self._seen[offer_id] = (count, self._clock() + FRESH_S)
        self._moved(offer_id)

    def foreign(self, offer_id: UUID, count: int) -> None:
        """Attempts of other gateways on a node that is connected here."""
        _set(self._foreign, offer_id, count)
        self._moved(offer_id)

    def published(self, offer_id: UUID, count: int) -> None:
        """What the node's own gateway says, these attempts included."""
        _set(self._published, offer_id, count)
        self._moved(offer_id)

    def sweep(self) -> None:
        """Forget reservations that ran out, and old counts."""
        now = self._clock()
        for offer_id, own in list(self._own.items()):
            for attempt_id in [attempt_id for attempt_id, until in own.items() if until <= now]:
                self.drop(offer_id, attempt_id)
        for offer_id in [offer_id for offer_id, (_, until) in self._seen.items() if until <= now]:
            del self._seen[offer_id]
            self._moved(offer_id)

    def _shift(self, offer_id: UUID, by: int) -> None:
        seen = self._seen.get(offer_id)
        if seen is not None:
            self._seen[offer_id] = (max(0, seen[0] + by), seen[1])


def _ignore(_: UUID) -> None:
    """Nobody watches."""


def _set(counts: dict[UUID, int], offer_id: UUID, count: int) -> None:
    if count > 0:
        counts[offer_id] = count
    else:
        counts.pop(offer_id, None)
