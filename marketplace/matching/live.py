"""One offer with its running load, as the matcher keeps it between two picks: mutable, small, no I/O."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from marketplace.matching.types import OfferView

if TYPE_CHECKING:
    from marketplace.matching.cells import Cell

UNKNOWN_PREFILL_TOKENS_PER_S: Final = 200.0
UNKNOWN_DECODE_TOKENS_PER_S: Final = 20.0
"""What an offer that does not say is taken for: slow enough that saying so always pays."""
COLD_LOAD_S: Final = 15.0
"""Loading weights into an engine that is not warm."""
LOAD_BYTES_PER_S: Final = 2e9
"""The same where the bytes are known: disk and bus together."""
PROBATION_S: Final = 0.15
"""By how much a node on probation must be better."""
HEADROOM_S: Final = 0.03
"""For each doubling of a device's memory over what the variant needs: small models belong on small cards."""
CAPPED_S: Final = 0.2
"""What a power-capped device loses by a job that is all reading, and gains by one that is all writing."""
RHO_TAU_S: Final = 10.0
"""Over how long the share of prefill in a device's time is averaged. It is forgotten as 1 / (1 + t), which costs a
division where an exponential would cost a call, for each offer looked at."""


class Live:
    """An offer, the figures derived from it once, and what runs there now. Times on the index's clock, in seconds."""

    __slots__ = (
        "aged",
        "ask_input",
        "ask_output",
        "ask_saved",
        "attention_s",
        "bias_s",
        "busy",
        "capped",
        "cell",
        "cold_s",
        "context_tokens",
        "free_at_s",
        "kv_s",
        "kv_tokens",
        "level",
        "offer",
        "place",
        "prefill_at_s",
        "prefill_load_s",
        "prefill_s",
        "prefill_total_s",
        "sampled_at_s",
        "step_s",
    )

    def __init__(self, offer: OfferView, now_s: float) -> None:
        self.busy = offer.slots_busy
        self.context_tokens = 0
        """Of what runs there: prompts and bounds of answers."""
        self.free_at_s = 0.0
        """When the prompts that were sent there are read, by prediction."""
        self.prefill_total_s = 0.0
        """Predicted seconds of prefill ever sent there: marks the place of each prompt in the line."""
        self.prefill_load_s = 0.0
        self.prefill_at_s = now_s
        self.cell: Cell | None = None
        self.level = -1
        self.place = -1
        self.describe(offer, now_s)

    def describe(self, offer: OfferView, now_s: float) -> None:
        """Take over what a fresh report says; what was dispatched meanwhile stays counted."""
        self.offer = offer
        self.sampled_at_s = now_s - offer.sampled_age_s
        self.aged = False
        self.prefill_s = 1.0 / (offer.prefill_tokens_per_s or UNKNOWN_PREFILL_TOKENS_PER_S)
        self.step_s = 1.0 / (offer.decode_tokens_per_s or UNKNOWN_DECODE_TOKENS_PER_S)
        rates = offer.rates
        # Only compared, never charged: floats will do, and are faster.
        self.ask_input = float(rates.input)
        self.ask_output = float(rates.output)
        self.ask_saved = float(rates.input - rates.cached_input)
        self.kv_s = offer.kv_step_s_per_token
        self.kv_tokens = offer.kv_tokens or 0
        self.attention_s = offer.attention_s_per_token2
        self.capped = offer.power_fraction < 0.95
        self.cold_s = 0.0
        if not offer.warm:
            needed = offer.memory_needed_bytes
            self.cold_s = COLD_LOAD_S if needed is None else needed / LOAD_BYTES_PER_S
        self.bias_s = HEADROOM_S * math.log2(max(1.0, offer.headroom)) + (PROBATION_S if offer.probation else 0.0)

    def dispatch(self, work_s: float, tokens: int, now_s: float) -> None:
        """A prompt of `work_s` seconds is on its way there: it counts from now on, not from when its stream starts."""
        self.free_at_s = (self.free_at_s if self.free_at_s > now_s else now_s) + work_s
        self.prefill_total_s += work_s
        self.prefill_load_s *= RHO_TAU_S / (RHO_TAU_S + now_s - self.prefill_at_s)
        self.prefill_load_s += work_s
        self.prefill_at_s = now_s
        self.context_tokens += tokens

    def started(self, mark_s: float, now_s: float) -> None:
        """The prompt whose place in the line was `mark_s` gave its first token: only what came after it waits."""
        behind_s = self.prefill_total_s - mark_s
        if behind_s >= 0.0:
            self.free_at_s = now_s + behind_s

    def withdrawn(self, work_s: float, mark_s: float, now_s: float) -> None:
        """A prompt that was sent here is not read after all: nobody waits for it."""
        self.free_at_s = max(now_s, self.free_at_s - work_s)
        self.prefill_load_s = max(0.0, self.prefill_load_s - work_s)
        if mark_s == self.prefill_total_s:
            # Nobody stands behind it, so no other place in the line moves.
            self.prefill_total_s -= work_s

    def read_s(self, prompt: int, cached: int) -> float:
        """Seconds that reading a prompt takes a device which does nothing else."""
        uncached = prompt - cached
        return uncached * (self.prefill_s + self.attention_s * (prompt + cached))

    def ended(self, tokens: int, now_s: float) -> None:
        """A request is over. With nothing left there, nothing waits either."""
        self.context_tokens = max(0, self.context_tokens - tokens)
        if self.busy <= 0:
            self.context_tokens = 0
            self.free_at_s = now_s
