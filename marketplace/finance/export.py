"""CSV that every spreadsheet reads alike: UTF-8, commas, points as decimal mark, one header, one kind of row a file.

Money is decimal strings to the nano; what is unknown is an empty cell, never 0. Text that a spreadsheet would run as a
formula gets an apostrophe in front.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import ledger
from marketplace.finance.document import Cell, Sheet, plain
from marketplace.finance.files import written
from marketplace.finance.statement import MICROS_PER_HOUR, DeviceYield, YieldStatement
from marketplace.metering.models import Receipt

STREAM_ROWS = 1_000
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")

STATEMENT_COLUMNS = (
    *("row", "owner", "period_start", "period_end", "time_zone", "node", "device", "device_name", "simulated", "jobs"),
    *("input_uncached_tokens", "input_cached_tokens", "output_visible_tokens", "output_reasoning_tokens"),
    *("gross_usd", "fee_usd", "adjustments_usd", "net_usd"),
    *("offered_hours", "rented_hours", "busy_hours", "rented_share", "busy_share", "token_share"),
    *("energy_kwh", "energy_source", "energy_unknown_hours"),
    *("opening_balance_usd", "carried_in_usd", "carried_out_usd", "settled_usd", "other_usd", "closing_balance_usd"),
)
"""`row` is `device` or `total`; balances stand on the total alone."""

RECEIPT_COLUMNS = (
    *("receipt", "job", "delivered_at", "node", "device", "model", "price_version", "outcome", "simulated"),
    *("input_uncached_tokens", "input_cached_tokens", "output_visible_tokens", "output_reasoning_tokens"),
    *("charge_usd", "platform_paid_usd", "fee_usd", "net_usd", "settlement_journal"),
)


def text_cell(value: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{value}" if value.startswith(_FORMULA_STARTS) else value


def write_statement(statement: YieldStatement, path: Path) -> Path:
    """One row a device, then the total with the account's balances. Returns the absolute path."""
    rows = [_yield_row(statement, device) for device in statement.devices]
    rows.append([*_yield_row(statement, statement.total), *_balances(statement)])
    return _write(path, STATEMENT_COLUMNS, rows)


def write_receipts(receipts: Iterable[tuple[Receipt, str]], path: Path) -> Path:
    """One row a receipt, with its model's name. Returns the absolute path."""
    return _write(path, RECEIPT_COLUMNS, (_receipt_row(receipt, model) for receipt, model in receipts))


def write_sheet(sheet: Sheet, path: Path) -> Path:
    """One sheet of a document, its total left out: whoever reads it sums. Returns the absolute path."""
    return _write(Path(path), sheet_columns(sheet), (_sheet_row(row, sheet) for row in sheet.rows))


def sheet_columns(sheet: Sheet) -> tuple[str, ...]:
    """The header of a sheet: `Input USD` is `input_usd`."""
    return tuple("_".join(column.title.lower().replace(",", "").split()) for column in sheet.columns)


def receipt_lines(receipts: Iterable[tuple[Receipt, str]]) -> Iterator[str]:
    """The same rows as `write_receipts`, as text to be streamed, header first."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(RECEIPT_COLUMNS)
    for count, (receipt, model) in enumerate(receipts, start=1):
        writer.writerow(_receipt_row(receipt, model))
        if count % STREAM_ROWS == 0:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _sheet_row(cells: Sequence[Cell], sheet: Sheet) -> list[str]:
    values = [plain(cell, column.format) for cell, column in zip(cells, sheet.columns, strict=True)]
    return [
        "" if value is None else text_cell(cell) if isinstance(cell, str) else str(value)
        for cell, value in zip(cells, values, strict=True)
    ]


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Path:
    with written(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            writer.writerow([*row, *[""] * (len(columns) - len(row))])
    return path.absolute()


def _yield_row(statement: YieldStatement, device: DeviceYield) -> list[str]:
    period, tokens, earnings, usage = statement.period, device.tokens, device.earnings, device.usage
    energy = device.energy
    return [
        "total" if device.node_id is None else "device",
        text_cell(statement.owner_name),
        period.local_start.isoformat(),
        period.local_end.isoformat(),
        text_cell(period.zone_name),
        text_cell(device.node_name),
        text_cell(device.device_id),
        text_cell(device.device_name),
        "yes" if device.simulated else "no",
        str(earnings.jobs),
        *map(str, (tokens.input_uncached, tokens.input_cached, tokens.output_visible, tokens.output_reasoning)),
        *_money(earnings.gross_nano, earnings.fee_nano, earnings.adjustments_nano, earnings.net_nano),
        *_hours(usage.offered_us, usage.rented_us, usage.busy_us),
        *map(_share, (usage.rented_share, usage.busy_share, device.token_share)),
        "" if energy.kwh is None else f"{energy.kwh:.9f}",
        energy.source,
        *_hours(energy.unknown_us),
    ]


def _balances(statement: YieldStatement) -> Iterator[str]:
    account = statement.account
    return _money(
        account.opening_nano,
        account.carried_in_nano,
        account.carried_out_nano,
        account.settled_nano,
        account.other_nano,
        account.closing_nano,
    )


def _receipt_row(receipt: Receipt, model: str) -> list[str]:
    return [
        receipt.id.hex,
        receipt.job_id.hex,
        receipt.at.isoformat(),
        receipt.node_id.hex,
        text_cell(receipt.device_id),
        text_cell(model),
        str(receipt.price_id),
        receipt.outcome,
        "yes" if receipt.simulated else "no",
        str(receipt.input_uncached_tokens),
        str(receipt.input_cached_tokens),
        str(receipt.output_visible_tokens),
        str(receipt.output_reasoning_tokens),
        *_money(receipt.charge_nano, receipt.loss_nano, receipt.fee_nano, receipt.owner_nano),
        str(receipt.journal_id) if receipt.journal_id else "",
    ]


def _money(*amounts_nano: int) -> Iterator[str]:
    return (ledger.format_nano(nano, min_places=9) for nano in amounts_nano)


def _hours(*times_us: int) -> Iterator[str]:
    return (f"{time_us / MICROS_PER_HOUR:.6f}" for time_us in times_us)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.6f}"
