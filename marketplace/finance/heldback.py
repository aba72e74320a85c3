"""What kept a node's capacity from being used: for each limit, what relaxing it alone would have let in. Pure.

The limits overlap (one request may have been lost to price at one node and to memory at another), so they are never
summed. Money is an upper bound: what the requests asked for at most, at the node's ask, before the fee. What nobody
recorded is unknown, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Final
from uuid import UUID

import ledger

MICROS_PER_MINUTE: Final = 60_000_000
TOKENS_PER_RATE: Final = 1_000_000


class Limit(StrEnum):
    """What may hold capacity back. The value is what an owner reads."""

    OWNER = "owner"
    """The owner's own use, schedule or absence: reported apart, no loss."""
    DEMAND = "demand"
    """Nobody asked for what the node serves."""
    PRICE = "price"
    """Somebody asked, and paid or bid less than the node's ask."""
    CHOICE = "choice"
    """Somebody asked and paid the node's ask or more elsewhere: faster, warmer, or drawn by lot."""
    CONTEXT = "memory for the KV cache: context"
    """The request was longer than a slot."""
    SLOTS = "memory for the KV cache: slots"
    """Every slot was taken, and one more would not fit beside the weights."""
    SLOTS_SET = "slots"
    """Every slot was taken; memory would hold more of them."""
    WEIGHTS = "memory for weights"
    """A model was asked for that nobody offered, too large for the device."""
    NOT_LOADED = "model not offered"
    """A model was asked for that nobody offered, and that would fit on the device."""
    MEMORY = "free memory"
    """Another program took the memory that the request needed."""
    STALE = "network"
    """The node was silent for too long."""
    FAILURES = "failures"
    """The node rested after failures."""
    OTHER = "other rules"
    BANDWIDTH = "bandwidth"
    COMPUTE = "compute"
    POWER = "power"
    FRAGMENTATION = "fragmentation"


UNKNOWN: Final[dict[Limit, str]] = {
    Limit.BANDWIDTH: "The time of single decode steps is not recorded.",
    Limit.COMPUTE: "The time of single prefills is not recorded.",
    Limit.POWER: "No card of it told its power and its limit.",
    Limit.FRAGMENTATION: "Groups of devices are not offered.",
}
_BY_FILTER: Final[dict[str, Limit]] = {
    "PRICE": Limit.PRICE,
    "BALANCE": Limit.PRICE,
    "CONTEXT": Limit.CONTEXT,
    "UNAVAILABLE": Limit.OWNER,
    "MEMORY": Limit.MEMORY,
    "STALE": Limit.STALE,
    "BREAKER": Limit.FAILURES,
    "EXCLUDED": Limit.FAILURES,
    "RESERVED": Limit.SLOTS_SET,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What one offer of a node asks for now, and what its device could hold."""

    node_id: UUID
    variant_id: UUID
    model_id: str
    input_rate: int
    output_rate: int
    """Nano-USD per million tokens."""
    more_slots_fit: bool | None
    """One slot more would fit beside the weights; None: the device's memory or the model's shape is not known."""

    def most_nano(self, prompt_tokens: int, output_tokens: int) -> int:
        """What so many tokens cost at this ask."""
        exact = prompt_tokens * self.input_rate + output_tokens * self.output_rate
        return ledger.divide_half_even(exact, TOKENS_PER_RATE)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Requests for an offer's variant that others served, at one price, while the offer had room."""

    node_id: UUID
    variant_id: UUID
    input_rate: int
    output_rate: int
    requests: int
    input_tokens: int
    output_tokens: int
    charge_nano: int


@dataclass(frozen=True, slots=True)
class RefusedDemand:
    """Requests that found no room anywhere, where one filter alone kept this node from serving them."""

    node_id: UUID
    variant_id: UUID
    filter: str
    requests: int
    prompt_tokens: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True)
class Unserved:
    """Requests for a variant that nobody offered."""

    model_id: str
    size_bytes: int
    requests: int


@dataclass(frozen=True, slots=True)
class NodeTime:
    """A node's time, in microseconds."""

    node_id: UUID
    node_name: str
    connected_us: int
    """Its agent reported."""
    offered_us: int
    rented_us: int
    no_demand_us: int
    """Offered, and in that whole minute nobody asked for what it serves; whole minutes."""
    memory_bytes: int | None
    capped_us: int | None = None
    """Its power stood at its limit; None: no card said so."""


@dataclass(frozen=True, slots=True)
class Held:
    """One limit at one node, relaxed alone."""

    node_id: UUID
    node_name: str
    limit: Limit
    hours_us: int | None
    requests: int | None
    at_most_nano: int | None
    """What it cost at most, before the fee. None: no loss, or unknown."""
    sentence: str


def held_back(
    times: Sequence[NodeTime],
    asks: Sequence[Ask],
    elsewhere: Sequence[Elsewhere],
    refused: Sequence[RefusedDemand],
    unserved: Sequence[Unserved],
) -> tuple[Held, ...]:
    """Every limit that held a node back, node by node, in the order of Limit; the unknown ones last."""
    found: list[Held] = []
    for time in times:
        own = {ask.variant_id: ask for ask in asks if ask.node_id == time.node_id}
        found += _of_time(time)
        found += _of_market(time, own, [row for row in elsewhere if row.node_id == time.node_id])
        found += _of_refusals(time, own, [row for row in refused if row.node_id == time.node_id])
        found += _of_unserved(time, unserved)
        unknown = UNKNOWN if time.capped_us is None else {**UNKNOWN, Limit.POWER: ""}
        found += [
            Held(time.node_id, time.node_name, limit, None, None, None, why) if why else _of_power(time)
            for limit, why in unknown.items()
        ]
    return tuple(found)


