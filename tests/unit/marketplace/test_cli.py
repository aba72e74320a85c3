from __future__ import annotations

from pathlib import Path

import pytest

from marketplace import cli
from marketplace.core.settings import get_settings


class TestWrongSettings:
    def test_are_named_in_a_sentence_without_their_values(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        get_settings.cache_clear()
        monkeypatch.setenv("DATABASE_URL", "mysql://u:hush@h/x")
        monkeypatch.setenv("FALLOW_PORT", "hush")
        monkeypatch.setattr("sys.argv", ["fallow", "gateway"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr().err
        assert ended.value.code == 1
        assert told.startswith("fallow gateway: DATABASE_URL: it must be of the form postgresql://")
        assert "FALLOW_PORT: " in told
        assert "hush" not in told
        assert "Traceback" not in told


class TestOptionsOfCelery:
    def test_that_it_does_not_know_are_told_in_a_sentence(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.argv", ["fallow", "beat", "--nonsense"])
        monkeypatch.setattr("marketplace.core.migrate.require_upgraded", lambda url: None)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 1
        assert capsys.readouterr().err.startswith("fallow beat: No such option '--nonsense'.")


class TestCommandsOfALocalStack:
    def test_find_its_database_by_the_folder_that_the_environment_names(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "running.json").write_text(
            '{"database_url": "postgresql://of-the-stack/x", "valkey_url": "unix:///v"}'
        )
        for name in ("DATABASE_URL", "FALLOW_DATABASE_URL"):
            monkeypatch.setenv(name, "")
        monkeypatch.setenv("VALKEY_URL", "unix:///v")
        monkeypatch.setenv("FALLOW_DATA_DIR", str(tmp_path))
        monkeypatch.setattr("marketplace.core.migrate.check", lambda url: [url])
        monkeypatch.setattr("sys.argv", ["fallow", "migrate", "--check"])
        get_settings.cache_clear()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        get_settings.cache_clear()
        assert ended.value.code == 1
        assert "of-the-stack" in capsys.readouterr().out
