"""From rows to a plan, and from a plan to advice. Pure.

A node that takes no plans, or says nothing of them, counts with what it offers: what it serves needs nobody else.
Against thrashing: what came by a plan stays for LEAST_STAY_S and what was refused, or just evicted, is left alone as
long; a node loads one thing at a time; a plan loads MAX_LOADS at most. What serves right now is never planned away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from agent.protocol import DeviceTerms
from agent.sizing.devices import find_device
from agent.sizing.fit import llamacpp_need
from agent.sizing.shape import ModelShape
from agent.sizing.speed import Load, SpeedModel
from marketplace.core.amounts import usd
from marketplace.fleet.plans import EVICT, LOAD, Ability, Recent, Runnable, Step
from marketplace.jobs.forecast import Asked
from marketplace.matching.fit import PAGED_ENGINES
from marketplace.matching.live import UNKNOWN_DECODE_TOKENS_PER_S
from marketplace.matching.planner import Plan, PlanDevice, VariantDemand
from marketplace.matching.types import OfferView

HORIZON_S: Final = 1_800.0
LEAST_STAY_S: Final = 600.0
BUSY_AGAIN_S: Final = 120.0
"""After a refusal that passes by itself."""
PASSING: Final = frozenset({"serving", "busy", "resident"})
MAX_LOADS: Final = 32
FETCH_BYTES_PER_S: Final = 25e6
"""What an owner's line is taken to bring."""
PAGED_SHARE: Final = 0.9
"""Of a card, for an engine that claims it as a whole."""
INPUT_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 256
INPUT_PER_OUTPUT: Final = INPUT_TOKENS / OUTPUT_TOKENS
"""Of the request that speeds and prices are told for, where none was served yet."""
Place = tuple[UUID, str]
"""A node and its device."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that a plan goes by."""

    abilities: Mapping[UUID, Ability]
    offers: Sequence[OfferView]
    asked: Sequence[Asked]
    shapes: Mapping[UUID, ModelShape | None] = field(default_factory=dict)
    sizes: Mapping[UUID, int] = field(default_factory=dict)
    """Bytes of a variant's file."""
    device_names: Mapping[Place, str] = field(default_factory=dict)
    recent: Sequence[Recent] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What the planner is asked."""

    devices: list[PlanDevice]
    demands: list[VariantDemand]
    circuits_w: dict[str, float]


def question(facts: Facts) -> Question:
    """Devices with what could run on them, and demand with what it pays."""
    devices: list[PlanDevice] = []
    circuits_w: dict[str, float] = {}
    for node_id, ability in facts.abilities.items():
        for terms in ability.devices:
            devices.append(_device(facts, node_id, ability, terms))
            if terms.circuit and terms.circuit_watts is not None:
                circuits_w[_circuit(node_id, terms)] = terms.circuit_watts
    devices += _fixed(facts)
    return Question(devices, [_demand(facts, asked) for asked in facts.asked], circuits_w)


def _device(facts: Facts, node_id: UUID, ability: Ability, terms: DeviceTerms) -> PlanDevice:
    here = [entry for entry in ability.runnable if entry.device_id == terms.device_id]
    loaded = frozenset(entry.variant_id.hex for entry in here if entry.loaded)
    resting = _resting(facts, (node_id, terms.device_id))
    usable = [entry for entry in here if entry.loaded or (ability.accepts and entry.variant_id not in resting)]
    name = facts.device_names.get((node_id, terms.device_id), "")
    return PlanDevice(
        device=_name((node_id, terms.device_id)),
        memory_bytes=terms.memory_bytes or 0,
        tokens_per_s={entry.variant_id.hex: _speed(facts, entry, name) for entry in usable},
        loaded=loaded,
        pinned=loaded & _pinned(facts, (node_id, terms.device_id), here, accepts=ability.accepts),
        offered_s=float("inf") if terms.offered_s is None else terms.offered_s,
        idle_w=terms.idle_watts or 0.0,
        load_w=max(terms.load_watts or 0.0, terms.idle_watts or 0.0),
        tariff_nano_per_kwh=float(terms.nano_usd_per_kwh or 0),
        circuit=_circuit(node_id, terms) if terms.circuit else "",
        needed_bytes={entry.variant_id.hex: _needed(facts, entry, terms) for entry in here},
        load_s={
            entry.variant_id.hex: facts.sizes.get(entry.variant_id, 0) / FETCH_BYTES_PER_S
            for entry in here
            if not entry.here
        },
    )


def _fixed(facts: Facts) -> list[PlanDevice]:
    """Nodes that take no part: they serve what they offer."""
    by_place: dict[Place, list[OfferView]] = {}
    for offer in facts.offers:
        if offer.node_id not in facts.abilities and offer.available:
            by_place.setdefault((offer.node_id, offer.device_id), []).append(offer)
    return [
        PlanDevice(
            device=_name(place),
            memory_bytes=1 << 60,
            tokens_per_s={
                offer.variant_id.hex: (offer.decode_tokens_per_s or UNKNOWN_DECODE_TOKENS_PER_S) * offer.slots
                for offer in offers
            },
            loaded=frozenset(offer.variant_id.hex for offer in offers),
            pinned=frozenset(offer.variant_id.hex for offer in offers),
        )
        for place, offers in by_place.items()
    ]


def _demand(facts: Facts, asked: Asked) -> VariantDemand:
    price = asked.nano_per_token
    if price is None:
        asks = [
            (entry.asks.output + entry.asks.input * INPUT_PER_OUTPUT) / 1e6
            for ability in facts.abilities.values()
            for entry in ability.runnable
            if entry.variant_id == asked.variant_id
        ]
        price = min(asks, default=0.0)
    size = facts.sizes.get(asked.variant_id, 0)
    return VariantDemand(asked.variant_id.hex, size, asked.tokens_per_s, price)


def _pinned(facts: Facts, place: Place, here: Sequence[Runnable], *, accepts: bool) -> frozenset[str]:
    """What stays: by the owner's word, since it serves now, since it came only lately, or since the node said so."""
    if not accepts:
        return frozenset(entry.variant_id.hex for entry in here)
    pinned = {entry.variant_id for entry in here if entry.pinned}
    pinned |= {
        offer.variant_id for offer in facts.offers if (offer.node_id, offer.device_id) == place and offer.slots_busy
    }
    for step in facts.recent:
        if (step.node_id, step.device_id) != place:
            continue
        came = step.action == LOAD and step.state == "accepted" and step.age_s < LEAST_STAY_S
        kept = step.action == EVICT and step.state == "refused" and step.age_s < BUSY_AGAIN_S
        if came or kept:
            pinned.add(step.variant_id)
    return frozenset(variant_id.hex for variant_id in pinned)


