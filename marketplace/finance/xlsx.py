"""A document as XLSX: typed cells, totals as formulas. The sole importer of xlsxwriter.

Spreadsheets keep 15 digits of a number. An amount that needs more is written as text, exactly, and not summed.
"""

from __future__ import annotations

from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import xlsxwriter
from xlsxwriter.exceptions import XlsxWriterException
from xlsxwriter.utility import xl_rowcol_to_cell

import ledger
from marketplace.finance.document import Cell, Column, Document, Fact, Format, Sheet
from marketplace.finance.files import NotWritten, written

MAX_DIGITS: Final = 15
NANO: Final = 10**9
MICROS_PER_HOUR: Final = 3_600_000_000
_NUMBER_FORMATS: Final[dict[Format, str]] = {
    Format.COUNT: "#,##0",
    Format.MONEY: "#,##0.00#######;[Red]-#,##0.00#######;0.00",
    Format.RATE: "#,##0.00#######",
    Format.SHARE: "0.0%",
    Format.HOURS: "#,##0.00",
    Format.KWH: "#,##0.000000",
    Format.YEARS: "0.00",
    Format.TIME: "yyyy-mm-dd hh:mm:ss",
}
FIRST_ROW: Final = 2
"""Of a sheet's table: below its name and an empty row."""


def write(document: Document, path: Path | str) -> Path:
    """Write a document; returns the absolute path. Raises NotWritten; nothing is left of it then."""
    path = Path(path).absolute()
    with written(path) as partial:
        try:
            _write(document, partial)
        except XlsxWriterException as error:
            raise NotWritten(f"{path} could not be written: {error}.") from error
    return path


