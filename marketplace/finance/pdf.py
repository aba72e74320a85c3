"""A document as PDF: a page that one would send. With bars.py the sole importer of reportlab; its fonts are embedded.

The same document gives the same bytes: no time of printing, no random ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import reportlab
from reportlab.lib import colors
from reportlab.lib.enums import TA_RIGHT
from reportlab.lib.pagesizes import A4, landscape
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.platypus import KeepTogether, LongTable, Paragraph, SimpleDocTemplate, Spacer, Table, TableStyle

import ledger
from marketplace.finance import bars
from marketplace.finance.document import Cell, Column, Document, Fact, Format, Sheet
from marketplace.finance.files import written

MICROS_PER_HOUR: Final = 3_600_000_000
MAX_ROWS: Final = 400
"""Of one table on paper; the rest is told as a count, and stands in the other formats."""
MAX_CELL_CHARACTERS: Final = 400
MARGIN: Final = 14 * mm
PAGE: Final = landscape(A4)
WIDTH: Final = PAGE[0] - 2 * MARGIN
INK: Final = colors.HexColor("#16202A")
GREY: Final = colors.HexColor("#5B6875")
RULE: Final = colors.HexColor("#C9D2DA")
SHADE: Final = colors.HexColor("#F2F5F8")
FONT: Final = "FallowSans"
BOLD: Final = "FallowSansBold"


def write(document: Document, path: Path | str) -> Path:
    """Write a document; returns the absolute path. Raises NotWritten; nothing is left of it then."""
    path = Path(path).absolute()
    _register_fonts()
    with written(path) as partial:
        _build(document, partial)
    return path


def _register_fonts() -> None:
    folder = Path(reportlab.__file__).parent / "fonts"
    for name, file in ((FONT, "Vera.ttf"), (BOLD, "VeraBd.ttf")):
        if name not in pdfmetrics.getRegisteredFontNames():
            pdfmetrics.registerFont(TTFont(name, str(folder / file)))
    pdfmetrics.registerFontFamily(FONT, normal=FONT, bold=BOLD, italic=FONT, boldItalic=BOLD)


def _styles() -> dict[str, ParagraphStyle]:
    base = ParagraphStyle("base", fontName=FONT, fontSize=7, leading=9, textColor=INK)
    # Paragraphs of the page stand in a frame with a padding; tables do not.
    flush = ParagraphStyle("flush", base, leftIndent=-4)
    return {
        "cell": base,
        "right": ParagraphStyle("right", base, alignment=TA_RIGHT),
        "head": ParagraphStyle("head", base, fontName=BOLD, fontSize=6.5, leading=8, textColor=GREY),
        "head right": ParagraphStyle(
            "head right", base, fontName=BOLD, fontSize=6.5, leading=8, textColor=GREY, alignment=TA_RIGHT
        ),
        "total": ParagraphStyle("total", base, fontName=BOLD),
        "total right": ParagraphStyle("total right", base, fontName=BOLD, alignment=TA_RIGHT),
        "title": ParagraphStyle("title", flush, fontName=BOLD, fontSize=18, leading=22),
        "party": ParagraphStyle("party", flush, fontSize=10, leading=14),
        "section": ParagraphStyle(
            "section", flush, fontName=BOLD, fontSize=10, leading=14, spaceBefore=8, spaceAfter=2
        ),
        "note": ParagraphStyle("note", flush, fontSize=6.5, leading=8.5, textColor=GREY, spaceBefore=2),
        "fact": ParagraphStyle("fact", base, fontSize=6.5, leading=9, textColor=GREY),
        "figure": ParagraphStyle("figure", base, fontName=BOLD, fontSize=10.5, leading=14),
    }


def _build(document: Document, path: Path) -> None:
    styles = _styles()
    with path.open("wb") as file:
        template = SimpleDocTemplate(
            file,
            pagesize=PAGE,
            leftMargin=MARGIN,
            rightMargin=MARGIN,
            topMargin=MARGIN,
            bottomMargin=MARGIN + 4 * mm,
            title=f"{document.title}, {document.party}",
            author="Fallow",
            subject=document.period,
            invariant=1,
        )

        def footer(canvas: Any, _: Any) -> None:
            canvas.saveState()
            canvas.setFont(FONT, 6.5)
            canvas.setFillColor(GREY)
            canvas.drawString(MARGIN, 9 * mm, f"Fallow · {document.title} · {document.party[:80]} · {document.period}")
            canvas.drawRightString(PAGE[0] - MARGIN, 9 * mm, f"page {canvas.getPageNumber()}")
            canvas.restoreState()

        template.build(_story(document, styles), onFirstPage=footer, onLaterPages=footer)


def _story(document: Document, styles: dict[str, ParagraphStyle]) -> list[Any]:
    story: list[Any] = [
        Paragraph(_text(document.title), styles["title"]),
        Paragraph(_text(document.party), styles["party"]),
        Paragraph(_text(document.period), styles["note"]),
        Spacer(1, 4 * mm),
        _fact_grid(document.facts, styles),
    ]
    story += [Paragraph(_text(note), styles["note"]) for note in document.notes]
    if document.bars:
        picture = bars.drawing(document.bars, WIDTH, FONT, lambda part: shown(part.value, part.format))
        # As wide as the tables are, which stand free of the page's padding.
        story += [Spacer(1, 4 * mm), Table([[picture]], colWidths=[WIDTH], style=[("LEFTPADDING", (0, 0), (0, 0), 0)])]
    for sheet in document.sheets:
        story += _section(sheet, styles)
    return story


def _fact_grid(facts: Sequence[Fact], styles: dict[str, ParagraphStyle]) -> Table:
    across = 5
    cells = [
        [
            Paragraph(_text(fact.name), styles["fact"]),
            Paragraph(_text(shown(fact.value, fact.format)), styles["figure"]),
        ]
        for fact in facts
    ]
    cells += [[]] * (-len(cells) % across)
    rows = [cells[start : start + across] for start in range(0, len(cells), across)]
    table = Table(rows, colWidths=[WIDTH / across] * across)
    table.setStyle(
        TableStyle(
            [
                ("BACKGROUND", (0, 0), (-1, -1), SHADE),
                ("VALIGN", (0, 0), (-1, -1), "TOP"),
                ("LEFTPADDING", (0, 0), (-1, -1), 6),
                ("TOPPADDING", (0, 0), (-1, -1), 4),
                ("BOTTOMPADDING", (0, 0), (-1, -1), 5),
            ]
        )
    )
    return table


def _figure(fact: Fact) -> str:
    text = shown(fact.value, fact.format)
    return f"{text} USD" if fact.format is Format.MONEY else text


def _section(sheet: Sheet, styles: dict[str, ParagraphStyle]) -> list[Any]:
    title = Paragraph(_text(sheet.name), styles["section"])
    notes = [Paragraph(_text(note), styles["note"]) for note in sheet.notes]
    if not sheet.rows:
        return [KeepTogether([title, Paragraph("Nothing in this period.", styles["note"])])]
    left_out = len(sheet.rows) - MAX_ROWS
    if left_out > 0:
        said = f"{left_out:,} more rows are in the other formats; the total counts them."
        notes.insert(0, Paragraph(said, styles["note"]))
    table = _table(sheet, styles)
    if len(sheet.rows) <= 12:
        return [KeepTogether([title, table, *notes])]
    return [title, table, *notes]


def _table(sheet: Sheet, styles: dict[str, ParagraphStyle]) -> LongTable:
    rows = [[Paragraph(_text(column.title), styles[_style("head", column)]) for column in sheet.columns]]
    shown_rows = sheet.rows[:MAX_ROWS]
    rows += [_row(cells, sheet.columns, "cell", styles) for cells in shown_rows]
    rules = [
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
        ("LINEBELOW", (0, 0), (-1, 0), 0.6, GREY),
        ("LINEBELOW", (0, 1), (-1, -1), 0.25, RULE),
        ("LEFTPADDING", (0, 0), (-1, -1), 2),
        ("RIGHTPADDING", (0, 0), (-1, -1), 2),
        ("TOPPADDING", (0, 0), (-1, -1), 2),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 2),
    ]
    if sheet.total is not None:
        rows.append(_row(sheet.total, sheet.columns, "total", styles, empty=""))
        rules += [("LINEABOVE", (0, -1), (-1, -1), 0.8, INK), ("BACKGROUND", (0, -1), (-1, -1), SHADE)]
    return LongTable(rows, colWidths=_widths(sheet, shown_rows), repeatRows=1, style=TableStyle(rules))


def _row(
    cells: Sequence[Cell],
    columns: Sequence[Column],
    style: str,
    styles: dict[str, ParagraphStyle],
    empty: str = "–",
) -> list[Paragraph]:
    return [
        Paragraph(_text(shown(cell, column.format, empty)), styles[_style(style, column)])
        for cell, column in zip(cells, columns, strict=True)
    ]


def _style(base: str, column: Column) -> str:
    if column.format is Format.TEXT:
        return base
    return "right" if base == "cell" else f"{base} right"


def _widths(sheet: Sheet, rows: Sequence[tuple[Cell, ...]]) -> list[float]:
    """The page's width, by the longest of what each column shows; numbers are never broken."""
    wanted = []
    for place, column in enumerate(sheet.columns):
        cells = [shown(row[place], column.format) for row in (*rows, *([sheet.total] if sheet.total else []))]
        widest = max((pdfmetrics.stringWidth(cell[:MAX_CELL_CHARACTERS], BOLD, 7) for cell in cells), default=0.0)
        words = max((pdfmetrics.stringWidth(word, BOLD, 6.5) for word in column.title.split()), default=0.0)
        wanted.append(max(widest, words) + 6)
    texts = [column.format is Format.TEXT for column in sheet.columns]
    room = WIDTH - sum(width for width, text in zip(wanted, texts, strict=True) if not text)
    texts_wanted = sum(width for width, text in zip(wanted, texts, strict=True) if text)
    if texts_wanted > room > 0:
        return _squeezed(wanted, texts, room)
    spare = (WIDTH - sum(wanted)) / len(wanted)
    return [width + spare for width in wanted]


