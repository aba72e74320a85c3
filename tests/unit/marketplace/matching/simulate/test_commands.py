"""`fallow simulate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from marketplace.matching.simulate.cli import app

runner = CliRunner()


def simulate(*arguments: str, code: int = 0) -> str:
    done = runner.invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "talk.csv"
    simulate("generate", str(path), "--minutes", "0.5")
    return path


class TestRun:
    def test_it_tells_service_use_and_earnings_and_writes_them(self, tmp_path: Path, trace: Path) -> None:
        pytest.importorskip("matplotlib")
        out = tmp_path / "out"
        shown = simulate("run", str(trace), "--load", "0.5", "--out", str(out))
        for wanted in ("first token p50", "rented / busy / token", "by owner, USD", "H100 SXM"):
            assert wanted in shown
        made = json.loads((out / "report.json").read_text())
        assert made["requests"] == made["done"] + made["refused"] + made["interrupted"]
        assert len(made["owners"]) == 24
        for name in ("latency", "use", "timeline", "owners"):
            assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    def test_a_fleet_of_ones_own(self, tmp_path: Path) -> None:
        fleet = tmp_path / "fleet.toml"
        fleet.write_text(simulate("example"))
        shown = simulate("run", "--fleet", str(fleet), "--pattern", "code", "--minutes", "1", "--policy", "random")
        assert "RTX 3090 at 70%" in shown

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("run", "absent.csv"), "absent.csv"),
            (("run", "--policy", "guess"), "there is no policy 'guess'"),
            (("run", "--pattern", "none"), "there is no pattern 'none'"),
            (("run", "--fleet", "absent.toml"), "absent.toml"),
            (("generate", "x.txt"), "must end with"),
            (("whatif", "GeForce GT 710"), "no card"),
        ],
    )
    def test_a_mistake_is_told_in_a_sentence(self, arguments: tuple[str, ...], complaint: str) -> None:
        assert complaint in simulate(*arguments, code=1)


class TestBenchmark:
    def test_every_policy_and_the_bound_in_one_table(self, tmp_path: Path, trace: Path) -> None:
        pytest.importorskip("scipy")
        pytest.importorskip("matplotlib")
        out = tmp_path / "out"
        shown = simulate("benchmark", str(trace), "--load", "0.5", "--seeds", "1", "--out", str(out))
        for policy in (
            "fallow",
            "sort by price",
            "no guard",
            "random",
            "round robin",
            "least outstanding",
            "cheapest",
            "prefix",
        ):
            assert policy in shown
        cells = json.loads((out / "benchmark.json").read_text())
        assert len(cells) == 8
        assert all(cell["of_bound"]["mean"] <= 1 for cell in cells)
        assert (out / "goodput.png").exists()
        assert (out / "cost.png").exists()

    def test_without_the_public_traces_it_says_where_they_belong(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FALLOW_TRACES", str(tmp_path))
        pytest.importorskip("scipy")
        assert "FALLOW_TRACES" in simulate("benchmark", code=1)


class TestWhatIf:
    def test_it_answers_in_a_sentence(self, trace: Path) -> None:
        shown = simulate("whatif", "NVIDIA GeForce RTX 4090", "--hours-a-day", "12", "--trace", str(trace))
        assert "it would have earned about" in shown
        assert "in 84 offered hours" in shown


def test_devices_are_listed_with_their_sources() -> None:
    shown = simulate("devices")
    assert "RTX 4090" in shown
    assert "165.2" in shown
    assert "whitepaper" in shown
