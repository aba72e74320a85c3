"""`fallow agent` as an owner runs it: real processes, a real socket, the stand-in engine and llama.cpp."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from agent import protocol
from agent.engines import sandbox
from agent.protocol import Accepted, Cancel, Failed, Finished, Goodbye, Inventory, Telemetry, Tokens
from tests.agent_doubles import ScriptedGateway, run_frame

COMMAND = (sys.executable, "-m", "agent.cli")
MEGABYTE = 1_000_000


async def fallow_agent(home: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a subcommand to its end: exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, *arguments, "--dir", str(home)), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, error = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


async def enrolled(gateway: ScriptedGateway, home: Path, *options: str) -> None:
    code, _, error = await fallow_agent(home, "enroll", "--url", gateway.url, "--token", "t", "--name", "box", *options)
    assert code == 0, error


@asynccontextmanager
async def running(
    gateway: ScriptedGateway, home: Path, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Inventory]]:
    """A running agent whose offer is live; killed at the end, should the test have left it."""
    log = (home / "agent.log").open("ab")
    process = await asyncio.create_subprocess_exec(*(*COMMAND, "run", "--dir", str(home), *options), stderr=log)
    try:
        live = await gateway.expect_that(Inventory, lambda inventory: bool(inventory.offers), timeout_s=30)
        yield process, live
    finally:
        log.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


def engine_of(process: asyncio.subprocess.Process) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children()
    return child


async def gone(process: psutil.Process, *, within_s: float = 3.0) -> None:
    deadline = time.monotonic() + within_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{process} is still there"
        await asyncio.sleep(0.02)


def variant_of(live: Inventory) -> str:
    return live.offers[0].variant_sha256


def ask(live: Inventory, attempt: bytes, tokens: int, **changes: Any) -> protocol.Run:
    body = {"messages": [{"role": "user", "content": "Count to a hundred."}], "max_tokens": tokens, "temperature": 0}
    return run_frame(attempt, body, variant_sha256=variant_of(live), max_output_tokens=tokens, **changes)


class TestEnrolling:
    def test_writes_key_identity_and_a_configuration_to_edit(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                home = tmp_path / "agent"
                await enrolled(gateway, home, "--ask-output", "0.75")
                assert {path.name for path in home.iterdir()} == {"node.key", "identity.json", "config.toml"}
                assert (home / "node.key").stat().st_mode & 0o777 == 0o600
                assert 'output = "0.75"' in (home / "config.toml").read_text()
                assert [(asked.token, asked.name) for asked in gateway.enrolments] == [("t", "box")]
                code, _, error = await fallow_agent(home, "enroll", "--url", gateway.url, "--token", "t2")
                assert (code, len(gateway.enrolments)) == (1, 1)
                assert "already enrolled" in error

        asyncio.run(act())

    def test_that_is_refused_says_why_and_can_be_tried_again_with_the_same_key(self, tmp_path: Path) -> None:
        from aiohttp import web

        async def act() -> None:
            async with ScriptedGateway() as gateway:
                gateway.enrol_answer = web.json_response({"error": {"message": "This token was used."}}, status=401)
                code, _, error = await fallow_agent(tmp_path, "enroll", "--url", gateway.url, "--token", "t")
                assert code == 1
                assert error.strip() == "The marketplace refused: This token was used (401)."
                assert not (tmp_path / "identity.json").exists()
                key = (tmp_path / "node.key").read_bytes()
                gateway.enrol_answer = None
                await enrolled(gateway, tmp_path)
                assert (tmp_path / "node.key").read_bytes() == key

        asyncio.run(act())

    @pytest.mark.parametrize(
        ("options", "word"),
        [
            (("--url", "ftp://x", "--token", "t"), "address"),
            (("--url", "http://127.0.0.1:1", "--token", "t"), "cannot be reached"),
            (("--url", "http://127.0.0.1:1", "--token", "t", "--ask-input", "cheap"), "amount"),
        ],
    )
    def test_with_bad_input_is_one_sentence(self, tmp_path: Path, options: tuple[str, ...], word: str) -> None:
        code, _, error = asyncio.run(fallow_agent(tmp_path, "enroll", *options))
        assert code == 1
        assert word in error
        assert "Traceback" not in error


class TestRunning:
    def test_without_enrolment_is_one_sentence(self, tmp_path: Path) -> None:
        code, _, error = asyncio.run(fallow_agent(tmp_path, "run"))
        assert (code, "enroll" in error, "Traceback" in error) == (1, True, False)

    def test_serves_says_so_and_leaves_nothing_behind(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                await enrolled(gateway, tmp_path, "--engine", "simulated")
                async with running(gateway, tmp_path) as (process, live):
                    offer = live.offers[0]
                    assert (offer.simulated, offer.output_nano_usd_per_mtok) == (True, 200_000_000)
                    engine = engine_of(process)
                    await gateway.send(ask(live, b"a", 20))
                    finished = await gateway.expect(Finished, timeout_s=10)
                    assert finished.finish_reason in ("stop", "length")
                    assert gateway.text(b"a")
                    telemetry = gateway.of(Telemetry)[-1]
                    assert telemetry.available
                    assert telemetry.devices[0].power_source == "unknown"
                    code, out, _ = await fallow_agent(tmp_path, "status", "--json")
                    status = msgspec.json.decode(out)
                    assert (code, status["running"], status["status"]["connected"]) == (0, True, True)
                    code, _, error = await fallow_agent(tmp_path, "run")
                    assert (code, "already runs" in error) == (1, True)
                    process.send_signal(signal.SIGTERM)
                    assert await asyncio.wait_for(process.wait(), 10) == 0
                    assert (await gateway.expect(Goodbye)).code == "stopping"
                    await gone(engine)
                    code, out, _ = await fallow_agent(tmp_path, "status")
                    assert (code, "Not running" in out) == (3, True)

        asyncio.run(act())

    def test_killed_takes_its_engine_along_and_starts_again(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                await enrolled(gateway, tmp_path, "--engine", "simulated")
                async with running(gateway, tmp_path) as (process, live):
                    engine = engine_of(process)
                    await gateway.send(ask(live, b"a", 500))
                    await gateway.expect(Tokens, timeout_s=10)
                    process.kill()
                    await process.wait()
                    await gone(engine)
                async with running(gateway, tmp_path) as (process, live):
                    assert gateway.hellos[-1].attempts == []
                    await gateway.send(ask(live, b"b", 5))
                    assert (await gateway.expect(Finished, timeout_s=10)).attempt == b"b"

        asyncio.run(act())

    def test_follows_a_marketplace_that_has_moved(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with ScriptedGateway() as old:
                await enrolled(old, tmp_path, "--engine", "simulated")
            async with ScriptedGateway(old.public_key) as new, running(new, tmp_path, "--url", new.url):
                assert len(new.hellos) == 1

        asyncio.run(act())

    def test_outlives_its_engines_death(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                await enrolled(gateway, tmp_path, "--engine", "simulated")
                async with running(gateway, tmp_path) as (process, live):
                    await gateway.send(ask(live, b"a", 500))
                    await gateway.expect(Tokens, timeout_s=10)
                    engine_of(process).kill()
                    assert (await gateway.expect(Failed)).code == "engine_died"
                    await gateway.expect_that(Inventory, lambda inventory: not inventory.offers)
                    await gateway.expect_that(Inventory, lambda inventory: bool(inventory.offers), timeout_s=20)
                    await gateway.send(ask(live, b"b", 5))
                    assert (await gateway.expect(Finished, timeout_s=10)).attempt == b"b"

        asyncio.run(act())

    def test_is_small_and_quiet(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                await enrolled(gateway, tmp_path, "--engine", "simulated")
                async with running(gateway, tmp_path) as (process, _):
                    agent = psutil.Process(process.pid)
                    await asyncio.sleep(4)
                    before = agent.cpu_times()
                    await asyncio.sleep(4)
                    after = agent.cpu_times()
                    busy_s = after.user + after.system - before.user - before.system
                    assert agent.memory_info().rss <= 50 * MEGABYTE
                    assert busy_s / 4 <= 0.015, "a core's share at rest, on a clock of 10 ms"

        asyncio.run(act())


class TestWithLlamaCpp:
    def test_answers_cancels_and_answers_again(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                await enrolled(gateway, tmp_path, "--slots", "1", "--context-per-slot", "512")
                async with running(gateway, tmp_path) as (process, live):
                    assert not live.offers[0].simulated
                    engine = engine_of(process)
                    await gateway.send(ask(live, b"a", 8))
                    first = await gateway.expect(Finished, timeout_s=60)
                    assert first.usage.completion_tokens == 8
                    assert first.usage.cached_tokens is not None
                    await gateway.send(ask(live, b"b", 400))
                    await gateway.expect_that(Tokens, lambda frame: frame.attempt == b"b", timeout_s=60)
                    await gateway.send(Cancel(b"b", 1, "client left"))
                    cancelled = await gateway.expect(Finished, timeout_s=20)
                    assert (cancelled.attempt, cancelled.finish_reason) == (b"b", "cancelled")
                    await gateway.send(ask(live, b"c", 4))
                    assert (await gateway.expect_that(Accepted, lambda frame: frame.attempt == b"c")).epoch == 1
                    assert (await gateway.expect(Finished, timeout_s=60)).attempt == b"c"
                    assert engine_of(process).pid == engine.pid, "a cancel that works restarts nothing"
                    process.send_signal(signal.SIGTERM)
                    assert await asyncio.wait_for(process.wait(), 10) == 0
                    await gone(engine)

        asyncio.run(act())


class TestPrivacy:
    def test_keeps_no_word_of_a_prompt_or_an_answer_on_disk_and_says_how_the_engine_is_enclosed(
        self, tmp_path: Path
    ) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                await enrolled(gateway, tmp_path, "--slots", "1", "--context-per-slot", "512")
                async with running(gateway, tmp_path) as (process, live):
                    body = {"messages": [{"role": "user", "content": "Repeat: xylophonist-4711"}], "temperature": 0}
                    frame = run_frame(b"a", body, variant_sha256=variant_of(live), max_output_tokens=12)
                    await gateway.send(frame)
                    await gateway.expect(Finished, timeout_s=60)
                    await asyncio.sleep(1.2)
                    status = msgspec.json.decode((await fallow_agent(tmp_path, "status", "--json"))[1])["status"]
                    kept = {path: path.read_bytes() for path in files_below(tmp_path)}
                    assert {path.name for path in kept} >= {"status.json", "agent.log", "earnings.json", "speeds.json"}
                    assert [path for path, data in kept.items() if b"xylophonist" in data] == []
                    said = gateway.text(b"a").strip().encode()
                    assert len(said) > 8
                    assert [path for path, data in kept.items() if said in data] == []
                    # What is active depends on the kernel; what is told is what the engine's process saw.
                    assert set(status["offers"][0]["protection"].split(", ")) <= {"", *sandbox_names()}
                    process.send_signal(signal.SIGTERM)
                    assert await asyncio.wait_for(process.wait(), 10) == 0

        asyncio.run(act())


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def sandbox_names() -> set[str]:
    return {sandbox.BUBBLEWRAP, sandbox.NO_NETWORK, sandbox.FEW_FILES}


class TestInstallingAlone:
    def test_needs_no_library_of_the_server(self) -> None:
        code = """
import sys
class Refuse:
    names = {"marketplace", "ledger", "sqlalchemy", "pydantic", "fastapi", "celery", "redis", "psycopg", "structlog",
             "tokenizers", "jinja2", "orjson", "uvicorn", "uvloop", "xllamacpp", "alembic", "websockets"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ImportError("not part of the agent: " + name)
sys.meta_path.insert(0, Refuse())
import agent.cli, agent.__main__
assert "typer" not in __import__("subprocess").run(
    [sys.executable, "-c", "import sys, agent.__main__; print(*sys.modules)"], capture_output=True, text=True
).stdout.split()
"""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("COV_")}

        async def act() -> tuple[int | None, str]:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", code), stderr=asyncio.subprocess.PIPE, env=environment
            )
            _, error = await asyncio.wait_for(process.communicate(), 30)
            return process.returncode, error.decode()

        assert asyncio.run(act()) == (0, "")