def _squeezed(wanted: Sequence[float], texts: Sequence[bool], room: float) -> list[float]:
    """Numbers keep their width; of the texts the longest give way first."""
    left, widths = room, list(wanted)
    places = sorted((place for place, text in enumerate(texts) if text), key=lambda place: wanted[place])
    for done, place in enumerate(places):
        widths[place] = min(wanted[place], left / (len(places) - done))
        left -= widths[place]
    return widths


def shown(cell: Cell, kind: Format, empty: str = "–") -> str:
    """A cell as people read it. Money is exact."""
    if cell is None or cell == "":
        return empty
    if isinstance(cell, str):
        return cell
    if isinstance(cell, datetime):
        return f"{cell:%Y-%m-%d %H:%M:%S}"
    return str(_NUMBERS[kind](cell))


_NUMBERS: Final[dict[Format, Any]] = {
    Format.TEXT: str,
    Format.COUNT: lambda cell: f"{int(cell):,}",
    Format.MONEY: lambda cell: _grouped(int(cell)),
    Format.RATE: lambda cell: _grouped(int(cell)),
    Format.SHARE: lambda cell: f"{float(cell):.1%}",
    Format.HOURS: lambda cell: f"{int(cell) / MICROS_PER_HOUR:,.2f}",
    Format.KWH: lambda cell: f"{float(cell):,.4f} kWh",
    Format.YEARS: lambda cell: f"{float(cell):,.2f}",
    Format.TIME: str,
}


def _grouped(nano: int) -> str:
    """`1,234.50`: every digit that counts."""
    whole, _, fraction = ledger.format_nano(abs(nano)).partition(".")
    return f"{'-' if nano < 0 else ''}{int(whole):,}.{fraction}"


def _text(value: str) -> str:
    clean = "".join(c if c.isprintable() else " " for c in value[:MAX_CELL_CHARACTERS])
    return escape(clean)
