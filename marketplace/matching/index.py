"""The fleet as one process picks from it: kept up offer by offer, asked once a request. Pure: no clock, no store.

index = FleetIndex(rules)
index.put(offer, now_s)                        # new, or reported anew
decision = index.choose(demand, now_s, rng)    # Chosen: its slot is taken in the index | Refusal
index.started(decision.reservation, now_s)     # its first token came
index.release(decision.reservation, now_s)     # it ended, however

A pick looks at cells of like offers (see cells) in the order of the least that each can cost, and stops where none can
be better than what was found. In each it looks at a few of the emptiest offers, all of them in a small cell. Nodes that
hold a prefix of the prompt are looked at besides. So a pick costs the same among a hundred thousand nodes as among ten
thousand, and in a small fleet it is exhaustive.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, KeysView
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from random import Random
from typing import Final, NamedTuple
from uuid import UUID

from marketplace.matching.cells import FULL, LEVELS, Cell, Key, key_of, level_of, weighted_median
from marketplace.matching.cost import NO_RATES, Cost, Want, cost_of, want
from marketplace.matching.guard import Found, allowed_s, idle_read_s, suspect, timely, too_late
from marketplace.matching.live import Live
from marketplace.matching.rank import arrange, cached_at, pick_place, refusal_of, refusals, worst_nano
from marketplace.matching.rules import DEFAULT_RULES, Rules, price_worth_s
from marketplace.matching.types import Demand, Filter, OfferView, Ranked, Refusal
from marketplace.metering.pricing import Rates

SAMPLE: Final = 3
"""Offers looked at in each cell."""
ENOUGH: Final = 12
"""With so many at hand, cells that can hold no better one are not searched for ties."""
MAX_LOOKED_AT: Final = 24
"""Offers that one pick predicts, those with a prefix apart."""
MOST_LATE: Final = 4 * MAX_LOOKED_AT
"""The same while everything would come too late."""
MOST_IN_CELL: Final = 8
"""Offers of one cell that are asked whether any of them could serve a demand, were it idle."""
SLACK: Final = 0.2
"""In a large market, a search ends where nothing left can be better by more than this part."""
EXHAUSTIVE: Final = 48
"""In a market of so many offers, no better one is ever left out."""
MAX_PREFIX_NODES: Final = 16
EXACT_REFUSALS: Final = 100
"""In a larger market a refusal is counted by cells."""
MAX_ORDERS: Final = 512
MIX_STEPS: Final = 8
UNKNOWN_OUTPUT_TOKENS: Final = 512
"""What an answer is taken for where none was seen yet."""
LIKELY_PART: Final = 1.5
"""Of the mean answer, what is expected of the next: memory that is short costs more than some that is spare."""
REMEMBERED_ANSWERS: Final = 200
_NOBODY: Final[frozenset[UUID]] = frozenset()
_NO_NODES: Final[dict[UUID, list[Live]]] = {}


class Reservation:
    """One slot of one offer, and what its request weighs there."""

    __slots__ = ("live", "mark_s", "tokens", "work_s")

    def __init__(self, live: Live, tokens: int, work_s: float, mark_s: float) -> None:
        self.live: Live | None = live
        self.tokens = tokens
        self.work_s = work_s
        self.mark_s = mark_s

    @property
    def offer_id(self) -> UUID | None:
        """Where it holds a slot; None once it was released."""
        return self.live.offer.offer_id if self.live is not None else None


class Chosen(NamedTuple):
    """A pick. Its slot counts as taken at once, and so the next pick sees it."""

    offer: OfferView
    """As it was last reported: its own count of taken slots is older than the index's."""
    reservation: Reservation
    cost: Cost
    looked_at: int


Decision = Chosen | Refusal


class _Sieve(NamedTuple):
    """The filters of one demand that look at single offers."""

    demand: Demand
    needed: int
    oldest_s: float
    banned: set[Live]
    strict: bool
    """True if more is asked than room for the tokens and fresh figures."""