def _resting(facts: Facts, place: Place) -> set[UUID]:
    """What should not be loaded there again so soon."""
    return {
        step.variant_id
        for step in facts.recent
        if (step.node_id, step.device_id) == place
        and step.age_s < (BUSY_AGAIN_S if step.code in PASSING else LEAST_STAY_S)
        and (step.action == LOAD or step.state == "accepted")
    }


def _speed(facts: Facts, entry: Runnable, device_name: str) -> float:
    """Output tokens a second of all slots together."""
    spec = find_device(device_name) if device_name else None
    shape = facts.shapes.get(entry.variant_id)
    measured = entry.decode_tokens_per_s
    if spec is None or shape is None:
        # A processor is bound by its arithmetic: slots share what one gets.
        alone = measured or UNKNOWN_DECODE_TOKENS_PER_S
        return alone if entry.device_id == "cpu" else alone * entry.slots
    model = SpeedModel(shape, spec)
    predicted = model.output_tokens_per_s(Load(entry.slots, INPUT_TOKENS, OUTPUT_TOKENS))
    return predicted if measured is None else predicted * measured * model.decode_step_s(1, INPUT_TOKENS)


def _needed(facts: Facts, entry: Runnable, terms: DeviceTerms) -> int:
    if entry.engine in PAGED_ENGINES and terms.memory_bytes is not None:
        return round(terms.memory_bytes * PAGED_SHARE)
    shape = facts.shapes.get(entry.variant_id)
    if shape is not None:
        on_gpu = entry.device_id != "cpu"
        return llamacpp_need(
            shape, slots=entry.slots, context_per_slot=entry.context_per_slot, on_gpu=on_gpu
        ).total  # fmt: skip
    return entry.needed_bytes or facts.sizes.get(entry.variant_id, 0)


# --- advice -----------------------------------------------------------------------------------------------------------


def steps(made: Plan, asked: Question, facts: Facts) -> list[Step]:
    """What to tell the nodes: the loads that gain most, each after the evictions that it needs."""
    devices = {device.device: device for device in asked.devices}
    models = {entry.variant_id: entry for entry in facts.asked}
    busy = {step.node_id for step in facts.recent if step.state in ("planned", "sent")}
    told: list[Step] = []
    for load in sorted(made.loads, key=lambda item: -item.gain_nano):
        node_id, device_id = _place(load.device)
        if node_id in busy:
            continue
        device = devices[load.device]
        leaving = _leaving(made, device, load.variant)
        if leaving is None:
            continue
        busy.add(node_id)
        wanted = models[UUID(hex=load.variant)]
        told += (
            Step(
                node_id,
                device_id,
                UUID(hex=variant),
                EVICT,
                f"Its memory is needed for {wanted.model}, which is asked for more.",
            )
            for variant in leaving
        )
        told.append(
            Step(
                *(node_id, device_id, wanted.variant_id, LOAD, _reason(wanted, load.gain_nano)),
                gain_nano=round(load.gain_nano),
                needed_bytes=device.needed_bytes.get(load.variant),
            )
        )
        if sum(1 for step in told if step.action == LOAD) >= MAX_LOADS:
            break
    return told


def _leaving(made: Plan, device: PlanDevice, variant: str) -> list[str] | None:
    """What has to go for this one load, of what the plan lets go; None if that is not enough."""
    need = device.needed_bytes.get(variant, 0)
    room = device.memory_bytes - sum(device.needed_bytes.get(name, 0) for name in device.loaded)
    leaving: list[str] = []
    for place, name in made.evictions:
        if room >= need:
            break
        if place == device.device:
            leaving.append(name)
            room += device.needed_bytes.get(name, 0)
    return leaving if room >= need else None


def _reason(wanted: Asked, gain_nano: float) -> str:
    missed = wanted.refused + wanted.queued
    found = f", {missed} requests found no room or wait" if missed else ""
    hourly = usd(round(gain_nano * 3600 / HORIZON_S))
    return f"{wanted.model}: {wanted.tokens_per_s:.2g} tokens/s are asked for{found}; here about {hourly} USD an hour."


def _circuit(node_id: UUID, terms: DeviceTerms) -> str:
    return f"{node_id.hex}/{terms.circuit}"


def _name(place: Place) -> str:
    return f"{place[0].hex}/{place[1]}"


def _place(name: str) -> Place:
    node, _, device_id = name.partition("/")
    return UUID(hex=node), device_id
