"""The figures of a model that memory and speed depend on, read from its own file. Pure but for reading that file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.sizing.gguf import GgufError, GgufHeader, read_header

KV_ELEMENT_BYTES: Final[dict[str, float]] = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Bytes of one cached element, block scales included."""
_EXPERT_TENSOR: Final = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the formulas of fit and speed need to know of a model."""

    weight_bytes: int
    """W: sum of the tensors' bytes."""
    parameters: int
    active_parameters: int
    """P: those that one token passes through; fewer than all in a mixture of experts."""
    layers: int
    hidden: int
    feed_forward: int
    """Of the widest layer."""
    vocabulary: int
    kv_elements_per_token: int
    """Cached elements a token, over all layers, keys and values together."""
    context_train: int
    """Tokens that it was trained for."""
    kv_type: str = "f16"

    @property
    def kv_bytes_per_token(self) -> float:
        """k: bytes that one token of context occupies and that each decode step reads again."""
        return self.kv_elements_per_token * KV_ELEMENT_BYTES[self.kv_type]


def read_shape(path: str | Path, kv_type: str = "f16") -> ModelShape:
    """The shape of the GGUF model at `path`. Raises GgufError if the file lacks a figure, OSError if unreadable."""
    header = read_header(path)
    architecture = header.text("general.architecture") or ""
    per_layer = frozenset(
        key for key in (_key(architecture, name) for name in _PER_LAYER) if header.array_lengths.get(key)
    )
    return shape_of(read_header(path, per_layer) if per_layer else header, kv_type)


_PER_LAYER: Final = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


def shape_of(header: GgufHeader, kv_type: str = "f16") -> ModelShape:
    """The shape that a header tells. Where layers differ, their arrays must have been kept: see `read_shape`."""
    if kv_type not in KV_ELEMENT_BYTES:
        raise ValueError(f"unknown type of KV cache {kv_type!r}")
    reader = _Reader(header)
    layers = reader.whole("block_count")
    hidden = reader.whole("embedding_length")
    parameters = sum(tensor.elements for tensor in header.tensors)
    return ModelShape(
        weight_bytes=header.tensor_bytes,
        parameters=parameters,
        active_parameters=parameters - _resting_parameters(header, reader),
        layers=layers,
        hidden=hidden,
        feed_forward=max(reader.per_layer("feed_forward_length", layers)),
        vocabulary=reader.vocabulary(),
        kv_elements_per_token=_kv_elements(reader, layers, hidden),
        context_train=reader.whole("context_length"),
        kv_type=kv_type,
    )


def _kv_elements(reader: _Reader, layers: int, hidden: int) -> int:
    rank = reader.optional("attention.kv_lora_rank")
    if rank is not None:  # Latent attention caches one compressed row and one rotary key a layer.
        return layers * (rank + reader.whole("rope.dimension_count"))
    heads = max(reader.per_layer("attention.head_count", layers))
    width = hidden // max(1, heads)
    key = reader.optional("attention.key_length") or width
    value = reader.optional("attention.value_length") or width
    return sum(reader.per_layer("attention.head_count_kv", layers, "attention.head_count")) * (key + value)


def _resting_parameters(header: GgufHeader, reader: _Reader) -> int:
    """Parameters of the experts that a token does not visit."""
    experts, used = reader.optional("expert_count"), reader.optional("expert_used_count")
    if not experts or not used or used > experts:
        return 0
    all_experts = sum(tensor.elements for tensor in header.tensors if _EXPERT_TENSOR.search(tensor.name))
    return all_experts - math.ceil(all_experts * used / experts)


def _key(architecture: str, name: str) -> str:
    return f"{architecture}.{name}"


class _Reader:
    """Figures of one header, under the prefix of its architecture."""

    def __init__(self, header: GgufHeader) -> None:
        architecture = header.text("general.architecture")
        if not architecture:
            raise GgufError("general.architecture is missing")
        self._header = header
        self._architecture = architecture

    def optional(self, name: str) -> int | None:
        value = self._header.integer(_key(self._architecture, name))
        return value if value is not None and value > 0 else None

    def whole(self, name: str) -> int:
        value = self.optional(name)
        if value is None:
            raise GgufError(f"{_key(self._architecture, name)} is missing, or no number above zero")
        return value

    def per_layer(self, name: str, layers: int, fallback: str | None = None) -> list[int]:
        """One figure a layer: the array, or the one number repeated. Zero is a layer without it."""
        value = self._header.metadata.get(_key(self._architecture, name))
        if isinstance(value, list) and len(value) >= layers:
            return [entry if isinstance(entry, int) and entry > 0 else 0 for entry in value[:layers]]
        if isinstance(value, int) and value >= 0:
            return [value] * layers
        if fallback is not None:
            return self.per_layer(fallback, layers)
        raise GgufError(f"{_key(self._architecture, name)} is missing, or no number for each layer")

    def vocabulary(self) -> int:
        length = self._header.array_lengths.get("tokenizer.ggml.tokens") or self.optional("vocab_size")
        if not length:
            raise GgufError("the file has no vocabulary")
        return length
