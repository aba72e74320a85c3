"""One cost in seconds and money for a demand on an offer. Pure.

    first token   overhead + cold load + prompts before this one + own prefill, slowed by the decoding beside it:
                  an engine that keeps its pace reads prompts in what decoding leaves of a step
    per token     step / (1 - share of prefill), the step longer by each token of running context, up to that pace
    cost          seconds until useful + what is late, many times + worth of the money + work taken from others
                  + age of the figures + bias of the offer (probation, a large card for a small model)

Money is counted against the market's usual price of the same job, so that one rule serves a tiny model and a huge one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from marketplace.matching.live import CAPPED_S, RHO_TAU_S, Live
from marketplace.matching.rules import (
    TARGET_MARGIN,
    TPOT_TARGET_S,
    Rules,
    Weights,
    price_worth_s,
    ttft_target_s,
)
from marketplace.matching.types import Demand, Service
from marketplace.metering.pricing import Rates

OVERHEAD_S: Final = 0.02
"""Network and scheduling, whatever the prompt."""
PACE_S: Final = 0.076
"""As long as a busy engine lets a step become: the chunk of prompts that it reads in one is what decoding leaves."""
MOST_DECODING: Final = 0.8
"""Of a step; prompts are read on even where decoding alone would fill it."""
AGE_WEIGHT: Final = 0.02
"""Cost of each second by which figures are older than a node's period of telemetry: stale telemetry ages."""
NO_RATES: Final = Rates(0, 0, 0)


class Want(NamedTuple):
    """A demand with everything that does not depend on the offer."""

    demand: Demand
    prompt: int
    output: int
    useful_ttft_s: float
    useful_tpot_s: float
    price_s: float
    """What the usual price of this job is worth, in seconds."""
    money_s: float
    """Seconds for one 1e-6 nano-USD."""
    input_part: float
    """Of the usual price, what its input makes: 0 to less than 1."""
    fixed_s: float
    """No offer costs less than this..."""
    per_time: float
    """...so many seconds for each until its first token..."""
    per_read: float
    """...and so many seconds for each that its device reads."""
    weights: Weights
    queued: bool
    fresh_s: float
    """Age up to which figures count as fresh."""


class Cost(NamedTuple):
    """What an offer would cost a demand, in seconds, and what is predicted of it."""

    total_s: float
    ttft_s: float
    tpot_s: float
    work_s: float
    """Predicted seconds of the device's own prefill."""
    money_s: float


_make = tuple.__new__
"""What a named tuple's own constructor does, without the frame of a function."""


def want(demand: Demand, rules: Rules, usual: Rates, likely_output: int | None = None) -> Want:
    """Prepare a demand. `usual` is what its variant usually costs, `likely_output` how long its answer will be as far
    as anybody can say; None: as long as it may be."""
    weights = rules.weights(demand.service)
    prompt = demand.prompt_tokens
    output = likely_output if likely_output is not None else demand.max_output_tokens
    reading = prompt * usual.input
    reference = reading + output * usual.output
    price_s = price_worth_s(demand, rules, prompt)
    tpot_s = demand.tpot_target_s if demand.tpot_target_s is not None else TPOT_TARGET_S
    queued = demand.service is not Service.INTERACTIVE
    per_time = weights.end if queued else 1.0
    return Want(
        demand,
        prompt,
        output,
        ttft_target_s(demand, rules),
        TARGET_MARGIN * tpot_s,
        price_s,
        price_s / reference if reference else 0.0,
        min(reading / reference, 0.999) if reference else 0.0,
        per_time * OVERHEAD_S,
        per_time,
        per_time + weights.work,
        weights,
        queued,
        rules.telemetry_every_s,
    )


def cost_of(live: Live, wanted: Want, now_s: float, cached: int = 0) -> Cost:
    """Predict and price one offer. `cached` tokens of the prompt are in its cache."""
    _, prompt, output, useful_ttft_s, useful_tpot_s, _, money_s, _, _, _, _, weights, queued, fresh_s = wanted
    # The hottest lines of the matcher, some twenty times a pick: hence no calls, and attributes read once.
    backlog_s = live.free_at_s - now_s if live.free_at_s > now_s else 0.0
    step_s = live.step_s
    prefill_s = live.prefill_s
    context = live.context_tokens
    if live.kv_s:
        # Who still waits to be read joins those who decode one by one: half of them at a time.
        waiting = backlog_s / prefill_s
        step_s += live.kv_s * (context + 0.5 * (prompt + output - (waiting if waiting < context else context)))
    work_s = (prompt - cached) * (prefill_s + live.attention_s * (prompt + cached))
    if live.busy > 0:
        decoding = step_s / PACE_S
        work_s /= 1.0 - (decoding if decoding < MOST_DECODING else MOST_DECODING)
    ttft_s = OVERHEAD_S + live.cold_s + work_s + backlog_s
    tpot_s = step_s
    if live.prefill_load_s and step_s < PACE_S:
        share = live.prefill_load_s / (RHO_TAU_S + now_s - live.prefill_at_s)
        tpot_s = step_s / (1.0 - share) if step_s < PACE_S * (1.0 - share) else PACE_S
    if live.kv_tokens and context + prompt + output > live.kv_tokens:
        # Memory comes free as those who run end: all of it in about the time of one answer.
        ttft_s += ((context + prompt + output) / live.kv_tokens - 1.0) * output * tpot_s
    money_s *= prompt * live.ask_input + output * live.ask_output
    if cached:
        money_s -= wanted.money_s * cached * live.ask_saved
    total_s = money_s + live.bias_s + weights.work * work_s
    if queued:
        total_s += weights.end * (ttft_s + output * tpot_s)
    else:
        total_s += ttft_s + weights.crowd_s * live.busy / live.offer.slots
        if ttft_s > useful_ttft_s:
            total_s += weights.missed_s + weights.late * (ttft_s - useful_ttft_s)
        if tpot_s > useful_tpot_s:
            total_s += weights.slow * output * (tpot_s - useful_tpot_s)
    if live.capped:
        total_s += capped_bias_s(work_s, output * step_s)
    aged_s = now_s - live.sampled_at_s - fresh_s
    if aged_s > 0.0:
        total_s += AGE_WEIGHT * aged_s
    return _make(Cost, (total_s, ttft_s, tpot_s, work_s, money_s))


def capped_bias_s(work_s: float, decode_s: float) -> float:
    """What the kind of work is worth on a power-capped device: reading suffers there, writing does not."""
    both_s = work_s + decode_s
    return CAPPED_S * (work_s - decode_s) / both_s if both_s > 0.0 else 0.0
