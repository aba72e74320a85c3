"""The matching benchmark: one fixed fleet, three real traces, three loads, five simple rules beside the real matcher.

Fleet, asks, targets and loads are fixed, so that figures of different days can be compared. Loads are parts of what the
fleet could serve at the target by the formulas of agent.sizing.speed, with owners' hours counted at their mean.
"""

from __future__ import annotations

from typing import Final

from agent.sizing.devices import DEVICES, DeviceSpec
from agent.sizing.shape import ModelShape
from agent.sizing.speed import Load
from marketplace.matching.simulate.fleet import Fleet, Hours, NodeSpec, capacity_requests_per_s, make_node
from marketplace.matching.simulate.traces import BLOCK_TOKENS, Trace
from marketplace.metering.pricing import Rates

LLAMA_8B_FP8: Final = ModelShape(
    weight_bytes=8_500_000_000,
    parameters=8_030_000_000,
    active_parameters=8_030_000_000,
    layers=32,
    hidden=4096,
    feed_forward=14_336,
    vocabulary=128_256,
    kv_elements_per_token=65_536,
    context_train=131_072,
)
LOADS: Final = (0.5, 0.8, 1.1)
SEEDS: Final = (1, 2, 3, 4, 5)
HOME: Final = Hours(on_s=40 * 60, off_s=25 * 60)
_ASKS: Final = {
    "RTX 4090": (0.05, 0.10),
    "L40S": (0.08, 0.16),
    "A100-80 SXM": (0.12, 0.24),
    "H100 SXM": (0.20, 0.40),
}
_ENERGY_USD_PER_KWH: Final = {"RTX 4090": 0.16}
_COLOCATED_USD_PER_KWH: Final = 0.12


def benchmark_fleet() -> Fleet:
    """24 nodes of one card: 12 RTX 4090 (6 in people's homes), 6 L40S, 4 A100 (2 at 70% power), 2 H100."""
    nodes = [
        *_some("RTX 4090", 6),
        *_some("RTX 4090", 6, first=7, hours=HOME),
        *_some("L40S", 6),
        *_some("A100-80 SXM", 2),
        *_some("A100-80 SXM", 2, first=3, power_fraction=0.7),
        *_some("H100 SXM", 2),
    ]
    return Fleet(LLAMA_8B_FP8, tuple(nodes))


def _some(
    card: str, count: int, *, first: int = 1, hours: Hours | None = None, power_fraction: float = 1.0
) -> list[NodeSpec]:
    usd_input, usd_output = _ASKS[card]
    device: DeviceSpec = DEVICES[card]
    rates = Rates(round(usd_input * 1e9), round(usd_input * 1e9 / 2), round(usd_output * 1e9))
    return [
        make_node(
            LLAMA_8B_FP8,
            device,
            name=f"{card} #{number}",
            rates=rates,
            power_fraction=power_fraction,
            hours=hours or Hours(),
            energy_usd_per_kwh=_ENERGY_USD_PER_KWH.get(card, _COLOCATED_USD_PER_KWH),
        )
        for number in range(first, first + count)
    ]


def capacity_requests(fleet: Fleet, trace: Trace) -> float:
    """Requests of this trace that the fleet serves a second at the target, with the prefix hits that it can hold."""
    load = Load(
        batch=1,
        input_tokens=trace.mean_prompt_tokens,
        output_tokens=trace.mean_output_tokens,
        cached_fraction=pooled_hit_rate(trace, sum(node.kv_tokens for node in fleet.nodes)),
    )
    return sum(capacity_requests_per_s(node, load, fleet.target) * node.hours.share for node in fleet.nodes)


def pooled_hit_rate(trace: Trace, kv_tokens: float) -> float:
    """Part of the prompt tokens that one cache of this size would have, the least recently used forgotten first."""
    held: dict[int, None] = {}
    room = int(kv_tokens // BLOCK_TOKENS)
    hits = 0
    tokens = 0
    for request in trace.requests:
        tokens += request.prompt_tokens
        unbroken = True
        for block in request.blocks:
            if block in held:
                del held[block]
                hits += unbroken * BLOCK_TOKENS
            else:
                unbroken = False
        for block in reversed(request.blocks):
            held[block] = None
        while len(held) > room:
            del held[next(iter(held))]
    return min(hits / tokens, 1.0) if tokens else 0.0
