"""What a variant is known by: its weights file and, where that serves another task than chat, the task too.

Chat came first, so a chat variant's name is the hash of its file alone. The same file read as an embedding model gives
other answers, which is why it has a name of its own; an agent that does not know the task can never say that name.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

from agent.sizing.gguf import GgufHeader

Task = Literal["chat", "embed"]
Pooling = Literal["mean", "cls", "last"]
CHAT: Final = "chat"
EMBED: Final = "embed"
DEFAULT_POOLING: Final = "mean"
_BY_NUMBER: Final[dict[int, Pooling]] = {1: "mean", 2: "cls", 3: "last"}
"""`<architecture>.pooling_type` as llama.cpp numbers it; 0 is none, and 4 ranks instead of embedding."""


def variant_sha256(weights_sha256: str, task: str, pooling: str | None) -> str:
    """The hash (hex) by which offers and requests name a variant. `pooling` counts for embeddings only."""
    if task == CHAT:
        return weights_sha256
    return hashlib.sha256(f"fallow-{task}-1\0{weights_sha256}\0{pooling}".encode()).hexdigest()


def pooling_of(header: GgufHeader) -> Pooling:
    """How the model makes one vector of its tokens': what its file says, else the mean of them."""
    architecture = header.text("general.architecture") or ""
    return _BY_NUMBER.get(header.integer(f"{architecture}.pooling_type") or 0, DEFAULT_POOLING)
