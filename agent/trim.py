"""Gives memory back that only the start needed: an owner's machine should not carry it for months. Linux alone."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from typing import Final

_M_ARENA_MAX: Final = -8
_MADV_DONTNEED: Final = 4


def begin() -> None:
    """Before threads are started: one arena for all of them, since only one ever allocates much."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def settle() -> None:
    """After the start. What was imported lives for ever, so it leaves the collector's rounds; free heap pages and pages
    of libraries' code go back to the system, which brings those that are still needed from its cache."""
    gc.collect()
    gc.freeze()
    if sys.platform != "linux":
        return
    with suppress(AttributeError, OSError, ValueError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in _code_of_libraries():
            libc.madvise(start, end - start, _MADV_DONTNEED)


def _code_of_libraries() -> list[tuple[int, int]]:
    """Mappings of pure code. Nothing else may be dropped: a read-only page of data may have been written before."""
    found = []
    with open("/proc/self/maps", encoding="utf-8") as maps:  # noqa: PTH123 - procfs, line by line
        for line in maps:
            fields = line.split()
            if len(fields) >= 6 and fields[1] == "r-xp" and ".so" in fields[5]:
                start, _, end = fields[0].partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found
