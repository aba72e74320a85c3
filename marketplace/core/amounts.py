"""Amounts at the border: decimal strings of USD outside, integers of nano-USD (1e-9) inside. No float on the way."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

NANO_DIGITS: Final = 9
MAX_USD_PER_MTOK: Final = 1_000_000
_PRICE = re.compile(r"(\d{1,7})(?:\.(\d{1,9}))?", re.ASCII)


@lru_cache(maxsize=4_096)
def usd(nano: int) -> str:
    """Nano-USD as a decimal string of USD, exact, without needless zeros: 1_500_000 is `0.0015`."""
    sign, nano = ("-", -nano) if nano < 0 else ("", nano)
    whole, part = divmod(nano, 10**NANO_DIGITS)
    if not part:
        return f"{sign}{whole}"
    return f"{sign}{whole}.{part:0{NANO_DIGITS}d}".rstrip("0")


def nano_of(text: str) -> int:
    """`25.00` USD as nano-USD, exact. Raises ValueError, saying what is expected, for anything but a plain decimal of
    at most nine places below 10 million."""
    found = _PRICE.fullmatch(text)
    if found is None:
        raise ValueError("write USD as a decimal string such as '25.00', with at most 9 places")
    return _nano(*found.groups(default=""))


def _nano(whole: str, part: str) -> int:
    return int(whole) * 10**NANO_DIGITS + int(part.ljust(NANO_DIGITS, "0"))


def nano_per_mtok(text: str) -> int:
    """`0.05` USD per million tokens as nano-USD per million tokens, exact. Raises ValueError, saying what is expected,
    for anything but a plain decimal of at most nine places up to MAX_USD_PER_MTOK."""
    found = _PRICE.fullmatch(text)
    if found is None:
        raise ValueError("write USD per million tokens as a decimal string such as '0.05', with at most 9 places")
    nano = _nano(*found.groups(default=""))
    if nano > MAX_USD_PER_MTOK * 10**NANO_DIGITS:
        raise ValueError(f"a price is at most {MAX_USD_PER_MTOK} USD per million tokens")
    return nano
