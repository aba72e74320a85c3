"""What the operator decides about matching: limits, and what a second is worth against money. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from marketplace.matching.types import Demand, OfferView, Service, Sort


@dataclass(frozen=True, slots=True)
class Weights:
    """The terms of the one cost, all in seconds."""

    money_s: float
    """What the market's usual price of a job is worth: an offer at twice the usual price costs one such sum more. Where
    somebody waits, it is worth this for each second until which a first token is useful: of a long prompt, money counts
    more and a second less."""
    missed_s: float = 10.0
    """What it costs that the first token comes too late to be useful, however little..."""
    late: float = 10.0
    """...and each second beyond counts so many more."""
    slow: float = 1.0
    """The same for each second that all tokens together come later than is useful."""
    work: float = 1.0
    """A second of the device's own prefill: what others then wait for. It is why a cached prefix is worth a detour."""
    crowd_s: float = 0.0
    """What the last free slot costs over the first: running neighbours slow each other."""
    end: float = 0.0
    """A second until the last token, for work that waits."""
    fill_s: float = 0.0
    """What filling a warm engine is worth against opening another."""


INTERACTIVE: Final = Weights(money_s=0.4, crowd_s=0.2)
THROUGHPUT: Final = Weights(money_s=60.0, missed_s=0.0, late=0.0, slow=0.0, work=0.0, end=0.25, fill_s=2.0)
FLEX: Final = Weights(money_s=600.0, missed_s=0.0, late=0.0, slow=0.0, work=0.0, end=0.05, fill_s=5.0)
SORT_FACTOR: Final = {Sort.BALANCED: 1.0, Sort.PRICE: 8.0, Sort.LATENCY: 0.05}
"""By how much a renter's preference moves the worth of money."""


@dataclass(frozen=True, slots=True)
class Rules:
    """One set of them serves a whole process."""

    allow_simulated: bool = False
    """True only in an environment of benches and tests."""
    stale_after_s: float = 30.0
    """A node silent for longer gets nothing new."""
    telemetry_every_s: float = 10.0
    """How often a quiet node speaks."""
    gateways: int = 1
    """Processes that pick from the same snapshot without seeing each other's picks at once."""
    exchange_s: float = 0.25
    """How long a pick of one of them stays unseen by the others."""
    probation_slots: int = 4
    """So many requests at a time for an offer of a node on probation."""
    guarded: bool = True
    """What a client waits for is sent only where its first token is predicted to be useful (see guard)."""
    first_token_s: float = 1.0
    """A first token is useful within so much..."""
    first_token_tokens_per_s: float = 4_000.0
    """...and a second more for each so many tokens of prompt."""
    interactive: Weights = INTERACTIVE
    throughput: Weights = THROUGHPUT
    flex: Weights = FLEX

    @classmethod
    def of(cls, *, allow_simulated: bool, stale_after_s: float = 30.0) -> Rules:
        """Rules of an environment. Where engines may be simulated, nobody has to prove anything."""
        rules = cls(allow_simulated=allow_simulated, stale_after_s=stale_after_s)
        return replace(rules, probation_slots=2**31) if allow_simulated else rules

    @property
    def stale_limit_s(self) -> float:
        """The limit in force: never under one and a half times the telemetry's own period, or every quiet node would be
        refused most of the time and all traffic pressed onto the few that happened to speak last."""
        return max(self.stale_after_s, 1.5 * self.telemetry_every_s)

    def slots_of(self, offer: OfferView) -> int:
        """How many slots of an offer may be taken at once: few of a node on probation."""
        return min(offer.slots, self.probation_slots) if offer.probation else offer.slots

    def contradiction(self) -> str | None:
        """A warning if the settings cannot both be meant, else None."""
        if self.stale_after_s >= self.stale_limit_s:
            return None
        return (
            f"Telemetry counts as stale after {self.stale_after_s:g} s but is only sent every "
            f"{self.telemetry_every_s:g} s; {self.stale_limit_s:g} s is used instead."
        )

    def weights(self, service: Service) -> Weights:
        """What seconds and money are worth to this kind of demand."""
        if service is Service.INTERACTIVE:
            return self.interactive
        return self.throughput if service is Service.THROUGHPUT else self.flex


DEFAULT_RULES: Final = Rules()
TPOT_TARGET_S: Final = 0.08
TARGET_MARGIN: Final = 0.8
"""Of the target per token: what comes closer to it than that counts as slow, for who comes later slows it more. A first
token only depends on who came before, and may use all of its time."""


def ttft_target_s(demand: Demand, rules: Rules) -> float:
    """Until when the first token is useful."""
    if demand.ttft_target_s is not None:
        return demand.ttft_target_s
    return usual_target_s(demand.prompt_tokens, rules)


def usual_target_s(prompt_tokens: float, rules: Rules) -> float:
    """The same where the demand does not say."""
    return rules.first_token_s + prompt_tokens / rules.first_token_tokens_per_s


def price_worth_s(demand: Demand, rules: Rules, prompt_tokens: float) -> float:
    """What the usual price of a job with such a prompt is worth, in seconds."""
    worth_s = rules.weights(demand.service).money_s * SORT_FACTOR[demand.sort]
    return worth_s * usual_target_s(prompt_tokens, rules) if demand.interactive else worth_s
