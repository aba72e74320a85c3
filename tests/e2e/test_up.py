"""`fallow up`: the same stack for a person to use; killed, started again, refused twice, and gone without a trace."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from marketplace.core.migrate import check
from marketplace.embedded import StoreUrls, socket_folder
from marketplace.local import free_port
from tests.e2e.local_run import LocalRun
from tests.stack import public_folder, until

SERVES: Final = "Ctrl-C stops everything."


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder("fallow-up-") as made:
        yield made


@pytest.fixture
def runs() -> Iterator[list[LocalRun]]:
    started: list[LocalRun] = []
    yield started
    for run in started:
        run.end()


def curl_line(run: LocalRun) -> str:
    (line,) = [line for line in run.output.splitlines() if line.startswith("curl ")]
    return line


def paste(line: str) -> dict[str, Any]:
    """What the shell prints for a pasted line."""
    done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def key_of(line: str) -> str:
    return line.partition("Bearer ")[2].partition("'")[0]


def test_serves_is_refused_a_second_time_is_killed_comes_back_and_ends(folder: Path, runs: list[LocalRun]) -> None:
    state, port = folder / "state", str(free_port())
    arguments = ("up", "--data-dir", str(state), "--port", port)
    first = LocalRun(folder, *arguments)
    runs.append(first)
    first.wait_for(SERVES)
    line = curl_line(first)
    answer = paste(line)
    assert answer["choices"][0]["message"]["content"]
    assert float(answer["usage"]["cost"]) > 0

    second = LocalRun(folder, *arguments)
    runs.append(second)
    assert second.wait() == 1
    assert "already runs" in second.output
    assert str(first.process.pid) in second.output
    assert first.process.poll() is None

    # kill -9: the kernel ends the parts, and nothing of them stays.
    assert len(first.processes()) >= 7
    first.signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    first.nothing_left()

    third = LocalRun(folder, *arguments)
    runs.append(third)
    third.wait_for(SERVES)
    assert curl_line(third) == line
    again = paste(line)
    assert again["choices"][0]["message"]["content"], again
    with psycopg.connect(database_of(state)) as connection:
        query = "select count(*) from outcomes where outcome = 'complete'"
        until(lambda: connection.execute(query).fetchone() == (2,), "both answers in the books", within_s=10)
        nodes = connection.execute("select count(*) from nodes").fetchone()
        keys = connection.execute("select count(*) from api_keys").fetchone()
        assert (nodes, keys) == ((1,), (1,))

    third.signal(signal.SIGINT)
    assert third.wait() == 0
    assert "Nothing is left running" in third.output
    third.nothing_left(within_s=2)


def database_of(state: Path) -> str:
    return f"postgresql://postgres@/fallow?host={socket_folder(state) / 'pg'}"


def test_uses_the_servers_that_the_environment_names(
    folder: Path, runs: list[LocalRun], database_url: str, valkey_url: str, stores: StoreUrls
) -> None:
    port = str(free_port())
    run = LocalRun(
        folder,
        *("up", "--data-dir", str(folder / "state"), "--port", port, "--no-agent"),
        environment={"DATABASE_URL": database_url, "VALKEY_URL": valkey_url},
    )
    runs.append(run)
    run.wait_for(SERVES)
    names = {process.name() for process in run.processes()}
    assert not {name for name in names if "postgres" in name or "valkey" in name}, names
    assert check(database_url) == []
    with psycopg.connect(database_url) as connection:
        assert connection.execute("select count(*) from api_keys").fetchone() == (1,)
    answer = paste(curl_line(run))
    assert answer["error"]["code"] == "no_capacity"
    run.signal(signal.SIGTERM)
    assert run.wait() == 0
    run.nothing_left(within_s=2)


def test_a_port_that_is_taken_is_named_and_nothing_is_started(folder: Path, runs: list[LocalRun]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = LocalRun(folder, "up", "--data-dir", str(folder / "state"), "--port", port)
        runs.append(run)
        assert run.wait() == 1
        assert f"Port {port} is taken" in run.output
        run.nothing_left(within_s=2)
