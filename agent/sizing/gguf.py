"""GGUF headers, read with the standard library alone: metadata and the tensor table, never the weights.

A header names everything that sizing and the catalogue need. Large arrays (a vocabulary, its merges) are walked over
unless asked for, so that a 100 MB file costs about 0.1 s and no memory to speak of. The file is hostile until proven
otherwise: every count and length is bounded before it is believed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

MAGIC: Final = b"GGUF"
SUPPORTED_VERSIONS: Final = frozenset({2, 3})
DEFAULT_ALIGNMENT: Final = 32
MAX_METADATA_ENTRIES: Final = 65_536
MAX_TENSORS: Final = 1_000_000
MAX_STRING_BYTES: Final = 16 * 1024 * 1024
"""A chat template is kilobytes; nothing honest comes near this."""
MAX_ARRAY_ELEMENTS: Final = 16 * 1024 * 1024
MAX_ARRAY_DEPTH: Final = 2
MAX_DIMENSIONS: Final = 8
MAX_ALIGNMENT: Final = 1024 * 1024
_CHUNK_BYTES: Final = 1024 * 1024

# GGUF value types.
_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_SCALARS: Final[dict[int, struct.Struct]] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

TENSOR_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    # type id: (name, elements a block, bytes a block), as in ggml
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}


class GgufError(ValueError):
    """The file is not a GGUF file that we can read, or it is damaged. The message says which, and where."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Elements along each dimension, fastest first, as stored."""
    type_name: str
    offset_bytes: int
    """From the start of the data section."""
    size_bytes: int

    @property
    def elements(self) -> int:
        """Number of weights."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself before its weights begin."""

    version: int
    metadata: dict[str, object]
    """str, int, float and bool as such; arrays (as lists) only where they were asked for by name."""
    tensors: tuple[TensorInfo, ...]
    tensor_bytes: int
    """Sum of the tensors' bytes: the weights' true size."""
    data_offset: int
    file_size: int
    array_lengths: dict[str, int] = field(default_factory=dict)
    """Length of every top-level array, kept or not."""

    @property
    def required_size(self) -> int:
        """Bytes that the file must have for its last tensor to be whole."""
        return self.data_offset + max((t.offset_bytes + t.size_bytes for t in self.tensors), default=0)

    @property
    def complete(self) -> bool:
        """True if no tensor reaches past the end of the file."""
        return self.required_size <= self.file_size

    def text(self, key: str) -> str | None:
        """A metadata string, or None if absent or of another type."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """A metadata integer, or None if absent or of another type."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_header(path: str | Path, arrays: frozenset[str] = frozenset()) -> GgufHeader:
    """Read the header of the GGUF file at `path`; keep the values of the arrays named in `arrays`.

    Strings are UTF-8; bytes that are not are kept as surrogate escapes. A file whose weights are cut short has a
    perfect header: ask `complete`, or call `require_complete`.

    Raises GgufError for anything that is not a sound header, and OSError if the file cannot be read.
    """
    path = Path(path)
    with path.open("rb") as stream:
        file_size = path.stat().st_size
        return _Parser(_Cursor(stream, file_size), arrays).parse(file_size)


def require_complete(header: GgufHeader) -> None:
    """Raise GgufError if the file is shorter than its own tensor table says."""
    if not header.complete:
        missing = header.required_size - header.file_size
        raise GgufError(
            f"the file is cut short: its tensors end at byte {header.required_size}, "
            f"the file has {header.file_size} ({missing} missing)"
        )


class _Cursor:
    """Forward reading in large chunks: a header is some hundred thousand tiny fields."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._size = size
        self._buffer = b""
        self._start = 0
        """File offset of the buffer's first byte."""
        self._at = 0

    @property
    def offset(self) -> int:
        return self._start + self._at

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._buffer):
            self._refill(count)
            end = count
        piece = self._buffer[self._at : end]
        self._at = end
        return piece

    def skip(self, count: int) -> None:
        if self._at + count <= len(self._buffer):
            self._at += count
            return
        target = self.offset + count
        if target > self._size:
            raise GgufError(f"the header is cut short at byte {self._size}")
        self._stream.seek(target)
        self._buffer, self._start, self._at = b"", target, 0

    def _refill(self, count: int) -> None:
        rest = self._buffer[self._at :]
        self._start += self._at
        self._buffer = rest + self._stream.read(max(count - len(rest), _CHUNK_BYTES))
        self._at = 0
        if len(self._buffer) < count:
            raise GgufError(f"the header is cut short at byte {self._start + len(self._buffer)}")

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])


