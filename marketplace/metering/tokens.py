"""Token classes: disjoint counts, and the rules that turn claims into billable ones. Pure.

A node's claim alone never bills. What it says is held against what the gateway counted for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

RECOUNT_SLACK_DIVISOR = 50
"""A claim may exceed the recount by 1/50 (2%): the same text can be cut into tokens in more than one way."""
RECOUNT_SLACK_TOKENS = 2
"""... and by this many tokens: end marks that have no text."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What one attempt delivered. The four classes are disjoint; totals are derived."""

    input_uncached: int
    input_cached: int
    output_visible: int
    output_reasoning: int

    def __post_init__(self) -> None:
        if min(self.input_uncached, self.input_cached, self.output_visible, self.output_reasoning) < 0:
            raise ValueError(f"token counts cannot be negative: {self}")

    @classmethod
    def of(cls, *, prompt: int, cached: int, output: int, reasoning: int = 0) -> TokenCounts:
        """Split totals into classes. `cached` is part of the prompt and `reasoning` part of the output; each is cut
        to its whole, so that neither is ever charged twice. Raises ValueError on a negative total."""
        cached = min(max(cached, 0), prompt)
        reasoning = min(max(reasoning, 0), output)
        return cls(
            input_uncached=prompt - cached,
            input_cached=cached,
            output_visible=output - reasoning,
            output_reasoning=reasoning,
        )

    @property
    def input(self) -> int:
        """Prompt tokens."""
        return self.input_uncached + self.input_cached

    @property
    def output(self) -> int:
        """Completion tokens."""
        return self.output_visible + self.output_reasoning


def billable_output(claimed: int | None, recount: int, max_tokens: int) -> int:
    """Output tokens that may be billed.

    `claimed`: how many token ids came, if they decode to exactly the delivered text; None if the engine sends none, or
    they do not decode to it. `recount`: our own count of that text. `max_tokens`: what was asked for.
    """
    if recount < 0 or max_tokens < 0:
        raise ValueError("recount and max_tokens cannot be negative")
    if claimed is None:
        return min(recount, max_tokens)
    allowed = recount + recount // RECOUNT_SLACK_DIVISOR + RECOUNT_SLACK_TOKENS
    return max(0, min(claimed, allowed, max_tokens))


def billable_cached(reported: int | None, proven_prefix: int, prompt: int) -> int:
    """Prompt tokens billed at the cached rate: the larger of what the engine reports (None: it does not say; 0 is an
    answer) and the prefix that this node served this organisation within the time it promises to keep it."""
    return min(max(reported or 0, proven_prefix, 0), prompt)
