"""What every export is made from: typed sheets, so that CSV, XLSX and PDF tell the same figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from fractions import Fraction
from typing import Final

import ledger

MICROS_PER_HOUR: Final = 3_600_000_000
Cell = str | int | float | Fraction | datetime | None
"""None: unknown, or not declared. Never shown as zero."""


class Format(Enum):
    """What a cell holds."""

    TEXT = "text"
    COUNT = "count"
    MONEY = "money"
    """Whole nano-USD."""
    RATE = "rate"
    """Nano-USD per million tokens."""
    SHARE = "share"
    """A number of which 1 is all."""
    HOURS = "hours"
    """Whole microseconds."""
    KWH = "kWh"
    YEARS = "years"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `summed`: its cells add up to the total's."""

    title: str
    format: Format = Format.TEXT
    summed: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table."""

    name: str
    """At most 31 characters."""
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    total: tuple[Cell, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure that stands at the head."""

    name: str
    value: Cell
    format: Format = Format.TEXT


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar."""

    name: str
    value: Cell
    format: Format

    @property
    def length(self) -> float:
        """In proportion to the value; 0 for one that is unknown or negative."""
        return max(0.0, float(self.value)) if isinstance(self.value, int | float | Fraction) else 0.0


@dataclass(frozen=True, slots=True)
class Bar:
    """Something whole and what it is made of, for those who would rather look than read."""

    title: str
    parts: tuple[Part, ...]
    """At most five."""


@dataclass(frozen=True, slots=True)
class Document:
    """A statement, an invoice or a report, ready to be written."""

    title: str
    party: str
    """Whom it is for."""
    period: str
    facts: tuple[Fact, ...]
    sheets: tuple[Sheet, ...]
    notes: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()
    """Drawn where the format can; they say nothing that the sheets do not."""


def totalled(name: str, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]], *notes: str) -> Sheet:
    """A sheet whose total is the sum of its summed columns. A column with an unknown cell has no total."""
    total: list[Cell] = []
    for place, column in enumerate(columns):
        cells = [row[place] for row in rows]
        if column.summed and all(isinstance(cell, int | float | Fraction) for cell in cells):
            total.append(sum(cell for cell in cells if isinstance(cell, int | float | Fraction)))
        else:
            total.append("total" if place == 0 else None)
    return Sheet(name, tuple(columns), tuple(rows), tuple(total), notes)


def as_json(document: Document) -> dict[str, object]:
    """A document as JSON: money and rates as decimal strings of USD, hours and shares as numbers, unknown as null."""
    return {
        "object": "document",
        "title": document.title,
        "party": document.party,
        "period": document.period,
        "facts": [
            {"name": fact.name, "format": fact.format.value, "value": plain(fact.value, fact.format)}
            for fact in document.facts
        ],
        "sheets": [
            {
                "name": sheet.name,
                "columns": [{"title": column.title, "format": column.format.value} for column in sheet.columns],
                "rows": [_plain_row(row, sheet.columns) for row in sheet.rows],
                "total": None if sheet.total is None else _plain_row(sheet.total, sheet.columns),
                "notes": list(sheet.notes),
            }
            for sheet in document.sheets
        ],
        "notes": list(document.notes),
    }


def _plain_row(cells: Sequence[Cell], columns: Sequence[Column]) -> list[str | int | float | None]:
    return [plain(cell, column.format) for cell, column in zip(cells, columns, strict=True)]


def plain(cell: Cell, kind: Format) -> str | int | float | None:
    """A cell for machines."""
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, datetime):
        return cell.isoformat()
    if kind in (Format.MONEY, Format.RATE):
        return ledger.format_nano(int(cell), min_places=9)
    if kind is Format.HOURS:
        return int(cell) / MICROS_PER_HOUR
    return int(cell) if kind in (Format.COUNT, Format.TEXT) else float(cell)
