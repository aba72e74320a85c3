"""Tables of the command line. Nothing is cut off: a figure without its end is a wrong figure."""

from __future__ import annotations

import os
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PIPE_CHARS: Final = 240
"""How wide a table may become in a file or a pipe, where no window bounds it, unless COLUMNS says otherwise."""


def console() -> Console:
    """Standard output, as wide as the window; without one, wide enough not to break lines."""
    found = Console()
    return found if found.is_terminal or os.environ.get("COLUMNS") else Console(width=PIPE_CHARS)


def show(table: Table, on: Console | None = None) -> None:
    """Print a table without frames. What does not fit wraps within its column."""
    table.box = SIMPLE_HEAD
    table.pad_edge = table.show_edge = False
    table.padding = (0, 1, 0, 0)
    for column in table.columns:
        column.overflow = "fold"
    (on or console()).print(table)
