"""The simulated engine's embeddings: the words of a text, hashed into as many dimensions as its model has.

Equal texts get equal vectors, and texts that share words lie nearer than texts that share none. It is no model: as
everything of this engine, it is labelled simulated and never sold.
"""

from __future__ import annotations

import hashlib
from array import array

from agent.engines.embed_wire import Input, unit
from agent.engines.simulation import prompt_pieces

MARKS: int = 4
"""Places of a vector that one word touches."""


def text_of(value: Input) -> str:
    """What the simulation reads of an input."""
    return value if isinstance(value, str) else " ".join(map(str, value))


def embed(value: Input, dimensions: int) -> array[float]:
    """The vector of one input."""
    sums = [0.0] * dimensions
    for word in prompt_pieces({"prompt": text_of(value)}):
        digest = hashlib.blake2b(word.strip().lower().encode("utf-8", "replace"), digest_size=5 * MARKS).digest()
        for start in range(0, len(digest), 5):
            place = int.from_bytes(digest[start : start + 4], "little") % dimensions
            sums[place] += 1.0 if digest[start + 4] & 1 else -1.0
    if not any(sums):
        sums[0] = 1.0
    return unit(sums)
