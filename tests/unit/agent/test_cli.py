"""What the owner reads."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from agent import home as folder
from agent import identity as identities
from agent.cli import app
from agent.config import check_url
from agent.enrol import is_private
from agent.home import AlreadyRunning, Lock, OfferStatus, Status
from agent.identity import IdentityFile

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
