"""Several answers to one request: asked of the engine one after the other, in the one slot that the attempt holds.

The engine still has the prompt in its cache for the second answer and those that follow, so they cost little more than
their own tokens. No engine is asked for `n` itself: not every one obeys it, and some would take a slot for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from agent.engines.port import Done, EngineRequest, Usage
from agent.events import StartWork

_SEEDS: Final = 2**64
_LAST_SEED: Final = 2**63 - 1


def request_for(work: StartWork, body: Mapping[str, object], choice: int, left_s: float) -> EngineRequest:
    """What the engine is asked for one choice; `left_s` is what is left of the attempt's time."""
    return EngineRequest(
        seeded(body, choice),
        work.max_output_tokens,
        work.cache_scope,
        max(left_s, 0.0),
        work.prompt_tokens,
        work.traceparent,
    )


def seeded(body: Mapping[str, object], choice: int) -> dict[str, object]:
    """The body with a seed of this choice's own, where the renter gave one: equal seeds would give equal answers."""
    seed = body.get("seed")
    if not choice or not isinstance(seed, int):
        return dict(body)
    own = seed + choice
    return {**body, "seed": own if own <= _LAST_SEED else own - _SEEDS}


def combined(ends: Sequence[Done]) -> tuple[str, Usage, tuple[str, ...]]:
    """How an attempt ended whose choices ended so, at least one: its finish reason (the last choice's; empty if any
    lacks one), its usage (one prompt, all outputs), and the reason of each choice where there are several."""
    reasons = tuple(end.finish_reason for end in ends)
    if len(ends) == 1:
        return reasons[0], ends[0].usage, ()
    first = ends[0].usage
    usage = Usage(
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        completion_tokens=_sum([end.usage.completion_tokens for end in ends]),
        reasoning_tokens=_sum([end.usage.reasoning_tokens for end in ends]),
    )
    return reasons[-1] if all(reasons) else "", usage, reasons


def _sum(counts: Sequence[int | None]) -> int | None:
    """The sum; unknown as soon as one part is."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
