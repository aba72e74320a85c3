"""Identifiers: UUIDv7 inside (ordered by time, so indexes stay local), prefixed hex outside."""

from __future__ import annotations

import secrets
import time
import uuid

from marketplace.core.errors import NotFound


def new_id() -> uuid.UUID:
    """A UUIDv7: 48 bits of Unix milliseconds, 74 random bits (RFC 9562, section 5.7)."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return uuid.UUID(int=value)


def show(prefix: str, value: uuid.UUID) -> str:
    """`job_0193...`: the outside form of an id."""
    return f"{prefix}_{value.hex}"


def parse(prefix: str, text: str) -> uuid.UUID:
    """The inside form of `show`. Raises NotFound for anything that cannot be such an id."""
    head, _, tail = text.partition("_")
    if head != prefix or len(tail) != 32:
        raise NotFound(f"There is no {prefix} with the id {text[:80]!r}.")
    try:
        return uuid.UUID(hex=tail)
    except ValueError:
        raise NotFound(f"There is no {prefix} with the id {text[:80]!r}.") from None
