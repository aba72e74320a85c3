"""OpenAI's embeddings, from the client's side: the body that we send, the vectors that we believe. Pure.

An embeddings request is one whose body has `input`: a list of texts and of lists of token ids.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from agent.engines.port import Embedded, EngineError, EngineRequest, Usage

PATH: Final = "/v1/embeddings"
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
"""Of one answer of an engine: more inputs than this holds are never asked for at once."""
GROUP_SIZE: Final = 65_536
"""Characters or ids of the inputs that travel together: a cancel takes effect at the latest between groups."""
_encoder: Final = msgspec.json.Encoder()

Input = str | list[int]


class _Item(msgspec.Struct):
    index: int
    embedding: list[float] | str


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct):
    data: list[_Item]
    usage: _Usage | None = None


_answers: Final = msgspec.json.Decoder(_Answer)


def is_embedding(request: EngineRequest) -> bool:
    """True if vectors are asked for."""
    return "input" in request.body


def inputs_of(request: EngineRequest) -> list[Input]:
    """What is to be embedded. Raises EngineError for a body that no gateway sends."""
    try:
        return msgspec.convert(request.body.get("input"), list[Input])
    except msgspec.ValidationError:
        raise EngineError("engine_rejected", "`input` is no list of texts and token ids") from None


def groups(inputs: Sequence[Input], at_once: int) -> Iterator[tuple[int, Sequence[Input]]]:
    """(first index, inputs): what is asked of the engine in one request, in order."""
    start, size = 0, 0
    for index, each in enumerate(inputs):
        if index > start and (index - start >= at_once or size + len(each) > GROUP_SIZE):
            yield start, inputs[start:index]
            start, size = index, 0
        size += len(each)
    if start < len(inputs):
        yield start, inputs[start:]


def build_body(inputs: Sequence[Input], model: str) -> bytes:
    """The JSON that goes to the engine. Floats, since not every server knows base64."""
    return _encoder.encode({"model": model, "input": list(inputs), "encoding_format": "float"})


def read_answer(body: bytes, first_index: int, count: int) -> tuple[Embedded, Usage]:
    """The vectors of one group, made unit length. Raises EngineError for what is no answer to it."""
    try:
        answer = _answers.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError("engine_error", f"the engine sent something that is no embedding: {error}") from None
    items = sorted(answer.data, key=lambda item: item.index)
    if [item.index for item in items] != list(range(count)):
        raise EngineError("engine_error", f"the engine answered {len(items)} of {count} inputs")
    vectors = [unit(_floats(item.embedding)) for item in items]
    dimensions = len(vectors[0])
    if any(len(vector) != dimensions for vector in vectors):
        raise EngineError("engine_error", "the engine's vectors differ in length")
    data = b"".join(little_endian(vector) for vector in vectors)
    told = answer.usage.prompt_tokens if answer.usage is not None else None
    return Embedded(first_index, dimensions, data), Usage(prompt_tokens=told, cached_tokens=0, completion_tokens=0)


def unit(vector: Sequence[float]) -> array[float]:
    """The vector scaled to length 1. Raises EngineError where it has no direction."""
    length = math.hypot(*vector)
    if not vector or not math.isfinite(length) or length == 0.0:
        raise EngineError("engine_error", "the engine's vector has no direction")
    return array("f", [value / length for value in vector])


def little_endian(vector: array[float]) -> bytes:
    """As it travels."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return vector.tobytes()


def _floats(embedding: list[float] | str) -> Sequence[float]:
    if isinstance(embedding, list):
        return embedding
    try:
        vector = array("f", base64.b64decode(embedding, validate=True))
    except (binascii.Error, ValueError):
        raise EngineError("engine_error", "the engine's vector is not base64 of floats") from None
    if sys.byteorder == "big":
        vector.byteswap()
    return vector
