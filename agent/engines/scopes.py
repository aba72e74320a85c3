"""Which slot a request goes to, so that a prefix cache never crosses from one tenant to another. Pure.

A shared prefix cache is a timing side channel: whoever guesses the beginning of another tenant's prompt sees his own
first token come sooner. llama.cpp caches per slot and lets us choose the slot, so a slot belongs to the scope that used
it last, and a request of another scope must begin there from nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

MAX_FINGERPRINTS: Final = 256
"""Messages of a prompt that are compared; what follows is rare and would only cost memory."""

_encoder: Final = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Seat:
    """A slot given to one request."""

    slot: int
    reuse: bool
    """True if what the slot remembers belongs to the same scope."""


@dataclass(slots=True)
class _Slot:
    busy: bool = False
    scope: str = ""
    fingerprints: tuple[bytes, ...] = ()
    used: int = 0
    """Position in the order of use; 0: never."""


class SlotTable:
    """The slots of one engine. An empty scope belongs to nobody: it never reuses, and nobody reuses after it."""

    def __init__(self, slots: int) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._clock = 0

    def take(self, scope: str, fingerprints: tuple[bytes, ...]) -> Seat | None:
        """Seat a request where most of its beginning is remembered, else where least is lost. None: all are busy."""
        free = [index for index, slot in enumerate(self._slots) if not slot.busy]
        if not free:
            return None
        best = max(free, key=lambda index: self._preference(self._slots[index], scope, fingerprints))
        slot = self._slots[best]
        seat = Seat(best, reuse=bool(scope) and slot.scope == scope)
        self._clock += 1
        slot.busy, slot.scope, slot.fingerprints, slot.used = True, scope, fingerprints, self._clock
        return seat

    def give_back(self, seat: Seat) -> None:
        """The request has ended; what it left in the slot stays its scope's."""
        self._slots[seat.slot].busy = False

    @property
    def busy(self) -> int:
        """Number of seats taken."""
        return sum(slot.busy for slot in self._slots)

    @staticmethod
    def _preference(slot: _Slot, scope: str, fingerprints: tuple[bytes, ...]) -> tuple[int, int]:
        shared = _common(slot.fingerprints, fingerprints) if scope and slot.scope == scope else 0
        # Sharing no more than "no tools" is no reason to overwrite the scope's own conversation.
        return (shared if shared > 1 else 0), -slot.used


def fingerprint_messages(body: Mapping[str, object]) -> tuple[bytes, ...]:
    """One short digest a message, tools first: enough to compare beginnings without keeping anybody's prompt."""
    messages = body.get("messages")
    parts: list[object] = [
        body.get("tools"),
        *(messages if isinstance(messages, list) else [{"prompt": body.get("prompt")}]),
    ]
    return tuple(
        hashlib.blake2b(_encoder.encode(part), digest_size=16).digest() for part in parts[: MAX_FINGERPRINTS + 1]
    )


def _common(left: tuple[bytes, ...], right: tuple[bytes, ...]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
