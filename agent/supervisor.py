"""Runs one engine as the state machine wants it: starts, watches, verifies, stops. One task, one engine at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from agent.calibration import Calibrator, Speeds
from agent.engines.port import STOP_GRACE_S, Engine, EngineError, EngineFacts
from agent.errors import ConfigError
from agent.events import EngineEvent, EngineFailed, EngineReady, IdleVerified

log = logging.getLogger("fallow.agent.engine")

PROCESS_CHECK_S: Final = 1.0
HEALTH_EVERY_CHECKS: Final = 5
MISSES_TO_FAIL: Final = 3
"""A machine at full load answers late now and then; a dead process is seen by its pid at once."""
VERIFY_S: Final = 10.0
"""How long a cancelled request may go on: llama.cpp leaves a prompt only between batches."""
VERIFY_FIRST_PAUSE_S: Final = 0.02
VERIFY_MAX_PAUSE_S: Final = 0.25
IDLE_CALL_S: Final = 2.0


Result = TypeVar("Result")


class Supervisor:
    """`start`, `stop` and `verify` say what is wanted and return at once; what happened comes through `dispatch`.

    `run` does the work, until cancelled; it ends only after the engine's process is gone.
    """

    def __init__(
        self,
        key: str,
        make: Callable[[], Engine],
        dispatch: Callable[[EngineEvent], None],
        check: Callable[[], None] | None = None,
        calibrator: Calibrator | None = None,
        *,
        prepare: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`prepare` makes room and has the weights here before each start, `check` then looks at them, in a thread;
        both raise ConfigError. `calibrator` measures an engine that is new here before it is offered."""
        self._key = key
        self._name = log_name(key)
        self._make = make
        self._check = check
        self._calibrator = calibrator
        self._prepare = prepare
        self._dispatch = dispatch
        self._wanted: int | None = None
        self._at_once = False
        self._changed = asyncio.Event()
        self._verifying: asyncio.Task[None] | None = None
        self.engine: Engine | None = None
        """The engine that serves now."""
        self.stopped = asyncio.Event()
        """Set while no process of this engine is left."""
        self.stopped.set()

    def start(self, generation: int) -> None:
        """Have a fresh engine of this generation."""
        self._wanted = generation
        self.stopped.clear()
        self._changed.set()

    def stop(self, *, at_once: bool = False) -> None:
        """Have none. `at_once` kills it instead of asking it to end."""
        self._at_once = at_once
        self._wanted = None
        self._changed.set()

    def verify(self, generation: int) -> None:
        """Ask the engine until it is idle or the time is up; answered by IdleVerified."""
        if self._verifying is not None:
            self._verifying.cancel()
        self._verifying = asyncio.create_task(self._verify(generation), name=f"verify-{self._name}")

    async def run(self) -> None:
        """The supervisor's task."""
        try:
            while True:
                if self._wanted is None:
                    self.stopped.set()
                    await self._changed.wait()
                    self._changed.clear()
                else:
                    await self._serve(self._wanted)
        finally:
            if self._verifying is not None:
                self._verifying.cancel()
            self.stopped.set()

    async def _serve(self, generation: int) -> None:
        engine: Engine | None = None
        try:
            if self._prepare is not None:
                await self._unless_unwanted(self._prepare(), generation)
                if self._wanted != generation:
                    return
            if self._check is not None:
                await asyncio.to_thread(self._check)
            engine = self._make()
            started = time.monotonic()
            facts = await self._start(engine, generation)
            if facts is None:
                return
            self.engine = engine
            log.info(
                "engine_ready engine=%s engine_key=%s slots=%d context_per_slot=%d load_s=%.1f",
                *(facts.name, self._name, facts.slots, facts.context_per_slot, time.monotonic() - started),
            )
            speeds = await self._speeds(engine, facts, generation)
            if speeds is None:
                return
            self._dispatch(
                EngineReady(
                    *(self._key, generation, facts, time.monotonic()),
                    prefill_tokens_per_s=speeds.prefill_tokens_per_s,
                    decode_tokens_per_s=speeds.decode_tokens_per_s,
                )
            )
            await self._watch(engine, generation)
        except EngineError as error:
            self._fail(generation, error.message)
        except ConfigError as error:
            self._fail(generation, str(error))
        except Exception as error:
            # The edge to an adapter: whatever it raises must cost this engine, not the agent.
            log.exception("engine_adapter_broke engine_key=%s", self._name)
            self._fail(generation, f"{type(error).__name__}: {error}")
        finally:
            self.engine = None
            if engine is not None:
                await engine.stop(grace_s=0.0 if self._at_once else STOP_GRACE_S)

    async def _start(self, engine: Engine, generation: int) -> EngineFacts | None:
        """The facts once it serves, or None if it is no longer wanted. Raises EngineError."""
        return await self._unless_unwanted(engine.start(), generation)

    async def _speeds(self, engine: Engine, facts: EngineFacts, generation: int) -> Speeds | None:
        """What it does, or None if it is no longer wanted."""
        if self._calibrator is None:
            return Speeds()
        variant, _, device = self._key.partition("@")
        return await self._unless_unwanted(self._calibrator.speeds(engine, facts, device or "cpu", variant), generation)

    async def _unless_unwanted(self, work: Coroutine[Any, Any, Result], generation: int) -> Result | None:
        starting = asyncio.create_task(work, name=f"start-{self._name}")
        try:
            while not starting.done():
                change = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait({starting, change}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
                self._changed.clear()
                if self._wanted != generation:
                    return None
            return starting.result()
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            if not starting.cancelled():
                starting.exception()  # seen, where nobody wants the engine any more

    async def _watch(self, engine: Engine, generation: int) -> None:
        """Returns when the engine is no longer wanted. Raises EngineError when it is dead."""
        checks = misses = 0
        while self._wanted == generation:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROCESS_CHECK_S):
                    await self._changed.wait()
            self._changed.clear()
            if self._wanted != generation:
                return
            if not _alive(engine.facts.pid):
                raise EngineError("engine_died", "the engine's process ended")
            checks += 1
            if checks % HEALTH_EVERY_CHECKS and not misses:
                continue
            misses = 0 if await engine.healthy() else misses + 1
            if misses >= MISSES_TO_FAIL:
                raise EngineError("engine_died", "the engine stopped answering")

    def _fail(self, generation: int, message: str) -> None:
        if self._wanted != generation:
            return
        self._wanted = None
        log.warning("engine_failed engine_key=%s reason=%r", self._name, message)
        self._dispatch(EngineFailed(self._key, generation, message, time.monotonic()))

    async def _verify(self, generation: int) -> None:
        deadline = time.monotonic() + VERIFY_S
        pause_s = VERIFY_FIRST_PAUSE_S
        idle = False
        while self.engine is not None and not idle and time.monotonic() < deadline:
            idle = await _is_idle(self.engine)
            if not idle:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, VERIFY_MAX_PAUSE_S)
        self._dispatch(IdleVerified(self._key, generation, idle, time.monotonic()))


def log_name(key: str) -> str:
    """A short name of an engine for logs: the beginning of its hash, and its device."""
    variant, _, device = key.partition("@")
    return f"{variant[:12]}@{device}" if device else variant[:12]


async def _is_idle(engine: Engine) -> bool:
    try:
        async with asyncio.timeout(IDLE_CALL_S):
            return await engine.idle()
    except (TimeoutError, EngineError):
        return False


def _alive(pid: int | None) -> bool:
    """False only if the process is certainly gone. Without a pid, `healthy` must judge."""
    if pid is None:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
