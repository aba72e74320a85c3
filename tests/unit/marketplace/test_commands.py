"""What an operator is told without any store."""

from __future__ import annotations

from typer.testing import CliRunner

from marketplace.commands import environment_name, settings
from marketplace.core.settings import Settings


class TestSettings:
    def test_each_is_listed_with_its_variable_and_its_meaning(self) -> None:
        told = CliRunner().invoke(settings, [])
        assert told.exit_code == 0
        lines = told.output.splitlines()
        entries = dict(zip(lines[::2], lines[1::2], strict=True))
        assert [entry.partition("=")[0] for entry in entries] == [
            environment_name(name) for name in Settings.model_fields
        ]
        assert [entry for entry, meaning in entries.items() if len(meaning.split()) < 3] == []

    def test_defaults_are_written_as_they_are_set_and_secrets_are_not_shown(self) -> None:
        told = CliRunner().invoke(settings, []).output
        for entry in ("FALLOW_REFUSE_LATE=true", "FALLOW_LEASE_S=15.0", "FALLOW_CLUSTER_SECRET=", "FALLOW_GATEWAY_ID="):
            assert f"{entry}\n" in told
        assert "DATABASE_URL=postgresql://" in told
