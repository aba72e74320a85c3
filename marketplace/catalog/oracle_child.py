"""llama.cpp's own tokenizer, in a process of its own: a native abort ends this child and nothing else.

Run as a script by `oracle.py`, isolated (`python -I -S`), so it imports the standard library alone:
    oracle_child.py <shared library of llama.cpp> <vocabulary GGUF>

It writes frames to standard output: a little-endian u32 length, then that many bytes. The first is JSON: the facts of
the vocabulary, or {"error": ...}. Then each frame read from standard input (a flag byte, 1 to parse special tokens, and
UTF-8) is answered by a frame of little-endian int32 token ids. It ends when standard input does.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import struct
import sys
from typing import BinaryIO, Final

_PARAMS_BYTES: Final = 512
"""Room for llama_model_params, which llama.cpp hands over by value and appends to: more than it will ever take."""
_VOCAB_ONLY_OFFSET: Final = 72
"""Of `vocab_only` in llama_model_params: behind seven pointers and four 32-bit integers. The file that is loaded has no
weights, so that loading fails, and says so, should a future llama.cpp have the flag elsewhere."""


class _ModelParams(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_ubyte * _PARAMS_BYTES),)


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class Vocabulary:
    """A vocabulary loaded by llama.cpp. Lives as long as the process."""

    def __init__(self, library_path: str, gguf_path: str) -> None:
        self._library = ctypes.CDLL(library_path)
        self._silence = _LogCallback(lambda _level, _text, _data: None)
        self._library.llama_log_set(self._silence, None)
        self._library.llama_backend_init()
        model = self._load(gguf_path)
        self._handle = self._pointer("llama_model_get_vocab", model)

    def facts(self) -> dict[str, int | bool]:
        """What llama.cpp adds by itself, and the ids of the ends."""
        return {
            "tokens": self._number("llama_vocab_n_tokens", ctypes.c_int32),
            "bos": self._number("llama_vocab_bos", ctypes.c_int32),
            "eos": self._number("llama_vocab_eos", ctypes.c_int32),
            "add_bos": bool(self._number("llama_vocab_get_add_bos", ctypes.c_bool)),
            "add_eos": bool(self._number("llama_vocab_get_add_eos", ctypes.c_bool)),
        }

    def encode(self, text: bytes, *, special: bool) -> bytes:
        """Token ids of UTF-8 text as little-endian int32, without the ends that llama.cpp can add."""
        room = len(text) + 16
        ids = (ctypes.c_int32 * room)()
        tokenize = self._library.llama_tokenize
        tokenize.restype = ctypes.c_int32
        tokenize.argtypes = [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_bool,
            ctypes.c_bool,
        ]
        count = tokenize(self._handle, text, len(text), ids, room, False, special)
        if count < 0:
            raise ValueError(f"llama_tokenize answered {count}")
        found = array.array("i", ids[:count])
        if sys.byteorder == "big":
            found.byteswap()
        return found.tobytes()

    def _load(self, gguf_path: str) -> int:
        defaults = self._library.llama_model_default_params
        defaults.restype, defaults.argtypes = _ModelParams, []
        params = defaults()
        params.raw[_VOCAB_ONLY_OFFSET] = 1
        load = self._library.llama_model_load_from_file
        load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p, _ModelParams]
        model = load(os.fsencode(gguf_path), params)
        if not model:
            raise ValueError("llama.cpp does not load this vocabulary")
        return int(model)

    def _pointer(self, name: str, argument: int) -> int:
        function = getattr(self._library, name)
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        return int(function(argument))

    def _number(self, name: str, kind: type[ctypes.c_int32] | type[ctypes.c_bool]) -> int:
        function = getattr(self._library, name)
        function.restype, function.argtypes = kind, [ctypes.c_void_p]
        return int(function(self._handle))


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, or None where the stream ends."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Send one frame at once."""
    stream.write(struct.pack("<I", len(body)))
    stream.write(body)
    stream.flush()


def main(library_path: str, gguf_path: str) -> int:
    """Serve until standard input ends."""
    # Native code may print; the frames keep the real standard output to themselves.
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        vocabulary = Vocabulary(library_path, gguf_path)
    except (OSError, AttributeError, ValueError) as error:
        write_frame(frames, json.dumps({"error": str(error)}).encode())
        return 1
    write_frame(frames, json.dumps(vocabulary.facts()).encode())
    while (request := read_frame(sys.stdin.buffer)) is not None:
        write_frame(frames, vocabulary.encode(request[1:], special=request[:1] == b"\x01"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2]))