def _of_power(time: NodeTime) -> Held:
    sentence = "Its cards ran at their power limit, or were held down for power: they decode as fast, and read slower."
    return Held(time.node_id, time.node_name, Limit.POWER, time.capped_us, None, None, sentence)


def best_ask(rows: Iterable[Elsewhere]) -> tuple[int, Fraction] | None:
    """(output rate, share of these requests that paid it or more) where rate times requests is the largest."""
    paid = [(row.output_rate, row.requests) for row in rows]
    total = sum(requests for _, requests in paid)
    if not total:
        return None
    takings = [
        (rate * sum(requests for other, requests in paid if other >= rate), rate) for rate in {r for r, _ in paid}
    ]
    _, rate = max(takings)
    return rate, Fraction(sum(requests for other, requests in paid if other >= rate), total)


def _of_time(time: NodeTime) -> list[Held]:
    found = []
    kept_us = max(0, time.connected_us - time.offered_us)
    if kept_us:
        sentence = "Connected and not offered: own use, schedule, or no model ready. No loss."
        found.append(Held(time.node_id, time.node_name, Limit.OWNER, kept_us, None, None, sentence))
    idle_us = time.offered_us - time.rented_us
    if time.no_demand_us and idle_us > 0:
        share = min(1.0, time.no_demand_us / idle_us)
        sentence = f"{share:.0%} of the idle hours had no demand for what this node serves: offer another model too."
        found.append(Held(time.node_id, time.node_name, Limit.DEMAND, time.no_demand_us, 0, None, sentence))
    return found


def _of_market(time: NodeTime, own: dict[UUID, Ask], rows: list[Elsewhere]) -> list[Held]:
    cheaper = [row for row in rows if _undercuts(row, own[row.variant_id])]
    others = [row for row in rows if not _undercuts(row, own[row.variant_id])]
    found = []
    if cheaper:
        best = best_ask(cheaper)
        assert best is not None
        rate, share = best
        sentence = (
            f"Others served these for less while there was room here; at {ledger.format_nano(rate)} USD a million"
            f" output tokens this node would have been as cheap for {float(share):.0%} of them."
        )
        found.append(_market(time, Limit.PRICE, cheaper, sentence))
    if others:
        sentence = "Others served these at this node's ask or above: they were faster or warmer, or the draw fell so."
        found.append(_market(time, Limit.CHOICE, others, sentence))
    return found


def _market(time: NodeTime, limit: Limit, rows: list[Elsewhere], sentence: str) -> Held:
    requests, nano = sum(row.requests for row in rows), sum(row.charge_nano for row in rows)
    return Held(time.node_id, time.node_name, limit, None, requests, nano, sentence)


def _undercuts(row: Elsewhere, ask: Ask) -> bool:
    paid = row.input_tokens * row.input_rate + row.output_tokens * row.output_rate
    return paid < row.input_tokens * ask.input_rate + row.output_tokens * ask.output_rate


def _of_refusals(time: NodeTime, own: dict[UUID, Ask], rows: list[RefusedDemand]) -> list[Held]:
    totals: dict[Limit, list[int]] = {}
    for row in rows:
        ask = own.get(row.variant_id)
        total = totals.setdefault(_limit_of(row.filter, ask), [0, 0])
        total[0] += row.requests
        total[1] += ask.most_nano(row.prompt_tokens, row.max_output_tokens) if ask is not None else 0
    return [
        Held(
            time.node_id,
            time.node_name,
            limit,
            None,
            requests,
            None if limit is Limit.OWNER else nano,
            _REFUSED[limit].format(requests=f"{requests:,}"),
        )
        for limit, (requests, nano) in sorted(totals.items(), key=lambda item: list(Limit).index(item[0]))
    ]


def _limit_of(filter_name: str, ask: Ask | None) -> Limit:
    if filter_name == "FULL":
        return Limit.SLOTS if ask is not None and ask.more_slots_fit is False else Limit.SLOTS_SET
    return _BY_FILTER.get(filter_name, Limit.OTHER)


_REFUSED: Final[dict[Limit, str]] = {
    Limit.OWNER: "{requests} requests came while the owner used the machine. No loss.",
    Limit.PRICE: "{requests} requests bid less than the ask, and found nobody.",
    Limit.CONTEXT: "{requests} requests were longer than a slot: fewer slots with more context would have taken them.",
    Limit.SLOTS: "{requests} requests found every slot taken, and memory holds no further one.",
    Limit.SLOTS_SET: "{requests} requests found every slot taken; try one slot more.",
    Limit.MEMORY: "{requests} requests found the memory taken by another program.",
    Limit.STALE: "{requests} requests came while the node was silent: look at its network.",
    Limit.FAILURES: "{requests} requests came while the node rested after failures: look at its log.",
    Limit.OTHER: "{requests} requests were refused by another rule of the market.",
}


def _of_unserved(time: NodeTime, unserved: Sequence[Unserved]) -> list[Held]:
    found = []
    for limit, fits in ((Limit.WEIGHTS, False), (Limit.NOT_LOADED, True)):
        rows = [
            row for row in unserved if time.memory_bytes is not None and (row.size_bytes <= time.memory_bytes) is fits
        ]
        if rows:
            most = max(rows, key=lambda row: (row.requests, row.model_id))
            requests = sum(row.requests for row in rows)
            ending = "fits here: offer it." if fits else "is larger than this node's memory."
            sentence = (
                f"{requests:,} requests were for models that nobody offered; the most wanted, {most.model_id}, {ending}"
            )
            found.append(Held(time.node_id, time.node_name, limit, None, requests, None, sentence))
    return found
