"""Like offers of one market, held together so that a pick looks at kinds and loads instead of at every node.

A cell is a band of price by a band of speed by what else decides alike. In it offers stand by how full they are, one
list a level; moving one costs the same in a market of ten and of a hundred thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from random import Random
from typing import Final, NamedTuple

from marketplace.matching.live import CAPPED_S, Live
from marketplace.matching.types import OfferView
from marketplace.metering.pricing import Rates

LEVELS: Final = 16
"""Of open offers, by the part of their slots that is taken."""
FULL: Final = LEVELS
AWAY: Final = LEVELS + 1
"""With their owner, or out of memory."""
AGED: Final = LEVELS + 2
"""Found silent for too long, until they are heard again: a pick meets each of them once."""
OPEN_MASK: Final = (1 << LEVELS) - 1
PRICE_RATIO: Final = 1.1
SPEED_RATIO: Final = 1.25
_LOG_PRICE: Final = math.log(PRICE_RATIO)
_LOG_SPEED: Final = math.log(SPEED_RATIO)


class Key(NamedTuple):
    """What offers of one cell share."""

    region: str
    input_band: int
    output_band: int
    prefill_band: int
    decode_band: int
    cold_s: int
    """Seconds of loading, whole; 0: warm."""
    simulated: bool
    probation: bool
    capped: bool
    country: str
    private: bool

    def stands_in(self, regions: frozenset[str]) -> bool:
        """True if its region or country is among these."""
        return self.region in regions or self.country in regions


def key_of(live: Live) -> Key:
    """The cell that an offer belongs to."""
    offer = live.offer
    return Key(
        offer.region,
        _price_band(offer.rates.input),
        _price_band(offer.rates.output),
        int(math.log(live.prefill_s) // _LOG_SPEED),
        int(math.log(live.step_s) // _LOG_SPEED),
        int(live.cold_s),
        offer.simulated,
        offer.probation,
        live.capped,
        offer.data.country,
        offer.data.private,
    )


def _price_band(rate: int) -> int:
    return int(math.log(rate) // _LOG_PRICE) if rate > 0 else -1


def _edge(band: int) -> int:
    """The lowest rate of a band, or a little less."""
    return 0 if band < 0 else max(0, int(PRICE_RATIO**band * 0.999))


class Cell:
    """Offers of one kind. `place` of each is its index in the list of its level."""

    __slots__ = (
        "cold_s",
        "floor",
        "input_ratio",
        "key",
        "least_bias_s",
        "levels",
        "mask",
        "middle",
        "output_ratio",
        "prefill_s",
        "step_s",
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.levels: list[list[Live]] = [[] for _ in range(LEVELS + 3)]
        self.mask = 0
        """Bit by bit, which open levels have anybody."""
        self.floor = Rates(_edge(key.input_band), 0, _edge(key.output_band))
        """No offer here asks less."""
        middle = PRICE_RATIO**0.5
        self.middle = Rates(round(self.floor.input * middle), 0, round(self.floor.output * middle))
        """In the middle of the bands."""
        self.prefill_s = SPEED_RATIO**key.prefill_band * 0.999
        """No offer here reads a token in less, in seconds."""
        self.step_s = SPEED_RATIO**key.decode_band * 0.999
        """Nor writes one."""
        self.least_bias_s = -CAPPED_S if key.capped else 0.0
        self.cold_s = float(key.cold_s)
        self.input_ratio = 0.0
        self.output_ratio = 0.0
        """Of the floor to what the variant usually costs."""

    @property
    def size(self) -> int:
        """Offers in all."""
        return sum(len(level) for level in self.levels)

    def put(self, live: Live, level: int) -> None:
        """Let an offer stand at a level."""
        members = self.levels[level]
        live.cell = self
        live.level = level
        live.place = len(members)
        members.append(live)
        if level < LEVELS:
            self.mask |= 1 << level

    def take(self, live: Live) -> None:
        """Take an offer out: the last one of its level gets its place."""
        level = live.level
        members = self.levels[level]
        last = members.pop()
        if last is not live:
            members[live.place] = last
            last.place = live.place
        if not members and level < LEVELS:
            self.mask &= ~(1 << level)
        live.cell = None

    def sample(self, room: int, rng: Random, *, fullest: bool = False) -> list[Live]:
        """Up to `room` open offers: the emptiest first (or the fullest), any of a level with the same chance. Of a
        level with more than room is left, some may come twice."""
        found: list[Live] = []
        mask = self.mask
        while mask:
            level = mask.bit_length() - 1 if fullest else (mask & -mask).bit_length() - 1
            mask ^= 1 << level
            members = self.levels[level]
            count = len(members)
            if count <= room:
                found += members
                room -= count
            else:
                chance = rng.random
                found += [members[int(chance() * count)] for _ in range(room)]
                room = 0
            if room <= 0:
                break
        return found

    def open(self) -> Iterator[Live]:
        """Every open offer, the emptiest first."""
        for level in range(LEVELS):
            yield from self.levels[level]

    def present(self) -> Iterator[Live]:
        """The same, and then the full ones: everybody who is not away."""
        yield from self.open()
        yield from self.levels[FULL]


def level_of(live: Live) -> int:
    """Where an offer stands now."""
    offer = live.offer
    if not offer.available or lacks_memory(offer):
        return AWAY
    if live.aged:
        return AGED
    if live.busy >= offer.slots:
        return FULL
    return live.busy * LEVELS // offer.slots if live.busy > 0 else 0


def lacks_memory(offer: OfferView) -> bool:
    """True if an engine that is not loaded would not fit beside what uses the device now."""
    needed, free = offer.memory_needed_bytes, offer.memory_free_bytes
    return not offer.warm and needed is not None and free is not None and needed > free


def weighted_median(items: Iterable[tuple[int, int]]) -> int:
    """The value at which half of the weight is reached, of (value, weight) with a value above zero; 0 if none is."""
    ordered = sorted(item for item in items if item[0] > 0)
    half = sum(weight for _, weight in ordered) / 2
    reached = 0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    return 0
