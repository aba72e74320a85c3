"""Over minutes: which variant to load where, and which to evict, so that demand finds warm engines. Pure.

What a device is worth for a variant in the coming horizon, in nano-USD:

    gain = served tokens x price - energy - tokens lost while its weights load

Served is bounded by demand that nobody serves yet, by the device's speed, by the share of its time that is left, and by
how long its owner leaves it to us. Energy is what serving draws beyond idling, at the owner's tariff. What is loaded
already loads in no time, so a plan does not shuffle weights for a small advantage. Circuits bound how many watts may be
drawn at once behind one fuse.

Where a solver is installed, a linear program says first how devices share their time (see solver). What its rounding
leaves, or everything without it, goes greedily: the largest gain first; gains only shrink while demand is served, so a
heap with lazy renewal finds the next one without looking at all. Then devices are moved where a move gains: a large
card that took a small model gives it to a small card when a large model waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from marketplace.matching.solver import available, solve

NANO_PER_KWH: Final = 3_600_000.0
"""Joules in a kilowatt-hour: prices are per kilowatt-hour, energy is in joules."""
INIT_S: Final = 5.0
"""Starting an engine, beside reading its weights."""
MIN_SHARE: Final = 0.02
"""A smaller part of a device's time is not worth a variant of its own."""
MIN_GAIN_PART: Final = 0.02
"""Loading something new must gain more than this part of what it earns: forecasts are not that sharp."""
MAX_MOVES: Final = 2_000
MAX_DEVICES: Final = 100_000
MAX_VARIANTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class VariantDemand:
    """What is asked of one variant in the coming horizon."""

    variant: str
    needed_bytes: int
    """Weights, cache and scratch of one engine, margin included."""
    tokens_per_s: float
    """Demand, in tokens that are paid for."""
    nano_per_token: float


@dataclass(frozen=True, slots=True)
class PlanDevice:
    """One device as the planner sees it."""

    device: str
    memory_bytes: int
    """That engines may use."""
    tokens_per_s: Mapping[str, float]
    """By variant; one that is missing cannot run there."""
    loaded: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()
    """Of the loaded, those that stay whatever is planned: by the owner's word, or since they came only just now."""
    load_bytes_per_s: float = 2e9
    offered_s: float = float("inf")
    """For how long its owner leaves it to us, by the schedule or by habit."""
    idle_w: float = 0.0
    load_w: float = 0.0
    tariff_nano_per_kwh: float = 0.0
    circuit: str = ""
    """Devices behind one fuse; empty: its own."""
    owner_choice: frozenset[str] | None = None
    """Variants that the owner allows; None: any."""
    needed_bytes: Mapping[str, int] = field(default_factory=dict)
    """By variant, where this device's engine takes another sum than the variant's usual one."""
    load_s: Mapping[str, float] = field(default_factory=dict)
    """By variant, where loading takes another time than reading so many bytes."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One variant on one device."""

    device: str
    variant: str
    share: float
    """Of the device's time."""
    tokens_per_s: float
    gain_nano: float
    """Over the horizon."""
    cold: bool
    """Its weights must be loaded first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be loaded, what evicted, and what that gains."""

    assignments: tuple[Assignment, ...]
    evictions: tuple[tuple[str, str], ...]
    """(device, variant), only where its memory is needed."""
    unserved_tokens_per_s: Mapping[str, float]
    gain_nano: float
    moves: int = 0
    bound_nano: float | None = None
    """No plan gains more; None where no solver was asked."""

    @property
    def loads(self) -> tuple[Assignment, ...]:
        """What has to be loaded."""
        return tuple(item for item in self.assignments if item.cold)


