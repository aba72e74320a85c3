"""The adapter for servers that somebody else runs, and the stand-in's own HTTP, spoken to by the official client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from agent.engines.factory import EngineConfig, make_engine
from agent.engines.port import Done, Engine, EngineError, EngineEvent, EngineRequest, Piece
from agent.engines.simulated_engine import InlineSimulatedEngine, SimulatedEngine
from agent.engines.simulation import Fault, FaultKind, SimulationConfig

FAST = SimulationConfig(speedup=100.0, slots=4, context_per_slot=512)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The stand-in as a program of its own on a free port."""
    command = [sys.executable, "-m", "agent.engines.simulated", "--port", "0", "--speedup", "100", "--slots", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ask(tokens: int = 8, **more: object) -> EngineRequest:
    return EngineRequest({"messages": [{"role": "user", "content": "hi"}], **more}, tokens, "tenant", 20.0)


async def answer(engine: Engine, request: EngineRequest) -> list[EngineEvent]:
    return [event async for event in engine.generate(request)]


def attached(url: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"slots": 4, "context_per_slot": 4096}
    return make_engine(EngineConfig(kind="openai", run_dir=Path(), url=url, **(defaults | options)))


class TestAnAttachedServer:
    def test_its_model_version_and_context_are_learned(self, url: str) -> None:
        async def scenario() -> None:
            engine = attached(url, context_per_slot=100_000)
            facts = await engine.start()
            assert (facts.name, facts.version, facts.context_per_slot) == ("vllm", "simulated-1", 8192)
            assert facts.pid is None
            assert not facts.simulated
            events = await answer(engine, ask())
            assert events[-1] == Done("length", events[-1].usage)  # type: ignore[union-attr]
            assert sum(isinstance(event, Piece) for event in events) == 8
            assert await engine.healthy()
            assert await engine.idle()
            await engine.stop()
            assert not await engine.healthy()

        asyncio.run(scenario())

    def test_another_model_than_the_one_meant_is_refused_by_name(self, url: str) -> None:
        async def scenario() -> None:
            with pytest.raises(EngineError, match="serves simulated"):
                await attached(url, served_model="llama").start()

        asyncio.run(scenario())

    def test_a_server_that_is_not_there_is_told_so(self) -> None:
        async def scenario() -> None:
            with pytest.raises(EngineError, match="no server answers") as caught:
                await attached("http://127.0.0.1:9", load_timeout_s=0.1).start()
            assert caught.value.code == "engine_timeout"

        asyncio.run(scenario())

    def test_a_server_that_does_not_tell_its_load_is_believed_to_stop(self, url: str) -> None:
        async def scenario() -> None:
            engine = attached(url, dialect="generic")
            await engine.start()
            assert await engine.healthy()
            assert await engine.idle()
            await engine.stop()

        asyncio.run(scenario())


@pytest.fixture(params=["process", "inline"])
def simulated(request: pytest.FixtureRequest, tmp_path: Path) -> SimulatedEngine | InlineSimulatedEngine:
    if request.param == "inline":
        return InlineSimulatedEngine(FAST, stall_timeout_s=1.0)
    return SimulatedEngine(FAST, run_dir=tmp_path / "run", stall_timeout_s=1.0)


async def suffer(engine: SimulatedEngine | InlineSimulatedEngine, kind: FaultKind) -> list[EngineEvent]:
    """What comes of an answer that meets this fault after three tokens."""
    await engine.start()
    try:
        armed = engine.arm(Fault(kind, after_tokens=3))
        if armed is not None:
            await armed
        return await answer(engine, ask())
    finally:
        await engine.stop()


class TestFaultsOnDemand:
    @pytest.mark.parametrize(
        ("kind", "code"),
        [
            (FaultKind.REJECT, "engine_rejected"),
            (FaultKind.ERROR, "engine_error"),
            (FaultKind.ERROR_EVENT, "engine_error"),
            (FaultKind.DROP, "engine_error"),
            (FaultKind.STALL, "engine_timeout"),
            (FaultKind.DIE, "engine_died"),
        ],
    )
    def test_each_is_an_error_with_its_culprit(
        self, simulated: SimulatedEngine | InlineSimulatedEngine, kind: FaultKind, code: str
    ) -> None:
        with pytest.raises(EngineError) as caught:
            asyncio.run(suffer(simulated, kind))
        assert caught.value.code == code

    @pytest.mark.parametrize(
        ("kind", "reason", "claimed"),
        [
            (FaultKind.EMPTY, "stop", 0),
            (FaultKind.BLANK, "", None),
            (FaultKind.NO_USAGE, "length", None),
            (FaultKind.OVERCLAIM, "length", 80),
        ],
    )
    def test_each_odd_end_is_seen_as_it_is(
        self, simulated: SimulatedEngine | InlineSimulatedEngine, kind: FaultKind, reason: str, claimed: int | None
    ) -> None:
        done = asyncio.run(suffer(simulated, kind))[-1]
        assert isinstance(done, Done)
        assert done.finish_reason == reason
        if kind is not FaultKind.BLANK:
            assert done.usage.completion_tokens == claimed

    def test_an_engine_that_works_on_after_a_cancel_is_found_out(
        self, simulated: SimulatedEngine | InlineSimulatedEngine
    ) -> None:
        async def scenario() -> tuple[bool, bool]:
            await simulated.start()
            armed = simulated.arm(Fault(FaultKind.IGNORE_CANCEL))
            if armed is not None:
                await armed
            stream = simulated.generate(EngineRequest({"messages": [{"content": "hi"}]}, 100_000, "t", 20.0))
            async for event in stream:
                if isinstance(event, Piece):
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            after_cancel = await simulated.idle()
            await simulated.start()
            after_restart = await simulated.idle()
            await simulated.stop()
            return after_cancel, after_restart

        assert asyncio.run(scenario()) == (False, True)


class TestTheStandInsHttp:
    def test_the_official_client_streams_from_it(self, url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        chunks = list(
            client.chat.completions.create(
                model="simulated",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        words = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
        assert len(words) == 6
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 6

    def test_the_official_client_gets_a_whole_answer_over_one_connection_again_and_again(self, url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        for _ in range(3):
            completion = client.chat.completions.create(
                model="simulated", messages=[{"role": "user", "content": "hi"}], max_tokens=4
            )
            assert completion.choices[0].finish_reason == "length"
            assert len((completion.choices[0].message.content or "").split()) == 4
        assert [model.id for model in client.models.list()] == ["simulated"]

    @pytest.mark.parametrize(
        ("method", "path", "body", "status"),
        [
            ("GET", "/nowhere", b"", 404),
            ("POST", "/v1/chat/completions", b"{", 400),
            ("POST", "/v1/chat/completions", b'{"messages":5}', 400),
            ("POST", "/faults", b'{"kind":"flood"}', 400),
            ("GET", "/health", b"", 200),
            ("GET", "/metrics", b"", 200),
        ],
    )
    def test_other_requests_get_their_status(self, url: str, method: str, path: str, body: bytes, status: int) -> None:
        assert httpx2.request(method, url + path, content=body).status_code == status

    def test_a_head_that_never_ends_and_a_body_without_length_are_refused(self, url: str) -> None:
        port = int(url.rsplit(":", 1)[1])

        async def first_line(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            line = await reader.readline()
            writer.close()
            return line

        assert b"400" in asyncio.run(first_line(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000))
        assert b"400" in asyncio.run(first_line(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"))
        assert b"413" in asyncio.run(first_line(b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"))

    def test_wrong_options_by_hand_are_explained(self) -> None:
        command = [sys.executable, "-m", "agent.engines.simulated", "--device", "abacus"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "unknown device" in done.stderr