class _Market:
    """One variant."""

    __slots__ = (
        "_usual",
        "answers",
        "by_node",
        "cells",
        "changes",
        "contexts",
        "lives",
        "mean_output",
        "orders",
        "tidy_at",
    )

    def __init__(self) -> None:
        self.cells: dict[Key, Cell] = {}
        self.by_node: dict[UUID, list[Live]] = {}
        self.lives = 0
        self.contexts: Counter[tuple[int, bool]] = Counter()
        """Offers by context of a slot, simulated ones apart."""
        self.changes = 0
        self.tidy_at = 64
        """With so many cells, the empty ones are looked for and dropped."""
        self.orders: dict[tuple[object, ...], list[tuple[float, Cell]]] = {}
        self._usual: Rates | None = None
        self.answers = 0
        self.mean_output = UNKNOWN_OUTPUT_TOKENS / LIKELY_PART
        """Tokens of the latest answers."""

    def likely_output(self, demand: Demand) -> int:
        """How long an answer will be as far as anybody can say: renters bound answers far above what they get."""
        return min(demand.max_output_tokens, math.ceil(LIKELY_PART * self.mean_output))

    def wrote(self, tokens: int) -> None:
        """An answer ended after so many tokens."""
        self.answers += 1
        self.mean_output += (tokens - self.mean_output) / min(self.answers, REMEMBERED_ANSWERS)

    def usual(self) -> Rates:
        """The median of what is asked for input and for output; zero where nothing is."""
        if self._usual is None:
            sizes = [(cell.middle, cell.size) for cell in self.cells.values()]
            self._usual = Rates(
                weighted_median((rates.input, size) for rates, size in sizes),
                0,
                weighted_median((rates.output, size) for rates, size in sizes),
            )
            for cell in self.cells.values():
                cell.input_ratio = cell.floor.input / self._usual.input if self._usual.input else 0.0
                cell.output_ratio = cell.floor.output / self._usual.output if self._usual.output else 0.0
        return self._usual

    def count(self, offer: OfferView, by: int) -> None:
        """An offer of this context came or went."""
        key = (offer.context_per_slot, offer.simulated)
        self.contexts[key] += by
        if not self.contexts[key]:
            del self.contexts[key]

    def changed(self, *, kinds: bool) -> None:
        """Offers came or went: what was derived from all of them is derived anew, at once for a new kind of offer."""
        self.changes += 1
        if kinds or self.changes * 4 > self.lives:
            self.changes = 0
            self.orders.clear()
            self._usual = None


