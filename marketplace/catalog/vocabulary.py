"""A vocabulary as a GGUF file describes it: read from the header, and written back as a file without weights.

The written file is what the oracle loads, so a gateway needs no weights to count as llama.cpp counts.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agent.sizing.gguf import GgufHeader

PREFIX: Final = "tokenizer.ggml."
ARRAYS: Final = frozenset(
    PREFIX + name for name in ("tokens", "token_type", "scores", "merges", "precompiled_charsmap", "suppress_tokens")
)
"""Arrays to keep when a header is read for the catalogue."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types of llama.cpp."""

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U8, _U64 = 4, 5, 6, 7, 8, 9, 0, 10


class VocabularyError(ValueError):
    """The file's metadata does not describe a vocabulary that can be sold. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything under `tokenizer.` in a GGUF header, and the architecture's name."""

    architecture: str
    metadata: Mapping[str, Any]

    @property
    def model(self) -> str:
        """`gpt2` (byte-level BPE), `llama` (SentencePiece-like), `bert`, ..."""
        return str(self.metadata.get(PREFIX + "model", ""))

    @property
    def pre(self) -> str:
        """llama.cpp's name of the splitting rules."""
        return str(self.metadata.get(PREFIX + "pre", "default"))

    @property
    def tokens(self) -> list[str]:
        return list(self.metadata.get(PREFIX + "tokens", ()))

    @property
    def token_types(self) -> list[int]:
        """One type a token; a file without types has only normal ones."""
        return list(self.metadata.get(PREFIX + "token_type", ())) or [NORMAL] * len(self.tokens)

    @property
    def scores(self) -> list[float]:
        return list(self.metadata.get(PREFIX + "scores", ()))

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs in order of rank. The separator is the first space behind the first character."""
        pairs = []
        for merge in self.metadata.get(PREFIX + "merges", ()):
            at = merge.find(" ", 1)
            pairs.append((merge[:at], merge[at + 1 :]))
        return pairs

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean of the tokenizer's metadata, such as `add_space_prefix`."""
        return bool(self.metadata.get(PREFIX + name, default))

    def to_gguf(self) -> bytes:
        """A GGUF file with this vocabulary and no tensors."""
        entries = {"general.architecture": self.architecture, **self.metadata}
        body = b"".join(_string(key) + _value(key, value) for key, value in entries.items())
        return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + body


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """The vocabulary of a header that was read with ARRAYS. Raises VocabularyError."""
    architecture = header.text("general.architecture")
    metadata = {key: value for key, value in header.metadata.items() if key.startswith(PREFIX)}
    vocabulary = Vocabulary(architecture or "", metadata)
    if not architecture or not vocabulary.model:
        raise VocabularyError("the file names no architecture or no tokenizer")
    if not vocabulary.tokens or len(vocabulary.token_types) != len(vocabulary.tokens):
        raise VocabularyError("the file has no vocabulary, or not one type for each token")
    return vocabulary


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: object) -> bytes:
    if isinstance(value, list):
        return struct.pack("<I", _ARRAY) + _array(key, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value & 0xFFFFFFFF)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    raise VocabularyError(f"metadata {key} has the type {type(value).__name__}")


def _array(key: str, values: list[Any]) -> bytes:
    if all(isinstance(value, str) for value in values):
        return struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_string, values))
    if all(isinstance(value, float) for value in values):
        return struct.pack(f"<IQ{len(values)}f", _F32, len(values), *values)
    if not all(isinstance(value, int) for value in values):
        raise VocabularyError(f"metadata {key} mixes types")
    if key.endswith("precompiled_charsmap"):
        return struct.pack("<IQ", _U8, len(values)) + bytes(value & 0xFF for value in values)
    return struct.pack(f"<IQ{len(values)}i", _I32, len(values), *values)
