"""The commands, as a person types them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from marketplace.accounts import cli
from marketplace.catalog import cli as catalog_cli
from marketplace.core import process
from marketplace.core.database import SessionFactory
from tests.vocabularies import MODEL_ID, smollm2_path

runner = CliRunner()


@pytest.fixture(autouse=True)
def on_the_tests_database(session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "session_factory", lambda: session_factory)
    monkeypatch.setenv("COLUMNS", "200")


class TestKeys:
    def test_a_key_is_made_shown_once_listed_and_revoked(self) -> None:
        assert runner.invoke(cli.org, ["create", "Acme"]).exit_code == 0
        made = runner.invoke(cli.key, ["create", "Acme", "--name", "ci", "--role", "renter", "--role", "finance"])
        assert made.exit_code == 0, made.output
        secret = made.stdout.strip()
        assert secret.startswith("sk-fallow-")
        listed = runner.invoke(cli.key, ["list", "Acme"])
        assert secret not in listed.output
        assert "active" in listed.output
        assert "finance, renter" in listed.output
        key_id = made.stderr.split()[1].rstrip(".")
        assert runner.invoke(cli.key, ["revoke", key_id]).exit_code == 0
        assert "revoked" in runner.invoke(cli.key, ["list", "Acme"]).output

    def test_organisations_are_listed(self) -> None:
        runner.invoke(cli.org, ["create", "Acme [GPU]"])
        assert "Acme [GPU]" in runner.invoke(cli.org, ["list"]).output

    @pytest.mark.parametrize(
        "arguments", [["list", "Nobody"], ["create", "Nobody"], ["revoke", "00000000-0000-7000-8000-000000000000"]]
    )
    def test_a_mistake_is_one_sentence_and_exit_code_1(self, arguments: list[str]) -> None:
        result = runner.invoke(cli.key, arguments)
        assert result.exit_code == 1
        assert result.output.strip().count("\n") == 0
        assert "Traceback" not in result.output


class TestCatalog:
    def test_a_model_file_is_imported_and_listed(self) -> None:
        result = runner.invoke(catalog_cli.app, ["import", str(smollm2_path()), "--model-id", MODEL_ID])
        assert result.exit_code == 0, result.output
        assert "tokenizer:fast" in result.output
        assert MODEL_ID in runner.invoke(catalog_cli.app, ["list"]).output

    def test_what_is_no_model_is_one_sentence_and_exit_code_1(self, tmp_path: Path) -> None:
        path = tmp_path / "x.gguf"
        path.write_bytes(b"no")
        result = runner.invoke(catalog_cli.app, ["import", str(path), "--model-id", "x"])
        assert result.exit_code == 1
        assert "cannot be sold" in result.output


class TestBudgetsAndMembers:
    def test_a_bounded_key_for_a_member(self) -> None:
        runner.invoke(cli.org, ["create", "Acme"])
        added = runner.invoke(cli.org, ["add-member", "Acme", "ann@example.org", "--role", "renter"])
        assert added.output.strip() == "ann@example.org: renter"
        bounds = ["--budget", "25.00", "--budget-period", "week", "--network", "10.0.0.0/8", "--model", "tiny"]
        made = runner.invoke(cli.key, ["create", "Acme", "--member", "ann@example.org", *bounds])
        assert made.exit_code == 0, made.output
        key_id = made.stderr.split()[1].rstrip(".")
        changed = runner.invoke(cli.key, ["budget", key_id, "30", "--period", "week"])
        assert changed.output.strip() == "30 of 30 USD left (week)."
        assert "no budget" in runner.invoke(cli.key, ["budget", key_id, "none"]).output
        assert "ann@example.org" in runner.invoke(cli.org, ["members", "Acme"]).output
        assert "1 keys revoked" in runner.invoke(cli.org, ["remove-member", "Acme", "ann@example.org"]).output
        wrong = runner.invoke(cli.key, ["create", "Acme", "--budget", "much"])
        assert (wrong.exit_code, "Traceback" in wrong.output) == (1, False)
