"""Why a node did not earn in one hour: every minute of it has one cause, and they add up to sixty. Pure.

Time is told from rows of time: leases, offered stretches, the owner's own, telemetry. A minute that was offered and not
rented has the first of these causes that its rows show: a rule of the market that refused this node alone, others who
were cheaper, others who were as dear, and where nobody asked anybody, no demand. What no row tells is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import Final

import ledger

HOUR: Final = timedelta(hours=1)
MINUTES: Final = 60
MINUTE_US: Final = 60_000_000
HOUR_US: Final = MINUTES * MINUTE_US
Span = tuple[int, int]
"""[start, end) in microseconds from the hour's beginning."""


class Cause(StrEnum):
    """What a stretch of the hour went to."""

    EARNING = "earning"
    OWNER = "owner"
    """Its owner had the machine: no loss."""
    NOT_OFFERED = "not offered"
    DISCONNECTED = "disconnected"
    BREAKER = "failures"
    STALE = "network"
    PROBATION = "probation"
    MEMORY = "free memory"
    CONTEXT = "context"
    POLICY = "data policy or region"
    FULL = "slots"
    PRICE = "price"
    CHOICE = "choice"
    OTHER = "other rules"
    DEMAND = "demand"
    BEFORE = "not joined yet"
    AHEAD = "not over yet"


_BY_FILTER: Final[dict[str, Cause]] = {
    "BREAKER": Cause.BREAKER,
    "EXCLUDED": Cause.BREAKER,
    "STALE": Cause.STALE,
    "PROBATION": Cause.PROBATION,
    "UNPROVEN": Cause.PROBATION,
    "MEMORY": Cause.MEMORY,
    "CONTEXT": Cause.CONTEXT,
    "REGION": Cause.POLICY,
    "DATA": Cause.POLICY,
    "FULL": Cause.FULL,
    "RESERVED": Cause.FULL,
    "PRICE": Cause.PRICE,
    "BALANCE": Cause.PRICE,
}
_SENTENCES: Final[dict[Cause, str]] = {
    Cause.EARNING: "A job held the node.",
    Cause.NOT_OFFERED: "Connected, but nothing was offered, and its agent said no reason for the whole machine: a model"
    " was loading, a card or a price was held apart, or a plan had freed it. `fallow agent status` tells.",
    Cause.DISCONNECTED: "Nothing was heard of its agent.",
    Cause.BREAKER: "{requests} requests passed it by while it rested after failures: look at its log.",
    Cause.STALE: "{requests} requests passed it by since it was silent too long: look at its network.",
    Cause.PROBATION: "{requests} requests wanted a proven node, or found its few slots of probation taken.",
    Cause.MEMORY: "{requests} requests found its memory taken by another program.",
    Cause.CONTEXT: "{requests} requests were longer than a slot: fewer slots with more context would take them.",
    Cause.POLICY: "{requests} requests asked for another region, or for a data policy that it does not declare.",
    Cause.FULL: "{requests} requests found every slot taken a moment before or after.",
    Cause.PRICE: "{requests} requests went to cheaper nodes or bid less than its ask{bid}: lower the ask.",
    Cause.CHOICE: "Others served {requests} requests at its ask or above: faster, warmer, or by the draw.",
    Cause.OTHER: "{requests} requests were refused by several rules at once, or by another one.",
    Cause.DEMAND: "Nobody asked for what it serves.{missed}",
    Cause.BEFORE: "The node had not joined yet.",
    Cause.AHEAD: "The hour is not over.",
}


@dataclass(slots=True)
class Minute:
    """What the market did in one minute, as far as the node's variants go."""

    refused: dict[str, int] = field(default_factory=dict)
    """Requests that found no room anywhere, by the filter that kept this node from them."""
    highest_bid: int | None = None
    """Of those refused by their price: nano-USD per million tokens of output."""
    cheaper: int = 0
    """Requests that others served for less than the node's ask."""
    dearer: int = 0

    def cause(self) -> tuple[Cause, int]:
        """Why an idle minute earned nothing, and how many requests say so."""
        counts: dict[Cause, int] = {}
        for name, requests in self.refused.items():
            cause = _BY_FILTER.get(name, Cause.OTHER)
            counts[cause] = counts.get(cause, 0) + requests
        if self.cheaper:
            counts[Cause.PRICE] = counts.get(Cause.PRICE, 0) + self.cheaper
        if self.dearer:
            counts[Cause.CHOICE] = self.dearer
        if not counts:
            return Cause.DEMAND, 0
        return max(counts.items(), key=lambda item: (item[1], -list(Cause).index(item[0])))


