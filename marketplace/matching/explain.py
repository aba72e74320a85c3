"""Why this one: for a request, what refused whom and what the best would cost; for an idle hour, what kept it idle.

Pure. Exact and complete, over every offer of the variant, and so not for the hot path. The parts of a cost add up to
it, and nodes refused and nodes fitting add up to all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from uuid import UUID

from marketplace.matching.cost import AGE_WEIGHT, Cost, Want, cost_of, want
from marketplace.matching.guard import allowed_s, idle_read_s, timely, too_late
from marketplace.matching.index import FleetIndex
from marketplace.matching.live import Live
from marketplace.matching.rank import cached_at, refusal_of, refusals, tied_places
from marketplace.matching.types import Demand, Filter, Late, OfferView, Refusal

BEST: Final = 5
TIE_S: Final = 0.02
"""Who is behind by less is not behind."""
_NOBODY: Final[frozenset[UUID]] = frozenset()


@dataclass(frozen=True, slots=True)
class Split:
    """A cost in its parts, in seconds; they add up to `total_s`."""

    total_s: float
    time_s: float
    """Until the first token, or, for work that waits, a share of the time until the last."""
    late_s: float
    """Beyond what is useful, weighted."""
    money_s: float
    work_s: float
    """What its prompt takes from others there."""
    crowd_s: float
    """Neighbours that slow each other."""
    age_s: float
    """Figures that are old."""
    bias_s: float
    """Probation, a large card for a small model, a power cap that suits or not."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An offer that could run the demand."""

    offer: OfferView
    ttft_s: float
    tpot_s: float
    cached_tokens: int
    split: Split


@dataclass(frozen=True, slots=True)
class Explanation:
    """Of one demand, now."""

    nodes: int
    """That offer the variant at all."""
    fitting: int
    """Of them, those with an offer that nothing refuses."""
    refusal: Refusal
    """Of the others, each counted once."""
    best: tuple[Candidate, ...]
    tied: int
    """So many of all fitting offers are as good as the best; load and chance decide between them."""
    late: Late | None = None
    """Set where all that fit would come too late: then the demand is refused (see guard)."""

    def sentence(self) -> str:
        """Why the first one, in words for a person."""
        if not self.best:
            return f"Nothing fits: {self.refusal.sentence()}."
        if self.late is not None:
            fits = f"{self.fitting} of {self.nodes} nodes would fit"
            return f"Refused: the first token would come too late, {self.late.sentence()}; {fits}."
        first = self.best[0]
        words = [f"{self.fitting} of {self.nodes} nodes fit"]
        if self.refusal.refused:
            words[0] += f" ({self.refusal.sentence()})"
        if self.tied > 1:
            words.append(f"{self.tied} offers are equally good, of which the emptiest is taken, then chance decides")
        rival = self._rival()
        if rival is not None:
            words.append(_lead(first.split, rival.split))
        words.append(f"first token in about {first.ttft_s:.2f} s")
        return "; ".join(words) + "."

    def _rival(self) -> Candidate | None:
        """The best that is not tied with the first."""
        return self.best[self.tied] if self.tied < len(self.best) else None


def _lead(first: Split, second: Split) -> str:
    """In what the first is ahead most."""
    name, ahead_s = max(
        ((name, getattr(second, name) - getattr(first, name)) for name in _PARTS), key=lambda item: item[1]
    )
    more_s = second.total_s - first.total_s
    return f"the next best costs {more_s:.2f} s more, most of it by its {_PARTS[name]} ({ahead_s:.2f} s)"


_PARTS: Final = {
    "time_s": "time",
    "late_s": "lateness",
    "money_s": "price",
    "work_s": "slower reading",
    "crowd_s": "running neighbours",
    "age_s": "old figures",
    "bias_s": "standing and kind",
}


def explain(index: FleetIndex, demand: Demand, now_s: float, *, resting: frozenset[UUID] = _NOBODY) -> Explanation:
    """Look at every offer of the demand's variant."""
    wanted = want(demand, index.rules, index.usual(demand.variant_id), index.likely_output(demand))
    fitting: list[tuple[Live, Cost, float]] = []
    reasons: list[tuple[UUID, Filter | None]] = []
    speeds: list[tuple[float, float, float]] = []
    for live in index.lives(demand.variant_id):
        reason = refusal_of(index.view(live, now_s), demand, index.rules, resting)
        reasons.append((live.offer.node_id, reason))
        if reason is None or reason is Filter.FULL:
            speeds.append((live.cold_s, live.prefill_s, live.step_s))
        if reason is None:
            fitting.append((live, cost_of(live, wanted, now_s, cached_at(live, demand)), 1.0))
    within_s = allowed_s(wanted, idle_read_s(wanted.prompt, speeds)) if index.rules.guarded else math.inf
    late = bool(fitting) and not timely(fitting, within_s)
    fitting.sort(key=lambda item: item[1].total_s)
    return Explanation(
        nodes=len({node_id for node_id, _ in reasons}),
        fitting=len({live.offer.node_id for live, _, _ in fitting}),
        refusal=refusals(reasons),
        best=tuple(_candidate(index, live, cost, wanted, now_s) for live, cost, _ in fitting[:BEST]),
        tied=len(tied_places(fitting, wanted)) if fitting else 0,
        late=too_late(fitting, within_s).late if late else None,
    )


