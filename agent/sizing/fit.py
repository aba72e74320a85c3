"""Does a model fit, and with how much context: bytes of weights, KV cache and scratch against free bytes. Pure.

Two kinds of engine count differently. llama.cpp allocates what its slots need and no more:

    KV    ceil256(context per slot) x slots x kv bytes a token
    COMP  4 u (2 n_ff + 7.68 n_embd) + 2 u ceil256(context per slot)      u: tokens in a micro-batch
    OUT   4 n_vocab x slots

within 4% of resident memory in four set-ups of a 135M model on a CPU. Engines with a paged cache (vLLM, SGLang) claim a
part of the whole device and fill the rest with cache:

    KV tokens = (n V u - W - n A) / k
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.sizing.shape import ModelShape

MIB: Final = 1024 * 1024
CONTEXT_GRAIN_TOKENS: Final = 256
SCRATCH_PER_EMBEDDING: Final = 7.68
"""Fitted."""
CPU_OVERHEAD_BYTES: Final = (26 + 25) * MIB
"""Heap, and the program itself."""
CUDA_CONTEXT_BYTES: Final = 600 * MIB
"""The upper end of what a CUDA context was seen to take."""
GPU_MARGIN_BYTES: Final = 512 * MIB
GPU_MARGIN_FRACTION: Final = 0.05
PAGED_UTILISATION: Final = 0.90
PAGED_ACTIVATION_BYTES: Final = 2_500_000_000
"""Activations and graphs a card, upper end."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What llama.cpp will occupy, in bytes."""

    weights: int
    kv_cache: int
    compute: int
    output: int
    overhead: int

    @property
    def total(self) -> int:
        """Resident bytes, or bytes on the card."""
        return self.weights + self.kv_cache + self.compute + self.output + self.overhead


def round_context(context_per_slot: int) -> int:
    """What llama.cpp makes of a slot's context, in tokens."""
    return -(-context_per_slot // CONTEXT_GRAIN_TOKENS) * CONTEXT_GRAIN_TOKENS


def llamacpp_need(
    shape: ModelShape, *, slots: int, context_per_slot: int, micro_batch: int = 128, on_gpu: bool = False
) -> MemoryNeed:
    """Memory of one llama.cpp with this model. Raises ValueError for sizes below one."""
    if min(slots, context_per_slot, micro_batch) < 1:
        raise ValueError("slots, context and batch must be at least one")
    context = round_context(context_per_slot)
    scratch = 4 * micro_batch * (2 * shape.feed_forward + SCRATCH_PER_EMBEDDING * shape.hidden)
    return MemoryNeed(
        weights=shape.weight_bytes,
        kv_cache=round(context * slots * shape.kv_bytes_per_token),
        compute=round(scratch + 2 * micro_batch * context),
        output=4 * shape.vocabulary * slots,
        overhead=CUDA_CONTEXT_BYTES if on_gpu else CPU_OVERHEAD_BYTES,
    )


def gpu_margin_bytes(memory_total_bytes: int) -> int:
    """What stays free on a card, so that a neighbour's growth does not end us."""
    return max(GPU_MARGIN_BYTES, round(memory_total_bytes * GPU_MARGIN_FRACTION))


def fits(need: MemoryNeed, free_bytes: int, margin_bytes: int = 0) -> bool:
    """True if it can be loaded beside everything that uses the device now."""
    return need.total + margin_bytes <= free_bytes


def largest_slots(
    shape: ModelShape, *, free_bytes: int, context_per_slot: int, on_gpu: bool, margin_bytes: int = 0, limit: int = 64
) -> int:
    """The most slots of this context that fit; 0 if not even one does."""
    for slots in range(limit, 0, -1):
        need = llamacpp_need(shape, slots=slots, context_per_slot=context_per_slot, on_gpu=on_gpu)
        if fits(need, free_bytes, margin_bytes):
            return slots
    return 0


def paged_kv_tokens(
    shape: ModelShape,
    *,
    memory_bytes: int,
    devices: int = 1,
    utilisation: float = PAGED_UTILISATION,
    activation_bytes: int = PAGED_ACTIVATION_BYTES,
) -> int:
    """Tokens of context that a paged cache can hold over all sequences; 0 if the weights alone do not fit."""
    room = devices * memory_bytes * utilisation - shape.weight_bytes - devices * activation_bytes
    return max(0, int(room / shape.kv_bytes_per_token))


def paged_fits(kv_tokens: int, longest_request: int) -> bool:
    """True if the longest request (prompt and output, tokens) has room."""
    return kv_tokens >= longest_request > 0


def paged_batch(kv_tokens: int, input_tokens: int, output_tokens: int) -> int:
    """Sequences of this size that run at once."""
    return kv_tokens // max(1, input_tokens + output_tokens)
