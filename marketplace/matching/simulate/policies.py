"""Who gets a request: the real matcher behind a small door, and the simple rules that it is compared with.

All see the same filters: only nodes that are offered, have a slot, and can hold the prompt and the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, Final, Protocol
from uuid import UUID

from marketplace.matching.index import FleetIndex
from marketplace.matching.rules import Rules
from marketplace.matching.simulate.fleet import Fleet, NodeSpec
from marketplace.matching.types import Demand, Filter, OfferView, Refusal

VARIANT: Final = UUID(int=1)
RENTER: Final = UUID(int=2)
FULL: Final = Refusal({Filter.FULL: 1})
SIMULATION_RULES: Final = Rules(allow_simulated=True)
REPORT_EVERY_S: Final = 10.0
"""How often nodes speak when nothing changes."""


class Order:
    """What a policy is told of one request."""

    __slots__ = ("bound", "cached", "prompt", "useful_s")

    def __init__(self, prompt: int, bound: int, cached: Mapping[int, int], useful_s: float) -> None:
        self.prompt = prompt
        self.bound = bound
        """Output tokens at most: what the renter asked for, never what the answer will be."""
        self.cached = cached
        """By node: leading tokens of the prompt in its cache."""
        self.useful_s = useful_s
        """Seconds from now until which a first token is useful; infinite for what a node lost and moves on."""


class Policy(Protocol):
    """Chooses nodes, by number, and counts what it sent there."""

    name: str
    wants_prefixes: bool

    def join(self, node: int, now_s: float, *, warm: bool) -> None:
        """A node is offered; again, warm, once its weights are loaded."""

    def leave(self, node: int, now_s: float) -> None:
        """It is gone, with all that was sent there."""

    def report(self, now_s: float) -> None:
        """Telemetry came from every node."""

    def choose(self, order: Order, now_s: float) -> tuple[int, Any] | Refusal:
        """A node and a ticket, its slot counted as taken, or why none."""

    def started(self, ticket: Any, now_s: float) -> None:
        """Its first token came."""

    def ended(self, ticket: Any, now_s: float, output: int | None) -> None:
        """It is over: after an answer of so many tokens, or None: cut off."""


Make = Callable[[Fleet, Random], Policy]


class Matcher:
    """The real matcher, guard included: what a gateway does with the same rules."""

    name = "fallow"
    wants_prefixes = True

    def __init__(self, fleet: Fleet, rng: Random, rules: Rules = SIMULATION_RULES) -> None:
        self._index = FleetIndex(rules)
        self._rng = rng
        self._offers = [_offer(node, number, fleet) for number, node in enumerate(fleet.nodes)]
        self._numbers = {offer.node_id: number for number, offer in enumerate(self._offers)}
        self._node_ids = [offer.node_id for offer in self._offers]
        self._tpot_s = fleet.target.tpot_s
        self._joined: set[int] = set()

    def join(self, node: int, now_s: float, *, warm: bool) -> None:
        offer = self._offers[node]
        if node in self._joined:
            self._index.remove(offer.offer_id)
        self._joined.add(node)
        self._index.put(replace(offer, warm=warm), now_s)

    def leave(self, node: int, now_s: float) -> None:
        del now_s
        self._joined.discard(node)
        self._index.remove(self._offers[node].offer_id)

    def report(self, now_s: float) -> None:
        for node in self._joined:
            self._index.heard(self._offers[node].offer_id, now_s)

    def choose(self, order: Order, now_s: float) -> tuple[int, Any] | Refusal:
        ids = self._node_ids
        cached = order.cached
        demand = Demand(
            VARIANT,
            order.prompt,
            order.bound,
            None,
            RENTER,
            cached_tokens={ids[node]: tokens for node, tokens in cached.items()} if cached else _NOTHING,
            ttft_target_s=order.useful_s,
            tpot_target_s=self._tpot_s,
        )
        decision = self._index.choose(demand, now_s, self._rng)
        if isinstance(decision, Refusal):
            return decision
        return self._numbers[decision.offer.node_id], decision.reservation

    def started(self, ticket: Any, now_s: float) -> None:
        self._index.started(ticket, now_s)

    def ended(self, ticket: Any, now_s: float, output: int | None) -> None:
        if output is not None:
            self._index.wrote(ticket, output)
        self._index.release(ticket, now_s)


_NOTHING: Final[dict[UUID, int]] = {}


def _offer(node: NodeSpec, number: int, fleet: Fleet) -> OfferView:
    """What such a node would report."""
    cost = node.model.step_cost(1)
    return OfferView(
        offer_id=UUID(int=10_000 + number),
        node_id=UUID(int=20_000 + number),
        owner_organisation_id=UUID(int=30_000 + number),
        device_id=node.kind,
        variant_id=VARIANT,
        gateway_id="simulated",
        price_id=number,
        rates=node.rates,
        slots=node.slots,
        slots_busy=0,
        context_per_slot=node.context_per_slot,
        available=True,
        warm=True,
        simulated=True,
        prefix_cache_s=3600.0,
        sampled_age_s=0.0,
        prefill_tokens_per_s=1.0 / cost.sequence_s,
        decode_tokens_per_s=1.0 / (cost.weights_s + cost.fixed_s),
        memory_free_bytes=None,
        region=node.region,
        memory_needed_bytes=fleet.shape.weight_bytes,
        kv_step_s_per_token=cost.kv_s,
        kv_tokens=node.kv_tokens,
        attention_s_per_token2=cost.attention_s / 2,
        power_fraction=node.power_fraction,
        headroom=1.0,
    )


class _Counting(ABC):
    """What the simple rules share: who is offered, and how much runs where.

    A ticket is (node, life of that node, tokens).
    """

    name = ""
    wants_prefixes = False

    def __init__(self, fleet: Fleet, rng: Random) -> None:
        self._rng = rng
        self._nodes = fleet.nodes
        self._busy = [0] * len(fleet.nodes)
        self._tokens = [0] * len(fleet.nodes)
        self._lives = [0] * len(fleet.nodes)
        self._offered: list[int] = []
        self._ask = [node.rates.input + node.rates.output for node in fleet.nodes]

    def join(self, node: int, now_s: float, *, warm: bool) -> None:
        del now_s, warm
        if node not in self._offered:
            self._offered.append(node)
            self._offered.sort()

    def leave(self, node: int, now_s: float) -> None:
        del now_s
        self._offered.remove(node)
        self._busy[node] = 0
        self._tokens[node] = 0
        self._lives[node] += 1

    def report(self, now_s: float) -> None:
        """They look at nothing that ages."""
        del now_s

    def choose(self, order: Order, now_s: float) -> tuple[int, Any] | Refusal:
        del now_s
        size = order.prompt + order.bound
        busy, tokens, nodes = self._busy, self._tokens, self._nodes
        able = [
            n
            for n in self._offered
            if busy[n] < nodes[n].slots and nodes[n].context_per_slot >= size and tokens[n] + size <= nodes[n].kv_tokens
        ]
        if not able:
            return FULL
        node = self._pick(able, order)
        busy[node] += 1
        tokens[node] += size
        return node, (node, self._lives[node], size)

    def started(self, ticket: Any, now_s: float) -> None:
        """They do not care."""
        del ticket, now_s

    def ended(self, ticket: Any, now_s: float, output: int | None) -> None:
        del now_s, output
        node, life, size = ticket
        if life == self._lives[node]:
            self._busy[node] -= 1
            self._tokens[node] -= size

    @abstractmethod
    def _pick(self, able: list[int], order: Order) -> int:
        """One of those that passed the filters; at least one did."""

    def _emptiest(self, able: list[int]) -> int:
        busy = self._busy
        least = min(busy[node] for node in able)
        return self._rng.choice([node for node in able if busy[node] == least])


class Chance(_Counting):
    """Any of them."""

    name = "random"

    def _pick(self, able: list[int], order: Order) -> int:
        return self._rng.choice(able)


class RoundRobin(_Counting):
    """The next one."""

    name = "round robin"

    def __init__(self, fleet: Fleet, rng: Random) -> None:
        super().__init__(fleet, rng)
        self._last = -1

    def _pick(self, able: list[int], order: Order) -> int:
        self._last = next((node for node in able if node > self._last), able[0])
        return self._last


class LeastOutstanding(_Counting):
    """The one with the fewest requests."""

    name = "least outstanding"

    def _pick(self, able: list[int], order: Order) -> int:
        return self._emptiest(able)


class Cheapest(_Counting):
    """The lowest ask; of equals the emptiest."""

    name = "cheapest first"

    def _pick(self, able: list[int], order: Order) -> int:
        least = min(self._ask[node] for node in able)
        return self._emptiest([node for node in able if self._ask[node] == least])


class PrefixFirst(_Counting):
    """The longest cached prefix, whatever the load; without one, any of them."""

    name = "prefix first"
    wants_prefixes = True

    def _pick(self, able: list[int], order: Order) -> int:
        cached = order.cached
        longest = max((cached.get(node, 0) for node in able), default=0)
        return self._rng.choice([node for node in able if cached.get(node, 0) == longest])


BASELINES: Final[tuple[Make, ...]] = (Chance, RoundRobin, LeastOutstanding, Cheapest, PrefixFirst)
POLICIES: Final[dict[str, Make]] = {
    "fallow": Matcher,
    "random": Chance,
    "round-robin": RoundRobin,
    "least-outstanding": LeastOutstanding,
    "cheapest": Cheapest,
    "prefix": PrefixFirst,
}
"""By the name on the command line."""

__all__ = ["BASELINES", "POLICIES", "Make", "Matcher", "Order", "Policy"]
