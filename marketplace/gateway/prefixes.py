"""What a node has read for a renter lately: the prefix of a prompt that it must have cached, by its own promise.

Token ids are kept as bytes, so that the longest common prefix is a few comparisons of memory. In memory of one gateway,
bounded; what another gateway knows is missing here, and then the node's own report counts.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

MAX_BYTES: Final = 64 * 1024 * 1024
MAX_IDS: Final = 8_192
"""Of each prompt, so many leading tokens are remembered."""
PER_NODE: Final = 4
"""Prompts remembered for one renter, variant and node: a slot keeps one prefix."""
ID_BYTES: Final = 4

_Key = tuple[UUID, UUID, UUID]


def pack(ids: Sequence[int]) -> bytes:
    """The leading token ids of a prompt, in the form that this module compares."""
    return array("I", ids[:MAX_IDS]).tobytes()


class PrefixMemory:
    """Prompts by (organisation, variant, node), each for as long as the node promised to keep it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[_Key, list[tuple[float, bytes]]] = OrderedDict()
        self._nodes: dict[tuple[UUID, UUID], set[UUID]] = {}

    def remember(self, organisation_id: UUID, variant_id: UUID, node_id: UUID, packed: bytes, *, for_s: float) -> None:
        """The node has just served this prompt and promises to keep its prefix for `for_s` seconds."""
        if for_s <= 0 or not packed:
            return
        key = (organisation_id, variant_id, node_id)
        now = self._clock()
        before = self._entries.pop(key, [])
        kept = [entry for entry in before if entry[0] > now and entry[1] != packed][-(PER_NODE - 1) :]
        self._entries[key] = [*kept, (now + for_s, packed)]
        self._bytes += _size(self._entries[key]) - _size(before)
        self._nodes.setdefault(key[:2], set()).add(node_id)
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def proven(self, organisation_id: UUID, variant_id: UUID, node_id: UUID, packed: bytes) -> int:
        """Leading tokens that the node promised to have cached; at most all but one, which it must compute."""
        entries = self._entries.get((organisation_id, variant_id, node_id))
        if not entries or not packed:
            return 0
        now = self._clock()
        longest = max((_common(packed, known) for until, known in entries if until > now), default=0)
        return min(longest, len(packed) // ID_BYTES - 1)

    def held(self, organisation_id: UUID, variant_id: UUID, packed: bytes) -> dict[UUID, int]:
        """By node: leading tokens of this prompt that it holds, for those that hold any. Matching prefers them."""
        held: dict[UUID, int] = {}
        for node_id in self._nodes.get((organisation_id, variant_id), ()):
            tokens = self.proven(organisation_id, variant_id, node_id, packed)
            if tokens:
                held[node_id] = tokens
        return held

    def _forget(self, key: _Key) -> None:
        self._bytes -= _size(self._entries.pop(key))
        nodes = self._nodes[key[:2]]
        nodes.discard(key[2])
        if not nodes:
            del self._nodes[key[:2]]


def _size(entries: list[tuple[float, bytes]]) -> int:
    return sum(len(packed) for _, packed in entries)


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix, in ids: the longest of which all bytes agree, by bisection."""
    low, high = 0, min(len(a), len(b)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * ID_BYTES : middle * ID_BYTES] == b[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
