"""The adapter against the shapes of vLLM, SGLang, Ollama and llama-server: attached, and started by us."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from agent.engines.dialects import find_number
from agent.engines.factory import EngineConfig, EngineKind, make_engine
from agent.engines.managed import _visible
from agent.engines.openai_http import AttachedEngine
from agent.engines.port import Done, EngineError, EngineEvent, EngineRequest, Piece
from tests.integration.agent.engines.standins import CONTEXT, StandIn

FLAVOURS = ["vllm", "sglang", "ollama", "llama-server"]
REPOSITORY = Path(__file__).resolve().parents[4]
every_flavour = pytest.mark.parametrize("flavour", FLAVOURS)


def ask(words: int = 5, tokens: int = 8, **changes: Any) -> EngineRequest:
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "word " * words}],
        "temperature": 0,
        "slot_id": 3,
        "lora": ["/etc/passwd"],
    }
    return EngineRequest(body, tokens, "tenant", 20.0, **changes)


async def answer(engine: AttachedEngine, request: EngineRequest) -> list[EngineEvent]:
    return [event async for event in engine.generate(request)]


def play(flavour: str, act: Callable[[StandIn, AttachedEngine], Awaitable[None]], **options: Any) -> None:
    """Attach to a server of this flavour, without telling the agent which it is."""

    async def scene() -> None:
        server = StandIn(flavour, key="k")
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = make_engine(
            EngineConfig(
                kind="openai",
                run_dir=Path(),
                url=f"http://127.0.0.1:{runner.addresses[0][1]}",
                api_key="k",
                **({"slots": 4, "context_per_slot": 100_000} | options),
            )
        )
        assert isinstance(engine, AttachedEngine)
        try:
            await act(server, engine)
        finally:
            await engine.stop()
            await runner.cleanup()

    asyncio.run(scene())


class TestAttached:
    @every_flavour
    def test_is_recognised_with_its_context_and_version(self, flavour: str) -> None:
        async def act(server: StandIn, engine: AttachedEngine) -> None:
            facts = await engine.start()
            assert (facts.name, facts.context_per_slot, facts.pid) == (flavour, CONTEXT, None)
            assert facts.version == {"vllm": "0.99.1", "ollama": "0.12.3"}.get(flavour, "unknown")
            assert await engine.healthy()

        play(flavour, act)

    @every_flavour
    def test_answers_and_says_what_it_knows_and_no_more(self, flavour: str) -> None:
        async def act(server: StandIn, engine: AttachedEngine) -> None:
            await engine.start()
            events = await answer(engine, ask(prompt_tokens=5))
            pieces = [event for event in events if isinstance(event, Piece)]
            assert "".join(piece.text for piece in pieces) == "Once upon a time there was a ship."
            done = events[-1]
            assert isinstance(done, Done)
            assert (done.finish_reason, done.usage.prompt_tokens, done.usage.completion_tokens) == ("length", 5, 8)
            cached = {"vllm": 3, "llama-server": 0}.get(flavour)
            assert done.usage.cached_tokens == cached, "None where it does not say, never 0"
            has_ids = flavour in ("vllm", "llama-server")
            assert [bool(piece.token_ids) for piece in pieces] == [has_ids] * 8

        play(flavour, act)

    @every_flavour
    def test_gets_no_field_that_is_not_allowed(self, flavour: str) -> None:
        async def act(server: StandIn, engine: AttachedEngine) -> None:
            await engine.start()
            await answer(engine, ask())
            (body,) = server.bodies
            assert {"slot_id", "lora"} & body.keys() == set()
            assert body["stream_options"] == {"include_usage": True}

        play(flavour, act)

    @every_flavour
    def test_stops_when_an_answer_is_closed(self, flavour: str) -> None:
        async def act(server: StandIn, engine: AttachedEngine) -> None:
            server.gap_s = 0.02
            await engine.start()
            async with aclosing(engine.generate(ask(tokens=2_000))) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, Piece):
                        break
                expected = (None, None) if flavour == "ollama" else (1, 0)
                assert await engine.load() == expected
            for _ in range(100):
                if server.running == 0:
                    break
                await asyncio.sleep(0.02)
            assert server.running == 0
            assert await engine.idle()
            await asyncio.sleep(0.05)
            assert len(server.aborted) == (1 if flavour == "sglang" else 0)

        play(flavour, act)

    @pytest.mark.parametrize("flavour", ["vllm", "sglang", "llama-server"])
    def test_words_an_overflow_in_its_own_way(self, flavour: str) -> None:
        async def act(server: StandIn, engine: AttachedEngine) -> None:
            await engine.start()
            with pytest.raises(EngineError) as caught:
                await answer(engine, ask(words=CONTEXT + 1))
            assert caught.value.code == "context_overflow"

        play(flavour, act)

    def test_of_ollama_cutting_a_prompt_is_caught(self) -> None:
        async def act(server: StandIn, engine: AttachedEngine) -> None:
            server.cut_prompt_to = 512
            await engine.start()
            with pytest.raises(EngineError, match="cut the prompt of 900 tokens to 512") as caught:
                await answer(engine, ask(words=900, prompt_tokens=900))
            assert caught.value.code == "engine_error", "the node's fault, not the renter's"

        play("ollama", act)

    @pytest.mark.parametrize(
        ("flavour", "asleep", "awake"),
        [
            ("vllm", "/sleep?level=1", "/wake_up"),
            ("sglang", "/release_memory_occupation {}", "/resume_memory_occupation {}"),
            (
                "ollama",
                '/api/generate {"model":"m","keep_alive":0}',
                '/api/generate {"model":"m","keep_alive":-1}',
            ),
        ],
    )
    def test_frees_the_cards_memory_when_the_owner_wants_it(self, flavour: str, asleep: str, awake: str) -> None:
        async def act(server: StandIn, engine: AttachedEngine) -> None:
            await engine.start()
            assert awake in server.calls
            assert asleep not in server.calls
            await engine.stop(grace_s=0.0)
            assert asleep in server.calls

        play(flavour, act)

    @pytest.mark.parametrize("flavour", ["vllm", "llama-server"])
    def test_tokenises(self, flavour: str) -> None:
        async def act(server: StandIn, engine: AttachedEngine) -> None:
            await engine.start()
            assert await engine.count_tokens("one two three") == 3

        play(flavour, act)

    def test_that_cannot_tokenise_says_nothing(self) -> None:
        async def act(server: StandIn, engine: AttachedEngine) -> None:
            await engine.start()
            assert await engine.count_tokens("one two three") is None

        play("ollama", act)


class TestNumbers:
    def test_are_found_where_the_server_has_put_them(self) -> None:
        assert find_number('{"a": {"n_ctx": 5}, "b": [{"n_ctx": 7}]}', "n_ctx") == 5
        assert find_number('[{"n": 1}, {"n": 2}]', "n") == 3
        assert find_number('{"n": true}', "n") is None
        assert find_number("no json", "n") is None


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """The stand-in of an engine as a program, found by its path."""

    def write(flavour: str) -> str:
        path = tmp_path / flavour
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent / "standins.py"} {flavour} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


def launched(kind: EngineKind, program: str, run_dir: Path, model_path: Path, **options: Any) -> Any:
    return make_engine(
        EngineConfig(
            kind=kind,
            run_dir=run_dir,
            slots=4,
            context_per_slot=1024,
            model_path=model_path,
            program=program,
            load_timeout_s=20,
            **({"isolate": False} | options),
        )
    )


def sockets(folder: Path) -> list[Path]:
    return list(folder.glob("*.sock"))


every_program = pytest.mark.parametrize("kind", ["llama-server", "vllm"])


class TestLaunched:
    @every_program
    def test_starts_answers_and_leaves_nothing_behind(
        self, kind: EngineKind, program: Callable[[str], str], run_dir: Path, model_path: Path
    ) -> None:
        async def scene() -> None:
            engine = launched(kind, program(kind), run_dir, model_path)
            facts = await engine.start()
            assert (facts.name, facts.slots, facts.context_per_slot) == (kind, 4, 1024)
            events = await answer(engine, ask())
            assert isinstance(events[-1], Done)
            child = psutil.Process(engine.pid)
            key = child.environ()["VLLM_API_KEY"]
            assert key not in " ".join(child.cmdline())
            assert not child.net_connections(kind="tcp"), "it listens on a Unix socket alone"
            await engine.stop(grace_s=0.0)
            assert not child.is_running()
            assert sockets(run_dir) == []

        asyncio.run(scene())

    @every_program
    def test_answers_nobody_without_its_key(
        self, kind: EngineKind, program: Callable[[str], str], run_dir: Path, model_path: Path
    ) -> None:
        async def scene() -> None:
            engine = launched(kind, program(kind), run_dir, model_path)
            await engine.start()
            (path,) = sockets(run_dir)
            connector = aiohttp.UnixConnector(str(path))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get("http://engine/v1/models") as response,
            ):
                assert response.status == 401
            assert path.parent.stat().st_mode & 0o077 == 0
            await engine.stop()

        asyncio.run(scene())

    @every_program
    def test_that_fails_says_why_in_its_own_words(
        self, kind: EngineKind, program: Callable[[str], str], run_dir: Path, model_path: Path
    ) -> None:
        async def scene() -> None:
            engine = launched(kind, program(kind), run_dir, model_path, arguments=("--fail", "CUDA out of memory"))
            with pytest.raises(EngineError, match="CUDA out of memory"):
                await engine.start()

        asyncio.run(scene())

    def test_that_is_not_installed_is_a_sentence(self, run_dir: Path, model_path: Path) -> None:
        with pytest.raises(ValueError, match="is not installed here"):
            launched("vllm", "/nowhere/vllm", run_dir, model_path)

    def test_on_a_card_sees_that_card_alone(self) -> None:
        assert _visible("GPU-7") == {"CUDA_VISIBLE_DEVICES": "GPU-7", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert _visible("cpu") == {}

    def test_survives_in_its_enclosure(
        self, program: Callable[[str], str], run_dir: Path, model_path: Path, tmp_path: Path
    ) -> None:
        async def scene() -> None:
            path = program("vllm")
            engine = launched("vllm", path, run_dir, model_path, isolate=True)
            engine._readable = (*engine._readable, REPOSITORY)
            facts = await engine.start()
            assert isinstance((await answer(engine, ask()))[-1], Done)
            assert facts.protection == engine.protection
            await engine.stop()

        asyncio.run(scene())