@dataclass(frozen=True, slots=True)
class Rows:
    """What is recorded of a node's hour."""

    node_name: str
    start: datetime
    now: datetime
    joined: datetime
    """When the node was enrolled."""
    rented: Sequence[Span]
    offered: Sequence[Span]
    held: Sequence[tuple[int, int, str]]
    """With the owner's reason."""
    connected: Sequence[Span]
    minutes: Mapping[int, Minute] = field(default_factory=dict)
    unserved: Sequence[tuple[str, int]] = ()
    """Models that were asked for and nobody offered, with how many requests."""
    utilisation_pct: float | None = None
    capped_us: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One cause's share of the hour."""

    cause: Cause
    us: int
    requests: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """An hour, accounted for."""

    node_name: str
    start: datetime
    parts: tuple[Part, ...]
    """The longest first; together an hour."""
    notes: tuple[str, ...]
    """What telemetry says of the time in which it worked, and what it does not."""

    @property
    def bottleneck(self) -> Part | None:
        """The longest part that a change of the owner's could turn into earnings; None: there is none."""
        return next((part for part in self.parts if part.cause not in _NO_LOSS), None)


_NO_LOSS: Final = frozenset({Cause.EARNING, Cause.OWNER, Cause.BEFORE, Cause.AHEAD})


def explain(rows: Rows) -> Explanation:
    """Account for every microsecond of the hour."""
    spent: dict[tuple[Cause, str], int] = {}
    seen: dict[Cause, set[int]] = {}
    for start, end in _segments(rows):
        cause, reason = _cause_at(rows, start)
        spent[cause, reason] = spent.get((cause, reason), 0) + end - start
        seen.setdefault(cause, set()).add(start // MINUTE_US)
    parts = [
        Part(cause, us, requests, reason or _sentence(cause, requests, rows))
        for (cause, reason), us in spent.items()
        for requests in [_requests(rows, cause, seen[cause])]
    ]
    parts.sort(key=lambda part: (-part.us, part.cause))
    return Explanation(rows.node_name, rows.start, tuple(parts), _notes(rows))


def _segments(rows: Rows) -> list[Span]:
    known = (_into_the_hour(rows, rows.now), _into_the_hour(rows, rows.joined))
    ends = {0, HOUR_US, *(minute * MINUTE_US for minute in range(MINUTES)), *known}
    for spans in (rows.rented, rows.offered, rows.connected, [(start, end) for start, end, _ in rows.held]):
        ends.update(point for span in spans for point in span)
    points = sorted(point for point in ends if 0 <= point <= HOUR_US)
    return list(pairwise(points))


def _into_the_hour(rows: Rows, moment: datetime) -> int:
    """Microseconds from the hour's beginning, within the hour."""
    return max(0, min(HOUR_US, (moment - rows.start) // timedelta(microseconds=1)))


def _cause_at(rows: Rows, at: int) -> tuple[Cause, str]:
    if at >= _into_the_hour(rows, rows.now):
        return Cause.AHEAD, ""
    if at < _into_the_hour(rows, rows.joined):
        return Cause.BEFORE, ""
    if _within(rows.rented, at):
        return Cause.EARNING, ""
    reason = next((reason for start, end, reason in rows.held if start <= at < end), None)
    if reason is not None:
        return Cause.OWNER, f"{reason[:1].upper()}{reason[1:]}. No loss."
    if _within(rows.offered, at):
        minute = rows.minutes.get(at // MINUTE_US)
        return (minute.cause()[0] if minute is not None else Cause.DEMAND), ""
    return (Cause.NOT_OFFERED if _within(rows.connected, at) else Cause.DISCONNECTED), ""


def _within(spans: Sequence[Span], at: int) -> bool:
    return any(start <= at < end for start, end in spans)


def _requests(rows: Rows, cause: Cause, minutes: set[int]) -> int:
    told = [rows.minutes[number].cause() for number in minutes if number in rows.minutes]
    return sum(requests for found, requests in told if found is cause)


def _sentence(cause: Cause, requests: int, rows: Rows) -> str:
    bids = [minute.highest_bid for minute in rows.minutes.values() if minute.highest_bid is not None]
    bid = f", the highest {ledger.format_nano(max(bids))} USD a million output tokens" if bids else ""
    missed = ""
    if rows.unserved:
        model, count = max(rows.unserved, key=lambda item: item[1])
        missed = f" {count:,} requests were for {model}, which nobody offered."
    return _SENTENCES[cause].format(requests=f"{requests:,}", bid=bid, missed=missed)


def _notes(rows: Rows) -> tuple[str, ...]:
    used = (
        "How busy its devices were is not recorded: they do not say it."
        if rows.utilisation_pct is None
        else f"Its devices were busy {rows.utilisation_pct:.0f}% of the time by their own count."
    )
    capped = (
        "Whether power held it down is not recorded: that takes a card that tells its power and its limit."
        if rows.capped_us is None
        else f"Power held it at its limit for {rows.capped_us / MINUTE_US:.1f} minutes."
    )
    return (
        used,
        capped,
        "Whether bandwidth or arithmetic bound it is not recorded: that takes counters of the card's profiler.",
    )