def _write(document: Document, path: Path) -> None:
    # No text becomes a formula or a link: what stands in names belongs to others.
    options = {"strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}
    with xlsxwriter.Workbook(str(path), options) as book:
        book.set_properties({"title": f"{document.title}, {document.party}", "subject": document.period})
        # A fixed date: the same statement gives the same bytes.
        book.set_properties({"created": datetime(2000, 1, 1)})  # noqa: DTZ001  # the format knows no zones
        formats = _formats(book)
        _write_summary(book, document, formats)
        for sheet in document.sheets:
            _write_sheet(book, sheet, formats)


def _formats(book: Any) -> dict[str, Any]:
    base = {"font_name": "Calibri", "font_size": 10, "valign": "top"}
    formats = {
        "text": book.add_format({**base, "text_wrap": False}),
        "wrap": book.add_format({**base, "text_wrap": True}),
    }
    formats["title"] = book.add_format({**base, "bold": True, "font_size": 16})
    formats["note"] = book.add_format({**base, "italic": True, "font_color": "#555555", "text_wrap": True})
    formats["head"] = book.add_format({**base, "bold": True, "bottom": 1, "text_wrap": True, "bg_color": "#EEF2F5"})
    formats["total text"] = book.add_format({**base, "bold": True, "top": 1})
    for kind, pattern in _NUMBER_FORMATS.items():
        formats[kind.value] = book.add_format({**base, "num_format": pattern})
        formats[f"total {kind.value}"] = book.add_format({**base, "num_format": pattern, "bold": True, "top": 1})
    return formats


def _write_summary(book: Any, document: Document, formats: dict[str, Any]) -> None:
    sheet = book.add_worksheet("Summary")
    sheet.hide_gridlines(2)
    sheet.set_column(0, 0, 36)
    sheet.set_column(1, 1, 30)
    sheet.write_string(0, 0, document.title, formats["title"])
    sheet.write_string(1, 0, document.party, formats["text"])
    sheet.write_string(2, 0, document.period, formats["text"])
    row = 4
    for fact in document.facts:
        sheet.write_string(row, 0, fact.name, formats["text"])
        _write_fact(sheet, row, fact, formats)
        row += 1
    for note in document.notes:
        row += 1
        sheet.merge_range(row, 0, row, 1, "", formats["note"])
        sheet.write_string(row, 0, note, formats["note"])
        sheet.set_row(row, 45)


def _write_fact(sheet: Any, row: int, fact: Fact, formats: dict[str, Any]) -> None:
    style = formats["text" if fact.format is Format.TEXT else fact.format.value]
    _write_cell(sheet, (row, 1), fact.value, fact.format, style)


def _write_sheet(book: Any, sheet: Sheet, formats: dict[str, Any]) -> None:
    page = book.add_worksheet(sheet.name)
    page.hide_gridlines(2)
    page.set_landscape()
    page.fit_to_pages(1, 0)
    page.repeat_rows(FIRST_ROW)
    page.freeze_panes(FIRST_ROW + 1, 1)
    page.write_string(0, 0, sheet.name, formats["title"])
    for place, column in enumerate(sheet.columns):
        page.set_column(place, place, _width(sheet, place))
        page.write_string(FIRST_ROW, place, column.title, formats["head"])
    row = FIRST_ROW + 1
    for cells in sheet.rows:
        for place, (cell, column) in enumerate(zip(cells, sheet.columns, strict=True)):
            style = formats["text" if column.format is Format.TEXT else column.format.value]
            _write_cell(page, (row, place), cell, column.format, style)
        row += 1
    if sheet.total is not None:
        _write_total(page, row, sheet, formats)
        row += 1
    for note in sheet.notes:
        row += 1
        page.merge_range(row, 0, row, min(len(sheet.columns) - 1, 8) or 1, "", formats["note"])
        page.write_string(row, 0, note, formats["note"])
        page.set_row(row, 45)


def _write_total(page: Any, row: int, sheet: Sheet, formats: dict[str, Any]) -> None:
    assert sheet.total is not None
    for place, (cell, column) in enumerate(zip(sheet.total, sheet.columns, strict=True)):
        style = formats["total text" if column.format is Format.TEXT else f"total {column.format.value}"]
        value = _number(cell, column.format)
        if column.summed and sheet.rows and value is not None and _summable(sheet, place):
            first = xl_rowcol_to_cell(FIRST_ROW + 1, place)
            last = xl_rowcol_to_cell(FIRST_ROW + len(sheet.rows), place)
            # The value is stored beside the formula, for readers that do not compute.
            page.write_formula(row, place, f"=SUM({first}:{last})", style, value)
        else:
            _write_cell(page, (row, place), cell, column.format, style)


def _write_cell(page: Any, at: tuple[int, int], cell: Cell, kind: Format, style: Any) -> None:
    if cell is None:
        page.write_blank(*at, None, style)
    elif kind is Format.TEXT or isinstance(cell, str):
        page.write_string(*at, str(cell), style)
    elif isinstance(cell, datetime):
        page.write_datetime(*at, cell.replace(tzinfo=None), style)
    else:
        value = _number(cell, kind)
        if value is None:
            page.write_string(*at, ledger.format_nano(int(cell)), style)
        else:
            page.write_number(*at, value, style)


def _number(cell: Cell, kind: Format) -> float | int | None:
    """The cell as a spreadsheet's number; None if it has none, or too many digits for one."""
    if not isinstance(cell, int | float | Fraction):
        return None
    if kind in (Format.MONEY, Format.RATE):
        nano = int(cell)
        return nano / NANO if len(str(abs(nano))) <= MAX_DIGITS else None
    if kind is Format.HOURS:
        return int(cell) / MICROS_PER_HOUR
    return int(cell) if kind is Format.COUNT else float(cell)


def _summable(sheet: Sheet, place: int) -> bool:
    kind = sheet.columns[place].format
    return all(_number(row[place], kind) is not None for row in sheet.rows)


def _width(sheet: Sheet, place: int) -> int:
    column: Column = sheet.columns[place]
    if column.format is not Format.TEXT:
        return max(14, min(18, len(column.title)))
    longest = max((len(str(row[place] or "")) for row in sheet.rows), default=0)
    return max(12, min(60, longest + 2, 200))