def split(live: Live, cost: Cost, wanted: Want, now_s: float) -> Split:
    """The parts of a cost."""
    weights, output = wanted.weights, wanted.output
    late_s = crowd_s = 0.0
    if wanted.queued:
        time_s = weights.end * (cost.ttft_s + output * cost.tpot_s)
    else:
        time_s = cost.ttft_s
        if cost.ttft_s > wanted.useful_ttft_s:
            late_s = weights.missed_s + weights.late * (cost.ttft_s - wanted.useful_ttft_s)
        late_s += weights.slow * output * max(0.0, cost.tpot_s - wanted.useful_tpot_s)
        crowd_s = weights.crowd_s * live.busy / live.offer.slots
    age_s = AGE_WEIGHT * max(0.0, now_s - live.sampled_at_s - wanted.fresh_s)
    work_s = weights.work * cost.work_s
    known_s = time_s + late_s + cost.money_s + work_s + crowd_s + age_s
    return Split(
        total_s=cost.total_s,
        time_s=time_s,
        late_s=late_s,
        money_s=cost.money_s,
        work_s=work_s,
        crowd_s=crowd_s,
        age_s=age_s,
        # Of a capped card the bias depends on the work, and is what is left.
        bias_s=cost.total_s - known_s if live.capped else live.bias_s,
    )


def _candidate(index: FleetIndex, live: Live, cost: Cost, wanted: Want, now_s: float) -> Candidate:
    cached = cached_at(live, wanted.demand)
    return Candidate(index.view(live, now_s), cost.ttft_s, cost.tpot_s, cached, split(live, cost, wanted, now_s))


# --- an idle hour -----------------------------------------------------------------------------------------------------


class Cause(StrEnum):
    """Why an offer did not get a demand that another one got, beside the filters."""

    PRICE = "others asked less"
    SPEED = "others were faster, or had the prompt cached"
    STANDING = "others had better standing, or a card that suits better"
    CHANCE = "as good as others, and chance decided"


@dataclass(frozen=True, slots=True)
class Lost:
    """A demand, and what the offer that got it cost; None where it found nothing."""

    demand: Demand
    winner: Split | None


@dataclass(frozen=True, slots=True)
class IdleHour:
    """What an offer missed in a stretch of time in which it had room."""

    demands: int
    """For its variant."""
    causes: dict[Filter | Cause, int]
    """Each demand once; they add up to `demands`."""

    @property
    def bottleneck(self) -> Filter | Cause | None:
        """What kept most of them away; None: nobody asked for its variant."""
        return max(self.causes, key=lambda cause: self.causes[cause]) if self.causes else None

    def sentence(self) -> str:
        """For the owner."""
        cause = self.bottleneck
        if cause is None:
            return "Nobody asked for this model."
        share = self.causes[cause] / self.demands
        return f"{share:.0%} of {self.demands} requests for this model went elsewhere: {cause.value}."


def idle_hour(index: FleetIndex, offer_id: UUID, lost: Iterable[Lost], now_s: float) -> IdleHour:
    """Say of each demand why this offer did not get it, by its state in the index. Raises KeyError for an unknown one.

    A demand that several filters refuse counts by the first of them that waiting cannot cure.
    """
    live = index.live(offer_id)
    view = index.view(live, now_s)
    usual = index.usual(view.variant_id)
    causes: dict[Filter | Cause, int] = {}
    demands = 0
    for item in lost:
        demands += 1
        cause: Filter | Cause | None = refusal_of(view, item.demand, index.rules)
        if cause is None:
            wanted = want(item.demand, index.rules, usual, index.likely_output(item.demand))
            cost = cost_of(live, wanted, now_s, cached_at(live, item.demand))
            cause = _behind(split(live, cost, wanted, now_s), item.winner)
        causes[cause] = causes.get(cause, 0) + 1
    return IdleHour(demands, causes)


def _behind(mine: Split, winner: Split | None) -> Cause:
    if winner is None:
        # Somebody else's refusal: by now this one would take it.
        return Cause.CHANCE
    behind = {
        Cause.PRICE: mine.money_s - winner.money_s,
        Cause.SPEED: sum(
            getattr(mine, name) - getattr(winner, name) for name in ("time_s", "late_s", "work_s", "crowd_s", "age_s")
        ),
        Cause.STANDING: mine.bias_s - winner.bias_s,
    }
    cause = max(behind, key=lambda name: behind[name])
    return cause if mine.total_s > winner.total_s and behind[cause] > TIE_S else Cause.CHANCE