@dataclass(slots=True)
class State:
    """A plan in the making."""

    devices: Sequence[PlanDevice]
    demands: Mapping[str, VariantDemand]
    circuits_w: Mapping[str, float]
    horizon_s: float
    unmet: dict[str, float] = field(default_factory=dict)
    share_left: list[float] = field(default_factory=list)
    memory_left: list[int] = field(default_factory=list)
    drawn_w: dict[str, float] = field(default_factory=dict)
    placed: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    """By device: variant -> (tokens a second, gain)."""

    def gain(self, at: int, variant: str, most: float | None = None) -> tuple[float, float]:
        """(gain in nano-USD, tokens a second) of a variant on a device as the plan stands; zeros where it cannot be."""
        device, demand = self.devices[at], self.demands[variant]
        speed = device.tokens_per_s.get(variant, 0.0)
        share = self.share_left[at]
        if speed <= 0.0 or share < MIN_SHARE or self.needed(at, variant) > self.memory_left[at]:
            return 0.0, 0.0
        if variant in self.placed[at] or not self._fuse_holds(at):
            return 0.0, 0.0
        rate = min(self.unmet[variant] if most is None else most, speed * share)
        useful_s = min(self.horizon_s, device.offered_s)
        cold = variant not in device.loaded
        if cold:
            read_s = self.needs(at, variant) / device.load_bytes_per_s
            useful_s -= INIT_S + device.load_s.get(variant, read_s)
        if useful_s <= 0.0 or rate <= 0.0:
            return 0.0, 0.0
        earned = rate * useful_s * demand.nano_per_token
        busy_s = useful_s * rate / speed
        energy = (device.load_w - device.idle_w) * busy_s * device.tariff_nano_per_kwh / NANO_PER_KWH
        gain = earned - energy
        if cold:
            gain -= MIN_GAIN_PART * earned
        return (gain, rate) if gain > 0.0 else (0.0, 0.0)

    def place(self, at: int, variant: str, gain: float, rate: float) -> None:
        device = self.devices[at]
        if not self.placed[at]:
            self.drawn_w[device.circuit] = self.drawn_w.get(device.circuit, 0.0) + device.load_w
        self.placed[at][variant] = (rate, gain)
        self.unmet[variant] -= rate
        self.share_left[at] -= rate / device.tokens_per_s[variant]
        self.memory_left[at] -= self.needed(at, variant)

    def needs(self, at: int, variant: str) -> int:
        """Bytes of one engine there."""
        return self.devices[at].needed_bytes.get(variant, self.demands[variant].needed_bytes)

    def needed(self, at: int, variant: str) -> int:
        """What placing it takes of the memory that is not taken for good."""
        return 0 if variant in self.devices[at].pinned else self.needs(at, variant)

    def memory_bytes(self, at: int) -> int:
        """What a plan may dispose of."""
        device = self.devices[at]
        held = sum(self.needs(at, name) for name in device.pinned if name in self.demands)
        return device.memory_bytes - held

    def clear(self, at: int) -> dict[str, tuple[float, float]]:
        """Take everything off a device, and answer what it was."""
        device = self.devices[at]
        before = self.placed[at]
        for variant, (rate, _) in before.items():
            self.unmet[variant] += rate
        if before:
            self.drawn_w[device.circuit] -= device.load_w
        self.placed[at] = {}
        self.share_left[at] = 1.0
        self.memory_left[at] = self.memory_bytes(at)
        return before

    def restore(self, at: int, before: Mapping[str, tuple[float, float]]) -> None:
        self.clear(at)
        for variant, (rate, gain) in before.items():
            self.place(at, variant, gain, rate)

    def fill(self, at: int, allowed: Sequence[str]) -> float:
        """Give a device what gains most, variant by variant, and answer the gain."""
        total = 0.0
        while True:
            best = max(((self.gain(at, variant), variant) for variant in allowed), default=None)
            if best is None or best[0][0] <= 0.0:
                return total
            (gain, rate), variant = best
            self.place(at, variant, gain, rate)
            total += gain

    def _fuse_holds(self, at: int) -> bool:
        device = self.devices[at]
        limit = self.circuits_w.get(device.circuit) if device.circuit else None
        return limit is None or bool(self.placed[at]) or self.drawn_w.get(device.circuit, 0.0) + device.load_w <= limit


def plan(
    devices: Sequence[PlanDevice],
    demands: Sequence[VariantDemand],
    *,
    horizon_s: float = 600.0,
    circuits_w: Mapping[str, float] | None = None,
    solver: bool | None = None,
) -> Plan:
    """Plan the coming horizon. `solver` chooses whether a linear program leads the way; by default wherever it is
    installed. Raises ValueError for more than MAX_DEVICES or MAX_VARIANTS, or a horizon of nothing."""
    if len(devices) > MAX_DEVICES or len(demands) > MAX_VARIANTS or horizon_s <= 0:
        raise ValueError("too many devices or variants, or no time to plan for")
    state = State(devices, {demand.variant: demand for demand in demands}, circuits_w or {}, horizon_s)
    state.unmet = {demand.variant: demand.tokens_per_s for demand in demands}
    state.share_left = [1.0] * len(devices)
    state.memory_left = [state.memory_bytes(at) for at in range(len(devices))]
    state.placed = [{} for _ in devices]
    allowed = [_allowed(state, at) for at in range(len(devices))]
    bound = None
    if available() if solver is None else solver:
        bound = _follow_solver(state, allowed)
    _greedy(state, allowed)
    moves = _improve(state, allowed)
    return _told(state, moves, bound)


def _follow_solver(state: State, allowed: Sequence[Sequence[str]]) -> float | None:
    """Place what the linear program gives most of a device's time to. Answers its bound."""
    solved = solve(state, allowed)
    if solved is None:
        return None
    bound, shares = solved
    for share, at, variant in sorted(shares, reverse=True):
        if share < MIN_SHARE:
            break
        most = share * state.devices[at].tokens_per_s[variant]
        gain, rate = state.gain(at, variant, most=min(most, state.unmet[variant], _left(state, at, variant)))
        if gain > 0.0:
            state.place(at, variant, gain, rate)
    return bound


