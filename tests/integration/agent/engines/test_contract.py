"""The engine port's contract, held against the real engine and against both forms of its stand-in."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from agent.engines.factory import EngineConfig, EngineKind, make_engine
from agent.engines.port import Done, Engine, EngineError, EngineEvent, EngineRequest, Piece, Progress

EngineMaker = Callable[..., Engine]
KINDS: list[EngineKind] = ["llama.cpp", "simulated", "simulated-inline"]
PROCESSES: list[EngineKind] = ["llama.cpp", "simulated"]
every_engine = pytest.mark.parametrize("kind", KINDS)
every_process = pytest.mark.parametrize("kind", PROCESSES)


def ask(text: str, *, tokens: int = 8, scope: str = "tenant", timeout_s: float = 60.0) -> EngineRequest:
    body: dict[str, object] = {"messages": [{"role": "user", "content": text}], "temperature": 0, "seed": 1}
    return EngineRequest(body, tokens, scope, timeout_s)


LONG_STORY = "Tell me a very long story about a ship, with every detail that you can think of."
LONG_PROMPT = "word " * 800


@asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[Engine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def answer(engine: Engine, request: EngineRequest) -> list[EngineEvent]:
    async with aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
        return [event async for event in events]


async def first_piece(events: AsyncIterator[EngineEvent]) -> None:
    async for event in events:
        if isinstance(event, Piece):
            return
    raise AssertionError("it ended without a word")


async def rest_of(events: AsyncIterator[EngineEvent]) -> list[EngineEvent]:
    return [event async for event in events]


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def modes(folder: Path) -> list[int]:
    """Permissions of the folder, then of what is in it."""
    return [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())]


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> float:
    """Seconds until it holds."""
    begin = time.monotonic()
    while not await condition():
        assert time.monotonic() - begin < timeout_s, "it did not come true in time"
        await asyncio.sleep(0.02)
    return time.monotonic() - begin


def text_of(events: list[EngineEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


def end_of(events: list[EngineEvent]) -> Done:
    last = events[-1]
    assert isinstance(last, Done)
    return last


@every_engine
class TestAnAnswer:
    def test_a_text_completion_goes_on_from_its_prompt(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                body: dict[str, object] = {"prompt": "The capital of France is", "temperature": 0}
                events = await answer(engine, EngineRequest(body, 4, "tenant", 60.0))
                assert text_of(events)
                assert end_of(events).finish_reason == "length"
                assert end_of(events).usage.completion_tokens == 4
                if kind == "llama.cpp":
                    assert text_of(events).startswith(" Paris")
                    assert end_of(events).usage.prompt_tokens == 5

        asyncio.run(scenario())

    def test_it_streams_text_and_ends_with_reason_and_usage(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                events = await answer(engine, ask(LONG_STORY))
                pieces = [event for event in events if isinstance(event, Piece)]
                assert any(isinstance(event, Progress) for event in events[: -len(pieces) - 1])
                assert text_of(events)
                done = end_of(events)
                assert done.finish_reason == "length"
                assert done.usage.completion_tokens == 8
                assert done.usage.cached_tokens == 0
                assert sum(len(piece.token_ids) for piece in pieces) == 8
                assert [type(event) for event in events].count(Done) == 1
                assert await engine.idle()

        asyncio.run(scenario())

    def test_facts_tell_what_it_is(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                facts = engine.facts
                assert (facts.slots, facts.context_per_slot) == (2, 1024)
                assert facts.simulated == (kind != "llama.cpp")
                assert facts.name == ("simulated" if facts.simulated else "llama.cpp")
                assert facts.version
                assert (facts.pid is None) == (kind == "simulated-inline")
                assert await engine.healthy()

        asyncio.run(scenario())

    def test_requests_run_side_by_side_in_its_slots(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                slow = engine.generate(ask(LONG_STORY, tokens=200))
                await first_piece(slow)
                assert end_of(await answer(engine, ask("hi", tokens=2, scope="other"))).finish_reason
                assert await engine.idle(), "an answer that is being read does not count"
                await slow.aclose()  # type: ignore[attr-defined]

        asyncio.run(scenario())

    def test_a_repeated_prefix_is_reused_within_its_scope_and_nowhere_else(
        self, make: EngineMaker, kind: EngineKind
    ) -> None:
        async def scenario() -> list[int | None]:
            cached = []
            async with started(make(kind)) as engine:
                for scope in ("a", "a", "b", "", "", "a"):
                    events = await answer(engine, ask("word " * 100, tokens=1, scope=scope))
                    cached.append(end_of(events).usage.cached_tokens)
            return cached

        first, again, other, nobody, nobody_again, _ = asyncio.run(scenario())
        assert (first, other, nobody, nobody_again) == (0, 0, 0, 0)
        assert again is not None
        assert again > 80


@every_engine
class TestACancel:
    def test_during_decode_it_stops_the_work_at_once(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                stream = engine.generate(ask(LONG_STORY, tokens=900))
                await first_piece(stream)
                await stream.aclose()  # type: ignore[attr-defined]
                assert await until(engine.idle, 3.0) < 3.0
                assert end_of(await answer(engine, ask("hi", tokens=2))).finish_reason

        asyncio.run(scenario())

    def test_during_prefill_it_stops_before_the_prompt_is_through(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                stream = engine.generate(ask(LONG_PROMPT, tokens=100))
                first = await anext(stream)  # type: ignore[type-var]
                assert isinstance(first, Progress)
                assert first.processed_tokens < first.total_tokens
                await stream.aclose()  # type: ignore[attr-defined]
                await until(engine.idle, 6.0)
                assert end_of(await answer(engine, ask("hi", tokens=2))).finish_reason

        asyncio.run(scenario())

    def test_a_cancelled_task_is_a_cancel_too(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                task = asyncio.create_task(answer(engine, ask(LONG_STORY, tokens=900)))
                await asyncio.sleep(0.5)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                await until(engine.idle, 3.0)

        asyncio.run(scenario())


@every_engine
class TestARefusal:
    def test_a_prompt_over_the_slot_is_the_requests_fault(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                with pytest.raises(EngineError) as caught:
                    await answer(engine, ask("word " * 3000))
                assert caught.value.code == "context_overflow"
                assert end_of(await answer(engine, ask("hi"))).finish_reason
                assert await engine.idle()

        asyncio.run(scenario())

    def test_a_deadline_ends_a_stream(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                with pytest.raises(EngineError) as caught:
                    await answer(engine, ask(LONG_STORY, tokens=900, timeout_s=0.7))
                assert caught.value.code == "engine_timeout"
                await until(engine.idle, 3.0)

        asyncio.run(scenario())

    def test_nothing_runs_before_start_or_after_stop(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            engine = make(kind)
            await engine.stop()
            assert not await engine.healthy()
            await engine.start()
            await engine.stop()
            await engine.stop()
            assert not await engine.healthy()
            with pytest.raises(EngineError) as caught:
                await answer(engine, ask("hi"))
            assert caught.value.code == "engine_died"

        asyncio.run(scenario())

    def test_it_starts_again_after_a_stop(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            engine = make(kind)
            for _ in range(2):
                async with started(engine):
                    assert end_of(await answer(engine, ask("hi", tokens=2))).finish_reason

        asyncio.run(scenario())


@every_process
class TestTheProcess:
    def test_a_killed_engine_is_told_apart_from_a_broken_stream(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind)) as engine:
                pid = engine.facts.pid
                assert pid is not None
                stream = engine.generate(ask(LONG_STORY, tokens=900))
                await first_piece(stream)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(EngineError) as caught:
                    await rest_of(stream)
                assert caught.value.code == "engine_died"
                assert not await engine.healthy()
                await engine.start()
                assert engine.facts.pid != pid
                assert end_of(await answer(engine, ask("hi", tokens=2))).finish_reason

        asyncio.run(scenario())

    def test_stop_leaves_no_process_and_no_socket(self, make: EngineMaker, kind: EngineKind, run_dir: Path) -> None:
        async def scenario() -> None:
            engine = make(kind)
            await engine.start()
            pid = engine.facts.pid
            assert pid is not None
            folder, socket = modes(run_dir)
            assert folder == 0o700
            assert socket & 0o077 == 0
            stream = engine.generate(ask(LONG_STORY, tokens=900))
            await anext(stream)  # type: ignore[type-var]
            begin = time.monotonic()
            await engine.stop()
            assert time.monotonic() - begin < 2.5
            assert not psutil.pid_exists(pid)
            assert modes(run_dir) == [0o700]
            with pytest.raises(EngineError) as caught:
                await rest_of(stream)
            assert caught.value.code == "engine_died"

        asyncio.run(scenario())

    def test_a_frozen_engine_is_not_healthy_and_still_stops(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scenario() -> None:
            async with started(make(kind, stall_timeout_s=1.0)) as engine:
                pid = engine.facts.pid
                assert pid is not None
                freeze(pid)
                begin = time.monotonic()
                assert not await engine.healthy()
                assert not await engine.idle()
                assert time.monotonic() - begin < 5.0
                with pytest.raises(EngineError) as caught:
                    await answer(engine, ask("hi"))
                assert caught.value.code == "engine_timeout"
                await engine.stop()
                assert not psutil.pid_exists(pid)

        asyncio.run(scenario())

    def test_only_our_key_opens_it_and_nobody_can_read_it_off(
        self, make: EngineMaker, kind: EngineKind, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FALLOW_SECRET", "do not pass on")

        async def scenario() -> tuple[int, list[str], dict[str, str]]:
            async with started(make(kind)) as engine:
                reader, writer = await asyncio.open_unix_connection(str(next(iter(os.scandir(run_dir))).path))
                body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                status = await reader.readline()
                writer.close()
                child = psutil.Process(engine.facts.pid)
                return int(status.split()[1]), child.cmdline(), child.environ()

        status, command, environment = asyncio.run(scenario())
        assert status == 401
        assert command[1:3] == ["-P", "-m"]
        assert len(command) == 4
        assert "FALLOW_SECRET" not in environment

    def test_a_long_path_for_its_socket_is_no_obstacle(
        self, model_path: Path, tmp_path: Path, kind: EngineKind
    ) -> None:
        async def scenario() -> None:
            deep = tmp_path / ("d" * 100)
            engine = make_engine(
                EngineConfig(kind=kind, run_dir=deep, slots=1, context_per_slot=256, model_path=model_path)
            )
            async with started(engine):
                assert await engine.healthy()

        asyncio.run(scenario())
