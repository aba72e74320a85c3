"""Breakers: a node that just failed a variant rests before it gets more of it. Pure: the caller brings the time.

Only failures by the node's own fault belong here. The first one opens the breaker, since an engine may be dead while
its agent goes on reporting; each further one doubles the rest. After it one request goes there as a canary, and the
others only once that one succeeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final
from uuid import UUID

FIRST_REST_S: Final = 5.0
LONGEST_REST_S: Final = 300.0
LEAST_REST_S: Final = 1.0
"""Even the last node of a variant rests for this long: an engine needs a moment to restart."""
FORGET_AFTER_S: Final = 900.0
"""A failure this long past no longer doubles anything."""
PROBE_S: Final = 30.0
"""For how long one request alone tries a node whose rest is over."""
MAX_ENTRIES: Final = 10_000
_NOBODY: Final[frozenset[UUID]] = frozenset()


@dataclass(slots=True)
class _Entry:
    failures: int
    failed_at_s: float
    until_s: float
    probed_until_s: float = 0.0
    """A request is on its way there to find out; no second one goes meanwhile."""


class Breakers:
    """One breaker per (node, variant). Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._entries: dict[tuple[UUID, UUID], _Entry] = {}
        self._nodes: dict[UUID, set[UUID]] = {}
        """By variant, those with an entry."""

    def failed(self, node_id: UUID, variant_id: UUID, now_s: float) -> None:
        """The node broke an attempt of this variant by its own fault."""
        key = (node_id, variant_id)
        entry = self._entries.pop(key, None)
        failures = 1 if entry is None or now_s - entry.failed_at_s > FORGET_AFTER_S else entry.failures + 1
        rest_s = min(FIRST_REST_S * 2.0 ** min(failures - 1, 16), LONGEST_REST_S)
        self._entries[key] = _Entry(failures, now_s, now_s + rest_s)
        self._nodes.setdefault(variant_id, set()).add(node_id)
        if len(self._entries) > MAX_ENTRIES:
            # Insertion order is order of failure: the oldest goes.
            self._forget(next(iter(self._entries)))

    def succeeded(self, node_id: UUID, variant_id: UUID) -> None:
        """The node delivered: it is trusted again."""
        if (node_id, variant_id) in self._entries:
            self._forget((node_id, variant_id))

    def forgive(self, node_id: UUID, variant_id: UUID) -> None:
        """The failure turned out to be the request's own (it broke several nodes): nobody rests for it."""
        self.succeeded(node_id, variant_id)

    def knows(self, node_id: UUID, variant_id: UUID) -> bool:
        """True if the node failed this variant, and has not delivered since."""
        return (node_id, variant_id) in self._entries

    def chosen(self, node_id: UUID, variant_id: UUID, now_s: float) -> None:
        """A request goes to the node. If that one failed before, it is the canary: the next ones wait for its end, at
        most PROBE_S."""
        entry = self._entries.get((node_id, variant_id))
        if entry is not None and now_s - entry.failed_at_s <= FORGET_AFTER_S:
            entry.probed_until_s = now_s + PROBE_S

    def resting(self, node_ids: Iterable[UUID], variant_id: UUID, now_s: float) -> frozenset[UUID]:
        """Those of the nodes that get nothing now. Quickest for a set, of which only those that failed are looked at.

        Never all of them for long: if every node would rest, the one whose rest ends first is let through, once it had
        LEAST_REST_S. A variant is not lost because its whole fleet stumbled.
        """
        failed = self._nodes.get(variant_id)
        if not failed:
            return _NOBODY
        nodes = node_ids if isinstance(node_ids, Set) else set(node_ids)
        open_: dict[UUID, _Entry] = {}
        for node_id in failed:
            entry = self._entries[node_id, variant_id]
            if node_id in nodes and max(entry.until_s, entry.probed_until_s) > now_s:
                open_[node_id] = entry
        if open_ and len(open_) == len(nodes):
            rested = [node_id for node_id, entry in open_.items() if now_s - entry.failed_at_s >= LEAST_REST_S]
            if rested:
                del open_[min(rested, key=lambda node_id: open_[node_id].until_s)]
        return frozenset(open_)

    def _forget(self, key: tuple[UUID, UUID]) -> None:
        del self._entries[key]
        node_id, variant_id = key
        nodes = self._nodes[variant_id]
        nodes.discard(node_id)
        if not nodes:
            del self._nodes[variant_id]
