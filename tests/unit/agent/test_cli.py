"""What the owner reads."""

from __future__ import annotations

import time
from datetime import date
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from agent import home as folder
from agent import identity as identities
from agent import screen, unit
from agent.cli import app
from agent.config import Initial, check_url, render
from agent.earnings import Earnings
from agent.enrol import is_private
from agent.home import AlreadyRunning, Lock, OfferStatus, Status
from agent.identity import IdentityFile
from agent.protocol import DeviceReport, UsageReport
from tests.agent_doubles import served

runner = CliRunner()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    identities.save(tmp_path, IdentityFile("node-1", "Acme [bold]", "http://127.0.0.1:1", "box"))
    return tmp_path


def status_of(**changes: object) -> Status:
    offer = OfferStatus("c" * 64, "resting", "llama.cpp", False, 2, 1, 2048, "out of memory [/nonsense]")
    status = Status(
        pid=1,
        written_at_s=time.time(),
        started_at_s=time.time() - 300,
        node_id="node-1",
        url="http://127.0.0.1:1",
        connected=False,
        gateway_id="",
        last_error="connection refused",
        available=False,
        unavailable_reason="paused by the owner",
        offers=[offer],
        reports_waiting=2,
        counters={"completed": 7, "cancelled": 1, "failed": 0, "refused": 3},
    )
    return msgspec.structs.replace(status, **changes)


