"""What the owner's asks come to, day by day: this machine's own note, before the platform's fee.

The marketplace's statement decides; this only says at once what to expect there. Money is integers of nano-USD.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Final

import msgspec

from agent.identity import write_private
from agent.protocol import UsageReport
from agent.records import Served

MAX_DAYS: Final = 400
_TOKENS_A_PRICE: Final = 1_000_000


class Day(msgspec.Struct):
    """One day's delivered answers of all models."""

    answers: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gross_nano_usd: int = 0


def gross_nano(served: Served, usage: UsageReport) -> int:
    """What the owner asks for one answer, rounded half to even. What the engine did not count is not asked for."""
    cached = usage.cached_tokens or 0
    uncached = max((usage.prompt_tokens or 0) - cached, 0)
    exact = (
        uncached * served.input_nano_usd_per_mtok
        + cached * served.cached_input_nano_usd_per_mtok
        + (usage.completion_tokens or 0) * served.output_nano_usd_per_mtok
    )
    whole, rest = divmod(exact, _TOKENS_A_PRICE)
    twice = 2 * rest
    return whole + (twice > _TOKENS_A_PRICE or (twice == _TOKENS_A_PRICE and whole % 2 == 1))


class Earnings:
    """earnings.json of one agent. Kept in memory, written by `save`; a file that cannot be read begins anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._days = read(path)
        self._dirty = False

    def add(self, served: Served, usage: UsageReport, today: date) -> None:
        """Note one answer that the gateway has taken."""
        day = self._days.setdefault(today.isoformat(), Day())
        while len(self._days) > MAX_DAYS:
            self._days.pop(min(self._days))
        day.answers += 1
        day.cached_tokens += usage.cached_tokens or 0
        day.input_tokens += max((usage.prompt_tokens or 0) - (usage.cached_tokens or 0), 0)
        day.output_tokens += usage.completion_tokens or 0
        day.gross_nano_usd += gross_nano(served, usage)
        self._dirty = True

    def today(self, today: date) -> Day:
        """The day so far."""
        return self._days.get(today.isoformat(), Day())

    def save(self) -> None:
        """Write the file if anything changed. Raises OSError."""
        if self._dirty:
            write_private(self._path, msgspec.json.encode(self._days), durable=False)
            self._dirty = False


def read(path: Path) -> dict[str, Day]:
    """Days by ISO date, oldest first."""
    try:
        days = msgspec.json.decode(path.read_bytes(), type=dict[str, Day])
    except (OSError, msgspec.DecodeError):
        return {}
    return dict(sorted(days.items()))


def usd(nano: int) -> str:
    """`1234567890` -> `1.234567890`."""
    return f"{nano // 10**9}.{nano % 10**9:09d}"
