from __future__ import annotations

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
