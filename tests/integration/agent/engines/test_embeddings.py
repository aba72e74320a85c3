"""Embeddings out of engines: the real llama.cpp with the bundled model, and the stand-in in all of its forms."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from agent.calibration import measure
from agent.engines.factory import EngineConfig, EngineKind, make_engine
from agent.engines.port import Done, Embedded, Engine, EngineError, EngineEvent, EngineRequest
from agent.engines.simulated import Server, serve
from agent.engines.simulated_engine import InlineSimulatedEngine
from agent.engines.simulation import Fault, FaultKind, Simulation, SimulationConfig
from tests.integration.agent.engines.conftest import EngineMaker

KINDS: list[EngineKind] = ["llama.cpp", "simulated", "simulated-inline"]
DIMENSIONS = 576
CATS = ["The cat sleeps on the sofa.", "A cat is sleeping on the couch.", "A cat naps on a couch in the house."]
STOCKS = ["Stock markets fell sharply on Monday.", "Shares on the stock exchange lost value on Monday."]
OPTIONS: dict[str, Any] = {"task": "embed", "pooling": "mean", "slots": 2, "context_per_slot": 512}


def ask(inputs: list[Any], timeout_s: float = 60.0) -> EngineRequest:
    return EngineRequest({"input": inputs}, 0, "tenant", timeout_s)


async def events_of(engine: Engine, request: EngineRequest) -> list[EngineEvent]:
    async with aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
        return [event async for event in events]


async def vectors_of(engine: Engine, inputs: list[Any]) -> list[array[float]]:
    """One for each input, checked for their order, their number and their length."""
    events = await events_of(engine, ask(inputs))
    came = [event for event in events if isinstance(event, Embedded)]
    done = events[-1]
    assert isinstance(done, Done)
    assert done.finish_reason == "stop"
    vectors = []
    for event in came:
        assert (event.first_index, event.dimensions) == (len(vectors), DIMENSIONS)
        floats = array("f", event.data)
        vectors += [floats[start : start + DIMENSIONS] for start in range(0, len(floats), DIMENSIONS)]
    assert len(vectors) == len(inputs)
    assert all(abs(math.hypot(*vector) - 1.0) < 1e-3 for vector in vectors)
    return vectors


def cosine(left: array[float], right: array[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def play(engine: Engine, scene: Callable[[Engine], Awaitable[None]]) -> None:
    async def started() -> None:
        await engine.start()
        try:
            await scene(engine)
        finally:
            await engine.stop()

    asyncio.run(started())


@pytest.mark.parametrize("kind", KINDS)
class TestEveryEngine:
    def test_gives_each_input_its_own_vector_alone_or_in_company(self, make: EngineMaker, kind: EngineKind) -> None:
        texts = [*CATS, *STOCKS, "short", "long " * 90, [5, 6, 7]]

        async def scene(engine: Engine) -> None:
            assert engine.facts.task == "embed"
            together = await vectors_of(engine, texts)
            again = await vectors_of(engine, texts[::-1])
            # Two requests of different lengths at a time, which share the engine's batches.
            alone = [
                vector
                for start in range(0, len(texts), 2)
                for (vector,) in await asyncio.gather(
                    *(vectors_of(engine, [text]) for text in texts[start : start + 2])
                )
            ]
            for one, other, third in zip(together, again[::-1], alone, strict=True):
                assert cosine(one, other) > 0.9999
                assert cosine(one, third) > 0.999
            near = min(cosine(together[i], together[j]) for i, j in ((0, 1), (1, 2), (3, 4)))
            far = max(cosine(together[i], together[j]) for i in range(3) for j in (3, 4))
            assert near > far
            assert await engine.idle()

        play(make(kind, **OPTIONS), scene)

    def test_stops_when_its_reader_leaves(self, make: EngineMaker, kind: EngineKind) -> None:
        async def scene(engine: Engine) -> None:
            async with aclosing(engine.generate(ask(["word " * 300] * 40))) as events:  # type: ignore[type-var]
                first = await anext(aiter(events))
                assert isinstance(first, Embedded)
            for _ in range(400):
                if await engine.idle():
                    break
                await asyncio.sleep(0.02)
            assert await engine.idle()

        play(make(kind, **OPTIONS), scene)


class TestCalibration:
    def test_times_reading_alone(self, make: EngineMaker) -> None:
        async def scene(engine: Engine) -> None:
            speeds = await measure(engine)
            assert speeds.prefill_tokens_per_s is not None
            assert speeds.prefill_tokens_per_s > 1
            assert speeds.decode_tokens_per_s is None

        play(make("llama.cpp", **OPTIONS | {"context_per_slot": 1024}), scene)


class TestAnAttachedServer:
    def test_is_asked_for_groups_of_inputs_over_http(self, model_path: Path) -> None:
        async def story() -> None:
            server = Server(Simulation(SimulationConfig(model_path=str(model_path), task="embed")))
            address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def ready(url: str) -> None:
                address.set_result(url)

            serving = asyncio.create_task(serve(server, ready=ready))
            config = EngineConfig(
                kind="openai", run_dir=Path(), url=await address, task="embed", dialect="vllm", context_per_slot=512
            )
            engine = make_engine(config)
            await engine.start()
            texts = [f"text number {number}" for number in range(70)]
            assert engine.facts.task == "embed"
            assert len(await vectors_of(engine, texts)) == 70
            events = await events_of(engine, ask(texts))
            assert [event.first_index for event in events if isinstance(event, Embedded)] == [0, 32, 64]
            await engine.stop()
            serving.cancel()

        asyncio.run(story())


class TestAFault:
    @pytest.mark.parametrize(
        ("kind", "code"),
        [(FaultKind.ERROR, "engine_error"), (FaultKind.REJECT, "engine_rejected"), (FaultKind.DIE, "engine_died")],
    )
    def test_of_the_engine_is_told_as_it_is(self, make: EngineMaker, kind: FaultKind, code: str) -> None:
        async def scene(engine: Engine) -> None:
            assert isinstance(engine, InlineSimulatedEngine)
            engine.arm(Fault(kind))
            with pytest.raises(EngineError) as caught:
                await vectors_of(engine, ["a", "b"])
            assert caught.value.code == code

        play(make("simulated-inline", **OPTIONS), scene)
