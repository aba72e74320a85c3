"""Breakers: a node that just failed a variant rests before it gets more of it. Pure: the caller brings the time.

Only failures by the node's own fault belong here. The first one opens the breaker, since an engine may be dead while
its agent goes on reporting; each further one doubles the rest. One success closes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

FIRST_REST_S: Final = 5.0
LONGEST_REST_S: Final = 300.0
LEAST_REST_S: Final = 1.0
"""Even the last node of a variant rests for this long: an engine needs a moment to restart."""
FORGET_AFTER_S: Final = 900.0
"""A failure this long past no longer doubles anything."""
MAX_ENTRIES: Final = 10_000


@dataclass(slots=True)
class _Entry:
    failures: int
    failed_at_s: float
    until_s: float


class Breakers:
    """One breaker per (node, variant). Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._entries: dict[tuple[UUID, UUID], _Entry] = {}

    def failed(self, node_id: UUID, variant_id: UUID, now_s: float) -> None:
        """The node broke an attempt of this variant by its own fault."""
        key = (node_id, variant_id)
        entry = self._entries.pop(key, None)
        failures = 1 if entry is None or now_s - entry.failed_at_s > FORGET_AFTER_S else entry.failures + 1
        rest_s = min(FIRST_REST_S * 2.0 ** min(failures - 1, 16), LONGEST_REST_S)
        self._entries[key] = _Entry(failures, now_s, now_s + rest_s)
        if len(self._entries) > MAX_ENTRIES:
            # Insertion order is order of failure: the oldest goes.
            del self._entries[next(iter(self._entries))]

    def succeeded(self, node_id: UUID, variant_id: UUID) -> None:
        """The node delivered: it is trusted again."""
        self._entries.pop((node_id, variant_id), None)

    def forgive(self, node_id: UUID, variant_id: UUID) -> None:
        """The failure turned out to be the request's own (it broke several nodes): nobody rests for it."""
        self.succeeded(node_id, variant_id)

    def resting(self, node_ids: Iterable[UUID], variant_id: UUID, now_s: float) -> frozenset[UUID]:
        """Those of the nodes that get nothing now.

        Never all of them for long: if every node would rest, the one whose rest ends first is let through, once it had
        LEAST_REST_S. A variant is not lost because its whole fleet stumbled.
        """
        if not self._entries:
            return frozenset()
        nodes = set(node_ids)
        open_: dict[UUID, _Entry] = {}
        for node_id in nodes:
            entry = self._entries.get((node_id, variant_id))
            if entry is not None and entry.until_s > now_s:
                open_[node_id] = entry
        if open_ and len(open_) == len(nodes):
            rested = [node_id for node_id, entry in open_.items() if now_s - entry.failed_at_s >= LEAST_REST_S]
            if rested:
                del open_[min(rested, key=lambda node_id: open_[node_id].until_s)]
        return frozenset(open_)
