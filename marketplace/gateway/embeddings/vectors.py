"""The vectors of one request as they come from a node: checked, kept, and written as OpenAI's list.

A node can lie, but only within this: in order, none twice, each of the model's length and of length 1. Whether a vector
is the right one only another node could tell.
"""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from array import array
from typing import Any, Final

import msgspec

from agent.protocol import FLOAT_BYTES, Accepted, Failed, Finished, Refused, Tokens, Vectors
from marketplace.core.amounts import usd
from marketplace.fleet.links import AttemptFrame
from marketplace.gateway.attempt import FINISH_REASONS, AttemptRun
from marketplace.gateway.embeddings.request import Encoding
from marketplace.gateway.outcomes import Ending
from marketplace.matching.types import OfferView
from marketplace.metering.pricing import Priced
from marketplace.metering.tokens import TokenCounts

LENGTH_SLACK: Final = 0.01
"""A vector of length 1 is this near to it: float32, and engines that add up in half precision."""
OFFLOAD_BYTES: Final = 256 * 1024
"""More vectors than this are written off the event loop."""
_encode: Final = msgspec.json.Encoder().encode


class Embedding:
    """What is due of one request, and what has come of it."""

    def __init__(self, inputs: tuple[int, ...], dimensions: int, encoding: Encoding) -> None:
        """`inputs`: tokens of each."""
        self.inputs = inputs
        self._dimensions = dimensions
        self._encoding = encoding
        self._vectors: list[bytes] = []
        self._written: msgspec.Raw | None = None
        self.received = 0
        """Vectors that were accepted."""

    @property
    def longest_input_tokens(self) -> int:
        """What a slot must hold at once."""
        return max(self.inputs)

    @property
    def complete(self) -> bool:
        """True once every input has its vector."""
        return self.received == len(self.inputs)

    @property
    def accepted_tokens(self) -> int:
        """Of the inputs whose vectors came."""
        return sum(self.inputs[: self.received])

    @property
    def data(self) -> bytes:
        """All that came, as it came: what the node signs."""
        return b"".join(self._vectors)

    def begin(self) -> None:
        """Another attempt starts over: vectors of two nodes are not mixed."""
        self._vectors.clear()
        self.received = 0

    def take(self, frame: Vectors) -> bool:
        """Accept a frame's vectors; False if they are not what is due."""
        size_bytes = self._dimensions * FLOAT_BYTES
        count, rest = divmod(len(frame.data), size_bytes)
        due = frame.first_index == self.received and 1 <= count <= len(self.inputs) - self.received
        if not due or rest or frame.dimensions != self._dimensions:
            return False
        floats = _floats(frame.data)
        for start in range(0, len(floats), self._dimensions):
            # Not a number and infinity fail this too.
            if not abs(math.hypot(*floats[start : start + self._dimensions]) - 1.0) <= LENGTH_SLACK:
                return False
        self._vectors.append(frame.data)
        self.received += count
        return True

    async def write(self) -> None:
        """Prepare the list of a complete answer."""
        if len(self.inputs) * self._dimensions * FLOAT_BYTES > OFFLOAD_BYTES:
            self._written = await asyncio.to_thread(self._list)
        else:
            self._written = self._list()

    def answer(self, *, model: str, tokens: TokenCounts, priced: Priced | None) -> dict[str, Any]:
        """The answer as OpenAI's clients read it; `write` comes first."""
        usage: dict[str, Any] = {"prompt_tokens": tokens.input, "total_tokens": tokens.input}
        usage["cost"] = usd(priced.gross_nano if priced else 0)
        return {"object": "list", "data": self._written, "model": model, "usage": usage}

    def _list(self) -> msgspec.Raw:
        data, size_bytes = self.data, self._dimensions * FLOAT_BYTES
        parts = [
            b'{"object":"embedding","index":%d,"embedding":%b}'
            % (index, self._shown(data[index * size_bytes : (index + 1) * size_bytes]))
            for index in range(self.received)
        ]
        return msgspec.Raw(b"[" + b",".join(parts) + b"]")

    def _shown(self, vector: bytes) -> bytes:
        if self._encoding == "base64":
            return b'"' + base64.b64encode(vector) + b'"'
        return _encode(_floats(vector).tolist())


def _floats(data: bytes) -> array[float]:
    floats = array("f", data)
    if sys.byteorder == "big":
        floats.byteswap()
    return floats


class EmbeddingRun(AttemptRun):
    """One attempt at vectors: as any other, but that Vectors come instead of Tokens, and that all of them must."""

    __slots__ = ("_embedding",)

    def __init__(self, offer: OfferView, attempt_id: bytes, epoch: int, embedding: Embedding) -> None:
        super().__init__(offer, attempt_id, epoch, 0)
        self._embedding = embedding
        embedding.begin()

    @property
    def produced(self) -> bool:
        """True if a vector was accepted."""
        return self._embedding.received > 0

    @property
    def vectors(self) -> bytes:
        """What was accepted, for the node's signature."""
        return self._embedding.data

    def on_frame(self, frame: AttemptFrame) -> None:
        """Take the next frame of this attempt."""
        if isinstance(frame, Vectors):
            if self.ending is None:
                self._on_vectors(frame)
        elif isinstance(frame, Tokens):
            self.stop(Ending.NODE, "engine_error", "The node sent text where vectors were asked for.")
        else:
            self._on_end(frame)

    def _on_vectors(self, frame: Vectors) -> None:
        if self.first_token_at is None:
            self.first_token_at = asyncio.get_running_loop().time()
        if not self._embedding.take(frame):
            self.stop(Ending.NODE, "engine_error", "The node sent vectors that nobody asked for, or that are none.")

    def _on_end(self, frame: Accepted | Refused | Finished | Failed) -> None:
        short = isinstance(frame, Finished) and frame.finish_reason in FINISH_REASONS and not self._embedding.complete
        if short and self.ending is None:
            self.stop(Ending.NODE, "engine_error", "The node ended before every input had its vector.")
        super().on_frame(frame)
