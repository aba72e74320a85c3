from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from marketplace.billing import service as billing
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory
from marketplace.finance import cli, service
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


class TestExports:
    def test_books_statement_invoice_and_receipts_are_written(self, run: CliRunner, tmp_path: Path) -> None:
        for name, options in (
            ("books.beancount", []),
            ("statement.pdf", ["--owner", "Olive's GPUs"]),
            ("invoice.xlsx", ["--renter", "Rita"]),
            ("receipts.csv", ["--owner", "Olive's GPUs", "--receipts"]),
        ):
            path = tmp_path / name
            result = run.invoke(cli.app, ["export", str(path), *options])
            assert result.exit_code == 0, result.output
            assert path.stat().st_size > 100

    def test_the_real_checker_takes_the_books(self, run: CliRunner, tmp_path: Path) -> None:
        path = tmp_path / "books.beancount"
        assert run.invoke(cli.app, ["export", str(path)]).exit_code == 0
        checked = subprocess.run([Path(sys.executable).with_name("bean-check"), path], check=False, capture_output=True)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")

    @pytest.mark.parametrize(
        "arguments",
        [
            ["x.pdf"],
            ["x.docx", "--owner", "Olive's GPUs"],
            ["/dev/full"],
            ["x.xlsx", "--owner", "Olive's GPUs", "--receipts"],
            ["x.beancount", "--owner", "Olive's GPUs"],
        ],
    )
    def test_what_cannot_be_written_says_why(self, run: CliRunner, tmp_path: Path, arguments: list[str]) -> None:
        result = run.invoke(cli.app, ["export", str(tmp_path / arguments[0]), *arguments[1:]])
        assert result.exit_code == 1
        assert result.output.startswith("fallow finance: ")
        assert list(tmp_path.iterdir()) == []

    def test_an_invoice_and_a_report_are_shown(self, run: CliRunner) -> None:
        assert "Why the bill changed" in run.invoke(cli.app, ["invoice", "Rita"]).output
        assert "Payables by age" in run.invoke(cli.app, ["report"]).output


class TestBooks:
    def test_a_period_is_closed_and_the_books_proved(self, run: CliRunner) -> None:
        result = run.invoke(cli.app, ["close", "2020", "--zone", "Europe/Berlin"])
        assert result.exit_code == 0, result.output
        assert "Keep this outside the database" in result.output
        assert run.invoke(cli.app, ["close", "2199"]).exit_code == 1
        assert "in order" in run.invoke(cli.app, ["verify"]).output

    def test_a_period_that_overlaps_a_closed_one_is_refused(self, run: CliRunner) -> None:
        assert run.invoke(cli.app, ["close", "2020"]).exit_code == 0
        result = run.invoke(cli.app, ["close", "2020-06"])
        assert result.exit_code == 1
        assert result.output.startswith("fallow finance: ")

    def test_a_period_that_cannot_close_yet_stands_in_the_way_of_none(self, run: CliRunner) -> None:
        assert run.invoke(cli.app, ["close", "2199-03-14"]).exit_code == 1
        result = run.invoke(cli.app, ["close", "2020-03"])
        assert result.exit_code == 0, result.output

    def test_tampering_ends_verify_with_an_error(self, run: CliRunner, session: Session) -> None:
        session.execute(text("alter table ledger_postings disable trigger all"))
        session.execute(text("update ledger_postings set amount_nano = amount_nano + 1 where amount_nano > 0"))
        session.commit()
        result = run.invoke(cli.app, ["verify"])
        assert result.exit_code == 1
        assert "problems" in result.output

    def test_settlements_and_receipts_are_compared(self, run: CliRunner, session: Session) -> None:
        assert "1 settlements agree with 1 receipts" in run.invoke(cli.app, ["reconcile"]).output
        session.execute(text("alter table receipts disable trigger all"))
        session.execute(
            text(
                "update receipts set charge_nano = charge_nano + 1, owner_nano = owner_nano + 1,"
                " output_visible_nano = output_visible_nano + 1"
            )
        )
        session.commit()
        result = run.invoke(cli.app, ["reconcile"])
        assert result.exit_code == 1
        assert "its receipts say" in result.output

    def test_a_receipt_is_traced_to_its_journal_and_back(self, run: CliRunner, session: Session, world: World) -> None:
        receipt = service.last_receipt(session, world.renter)
        assert receipt is not None
        assert f"Journal {receipt.journal_id}: settlement" in run.invoke(cli.app, ["trace", str(receipt.id)]).output
        assert "1 receipts" in run.invoke(cli.app, ["trace", str(receipt.journal_id)]).output
        assert run.invoke(cli.app, ["trace", "nonsense"]).exit_code == 1
        assert run.invoke(cli.app, ["trace", "999999"]).exit_code == 1

    def test_a_node_s_cost_is_declared_and_shows_on_the_statement(self, run: CliRunner, world: World) -> None:
        result = run.invoke(cli.app, ["declare", str(world.node), "--energy", "0.16", "--pue", "1.0"])
        assert result.exit_code == 0, result.output
        assert run.invoke(cli.app, ["declare", str(world.node), "--capital", "1600"]).exit_code == 1
        assert run.invoke(cli.app, ["declare", str(world.node), "--pue", "0.5"]).exit_code == 1
        shown = run.invoke(cli.app, ["statement", "Olive's GPUs", "--held-back"])
        assert "No card of it told its power" in shown.output
