from __future__ import annotations

import csv
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from marketplace.billing import service as billing
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory
from marketplace.finance import cli
from tests.integration.finance.conftest import World


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, session_factory: SessionFactory, session: Session, world: World) -> CliRunner:
    world.receipt(session, utcnow(), 1_003, tokens=(60, 40, 20, 0))
    billing.settle(session, 100)
    session.commit()
    monkeypatch.setattr(cli, "session_factory", lambda: session_factory)
    return CliRunner(env={"COLUMNS": "200"})


class TestCommands:
    def test_a_statement_is_shown_and_written(self, run: CliRunner, tmp_path: Path) -> None:
        paths = [tmp_path / "statement.csv", tmp_path / "receipts.csv"]
        options = ["--zone", "Europe/Berlin", "--csv", str(paths[0]), "--receipts", str(paths[1])]
        result = run.invoke(cli.app, ["statement", "Olive's GPUs", *options])
        assert result.exit_code == 0, result.output
        assert "$0.000000802" in result.output
        assert str(paths[0]) in result.output
        with paths[1].open(encoding="utf-8", newline="") as file:
            assert [row["net_usd"] for row in csv.DictReader(file)] == ["0.000000802"]

    def test_a_bill_shows_its_levers(self, run: CliRunner) -> None:
        result = run.invoke(cli.app, ["bill", "Rita"])
        assert result.exit_code == 0, result.output
        assert "input, cached" in result.output
        assert "$0.000001003" in result.output

    def test_the_books_are_shown_and_checked(self, run: CliRunner) -> None:
        assert "platform:fees" in run.invoke(cli.app, ["trial-balance"]).output
        assert run.invoke(cli.app, ["check"]).output == "The books are in order.\n"

    def test_broken_books_end_with_an_error(self, run: CliRunner, session: Session) -> None:
        session.execute(text("update ledger_balances set posted_nano = posted_nano + 1"))
        session.commit()
        result = run.invoke(cli.app, ["check"])
        assert result.exit_code == 1
        assert "balance_posted" in result.output

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["statement", "Nobody"], "no organisation named 'Nobody'"),
            (["statement", "Rita", "--period", "2026-13"], "'2026-13' is no period"),
            (["bill", "Rita", "--zone", "Mars/Olympus"], "no time zone 'Mars/Olympus'"),
            (["trial-balance", "--as-of", "2026-01-01"], "no time with an offset"),
        ],
    )
    def test_what_cannot_be_answered_says_why(self, run: CliRunner, arguments: list[str], told: str) -> None:
        result = run.invoke(cli.app, arguments)
        assert result.exit_code == 1
        assert told in result.output