class FleetIndex:
    """Offers by variant and region. One thread; times are seconds of one monotonic clock."""

    def __init__(self, rules: Rules = DEFAULT_RULES) -> None:
        self.rules = rules
        self._markets: dict[UUID, _Market] = {}
        self._lives: dict[UUID, Live] = {}
        self._recent_picks = 0.0
        self._recent_at_s = 0.0

    def __len__(self) -> int:
        return len(self._lives)

    def __contains__(self, offer_id: UUID) -> bool:
        return offer_id in self._lives

    # --- keeping up -----------------------------------------------------------------------------------------------

    def put(self, offer: OfferView, now_s: float) -> None:
        """A new offer, or a fresh report of a known one, its count of taken slots included."""
        live = self._lives.get(offer.offer_id)
        if live is None:
            live = self._lives[offer.offer_id] = Live(offer, now_s)
            self._enter(live)
            return
        if live.offer.variant_id != offer.variant_id or live.offer.node_id != offer.node_id:
            self.remove(offer.offer_id)
            self.put(offer, now_s)
            return
        cell = live.cell
        market = self._markets[offer.variant_id]
        market.count(live.offer, -1)
        market.count(offer, 1)
        live.describe(offer, now_s)
        live.busy = offer.slots_busy
        if cell is not None and cell.key == key_of(live):
            self._stand(live)
            return
        if cell is not None:
            cell.take(live)
        self._cell_of(market, live).put(live, level_of(live))

    def remove(self, offer_id: UUID) -> None:
        """The offer is gone. Removing what is not there does nothing."""
        live = self._lives.pop(offer_id, None)
        if live is None:
            return
        market = self._markets[live.offer.variant_id]
        if live.cell is not None:
            live.cell.take(live)
        market.lives -= 1
        market.count(live.offer, -1)
        market.changed(kinds=False)
        siblings = market.by_node[live.offer.node_id]
        siblings.remove(live)
        if not siblings:
            del market.by_node[live.offer.node_id]
        if not market.lives:
            del self._markets[live.offer.variant_id]

    def heard(self, offer_id: UUID, now_s: float, age_s: float = 0.0) -> None:
        """Telemetry said nothing new about it."""
        live = self._lives.get(offer_id)
        if live is not None:
            live.sampled_at_s = now_s - age_s
            if live.aged:
                live.aged = False
                self._stand(live)

    def set_busy(self, offer_id: UUID, busy: int, now_s: float) -> None:
        """Somebody who knows counted the taken slots."""
        live = self._lives.get(offer_id)
        if live is None or live.busy == busy:
            return
        live.busy = busy
        if not busy:
            live.ended(0, now_s)
        self._stand(live)

    # --- picking --------------------------------------------------------------------------------------------------

    def choose(self, demand: Demand, now_s: float, rng: Random, *, resting: frozenset[UUID] = _NOBODY) -> Decision:
        """The best offer for a demand, its slot taken, or why there is none.

        `resting` names nodes whose breaker is open for this variant. `rng` breaks ties; the caller owns it.
        """
        found, wanted = self._look(demand, now_s, rng, resting)
        if not found:
            return self._refuse(demand, now_s, resting)
        hidden = self._hidden_picks(now_s)
        place = pick_place(found, wanted, rng, hidden)
        if self.rules.guarded and suspect(found[place][1], wanted):
            in_time = self._in_time(found, wanted, now_s, resting)
            if isinstance(in_time, Refusal):
                return in_time
            if len(in_time) < len(found):
                found = in_time
                place = pick_place(found, wanted, rng, hidden)
        live, cost, _ = found[place]
        self._recent_picks += 1.0
        reservation = self._dispatch(live, _held_tokens(demand, wanted.output), cost.work_s, now_s)
        live.busy += 1
        self._stand(live)
        return Chosen(live.offer, reservation, cost, len(found))

    def rank(
        self,
        demand: Demand,
        now_s: float,
        rng: Random,
        *,
        resting: frozenset[UUID] = _NOBODY,
        limit: int = MAX_LOOKED_AT,
    ) -> Ranked:
        """The same, best first, for a caller that reserves elsewhere; nothing is taken. Refusals are told only where
        nothing fits."""
        found, wanted = self._look(demand, now_s, rng, resting)
        if not found:
            return Ranked((), (), self._refuse(demand, now_s, resting), tied=0)
        if self.rules.guarded and any(suspect(cost, wanted) for _, cost, _ in found):
            in_time = self._in_time(found, wanted, now_s, resting)
            if isinstance(in_time, Refusal):
                return Ranked((), (), in_time, tied=0)
            found = in_time
        return arrange(found, wanted, rng, limit=limit, hidden=self._hidden_picks(now_s))

    def full(self, demand: Demand, now_s: float, *, resting: frozenset[UUID] = _NOBODY) -> list[UUID]:
        """Offers that would run the demand but for their slots, which are taken."""
        market = self._markets.get(demand.variant_id)
        if market is None:
            return []
        wanted = want(demand, self.rules, market.usual(), market.likely_output(demand))
        sieve = self._sieve(market, wanted, now_s, resting)
        return [
            live.offer.offer_id
            for cell in market.cells.values()
            if self._admits(cell, demand)
            for live in cell.levels[FULL]
            if self._passes(live, sieve)
        ]

    def dispatched(self, offer_id: UUID, demand: Demand, now_s: float) -> Reservation | None:
        """A request goes to an offer of `rank`, whose slots somebody else counts: its prompt weighs there from now on.

        None: the offer is gone.
        """
        live = self._lives.get(offer_id)
        if live is None:
            return None
        self._hidden_picks(now_s)
        self._recent_picks += 1.0
        work_s = live.read_s(demand.prompt_tokens, cached_at(live, demand))
        likely = self._markets[live.offer.variant_id].likely_output(demand)
        return self._dispatch(live, _held_tokens(demand, likely), work_s, now_s)

    def started(self, reservation: Reservation, now_s: float) -> None:
        """The first token came: prompts before it are read."""
        if reservation.live is not None:
            reservation.live.started(reservation.mark_s, now_s)
            reservation.work_s = 0.0

    def wrote(self, reservation: Reservation, tokens: int) -> None:
        """The answer ended after so many tokens: what the next ones are expected to have. Before its release."""
        live = reservation.live
        market = self._markets.get(live.offer.variant_id) if live is not None else None
        if market is not None:
            market.wrote(tokens)

    def release(self, reservation: Reservation, now_s: float, *, slot: bool = True) -> None:
        """The request ended, however. `slot` is False where `dispatched` made it. Releasing twice does nothing more."""
        live = reservation.live
        if live is None:
            return
        reservation.live = None
        if reservation.work_s:
            live.withdrawn(reservation.work_s, reservation.mark_s, now_s)
        if slot:
            live.busy = max(0, live.busy - 1)
        live.ended(reservation.tokens, now_s)
        if slot and live.cell is not None:
            self._stand(live)

    # --- reading --------------------------------------------------------------------------------------------------

    def offers(self, variant_id: UUID, now_s: float) -> list[OfferView]:
        """Every offer of a variant as it stands now; in time that grows with their number."""
        return [self.view(live, now_s) for live in self._all(variant_id)]

    def view(self, live: Live, now_s: float) -> OfferView:
        """One offer with its present count and age."""
        age_s = max(0.0, now_s - live.sampled_at_s)
        return replace(live.offer, slots_busy=live.busy, sampled_age_s=age_s)

    def lives(self, variant_id: UUID) -> Iterator[Live]:
        """The same with their running load, for explanations. Not to be changed."""
        return self._all(variant_id)

    def live(self, offer_id: UUID) -> Live:
        """One offer with its running load. Raises KeyError. Not to be changed."""
        return self._lives[offer_id]

    def nodes(self, variant_id: UUID) -> KeysView[UUID]:
        """Nodes that offer a variant, whatever their state."""
        market = self._markets.get(variant_id)
        return market.by_node.keys() if market is not None else _NO_NODES.keys()

    def largest_context(self, variant_id: UUID) -> int:
        """Tokens of the largest slot that serves a variant, whatever its state; 0 for none."""
        market = self._markets.get(variant_id)
        if market is None:
            return 0
        allowed = self.rules.allow_simulated
        return max((tokens for tokens, simulated in market.contexts if allowed or not simulated), default=0)

    def usual(self, variant_id: UUID) -> Rates:
        """What this variant usually costs: the median ask for input and for output."""
        market = self._markets.get(variant_id)
        return market.usual() if market is not None else NO_RATES

    def likely_output(self, demand: Demand) -> int:
        """How long its answer will be as far as anybody can say."""
        market = self._markets.get(demand.variant_id)
        return market.likely_output(demand) if market is not None else demand.max_output_tokens

    # --- inside: looking ------------------------------------------------------------------------------------------

    def _look(self, demand: Demand, now_s: float, rng: Random, resting: frozenset[UUID]) -> tuple[list[Found], Want]:
        market = self._markets.get(demand.variant_id)
        if market is None:
            return [], want(demand, self.rules, NO_RATES)
        wanted = want(demand, self.rules, market.usual(), market.likely_output(demand))
        sieve = self._sieve(market, wanted, now_s, resting)
        found: list[Found] = []
        best = math.inf
        seen: set[Live] = set()
        if demand.cached_tokens:
            best = self._look_at_prefixes(market, wanted, now_s, sieve, found)
            seen = {live for live, _, _ in found}
        band = 0.1 + 0.1 * wanted.price_s
        large = market.lives > EXHAUSTIVE
        slack = SLACK if large else 0.0
        most = MAX_LOOKED_AT + len(found) if large else EXHAUSTIVE
        sample = SAMPLE if large else EXHAUSTIVE
        queued, ceiling, per_time = wanted.queued, demand.ceiling, wanted.per_time
        crowd_s = 0.0 if queued else wanted.weights.crowd_s / LEVELS
        fixed_s = wanted.fixed_s - crowd_s
        # While all that was seen is late, more is looked at.
        patient_s = wanted.weights.missed_s or math.inf
        reads = wanted.prompt * wanted.per_read
        input_s = wanted.price_s * wanted.input_part
        output_s = wanted.price_s - input_s
        limit = best + band
        for least, cell in self._order(market, wanted):
            if least > limit:
                break
            mask = cell.mask
            if not mask:
                continue
            if (
                fixed_s
                + cell.least_bias_s
                + per_time * cell.cold_s
                + reads * cell.prefill_s
                + input_s * cell.input_ratio
                + output_s * cell.output_ratio
                + crowd_s * (mask & -mask).bit_length()
                > limit
            ):
                continue
            if ceiling is not None and not cell.floor.within(ceiling):
                continue
            for live in self._sift(cell, cell.sample(sample, rng, fullest=queued), sieve):
                if seen and live in seen:
                    continue
                cost = cost_of(live, wanted, now_s)
                alike = len(cell.levels[live.level]) if large else 1
                found.append((live, cost, alike / sample if alike > sample else 1.0))
                best = min(best, cost.total_s)
            if len(found) >= most and (best < patient_s or len(found) >= MOST_LATE):
                break
            limit = best + band if len(found) < ENOUGH else best - slack * (0.5 + best)
        return found, wanted

    def _in_time(
        self, found: list[Found], wanted: Want, now_s: float, resting: frozenset[UUID]
    ) -> list[Found] | Refusal:
        """Those of what was found that come early enough (see guard), by what the variant's offers could do idle."""
        market = self._markets[wanted.demand.variant_id]
        sieve = self._sieve(market, wanted, now_s, resting)
        speeds = [
            (cell.cold_s, cell.prefill_s, cell.step_s)
            for _, cell in self._order(market, wanted)
            if any(self._passes(live, sieve) for live in islice(cell.present(), MOST_IN_CELL))
        ]
        within_s = allowed_s(wanted, idle_read_s(wanted.prompt, speeds))
        return timely(found, within_s) or too_late(found, within_s)

    def _look_at_prefixes(
        self, market: _Market, wanted: Want, now_s: float, sieve: _Sieve, found: list[Found]
    ) -> float:
        best = math.inf
        for node_id in list(wanted.demand.cached_tokens)[:MAX_PREFIX_NODES]:
            for live in market.by_node.get(node_id, ()):
                if live.level < FULL and live.cell is not None and self._admits(live.cell, wanted.demand):
                    if not self._passes(live, sieve):
                        continue
                    cost = cost_of(live, wanted, now_s, cached_at(live, wanted.demand))
                    found.append((live, cost, 1.0))
                    best = min(best, cost.total_s)
        return best

    def _sieve(self, market: _Market, wanted: Want, now_s: float, resting: frozenset[UUID]) -> _Sieve:
        demand = wanted.demand
        banned: set[Live] = set()
        for node_id in (*demand.excluded_nodes, *resting):
            banned.update(market.by_node.get(node_id, ()))
        oldest_s = now_s - self.rules.stale_limit_s
        strict = bool(banned) or demand.ceiling is not None or demand.most_nano is not None or demand.choices > 1
        return _Sieve(demand, demand.slot_tokens, oldest_s, banned, strict)

    def _sift(self, cell: Cell, sampled: list[Live], sieve: _Sieve) -> list[Live]:
        """Those of a sample that every filter lets through; where none of it does, of the whole cell."""
        needed, oldest_s = sieve.needed, sieve.oldest_s
        some = [live for live in sampled if live.offer.context_per_slot >= needed and live.sampled_at_s >= oldest_s]
        if sieve.strict or cell.key.probation:
            some = [live for live in some if self._passes(live, sieve)]
        if not some:
            for live in [live for live in cell.open() if live.sampled_at_s < oldest_s]:
                # Out of the way until it is heard again: else each pick would wade through a silent crowd.
                live.aged = True
                self._stand(live)
            some = list(islice((live for live in cell.open() if self._passes(live, sieve)), SAMPLE))
        return some

    def _passes(self, live: Live, sieve: _Sieve) -> bool:
        """Every filter that is not a cell's or a level's."""
        offer, demand = live.offer, sieve.demand
        return (
            offer.context_per_slot >= sieve.needed
            and live.sampled_at_s >= sieve.oldest_s
            and live not in sieve.banned
            and (demand.ceiling is None or offer.rates.within(demand.ceiling))
            and (demand.most_nano is None or worst_nano(offer.rates, demand) <= demand.most_nano)
            and not (offer.probation and live.busy >= self.rules.probation_slots)
            and (demand.choices == 1 or offer.gives_choices)
        )

    def _order(self, market: _Market, wanted: Want) -> list[tuple[float, Cell]]:
        """Cells that may serve such a demand, each with a bound under what anything there costs any demand like it:
        with prompts of about this length and about this mix of input and output in its price."""
        demand = wanted.demand
        length = int(2.0 * math.log2(wanted.prompt)) if wanted.prompt > 0 else 0
        mix = int(wanted.input_part * MIX_STEPS)
        key = (demand.service, demand.sort, demand.regions, demand.proven_only, demand.private_only, length, mix)
        order = market.orders.get(key)
        if order is None:
            if len(market.orders) >= MAX_ORDERS:
                market.orders.clear()
            order = market.orders[key] = self._make_order(market, wanted, length, mix)
        return order

    def _make_order(self, market: _Market, wanted: Want, length: int, mix: int) -> list[tuple[float, Cell]]:
        shortest = 2.0 ** (length / 2) if length else 0.0
        reads = wanted.per_read * shortest
        per_time, fixed_s = wanted.per_time, wanted.fixed_s
        price_s = price_worth_s(wanted.demand, self.rules, shortest)
        low, high = mix / MIX_STEPS, (mix + 1) / MIX_STEPS
        order: list[tuple[float, Cell]] = []
        for cell in market.cells.values():
            if not self._admits(cell, wanted.demand):
                continue
            output, more = cell.output_ratio, cell.input_ratio - cell.output_ratio
            price = output + (low if more > 0.0 else high) * more
            wait_s = per_time * cell.cold_s
            order.append((fixed_s + wait_s + reads * cell.prefill_s + price_s * price + cell.least_bias_s, cell))
        order.sort(key=itemgetter(0))
        return order

    def _admits(self, cell: Cell, demand: Demand) -> bool:
        key = cell.key
        if key.simulated and not self.rules.allow_simulated:
            return False
        if demand.regions and not key.stands_in(demand.regions):
            return False
        return not (demand.proven_only and key.probation) and (key.private or not demand.private_only)

    def _hidden_picks(self, now_s: float) -> float:
        """Picks of other gateways that this one's snapshot does not show, were they as busy as this one."""
        self._recent_picks *= math.exp((self._recent_at_s - now_s) / self.rules.exchange_s)
        self._recent_at_s = now_s
        return (self.rules.gateways - 1) * self._recent_picks

    # --- inside: refusing -----------------------------------------------------------------------------------------

    def _refuse(self, demand: Demand, now_s: float, resting: frozenset[UUID]) -> Refusal:
        market = self._markets.get(demand.variant_id)
        if market is None:
            return Refusal()
        if market.lives <= EXACT_REFUSALS:
            return self.refusal(demand, now_s, resting=resting)
        return self._refusal_by_cells(market, demand, now_s, resting)

    def refusal(self, demand: Demand, now_s: float, *, resting: frozenset[UUID] = _NOBODY) -> Refusal:
        """How many nodes each filter refuses, exactly; in time that grows with the number of offers."""
        return refusals(
            (live.offer.node_id, refusal_of(self.view(live, now_s), demand, self.rules, resting))
            for live in self._all(demand.variant_id)
        )

    def _refusal_by_cells(self, market: _Market, demand: Demand, now_s: float, resting: frozenset[UUID]) -> Refusal:
        counts: dict[Filter, int] = {}
        for cell in market.cells.values():
            lasting = self._lasting(cell, demand)
            for level, members in enumerate(cell.levels):
                if not members:
                    continue
                reason = lasting
                if reason is None and level == FULL:
                    reason = Filter.FULL
                if reason is None:
                    # Of one kind at one level: the first speaks for all.
                    reason = refusal_of(self.view(members[0], now_s), demand, self.rules, resting)
                if reason is not None:
                    counts[reason] = counts.get(reason, 0) + len(members)
        return Refusal(counts, exact=False)

    def _lasting(self, cell: Cell, demand: Demand) -> Filter | None:
        """What refuses a whole cell for good, if its key alone says so."""
        key = cell.key
        checks = (
            (key.simulated and not self.rules.allow_simulated, Filter.SIMULATED),
            (demand.ceiling is not None and not cell.floor.within(demand.ceiling), Filter.PRICE),
            (bool(demand.regions) and not key.stands_in(demand.regions), Filter.REGION),
            (demand.private_only and not key.private, Filter.DATA),
            (demand.proven_only and key.probation, Filter.UNPROVEN),
        )
        return next((name for hit, name in checks if hit), None)

    # --- inside: places -------------------------------------------------------------------------------------------

    def _all(self, variant_id: UUID) -> Iterator[Live]:
        market = self._markets.get(variant_id)
        if market is not None:
            for siblings in market.by_node.values():
                yield from siblings

    def _enter(self, live: Live) -> None:
        market = self._markets.get(live.offer.variant_id)
        if market is None:
            market = self._markets[live.offer.variant_id] = _Market()
        market.lives += 1
        market.count(live.offer, 1)
        market.changed(kinds=False)
        market.by_node.setdefault(live.offer.node_id, []).append(live)
        self._cell_of(market, live).put(live, level_of(live))

    def _cell_of(self, market: _Market, live: Live) -> Cell:
        key = key_of(live)
        cell = market.cells.get(key)
        if cell is None:
            if len(market.cells) >= market.tidy_at:
                market.cells = {known.key: known for known in market.cells.values() if known.size}
                market.tidy_at = max(64, 2 * len(market.cells))
            cell = market.cells[key] = Cell(key)
            market.changed(kinds=True)
        return cell

    def _stand(self, live: Live) -> None:
        """Move an offer to the level where it belongs."""
        cell = live.cell
        level = level_of(live)
        if cell is not None and level != live.level:
            cell.take(live)
            cell.put(live, level)

    def _dispatch(self, live: Live, tokens: int, work_s: float, now_s: float) -> Reservation:
        live.dispatch(work_s, tokens, now_s)
        return Reservation(live, tokens, work_s, live.prefill_total_s)


def _held_tokens(demand: Demand, output_tokens: int) -> int:
    """Context that a demand takes while it runs, if its answer has so many tokens."""
    return demand.longest_input_tokens or demand.prompt_tokens + output_tokens