class TestStatus:
    def test_of_a_machine_that_is_not_enrolled_says_so(self, tmp_path: Path) -> None:
        result = runner.invoke(app, ["status", "--dir", str(tmp_path)])
        assert (result.exit_code, "Not enrolled" in result.output) == (3, True)

    def test_of_a_stopped_agent_ignores_what_it_last_wrote(self, home: Path) -> None:
        folder.write_status(home, status_of(connected=True))
        result = runner.invoke(app, ["status", "--dir", str(home)])
        assert (result.exit_code, "Not running" in result.output) == (3, True)
        result = runner.invoke(app, ["status", "--dir", str(home), "--json"])
        assert msgspec.json.decode(result.output)["status"] is None

    def test_names_each_model_by_its_file_and_vectors_as_such(self, home: Path) -> None:
        chat = OfferStatus("c" * 64, "ready", "llama.cpp", False, 2, 1, 2048, "", name="Small [1B]")
        vectors = msgspec.structs.replace(chat, variant_sha256="d" * 64, task="embed")
        lines = screen.status_lines(status_of(offers=[chat, vectors, msgspec.structs.replace(vectors, name="")]))
        said = [line.split(" on ")[0].strip() for line in lines if " on cpu" in line]
        assert said == ["Small [1B]", "Small [1B] (embed)", "dddddddddddd (embed)"]

    def test_of_a_running_agent_tells_what_matters_word_for_word(self, home: Path) -> None:
        lock = Lock(home)
        lock.take()
        folder.write_status(home, status_of())
        result = runner.invoke(app, ["status", "--dir", str(home)])
        lock.release()
        assert result.exit_code == 0
        for words in (
            "Acme [bold]",
            "Running for 5 min",
            "not connected: connection refused",
            "Taking no work: paused by the owner",
            "llama.cpp resting, 1 of 2 slots busy",
            "out of memory [/nonsense]",
            "7 answers",
            "2 reports wait",
        ):
            assert words in result.output

    def test_of_an_agent_whose_engine_fails_claims_no_work(self, home: Path) -> None:
        lock = Lock(home)
        lock.take()
        folder.write_status(home, status_of(available=True, unavailable_reason="", connected=True))
        told = [runner.invoke(app, [name, "--dir", str(home)]).output for name in ("status", "doctor")]
        lock.release()
        assert "Taking no work: no engine of it is ready" in told[0]
        assert "PROBLEM engine: out of memory [/nonsense]" in told[1]

    def test_of_a_stopped_agent_names_what_starts_it_wherever_one_stands(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(home.parent)
        result = runner.invoke(app, ["status", "--dir", home.name])
        assert f"fallow agent run --dir {home.resolve()}" in result.output.replace("\n", "")

    def test_of_an_agent_that_fell_silent_says_so(self, home: Path) -> None:
        lock = Lock(home)
        lock.take()
        folder.write_status(home, status_of(written_at_s=time.time() - 120))
        result = runner.invoke(app, ["status", "--dir", str(home)])
        lock.release()
        assert "not said anything for 120 s" in result.output


class TestPauseAndResume:
    def test_leave_a_mark_that_the_agent_reads(self, home: Path) -> None:
        assert runner.invoke(app, ["pause", "--dir", str(home)]).exit_code == 0
        assert folder.paused(home)
        assert runner.invoke(app, ["resume", "--dir", str(home)]).exit_code == 0
        assert not folder.paused(home)
        assert runner.invoke(app, ["resume", "--dir", str(home)]).exit_code == 0

    def test_need_an_enrolled_machine(self, tmp_path: Path) -> None:
        result = runner.invoke(app, ["pause", "--dir", str(tmp_path)])
        assert (result.exit_code, folder.paused(tmp_path)) == (1, False)


class TestTheLock:
    def test_lets_one_agent_in_and_names_the_other(self, home: Path) -> None:
        first, second = Lock(home), Lock(home)
        assert not folder.is_running(home)
        first.take()
        assert folder.is_running(home)
        with pytest.raises(AlreadyRunning, match="process"):
            second.take()
        first.release()
        second.take()
        second.release()


class TestTheAddress:
    def test_is_checked(self) -> None:
        assert check_url("https://fallow.example/") == "https://fallow.example"
        for url in ("fallow.example", "ws://x", "http://", "http://x/?a=1"):
            with pytest.raises(Exception, match="address"):
                check_url(url)

    def test_is_private_only_if_nobody_can_listen(self) -> None:
        assert is_private("https://fallow.example")
        assert is_private("http://127.0.0.1:8080")
        assert not is_private("http://fallow.example")


class TestDrain:
    def test_and_a_pause_now_leave_what_the_agent_is_to_do(self, home: Path) -> None:
        assert runner.invoke(app, ["drain", "--dir", str(home)]).exit_code == 0
        assert folder.asked(home) == "drain"
        assert runner.invoke(app, ["pause", "--now", "--dir", str(home)]).exit_code == 0
        assert folder.asked(home) == "evict"
        assert runner.invoke(app, ["resume", "--dir", str(home)]).exit_code == 0
        assert folder.asked(home) == ""

    def test_waits_until_nothing_runs(self, home: Path) -> None:
        lock = Lock(home)
        lock.take()
        idle = msgspec.structs.replace(status_of().offers[0], busy=0)
        folder.write_status(home, status_of(offers=[idle]))
        result = runner.invoke(app, ["drain", "--wait", "--dir", str(home)])
        lock.release()
        assert (result.exit_code, "Drained" in result.output) == (0, True)

    def test_that_cannot_be_read_counts_as_a_pause(self, home: Path) -> None:
        (home / "paused").write_bytes(b"\xff")
        assert folder.asked(home) == "pause"


class TestTop:
    def test_shows_cards_engines_answers_and_what_they_come_to(self, home: Path) -> None:
        lock = Lock(home)
        lock.take()
        card = DeviceReport(
            "GPU-0001",
            "RTX 4090",
            "gpu",
            24 << 30,
            8 << 30,
            power_mw=312_000,
            power_source="nvml",
            power_limit_mw=450_000,
        )
        blank = DeviceReport("GPU-0002", "Old card", "gpu", state="lost", reason="the GPU fell off the bus")
        folder.write_status(
            home,
            status_of(
                available=True,
                unavailable_reason="",
                offers=[OfferStatus("c" * 64, "ready", "llama.cpp", False, 2, 1, 2048, "")],
                devices=[card, blank],
                attempts=[folder.AttemptStatus("c" * 64, 3.0, 17)],
                energy=[folder.EnergyStatus("GPU-0001", "counter", 7_200_000, 60)],
                problems=["config.toml was changed and is not used"],
                earned_today_nano_usd=1_500_000_000,
            ),
        )
        result = runner.invoke(app, ["top", "--dir", str(home)], env={"COLUMNS": "200"})
        lock.release()
        assert result.exit_code == 0
        for words in ("taking work", "1.500000000 USD", "312/450 W", "0.002 kWh counter", "unknown", "lost", "17"):
            assert words in result.output
        assert "config.toml was changed" in result.output

    def test_of_a_stopped_agent_says_so(self, home: Path) -> None:
        assert "does not run" in runner.invoke(app, ["top", "--dir", str(home)]).output


class TestEarnings:
    def test_are_shown_by_day_with_their_sum(self, home: Path) -> None:
        note = Earnings(home / "earnings.json")
        for day in (1, 2):
            note.add(served(), UsageReport(1_000, 0, 100, 0), date(2026, 3, day))
        note.save()
        output = runner.invoke(app, ["earnings", "--dir", str(home)], env={"COLUMNS": "120"}).output
        assert "2026-03-01" in output
        assert "0.000140000" in output


class TestDoctor:
    def test_names_each_check_with_its_remedy(self, home: Path) -> None:
        (home / "config.toml").write_text("[owner]\nhours = ['never']\n")
        home.chmod(0o755)
        result = runner.invoke(app, ["doctor", "--dir", str(home)], env={"COLUMNS": "200"})
        assert result.exit_code == 1
        lines = result.output.splitlines()
        for name, words in (
            ("identity", "node.key is missing"),
            ("configuration", "'never' is not of the form"),
            ("permissions", "can be read by others"),
            ("marketplace", "does not answer"),
        ):
            at = next(index for index, line in enumerate(lines) if line.startswith(f"PROBLEM {name}:"))
            assert words in lines[at]
            assert lines[at + 1].startswith("          "), "a remedy follows"


class TestInstall:
    def test_writes_a_unit_that_runs_this_agent(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setenv("PATH", str(tmp_path))
        identities.load_or_make_key(home)
        (home / "config.toml").write_text(render(Initial()))
        result = runner.invoke(app, ["install", "--dir", str(home)])
        assert result.exit_code == 0
        text = unit.unit_path().read_text()
        assert f'-P -m agent "{home.resolve()}"' in text
        assert "Restart=always" in text
        assert "systemd is not here" in result.output

    def test_quotes_what_systemd_would_read_otherwise(self) -> None:
        assert '"/odd %%n $$HOME \\"x\\""' in unit.text(Path('/odd %n $HOME "x"'), 2.0)


class TestModels:
    def test_list_what_is_bundled(self, home: Path) -> None:
        result = runner.invoke(app, ["models", "--dir", str(home)], env={"COLUMNS": "200"})
        assert result.exit_code == 0
        assert "SmolLM2" in result.output
        assert "yes" in result.output
        assert "name an API key" in result.output
