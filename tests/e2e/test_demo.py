"""`fallow demo` tells the whole story with real data and leaves nothing running."""

from __future__ import annotations

import csv

from tests.e2e.local_run import LocalRun
from tests.stack import public_folder


def test_the_demo_comes_true() -> None:
    with public_folder("fallow-demo-") as folder:
        run = LocalRun(folder, "demo", "--dir", str(folder / "demo"))
        try:
            assert run.wait(within_s=150) == 0, run.output
            run.nothing_left(within_s=2)
        finally:
            run.end()
        assert "10/10" in run.output
        assert "Traceback" not in run.output
        assert "paid out" in run.output
        assert "ledger and sandbox agree" in run.output
        with (folder / "demo" / "yield-statement.csv").open(newline="") as file:
            assert len(list(csv.reader(file))) > 1
