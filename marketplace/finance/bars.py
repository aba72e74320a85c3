"""A document's bars as drawings for paper. Beside pdf.py the only importer of reportlab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from reportlab.graphics.shapes import Drawing, Rect, String
from reportlab.lib import colors
from reportlab.lib.units import mm
from reportlab.pdfbase import pdfmetrics

from marketplace.finance.document import Bar, Part

TITLE_WIDTH: Final = 62 * mm
LINE: Final = 8.5 * mm
THICKNESS: Final = 4 * mm
TITLE_PT: Final = 7.0
LEGEND_PT: Final = 5.5
MAX_BARS: Final = 10
PALETTE: Final = tuple(colors.HexColor(code) for code in ("#1F6F5C", "#7DB9A4", "#DCE4EA", "#C58B2B", "#8A4F7D"))
INK: Final = colors.HexColor("#16202A")
GREY: Final = colors.HexColor("#5B6875")


def drawing(bars: Sequence[Bar], width: float, font: str, shown: Callable[[Part], str]) -> Drawing:
    """Bars below each other, `width` points wide: a title, the parts in proportion, and under them what each is.
    At most MAX_BARS, the first ones. A part that is unknown or not positive takes no room, but is named."""
    bars = bars[:MAX_BARS]
    picture = Drawing(width, LINE * len(bars))
    for place, bar in enumerate(bars):
        for shape in _bar(bar, LINE * (len(bars) - 1 - place), width, font, shown):
            picture.add(shape)
    return picture


def _bar(bar: Bar, base: float, width: float, font: str, shown: Callable[[Part], str]) -> list[Any]:
    room = width - TITLE_WIDTH
    whole = sum(part.length for part in bar.parts)
    middle = base + LINE - THICKNESS
    shapes: list[Any] = [
        String(
            0,
            middle + 3,
            _cut(bar.title, font, TITLE_PT, TITLE_WIDTH - 4),
            fontName=font,
            fontSize=TITLE_PT,
            fillColor=INK,
        )
    ]
    start = legend = TITLE_WIDTH
    for part, colour in zip(bar.parts, PALETTE, strict=False):
        length = room * part.length / whole if whole else 0.0
        shapes.append(Rect(start, middle, length, THICKNESS, fillColor=colour, strokeColor=None))
        start += length
        text = f"{part.name}: {shown(part)}"
        shapes.append(Rect(legend, base + 3.5, 4, 4, fillColor=colour, strokeColor=None))
        shapes.append(String(legend + 6, base + 3.5, text, fontName=font, fontSize=LEGEND_PT, fillColor=GREY))
        legend += 6 + pdfmetrics.stringWidth(text, font, LEGEND_PT) + 10
    return shapes


def _cut(text: str, font: str, size: float, room: float) -> str:
    if pdfmetrics.stringWidth(text, font, size) <= room:
        return text
    while text and pdfmetrics.stringWidth(f"{text}…", font, size) > room:
        text = text[:-1]
    return f"{text}…"
