"""Does a variant fit on what a node has free now, alone or over several cards? Pure.

Weights, KV cache and scratch are counted by agent.sizing; here they are set against live free memory with a margin,
card by card. Over n cards an engine in tensor parallel holds 1/n of weights and cache on each, and its own overhead n
times, so the card with the least room decides for all. An engine with a paged cache claims a part of each card and
fills what the weights leave with cache: it is refused not only where the weights do not fit, but also where the slots
that it promises would need more cache than that, which shows only under full load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from agent.sizing.devices import find_device
from agent.sizing.fit import (
    CUDA_CONTEXT_BYTES,
    PAGED_ACTIVATION_BYTES,
    PAGED_UTILISATION,
    gpu_margin_bytes,
    llamacpp_need,
)
from agent.sizing.shape import ModelShape
from agent.sizing.speed import Efficiency

PAGED_ENGINES: Final = frozenset({"vllm", "sglang", "tensorrt-llm"})
CPU_MARGIN_BYTES: Final = 256 * 1024 * 1024
MAX_CARDS: Final = 64


@dataclass(frozen=True, slots=True)
class Card:
    """One device as it is now. Bytes."""

    total_bytes: int
    free_bytes: int
    """By anybody's use, not by what we allocated."""
    gpu: bool = True

    @property
    def margin_bytes(self) -> int:
        """What stays free, so that a neighbour's growth does not end us."""
        return gpu_margin_bytes(self.total_bytes) if self.gpu else CPU_MARGIN_BYTES


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer, with what an owner should know about it."""

    fits: bool
    needed_bytes: int
    """Of each card, margin included."""
    room_bytes: int
    """Free on the card that has least."""
    slots: int
    """The most slots of that context that would fit; 0: not even one."""
    reason: str
    """A sentence where it does not fit, else empty."""


def fit(shape: ModelShape, cards: Sequence[Card], *, slots: int, context_per_slot: int, paged: bool = False) -> Fit:
    """Set an engine with so many slots of so much context against these cards, one replica over all of them.

    Raises ValueError without a card, with more than MAX_CARDS, or for sizes below one.
    """
    if not 1 <= len(cards) <= MAX_CARDS:
        raise ValueError(f"an engine runs on 1 to {MAX_CARDS} cards, not {len(cards)}")
    if min(slots, context_per_slot) < 1:
        raise ValueError("slots and context must be at least one")
    tightest = min(cards, key=lambda card: card.free_bytes - card.margin_bytes)
    need = _paged_need if paged else _plain_need
    needed = need(shape, tightest, len(cards), slots, context_per_slot)
    room = _room(tightest, paged=paged)
    if needed <= room:
        return Fit(True, needed, tightest.free_bytes, slots, "")
    most = _most_slots(shape, tightest, len(cards), context_per_slot, slots, paged=paged)
    over = f" on each of {len(cards)} cards" if len(cards) > 1 else ""
    sentence = f"{slots} slots of {context_per_slot} tokens need {_gib(needed)}{over}, and {_gib(room)} is free"
    cure = f"; {most} would fit." if most else "; not even one fits."
    return Fit(False, needed, tightest.free_bytes, most, sentence + cure)


def _room(card: Card, *, paged: bool) -> int:
    if paged:
        return min(int(card.total_bytes * PAGED_UTILISATION), card.free_bytes - card.margin_bytes)
    return card.free_bytes


def _plain_need(shape: ModelShape, card: Card, cards: int, slots: int, context_per_slot: int) -> int:
    """Bytes of each card, its margin included."""
    need = llamacpp_need(shape, slots=slots, context_per_slot=context_per_slot, on_gpu=card.gpu)
    shared = need.weights + need.kv_cache
    return -(-shared // cards) + need.total - shared + card.margin_bytes


def _paged_need(shape: ModelShape, card: Card, cards: int, slots: int, context_per_slot: int) -> int:
    """Bytes of each card within the part that the engine claims."""
    cache = round(slots * context_per_slot * shape.kv_bytes_per_token)
    overhead = PAGED_ACTIVATION_BYTES if card.gpu else CUDA_CONTEXT_BYTES
    return -(-(shape.weight_bytes + cache) // cards) + overhead


def _most_slots(shape: ModelShape, card: Card, cards: int, context_per_slot: int, limit: int, *, paged: bool) -> int:
    need = _paged_need if paged else _plain_need
    room = _room(card, paged=paged)
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if need(shape, card, cards, middle, context_per_slot) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _gib(size: int) -> str:
    return f"{max(0, size) / 2**30:.1f} GiB"


# --- what the matcher knows of an offer beyond what its node says -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one offer, from the model's own shape and the device's data sheet. The defaults say: not known."""

    memory_needed_bytes: int | None = None
    """To load it, margin included."""
    headroom: float = 1.0
    """Memory of the device over that."""
    kv_step_s_per_token: float = 0.0
    power_fraction: float = 1.0


def figures(
    shape: ModelShape | None,
    *,
    slots: int,
    context_per_slot: int,
    engine: str,
    device_name: str,
    gpu: bool,
    total_bytes: int | None,
    power_limit_mw: int | None = None,
) -> Figures:
    """What is known of a variant on a device. Nothing here is the node's claim but the device's name and limit."""
    spec = find_device(device_name) if gpu else None
    fraction = 1.0
    if spec is not None and spec.tdp_w and power_limit_mw:
        fraction = min(1.0, max(0.05, power_limit_mw / (1000.0 * spec.tdp_w)))
    if shape is None:
        return Figures(power_fraction=fraction)
    step_s = shape.kv_bytes_per_token / (spec.bandwidth_bytes_per_s * Efficiency().memory) if spec else 0.0
    if total_bytes is None:
        return Figures(kv_step_s_per_token=step_s, power_fraction=fraction)
    card = Card(total_bytes, total_bytes, gpu)
    need = _paged_need if engine in PAGED_ENGINES else _plain_need
    needed = need(shape, card, 1, slots, context_per_slot)
    return Figures(needed, max(1.0, total_bytes / max(1, needed)), step_s, fraction)


def shape_from(stored: Mapping[str, Any] | None) -> ModelShape | None:
    """The shape as the catalogue stores it; None where it lacks a figure."""
    if stored is None:
        return None
    names = [field.name for field in fields(ModelShape)]
    try:
        return ModelShape(**{name: stored[name] for name in names if name in stored})
    except TypeError:
        return None
