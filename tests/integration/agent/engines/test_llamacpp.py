"""What only the real llama.cpp can show: its loading, its memory, its silence about prompts, its death with us."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent.engines.factory import EngineConfig, make_engine
from agent.engines.llamacpp import LlamaCppConfig, LlamaCppEngine
from agent.engines.port import Engine, EngineError, EngineRequest, Piece
from agent.engines.simulation import read_words
from agent.sizing.fit import llamacpp_need
from agent.sizing.gguf import read_header
from agent.sizing.shape import read_shape

EngineMaker = Callable[..., Engine]


def ask(text: str, **more: object) -> EngineRequest:
    body: dict[str, object] = {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}
    return EngineRequest(body, 12, "tenant", 60.0)


def gone(pid: int, within_s: float = 3.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def failed_start(path: Path, run_dir: Path) -> EngineError:
    engine = make_engine(EngineConfig(kind="llama.cpp", run_dir=run_dir, model_path=path, context_per_slot=256))
    with pytest.raises(EngineError) as caught:
        await engine.start()
    return caught.value


async def started_and_stopped(path: Path, run_dir: Path) -> None:
    engine = make_engine(EngineConfig(kind="llama.cpp", run_dir=run_dir, model_path=path, context_per_slot=256))
    await engine.start()
    await engine.stop()


class TestLoading:
    def test_half_a_file_is_refused_before_anything_is_started(
        self, model_path: Path, run_dir: Path, tmp_path: Path
    ) -> None:
        half = tmp_path / "half.gguf"
        with model_path.open("rb") as source:
            half.write_bytes(source.read(model_path.stat().st_size // 2))
        before = children()
        error = asyncio.run(failed_start(half, run_dir))
        assert error.code == "engine_error"
        assert "half.gguf cannot be loaded: the file is cut short" in error.message
        assert children() == before

    def test_a_file_that_is_no_model_or_not_there_is_refused(self, run_dir: Path, tmp_path: Path) -> None:
        noise = tmp_path / "noise.gguf"
        noise.write_bytes(os.urandom(4096))
        assert "not a GGUF file" in asyncio.run(failed_start(noise, run_dir)).message
        assert "No such file" in asyncio.run(failed_start(tmp_path / "absent.gguf", run_dir)).message

    def test_what_llama_cpp_cannot_load_is_told_in_its_own_words(self, run_dir: Path, tmp_path: Path) -> None:
        name, value = b"general.architecture", b"abacus"
        entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value
        strange = tmp_path / "strange.gguf"
        strange.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + b"\0" * 64)
        error = asyncio.run(failed_start(strange, run_dir))
        assert error.code == "engine_error"
        assert "unknown model architecture: 'abacus'" in error.message
        assert list(run_dir.iterdir()) == []

    def test_a_start_that_is_given_up_leaves_no_process(self, make: EngineMaker) -> None:
        async def scenario() -> None:
            task = asyncio.create_task(make("llama.cpp").start())
            await asyncio.sleep(0.15)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        before = children()
        asyncio.run(scenario())
        assert children() == before

    def test_a_load_that_takes_too_long_is_given_up(self, make: EngineMaker) -> None:
        before = children()
        with pytest.raises(EngineError, match="did not load in") as caught:
            asyncio.run(make("llama.cpp", load_timeout_s=0.02).start())  # type: ignore[arg-type]
        assert caught.value.code == "engine_timeout"
        assert children() == before


class TestItsMemory:
    def test_it_is_as_predicted(self, model_path: Path, run_dir: Path) -> None:
        async def scenario() -> int:
            engine = LlamaCppEngine(LlamaCppConfig(model_path, run_dir, slots=2, context_per_slot=4096))
            facts = await engine.start()
            try:
                async for _ in engine.generate(ask("hello")):
                    pass
                return int(psutil.Process(facts.pid).memory_info().rss)
            finally:
                await engine.stop()

        predicted = llamacpp_need(read_shape(model_path), slots=2, context_per_slot=4096).total
        assert asyncio.run(scenario()) == pytest.approx(predicted, rel=0.15)


class TestDiscretion:
    def test_its_log_never_keeps_a_prompt_nor_a_complaint_about_one(self, model_path: Path, run_dir: Path) -> None:
        canary = "canary-8731"

        async def scenario() -> list[str]:
            engine = LlamaCppEngine(LlamaCppConfig(model_path, run_dir, slots=1, context_per_slot=512))
            await engine.start()
            try:
                async for _ in engine.generate(ask(canary)):
                    pass
                schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": canary}}}
                with pytest.raises(EngineError) as caught:
                    async for _ in engine.generate(ask("x", response_format=schema)):
                        pass
                assert caught.value.code == "engine_rejected"
                with pytest.raises(EngineError):
                    async for _ in engine.generate(ask(canary * 500)):
                        pass
                return list(engine._log)
            finally:
                await engine.stop()

        log = asyncio.run(scenario())
        assert log, "what it said while loading is kept"
        assert not any(canary in line for line in log)


class TestItsLife:
    def test_it_dies_with_an_agent_that_is_killed(self, model_path: Path, run_dir: Path) -> None:
        program = textwrap.dedent(f"""
            import asyncio
            from pathlib import Path
            from agent.engines.factory import EngineConfig, make_engine

            async def main():
                config = EngineConfig(kind="llama.cpp", run_dir=Path({str(run_dir)!r}), context_per_slot=256,
                                      model_path=Path({str(model_path)!r}))
                facts = await make_engine(config).start()
                print(facts.pid, flush=True)
                await asyncio.sleep(60)

            asyncio.run(main())
        """)
        agent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        try:
            assert agent.stdout is not None
            pid = int(agent.stdout.readline())
            assert psutil.pid_exists(pid)
            [left_behind] = run_dir.iterdir()
            agent.send_signal(signal.SIGKILL)
            assert gone(pid)
            assert left_behind.exists()
            asyncio.run(started_and_stopped(model_path, run_dir))
            assert list(run_dir.iterdir()) == []
        finally:
            agent.kill()
            agent.wait()
            if agent.stdout is not None:
                agent.stdout.close()

    def test_a_closed_lifeline_ends_it_where_the_kernel_does_not(self, run_dir: Path) -> None:
        run_dir.mkdir()
        command = [sys.executable, "-P", "-m", "agent.engines.simulated"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps({"socket": str(run_dir / "s"), "api_key": "k"}).encode() + b"\n")
            child.stdin.flush()
            assert json.loads(child.stdout.readline())["ready"] is True
            child.stdin.close()
            assert child.wait(timeout=3) == 0
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


class TestCounting:
    def test_words_of_the_stand_in_are_single_tokens_of_the_real_model(self, model_path: Path, run_dir: Path) -> None:
        words = read_words(model_path)[::7]
        text, ids = "".join(word.text for word in words), [word.token_id for word in words]

        async def scenario() -> list[int]:
            engine = LlamaCppEngine(LlamaCppConfig(model_path, run_dir, slots=1, context_per_slot=256))
            await engine.start()
            try:
                async with engine._http().post("/tokenize", json={"content": text}) as response:
                    tokens: list[int] = (await response.json())["tokens"]
                    return tokens
            finally:
                await engine.stop()

        assert asyncio.run(scenario()) == ids

    def test_ids_decode_to_the_text_that_was_streamed(self, model_path: Path, run_dir: Path) -> None:
        tokens: Any = read_header(model_path, frozenset({"tokenizer.ggml.tokens"})).metadata["tokenizer.ggml.tokens"]

        async def scenario() -> list[Piece]:
            engine = LlamaCppEngine(LlamaCppConfig(model_path, run_dir, slots=1, context_per_slot=256))
            await engine.start()
            try:
                request = ask("Write one plain sentence about the sea.")
                return [event async for event in engine.generate(request) if isinstance(event, Piece)]
            finally:
                await engine.stop()

        pieces = asyncio.run(scenario())
        ids = [token for piece in pieces for token in piece.token_ids]
        spelled = "".join(tokens[token] for token in ids).replace("Ġ", " ").replace("Ċ", "\n")
        assert spelled == "".join(piece.text for piece in pieces)
