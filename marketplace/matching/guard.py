"""What would come too late everywhere is refused at once, and told so. Pure.

Sent nevertheless, it would take time from others, come too late itself, and make the next ones late too: under overload
that is most of what is lost. So what a client waits for goes only where its first token is predicted to be useful.

The guard is about waiting, not about slow machines. What is allowed is the target, or, where an idle fleet's t0 takes
much of that already, more:

    allowed    max(target, PATIENCE t0 / (1 - t0 / target)),  without bound from t0 = target on

So where even an idle fleet would miss the target there is none to keep, and everything goes somewhere. Engines too slow
to keep the pace that predictions take for granted do not count as fast ones; where there are no others nothing is
guarded. An offer that does not say how fast it reads is never called late, nor is one of few slots: those bound its
line as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from marketplace.matching.cost import OVERHEAD_S, PACE_S, Cost, Want
from marketplace.matching.live import Live
from marketplace.matching.types import Filter, Late, OfferView, Refusal

PATIENCE: Final = 4.0
"""So many prompts like it, one after the other, are no queue yet."""

FEW_SLOTS: Final = 8
"""An engine with no more takes what it has slots for. Overload needs a line that can grow."""
MARGIN_S: Final = PACE_S / 2
"""A token comes at the end of a step: on average so much after its prompt is read."""

Found = tuple[Live, Cost, float]
"""An offer, what it would cost, and how many like it this one stands for."""


def allowed_s(wanted: Want, idle_s: float) -> float:
    """Seconds until a first token that are worth the work; infinite where nothing is guarded. `idle_s` is what the
    fastest would take if nothing ran there."""
    if wanted.queued:
        return math.inf
    target_s = wanted.useful_ttft_s
    spare = 1.0 - idle_s / target_s
    return max(target_s, PATIENCE * idle_s / spare) if spare > 0.0 else math.inf


def idle_read_s(prompt_tokens: int, speeds: Iterable[tuple[float, float, float]]) -> float:
    """What the fastest of these would take; each is (seconds of loading, to read a token, to write one)."""
    return OVERHEAD_S + min(
        (cold_s + prompt_tokens * read_s for cold_s, read_s, step_s in speeds if step_s < PACE_S), default=math.inf
    )


def suspect(cost: Cost, wanted: Want) -> bool:
    """True if a pick may be too late: only then is the guard worth a look at the fleet."""
    return cost.ttft_s + MARGIN_S > wanted.useful_ttft_s and not wanted.queued


def timely(found: Sequence[Found], within_s: float) -> list[Found]:
    """Those whose first token is predicted within so many seconds, or that are never late."""
    return [item for item in found if item[1].ttft_s + MARGIN_S <= within_s or _never_late(item[0].offer)]


def _never_late(offer: OfferView) -> bool:
    return offer.prefill_tokens_per_s is None or offer.slots <= FEW_SLOTS


def too_late(found: Sequence[Found], within_s: float) -> Refusal:
    """Nothing was timely: the soonest of it, for the renter."""
    nodes = len({live.offer.node_id for live, _, _ in found})
    soonest_s = min(cost.ttft_s for _, cost, _ in found) + MARGIN_S
    return Refusal({Filter.LATE: nodes}, exact=False, late=Late(soonest_s, within_s))
