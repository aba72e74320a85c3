from __future__ import annotations

import pytest
from rich.table import Table

from marketplace.core import tables

NODE = "01a22c2d-0c11-7205-b9e5-77357db10a52"


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    table = Table(*(f"column {number}" for number in range(6)))
    table.add_row(*[NODE] * 4, "$0.000356936", "$0.000356936")
    tables.show(table)
    return capsys.readouterr().out


class TestShow:
    def test_keeps_a_row_on_one_line_where_no_window_bounds_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("COLUMNS", raising=False)
        assert shown(capsys).splitlines()[-1].split() == [*[NODE] * 4, "$0.000356936", "$0.000356936"]

    def test_cuts_nothing_off_in_a_narrow_window(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        output = shown(capsys)
        assert "…" not in output
        assert max(map(len, output.splitlines())) <= 60