class _Parser:
    def __init__(self, cursor: _Cursor, arrays: frozenset[str]) -> None:
        self._cursor = cursor
        self._arrays = arrays
        self._lengths: dict[str, int] = {}

    def parse(self, file_size: int) -> GgufHeader:
        version = self._preamble()
        tensor_count = _bounded(self._cursor.u64(), MAX_TENSORS, "tensors")
        entry_count = _bounded(self._cursor.u64(), MAX_METADATA_ENTRIES, "metadata entries")
        metadata: dict[str, object] = {}
        for _ in range(entry_count):
            key = self._string()
            if key in metadata or key in self._lengths:
                raise GgufError(f"metadata key {key[:80]!r} appears twice")
            self._entry(key, metadata)
        alignment = _alignment(metadata)
        tensors = tuple(self._tensor(alignment) for _ in range(tensor_count))
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise GgufError("two tensors have the same name")
        return GgufHeader(
            version=version,
            metadata=metadata,
            tensors=tensors,
            tensor_bytes=sum(tensor.size_bytes for tensor in tensors),
            data_offset=-(-self._cursor.offset // alignment) * alignment,
            file_size=file_size,
            array_lengths=self._lengths,
        )

    def _preamble(self) -> int:
        magic = self._cursor.take(4)
        if magic != MAGIC:
            raise GgufError(f"not a GGUF file: it begins with {magic!r}")
        version = self._cursor.u32()
        if version not in SUPPORTED_VERSIONS:
            kind = "big-endian files are" if version & 0xFFFF == 0 else f"version {version} is"
            raise GgufError(f"GGUF {kind} not supported")
        return version

    def _entry(self, key: str, metadata: dict[str, object]) -> None:
        kind = self._cursor.u32()
        if kind != _ARRAY:
            metadata[key] = self._scalar(kind)
            return
        element, count = self._array_head()
        self._lengths[key] = count
        if key in self._arrays:
            metadata[key] = self._elements(element, count, depth=1)
        else:
            self._skip_elements(element, count, depth=1)

    def _array_head(self) -> tuple[int, int]:
        element = self._cursor.u32()
        return element, _bounded(self._cursor.u64(), MAX_ARRAY_ELEMENTS, "array elements")

    def _scalar(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        layout = _layout(kind)
        value = layout.unpack(self._cursor.take(layout.size))[0]
        return bool(value) if kind == _BOOL else value

    def _string(self) -> str:
        length = _bounded(self._cursor.u64(), MAX_STRING_BYTES, "bytes in a string")
        return self._cursor.take(length).decode("utf-8", errors="surrogateescape")

    def _elements(self, kind: int, count: int, *, depth: int) -> list[object]:
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            return self._nested(lambda element, length: self._elements(element, length, depth=depth + 1), count, depth)
        layout = _layout(kind)
        values = [value for (value,) in layout.iter_unpack(self._cursor.take(layout.size * count))]
        return [bool(value) for value in values] if kind == _BOOL else values

    def _skip_elements(self, kind: int, count: int, *, depth: int) -> None:
        if kind == _STRING:
            self._skip_strings(count)
        elif kind == _ARRAY:
            self._nested(lambda element, length: self._skip_elements(element, length, depth=depth + 1), count, depth)
        else:
            self._cursor.skip(_layout(kind).size * count)

    def _skip_strings(self, count: int) -> None:
        u64, skip = self._cursor.u64, self._cursor.skip
        for _ in range(count):
            length = u64()
            if length > MAX_STRING_BYTES:
                _bounded(length, MAX_STRING_BYTES, "bytes in a string")
            skip(length)

    def _nested(self, read: Callable[[int, int], object], count: int, depth: int) -> list[object]:
        if depth >= MAX_ARRAY_DEPTH:
            raise GgufError("arrays are nested too deeply")
        return [read(*self._array_head()) for _ in range(count)]

    def _tensor(self, alignment: int) -> TensorInfo:
        name = self._string()
        dimensions = _bounded(self._cursor.u32(), MAX_DIMENSIONS, "dimensions of a tensor")
        shape = tuple(self._cursor.u64() for _ in range(dimensions))
        kind = self._cursor.u32()
        offset = self._cursor.u64()
        if kind not in TENSOR_TYPES:
            raise GgufError(f"tensor {name[:80]!r} has type {kind}, which is not known here")
        if offset % alignment:
            raise GgufError(f"tensor {name[:80]!r} is not aligned")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        tensor = TensorInfo(name, shape, type_name, offset, 0)
        if shape and shape[0] % block:
            raise GgufError(f"tensor {name[:80]!r} has rows that are no whole number of {type_name} blocks")
        return TensorInfo(name, shape, type_name, offset, tensor.elements // block * block_bytes)


def _layout(kind: int) -> struct.Struct:
    layout = _SCALARS.get(kind)
    if layout is None:
        raise GgufError(f"value type {kind} is not known")
    return layout


def _bounded(value: int, bound: int, what: str) -> int:
    if value > bound:
        raise GgufError(f"{value} {what}: more than the {bound} that a sound file has")
    return value


def _alignment(metadata: dict[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise GgufError(f"general.alignment is {value!r}")
    return value
