"""`fallow credit` from the command line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from marketplace.accounts.service import create_organisation
from marketplace.billing import cli
from marketplace.core.database import SessionFactory, transaction


@pytest.fixture
def runner(session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setattr(cli, "session_factory", lambda: session_factory)
    with transaction(session_factory) as session:
        create_organisation(session, "Ada's lab")
    return CliRunner()


class TestCredit:
    def test_added_credit_is_shown_to_the_cent(self, runner: CliRunner) -> None:
        added = runner.invoke(cli.app, ["add", "Ada's lab", "19.99"])
        assert added.exit_code == 0
        shown = runner.invoke(cli.app, ["show", "Ada's lab"])
        assert shown.output == added.output
        assert "19.99 USD available" in shown.output

    def test_the_same_key_adds_once(self, runner: CliRunner) -> None:
        for _ in range(2):
            added = runner.invoke(cli.app, ["add", "Ada's lab", "5.00", "--key", "invoice-7"])
        assert "5.00 USD available" in added.output

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["add", "Ada's lab", "1e3"], "plain decimal"),
            (["add", "Ada's lab", "0"], "more than nothing"),
            (["add", "Nobody", "1"], "no organisation"),
            (["show", "Nobody"], "no organisation"),
        ],
    )
    def test_a_refusal_says_why_and_exits_with_one(self, runner: CliRunner, arguments: list[str], reason: str) -> None:
        refused = runner.invoke(cli.app, arguments)
        assert refused.exit_code == 1
        assert reason in refused.output

    def test_promotional_credit_stands_apart(self, runner: CliRunner) -> None:
        runner.invoke(cli.app, ["add", "Ada's lab", "5"])
        for _ in range(2):
            given = runner.invoke(cli.app, ["promote", "Ada's lab", "2.50", "a welcome", "--key", "welcome"])
        assert "7.50 USD available" in given.output
        assert "credit 5.00 USD" in given.output
        assert "promotional 2.50 USD" in given.output