def _left(state: State, at: int, variant: str) -> float:
    return state.devices[at].tokens_per_s[variant] * state.share_left[at]


def _allowed(state: State, at: int) -> list[str]:
    device = state.devices[at]
    choice = device.owner_choice
    return [
        variant
        for variant in device.tokens_per_s
        if variant in state.demands
        and (choice is None or variant in choice)
        and state.needed(at, variant) <= device.memory_bytes
    ]


def _greedy(state: State, allowed: Sequence[Sequence[str]]) -> None:
    heap: list[tuple[float, int, str]] = []
    for at, variants in enumerate(allowed):
        for variant in variants:
            gain, _ = state.gain(at, variant)
            if gain > 0.0:
                heap.append((-gain, at, variant))
    heapq.heapify(heap)
    while heap:
        _, at, variant = heapq.heappop(heap)
        gain, rate = state.gain(at, variant)
        if gain <= 0.0:
            continue
        if heap and -heap[0][0] > gain:
            # Others took of its demand meanwhile: it goes back to where it now belongs.
            heapq.heappush(heap, (-gain, at, variant))
            continue
        state.place(at, variant, gain, rate)


def _improve(state: State, allowed: Sequence[Sequence[str]]) -> int:
    """Move devices to variants that are still asked for, as long as all together gain."""
    moves = tried = 0
    progress = True
    while progress and tried < MAX_MOVES:
        progress = False
        wanted = sorted(state.unmet, key=lambda name: -state.unmet[name] * state.demands[name].nano_per_token)
        for variant in wanted:
            if state.unmet[variant] <= 1e-9:
                continue
            for at in _movable(state, allowed, variant):
                tried += 1
                if tried >= MAX_MOVES:
                    break
                if _move(state, allowed, at, variant):
                    moves += 1
                    progress = True
    return moves


def _movable(state: State, allowed: Sequence[Sequence[str]], variant: str) -> list[int]:
    """Devices that could serve it but serve others, or others as well; those that lose least first, a few of them."""
    able = [at for at in range(len(state.devices)) if variant in allowed[at] and state.placed[at]]
    able = [at for at in able if len(state.placed[at]) > (variant in state.placed[at])]
    return heapq.nsmallest(8, able, key=lambda at: sum(gain for _, gain in state.placed[at].values()))


def _move(state: State, allowed: Sequence[Sequence[str]], at: int, variant: str) -> bool:
    before = state.clear(at)
    lost = sum(gain for _, gain in before.values())
    gain, rate = state.gain(at, variant)
    if gain <= 0.0:
        state.restore(at, before)
        return False
    state.place(at, variant, gain, rate)
    gain += state.fill(at, allowed[at])
    others = [other for other in _spare(state, allowed, before) if other != at]
    kept = [(other, dict(state.placed[other])) for other in others]
    for other in others:
        gain += state.fill(other, [name for name in allowed[other] if name in before])
    if gain > lost * 1.001 + 1e-6:
        return True
    for other, placed in kept:
        state.restore(other, placed)
    state.restore(at, before)
    return False


def _spare(state: State, allowed: Sequence[Sequence[str]], variants: Mapping[str, object]) -> list[int]:
    """Devices with time left that could take over some of these variants; a few of them."""
    spare = [
        at
        for at in range(len(state.devices))
        if state.share_left[at] >= MIN_SHARE and any(name in allowed[at] for name in variants)
    ]
    return heapq.nlargest(8, spare, key=lambda at: state.share_left[at])


def _told(state: State, moves: int, bound: float | None) -> Plan:
    assignments: list[Assignment] = []
    evictions: list[tuple[str, str]] = []
    for at, device in enumerate(state.devices):
        for variant, (rate, gain) in state.placed[at].items():
            share = rate / device.tokens_per_s[variant]
            cold = variant not in device.loaded
            assignments.append(Assignment(device.device, variant, share, rate, gain, cold))
        evictions += ((device.device, variant) for variant in _crowded_out(state, at))
    return Plan(
        assignments=tuple(assignments),
        evictions=tuple(evictions),
        unserved_tokens_per_s={name: max(0.0, left) for name, left in state.unmet.items()},
        gain_nano=sum(item.gain_nano for item in assignments),
        moves=moves,
        bound_nano=bound,
    )


def _crowded_out(state: State, at: int) -> list[str]:
    """What is loaded there and must go, because what comes needs its memory; the largest first."""
    device = state.devices[at]
    there = device.loaded - device.pinned
    stays = [name for name in there if name not in state.placed[at] and name in state.demands]
    room = state.memory_left[at]
    gone: list[str] = []
    held = sum(state.needs(at, name) for name in stays)
    for name in sorted(stays, key=lambda name: (state.unmet[name] > 0, -state.needs(at, name))):
        if held <= room:
            break
        gone.append(name)
        held -= state.needs(at, name)
    return gone
