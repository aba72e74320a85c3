"""The stand-in behind the engine port: in a child process as the real ones, or in this one where it must be cheap."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from agent.engines.chat_wire import Dialect
from agent.engines.embed_wire import inputs_of, is_embedding, little_endian
from agent.engines.managed import ManagedEngine
from agent.engines.port import (
    STOP_GRACE_S,
    Done,
    Embedded,
    EngineError,
    EngineEvent,
    EngineFacts,
    EngineRequest,
    Piece,
    Progress,
)
from agent.engines.simulated import VERSION, Pacer
from agent.engines.simulated_vectors import embed, text_of
from agent.engines.simulation import Fault, FaultKind, Refused, SimEvent, Simulation, SimulationConfig

NAME: Final = "simulated"

_DIALECT: Final = Dialect(
    name=NAME,
    busy_gauges=("vllm:num_requests_running", "vllm:num_requests_waiting"),
    extra_body={"return_token_ids": True, "return_progress": True},
    scope_field="cache_salt",
    counts_prompt=False,
    inputs_at_once=1,
)


class SimulatedEngine(ManagedEngine):
    """A simulated engine as a process of its own: what can happen to a process can happen to it."""

    def __init__(
        self,
        config: SimulationConfig,
        *,
        run_dir: Path,
        load_timeout_s: float = 60.0,
        stall_timeout_s: float = 120.0,
        prefix_cache_s: float = 0.0,
    ) -> None:
        super().__init__(
            _DIALECT,
            "agent.engines.simulated",
            run_dir=run_dir,
            load_timeout_s=load_timeout_s,
            stall_timeout_s=stall_timeout_s,
            readable=(Path(config.model_path),) if config.model_path else (),
        )
        self._config = config
        self._prefix_cache_s = prefix_cache_s

    async def start(self) -> EngineFacts:
        """Start it. Raises EngineError."""
        options: dict[str, Any] = msgspec.to_builtins(self._config)
        version = await self._launch(options)
        self._facts = replace(_facts(self._config, version, self._prefix_cache_s, self.pid), protection=self.protection)
        return self._facts

    async def arm(self, fault: Fault, count: int = 1) -> None:
        """The next `count` requests meet this fault."""
        order = {"kind": fault.kind, "after_tokens": fault.after_tokens, "count": count}
        async with self._http().post("/faults", json=order) as response:
            response.raise_for_status()


class InlineSimulatedEngine:
    """The same without a process and without HTTP: many of them fit into one program. Death is a flag."""

    def __init__(
        self, config: SimulationConfig, *, stall_timeout_s: float = 120.0, prefix_cache_s: float = 0.0
    ) -> None:
        self._config = config
        self._stall_timeout_s = stall_timeout_s
        self._prefix_cache_s = prefix_cache_s
        self._simulation: Simulation | None = None
        self._pacer: Pacer | None = None
        self._task: asyncio.Task[None] | None = None
        self._streams = 0

    @property
    def facts(self) -> EngineFacts:
        """As agent.engines.port says."""
        return _facts(self._config, VERSION, self._prefix_cache_s, None)

    async def start(self) -> EngineFacts:
        """Begin to serve. Raises EngineError."""
        await self.stop()
        try:
            self._simulation = Simulation(self._config)
        except (ValueError, OSError) as error:
            raise EngineError("engine_error", str(error)) from None
        self._pacer = Pacer(self._simulation)
        self._task = asyncio.create_task(self._pacer.run())
        return self.facts

    def arm(self, fault: Fault, count: int = 1) -> None:
        """The next `count` requests meet this fault."""
        for _ in range(count):
            self._alive().arm(fault)

    async def healthy(self) -> bool:
        """True between start and its end."""
        return self._simulation is not None

    async def idle(self) -> bool:
        """True if it works on nothing beyond the answers that are being read."""
        simulation = self._simulation
        return simulation is not None and simulation.running + simulation.waiting <= self._streams

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End it. Never raises."""
        self._simulation = None
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _alive(self) -> Simulation:
        if self._simulation is None:
            raise EngineError("engine_died", "the engine is not running")
        return self._simulation

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        """As agent.engines.port says."""
        if not is_embedding(request):
            async with aclosing(self._stream(request)) as events:
                async for event in events:
                    yield event
            return
        for index, each in enumerate(inputs_of(request)):
            body: dict[str, object] = {"prompt": text_of(each)}
            async with aclosing(self._stream(replace(request, body=body, max_output_tokens=1))) as events:
                async for event in events:
                    if isinstance(event, Done) and event.finish_reason:
                        vector = embed(each, self._alive().dimensions)
                        yield Embedded(index, len(vector), little_endian(vector))
        yield Done("stop")

    async def _stream(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        simulation = self._alive()
        # Bounded by the answer's own length: a simulated engine does not wait for a slow reader, nor does a real one.
        events: asyncio.Queue[SimEvent] = asyncio.Queue()
        scope = request.cache_scope or secrets.token_hex(16)
        try:
            sequence = simulation.submit(request.body, request.max_output_tokens, scope, events.put_nowait)
        except Refused as refusal:
            raise _refusal(refusal) from None
        assert self._pacer is not None
        self._pacer.poke()
        self._streams += 1
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        try:
            while True:
                event = await self._next(events, deadline)
                if isinstance(event, Fault):
                    raise await self._suffer(event)
                yield _public(event)
                if isinstance(event, Done):
                    return
        finally:
            self._streams -= 1
            simulation.cancel(sequence)

    async def _next(self, events: asyncio.Queue[SimEvent], deadline: float) -> SimEvent:
        if events.empty():
            self._alive()
        try:
            async with asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + self._stall_timeout_s)):
                return await events.get()
        except TimeoutError:
            raise EngineError("engine_timeout", "the engine stopped sending") from None

    async def _suffer(self, fault: Fault) -> EngineError:
        if fault.kind is FaultKind.DIE:
            await self.stop()
            return EngineError("engine_died", "the engine's process ended")
        return EngineError("engine_error", "simulated failure")


def _public(event: Progress | Piece | Done) -> EngineEvent:
    """The prompt's count is an estimate, so it is not told."""
    if isinstance(event, Done):
        return replace(event, usage=replace(event.usage, prompt_tokens=None))
    return event


def _refusal(refusal: Refused) -> EngineError:
    if refusal.status >= 500:
        return EngineError("engine_error", refusal.message)
    overflow = refusal.kind == "exceed_context_size_error"
    return EngineError("context_overflow" if overflow else "engine_rejected", refusal.message)


def _facts(config: SimulationConfig, version: str, prefix_cache_s: float, pid: int | None) -> EngineFacts:
    return EngineFacts(
        name=NAME,
        version=version,
        slots=config.slots,
        context_per_slot=config.context_per_slot,
        simulated=True,
        prefix_cache_s=prefix_cache_s,
        pid=pid,
        task=config.task,
    )
