"""The exact tokenizer: llama.cpp itself, asked through a child process. Bounded, and restarted if it dies."""

from __future__ import annotations

import array
import importlib.util
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from marketplace.core.errors import Unavailable

ANSWER_S: Final = 60.0
"""How long one answer may take, loading included."""
MAX_TEXT_BYTES: Final = 16 * 1024 * 1024
MAX_ANSWER_BYTES: Final = 4 * (MAX_TEXT_BYTES + 16)
_CHILD: Final = Path(__file__).with_name("oracle_child.py")


class OracleError(Unavailable):
    """llama.cpp's tokenizer cannot be asked: not installed, or its process died, or it refuses the vocabulary."""

    code = "tokenizer_unavailable"


@dataclass(frozen=True, slots=True)
class OracleFacts:
    """What llama.cpp says of a vocabulary."""

    tokens: int
    bos: int
    """-1: none."""
    eos: int
    add_bos: bool
    add_eos: bool


def llama_library() -> Path:
    """The shared library of the installed llama.cpp. It is never imported here. Raises OracleError if there is none."""
    spec = importlib.util.find_spec("xllamacpp")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in ("xllamacpp*.so", "xllamacpp*.pyd", "xllamacpp*.dylib"):
            found = sorted(Path(folder).glob(pattern))
            if found:
                return found[0]
    raise OracleError("llama.cpp is not installed here; install the extra: pip install 'fallow[engine]'.")


class Oracle:
    """One vocabulary in one child process, started on first use. Safe to share between threads; blocking."""

    def __init__(self, vocabulary_gguf: bytes) -> None:
        self._gguf = vocabulary_gguf
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def __enter__(self) -> Oracle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def facts(self) -> OracleFacts:
        """Raises OracleError."""
        with self._lock:
            return self._started().facts

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids, without begin or end tokens. `special`: texts of special tokens count as those tokens.

        A child that died is replaced once. Raises OracleError, and ValueError for text that is not valid Unicode.
        """
        data = text.encode()
        if len(data) > MAX_TEXT_BYTES:
            raise OracleError(f"A text of {len(data)} bytes is too long to count.")
        with self._lock:
            try:
                return self._started().encode(data, special=special)
            except OracleError:
                self._end()
                return self._started().encode(data, special=special)

    def close(self) -> None:
        """End the child. The next question starts another."""
        with self._lock:
            self._end()

    def _started(self) -> _Child:
        if self._child is None:
            self._child = _Child(llama_library(), self._gguf)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """The process and its two pipes."""

    def __init__(self, library: Path, gguf: bytes) -> None:
        with tempfile.NamedTemporaryFile(prefix="fallow-vocabulary-", suffix=".gguf") as file:
            file.write(gguf)
            file.flush()
            self._process = subprocess.Popen(  # our own interpreter, our own script
                [sys.executable, "-I", "-S", str(_CHILD), str(library), file.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
            try:
                # The file is only needed until the child has answered that it loaded it.
                answer = json.loads(self._receive(time.monotonic() + ANSWER_S))
                if "error" in answer:
                    raise OracleError(f"llama.cpp's tokenizer did not start: {answer['error']}.")
            except BaseException:
                self.end()
                raise
        self.facts = OracleFacts(**answer)

    def encode(self, data: bytes, *, special: bool) -> list[int]:
        deadline = time.monotonic() + ANSWER_S
        self._send(struct.pack("<IB", len(data) + 1, special) + data, deadline)
        ids = array.array("i", self._receive(deadline))
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tolist()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, data: bytes, deadline: float) -> None:
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        view = memoryview(data)
        while view:
            self._wait([], [fd], deadline)
            try:
                # At most PIPE_BUF, which a pipe that is ready for writing takes without blocking.
                view = view[os.write(fd, view[: select.PIPE_BUF]) :]
            except OSError as error:
                raise OracleError("llama.cpp's tokenizer died.") from error

    def _receive(self, deadline: float) -> bytes:
        (length,) = struct.unpack("<I", self._read(4, deadline))
        if length > MAX_ANSWER_BYTES:
            raise OracleError("llama.cpp's tokenizer answered nonsense.")
        return self._read(length, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        pieces = []
        while count:
            self._wait([fd], [], deadline)
            piece = os.read(fd, min(count, 1 << 20))
            if not piece:
                raise OracleError("llama.cpp's tokenizer died.")
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    @staticmethod
    def _wait(readers: list[int], writers: list[int], deadline: float) -> None:
        # poll, not select: a busy gateway has descriptors beyond select's 1,024.
        poller = select.poll()
        for fd in readers:
            poller.register(fd, select.POLLIN)
        for fd in writers:
            poller.register(fd, select.POLLOUT)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise OracleError(f"llama.cpp's tokenizer did not answer within {ANSWER_S:.0f} s.")
