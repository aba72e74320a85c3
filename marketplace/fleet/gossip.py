"""What gateways tell each other besides their nodes: who failed, who delivered again, and what retries are spent.

One stream in Valkey, read and written in one round trip with each exchange. Every gateway keeps breakers and a budget
of its own and adds what it hears, so that all agree within an exchange; with Valkey away each goes on by what it saw.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

import msgspec

from marketplace.core.valkey import Script, ValkeyDownError, ValkeyPipe
from marketplace.matching.breakers import Breakers
from marketplace.matching.retries import RetryBudget

KEY: Final = "fallow:gossip"
MAX_LENGTH: Final = 4_096
MAX_HEARD: Final = 512
"""Messages taken in one exchange; the next one goes on."""
LIFE_S: Final = 60.0
LOOK_BACK_S: Final = 10.0
"""What a gateway that starts still wants to know."""
MAX_TOLD: Final = 1_000
"""Events between two exchanges; in a storm the oldest fall off."""
MAX_COUNTED: Final = 1_000
FAILED: Final = "f"
DELIVERED: Final = "d"
CHOSEN: Final = "c"

# KEYS: the stream. ARGV: the last id read ('' at first), the message to add ('' for none), the stream's length and life
# in ms, how far back to look at first in ms, how many to read. Answers Valkey's time in ms, then each id and message.
_EXCHANGE: Final = Script("""
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if ARGV[2] ~= '' then
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'm', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
local from = '(' .. ARGV[1]
if ARGV[1] == '' then from = string.format('%.0f', math.max(0, now - ARGV[5])) end
local out = {string.format('%.0f', now)}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', ARGV[6])) do
  out[#out + 1] = entry[1]
  out[#out + 1] = entry[2][2]
end
return out
""")


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one gateway tells the others at a time."""

    gateway_id: str
    events: list[tuple[str, bytes, bytes]]
    """Kind, node, variant; in order."""
    counts: list[tuple[bytes, int, int]]
    """Variant, requests, retries, since the last message."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class SharedBreakers(Breakers):
    """Breakers that note for others what happened here."""

    def __init__(self, told: deque[tuple[str, bytes, bytes]]) -> None:
        super().__init__()
        self._told = told

    def failed(self, node_id: UUID, variant_id: UUID, now_s: float) -> None:
        super().failed(node_id, variant_id, now_s)
        self._told.append((FAILED, node_id.bytes, variant_id.bytes))

    def succeeded(self, node_id: UUID, variant_id: UUID) -> None:
        if self.knows(node_id, variant_id):
            self._told.append((DELIVERED, node_id.bytes, variant_id.bytes))
        super().succeeded(node_id, variant_id)

    def chosen(self, node_id: UUID, variant_id: UUID, now_s: float) -> None:
        if self.knows(node_id, variant_id):
            self._told.append((CHOSEN, node_id.bytes, variant_id.bytes))
        super().chosen(node_id, variant_id, now_s)

    def hear(self, kind: str, node_id: UUID, variant_id: UUID, now_s: float) -> None:
        """It happened at another gateway."""
        if kind == FAILED:
            super().failed(node_id, variant_id, now_s)
        elif kind == DELIVERED:
            super().succeeded(node_id, variant_id)
        elif kind == CHOSEN:
            super().chosen(node_id, variant_id, now_s)


class SharedBudget(RetryBudget):
    """A retry budget that counts for others what was made here."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[UUID, list[int]] = {}

    def request(self, variant_id: UUID, now_s: float) -> None:
        super().request(variant_id, now_s)
        self._count(variant_id, 0)

    def try_retry(self, variant_id: UUID, now_s: float) -> bool:
        granted = super().try_retry(variant_id, now_s)
        if granted:
            self._count(variant_id, 1)
        return granted

    def take(self) -> list[tuple[bytes, int, int]]:
        """What was made since the last call."""
        made, self._made = self._made, {}
        return [(variant_id.bytes, requests, retries) for variant_id, (requests, retries) in made.items()]

    def _count(self, variant_id: UUID, place: int) -> None:
        if variant_id in self._made or len(self._made) < MAX_COUNTED:
            self._made.setdefault(variant_id, [0, 0])[place] += 1


class Gossip:
    """One gateway's part in it. One event loop."""

    def __init__(self, gateway_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway_id = gateway_id
        self._clock = clock
        self._told: deque[tuple[str, bytes, bytes]] = deque(maxlen=MAX_TOLD)
        self._last = ""
        self.breakers = SharedBreakers(self._told)
        self.retries = SharedBudget()

    async def exchange(self, pipe: ValkeyPipe) -> None:
        """Tell what happened here, and take in what happened elsewhere. Raises ValkeyDownError: what was to be told of
        breakers waits, counts of retries are too old by then."""
        events = list(self._told)
        self._told.clear()
        message = Message(self._gateway_id, events, self.retries.take())
        told = _encoder.encode(message) if message.events or message.counts else b""
        args = [self._last, told, MAX_LENGTH, int(LIFE_S * 1000), int(LOOK_BACK_S * 1000), MAX_HEARD]
        try:
            answer = await pipe.run(_EXCHANGE, [KEY], args)
        except ValkeyDownError:
            self._told.extendleft(reversed(events[len(self._told) :]))
            raise
        self._hear(answer)

    def _hear(self, answer: list[Any]) -> None:
        now_ms = int(answer[0])
        for entry_id, packed in zip(answer[1::2], answer[2::2], strict=True):
            self._last = entry_id.decode()
            try:
                message = _decoder.decode(packed)
            except msgspec.DecodeError:
                continue  # of another release
            if message.gateway_id == self._gateway_id:
                continue
            now_s = self._clock()
            at_s = now_s - max(0.0, (now_ms - int(self._last.partition("-")[0])) / 1000)
            for kind, node_id, variant_id in message.events:
                self.breakers.hear(kind, UUID(bytes=node_id), UUID(bytes=variant_id), at_s)
            for variant_id, requests, retries in message.counts:
                self.retries.heard(UUID(bytes=variant_id), requests, retries, now_s)
