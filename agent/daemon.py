"""The agent's shell: carries out what the state machine says, and tells it what happened.

assembly.py puts it together. `Daemon.run` ends only when no engine process of ours is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import asdict
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from agent import events, protocol
from agent import home as folder
from agent import identity as identities
from agent.awake import Awake
from agent.calibration import Calibrator
from agent.choices import combined, request_for
from agent.client import Client, TurnedAway
from agent.config import AgentConfig, AskTable, ConfigError, ModelTable
from agent.earnings import Earnings
from agent.engines.port import Done, Embedded, Engine, EngineError, EngineEvent, EngineRequest, Piece
from agent.events import Event
from agent.lookout import Lookout
from agent.planning import Fetch, Planning
from agent.policy import Sold
from agent.protocol import Evict, GatewayFrame, Load, RunningAttempt, Telemetry, Welcome
from agent.records import EngineState, Served
from agent.sizing.variants import EMBED
from agent.state import AgentState
from agent.supervisor import Supervisor, log_name
from agent.telemetry.port import Source, worth_sending
from agent.version import version

log = logging.getLogger("fallow.agent")

TICK_S: Final = 1.0
STATUS_EVERY_S: Final = 10.0
BUSY_STATUS_S: Final = 1.0
EXIT_RESTART: Final = 75
"""The process should be started again: a driver's library is stuck in it."""
REPORTS_WAIT_S: Final = 2.0
"""How long a stopping agent waits for its last reports to be acknowledged."""
STOP_MARGIN_S: Final = 15.0
"""Beyond the owner's grace: for engines to let go of what they do."""


class Daemon:
    """One node. Single-threaded: everything but a GPU driver's sampling happens on one event loop."""

    def __init__(
        self,
        *,
        home: Path,
        identity: identities.Identity,
        config: AgentConfig,
        served: list[Served],
        makers: dict[str, Callable[[], Engine]],
        sources: list[Source],
        checks: dict[str, Callable[[bool], None]] | None = None,
        calibrator: Calibrator | None = None,
        fetches: dict[str, Fetch] | None = None,
    ) -> None:
        """`makers`, `checks` and `fetches` are by engine; a check raises ConfigError for weights that changed, and
        reads them afresh if told to."""
        self._home = home
        self._identity = identity
        self._config = config
        self._lookout = Lookout(home, config, sources)
        self._awake = Awake(wanted=config.owner.keep_awake)
        self._state = AgentState(
            served,
            identity.sign,
            declared_idle_watts=config.power.idle_watts,
            declared_load_watts=config.power.load_watts,
            data=config.data.policy,
        )
        self._checks = checks or {}
        self._changed_weights: dict[str, str] = {}
        self._planning = Planning(config, self._lookout, self._state, fetches or {})
        self._supervisors = {
            key: Supervisor(
                *(key, make, self._dispatch, self._check_of(key), calibrator), prepare=self._preparation(key)
            )
            for key, make in makers.items()
        }
        self._client = Client(identity.file.url, identity, version(), self)
        self._work: dict[bytes, asyncio.Task[events.WorkEvent]] = {}
        self._stop_requested = asyncio.Event()
        self._moved = asyncio.Event()
        self._told: Telemetry | None = None
        self._told_at = float("-inf")
        self._status_written: folder.Status | None = None
        self._facts_told: tuple[object, ...] = ()
        self._started_at_s = time.time()
        self._restarting = False
        self._restart_needed = False
        self._earnings = Earnings(home / "earnings.json")

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until `stop`, or until the gateway turns this node away. Returns the process's exit code."""
        loop = asyncio.get_running_loop()
        self._lookout.listen(lambda: _soon(loop, self._look_around))
        self._look_around()
        tasks = [
            asyncio.create_task(self._client.run(), name="client"),
            asyncio.create_task(self._tick_forever(), name="tick"),
            *(asyncio.create_task(item.run(), name="engine") for item in self._supervisors.values()),
            asyncio.create_task(self._check_again(), name="weights"),
        ]
        stopping = asyncio.create_task(self._stop_requested.wait(), name="stop")
        try:
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            exit_code = EXIT_RESTART if self._restarting else _exit_code(tasks)
            await self._wind_down()
        finally:
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.wait({stopping, *tasks})
            self._awake.release()
            self._lookout.close()
        self._write_status()
        return exit_code

    def stop(self) -> None:
        """Finish what runs within the grace, then end. A second call ends the grace."""
        if self._stop_requested.is_set():
            self._dispatch(events.Stopping(0.0, time.monotonic()))
        self._stop_requested.set()

    async def _wind_down(self) -> None:
        log.info("stopping running=%d", self._state.running)
        grace_s = self._config.stop_grace_s
        self._dispatch(events.Stopping(grace_s, time.monotonic()))
        await self._until(lambda: not self._state.attempts, grace_s + STOP_MARGIN_S)
        await self._until(lambda: self._state.at_rest or not self._client.connected, REPORTS_WAIT_S)
        await self._client.leave("stopping", "the agent is stopping")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_MARGIN_S):
                for supervisor in self._supervisors.values():
                    supervisor.stop()
                    await supervisor.stopped.wait()

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait for what only an event can bring about."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not condition():
                    self._moved.clear()
                    await self._moved.wait()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._look_around()
            self._dispatch(events.Tick(time.monotonic()))
            self._tell_telemetry(force=False)
            self._tell_abilities()
            self._tell_owner()
            self._awake.hold(bool(self._state.attempts))
            if self._lookout.needs_restart and not self._state.attempts and not self._restarting:
                log.error("driver_stuck: ending, to be started anew")
                self._restarting = True
                self._stop_requested.set()

    def _check_of(self, key: str) -> Callable[[], None] | None:
        check = self._checks.get(key)
        return None if check is None else lambda: check(False)

    def _preparation(self, key: str) -> Callable[[], Coroutine[Any, Any, None]]:
        return lambda: self._planning.prepare(key, self._supervisors)

    async def _check_again(self) -> None:
        """Read the weights again now and then: a byte that changed must not go on answering."""
        pause_s = self._config.weights.check_every_h * 3600
        while True:
            await asyncio.sleep(pause_s)
            for key, check in self._checks.items():
                if not self._state.engines[key].wanted:
                    continue  # looked at before it is loaded, if it is here at all
                try:
                    await asyncio.to_thread(check, True)
                except ConfigError as error:
                    log.error("weights_changed engine_key=%s reason=%r", log_name(key), str(error))
                    self._changed_weights[key] = str(error)
                    engine = self._state.engines[key]
                    self._dispatch(events.EngineFailed(key, engine.generation, str(error), time.monotonic()))

    # --- events and instructions --------------------------------------------------------------------------------------

    def _dispatch(self, event: Event) -> None:
        for instruction in self._state.handle(event):
            self._carry_out(instruction)
        self._moved.set()

    def _carry_out(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.Send(frame):
                self._client.send(frame)
            case events.Delivered(served, usage):
                self._earnings.add(served, usage, _today())
            case events.SendTelemetry():
                self._tell_telemetry(force=True)
            case events.StartWork():
                self._start_work(instruction)
            case events.StopWork(attempt):
                task = self._work.get(attempt)
                if task is not None and not task.cancelling():
                    task.cancel()
            case events.StartEngine(key, generation):
                self._supervisors[key].start(generation)
            case events.StopEngine(key, at_once):
                self._supervisors[key].stop(at_once=at_once)
            case events.VerifyIdle(key, generation):
                self._supervisors[key].verify(generation)

    def _start_work(self, instruction: events.StartWork) -> None:
        task = asyncio.create_task(self._do_work(instruction), name=f"work-{instruction.attempt.hex()[:8]}")
        self._work[instruction.attempt] = task
        task.add_done_callback(lambda done: self._work_done(instruction.attempt, done))

    def _work_done(self, attempt: bytes, task: asyncio.Task[events.WorkEvent]) -> None:
        # Here and nowhere else an attempt's work ends, so that it ends exactly once: a task that is cancelled before
        # its first step never runs a line of its own.
        del self._work[attempt]
        if task.cancelled():
            self._dispatch(events.WorkStopped(attempt, time.monotonic()))
        elif (error := task.exception()) is not None:
            log.error("work_broke attempt=%s", attempt.hex(), exc_info=error)
            message = f"{type(error).__name__} in the agent"
            self._dispatch(events.WorkBroke(attempt, "engine_error", message, time.monotonic()))
        else:
            ended = task.result()
            if isinstance(ended, events.WorkBroke):
                # The code only: an engine's message may quote the prompt.
                log.warning("attempt_failed attempt=%s code=%s", attempt.hex(), ended.code)
            self._dispatch(ended)

    async def _do_work(self, work: events.StartWork) -> events.WorkEvent:
        """Stream the answers out of the engine. Returns how that ended; raises only CancelledError and defects."""
        engine = self._supervisors[work.key].engine
        if engine is None:
            return events.WorkBroke(work.attempt, "engine_died", "the engine is gone", time.monotonic())
        try:
            body = msgspec.json.decode(work.body, type=dict[str, object])
        except msgspec.DecodeError:
            return events.WorkBroke(work.attempt, "engine_rejected", "the request is not JSON", time.monotonic())
        began = time.monotonic()
        self._dispatch(events.WorkBegan(work.attempt, began))
        ends: list[Done] = []
        try:
            for choice in range(work.choices):
                left_s = began + work.timeout_s - time.monotonic()
                ends.append(await self._stream(engine, request_for(work, body, choice, left_s), work.attempt, choice))
                if not ends[-1].finish_reason:
                    break
        except EngineError as error:
            return events.WorkBroke(work.attempt, error.code, error.message, time.monotonic())
        finish_reason, usage, finish_reasons = combined(ends)
        return events.WorkEnded(work.attempt, finish_reason, usage, time.monotonic(), finish_reasons)

    async def _stream(self, engine: Engine, request: EngineRequest, attempt: bytes, choice: int) -> Done:
        """Stream one answer. Raises EngineError."""
        # The port promises aclose; typing has no name for an iterator with it but the generator's.
        stream = cast("AsyncGenerator[EngineEvent, None]", engine.generate(request))
        done = Done("")
        async with contextlib.aclosing(stream):
            async for event in stream:
                if isinstance(event, Done):
                    done = event
                    continue
                if isinstance(event, Piece):
                    self._dispatch(events.PieceCame(attempt, event, time.monotonic(), choice))
                elif isinstance(event, Embedded):
                    self._dispatch(events.VectorsCame(attempt, event, time.monotonic()))
                if self._client.congested:
                    await self._client.room()
        return done

    # --- the connection (client.Listener) -----------------------------------------------------------------------------

    def known_attempts(self) -> list[RunningAttempt]:
        return self._state.known_attempts()

    def on_connected(self, welcome: Welcome) -> None:
        self._planning.gateway_plans = welcome.plans
        self._dispatch(events.Connected(time.monotonic()))
        self._tell_owner()

    def on_frames(self, frames: Sequence[GatewayFrame]) -> None:
        now = time.monotonic()
        for frame in frames:
            if isinstance(frame, Load | Evict):
                self._dispatch(events.PlanCame(frame, self._planning.room(frame, self._supervisors), now))
            else:
                self._dispatch(events.GatewaySaid(frame, now))

    def on_disconnected(self, reason: str) -> None:
        log.info("disconnected reason=%r", reason)
        self._dispatch(events.Disconnected(time.monotonic()))

    # --- telemetry, owner ---------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Sample the devices, let the owner's terms decide, and take up new ones."""
        agent = self._state
        pids = [engine.facts.pid for engine in agent.engines.values() if engine.facts and engine.facts.pid]
        found = self._lookout.look([_sold(engine) for engine in agent.engines.values()], pids)
        if found.config is not None:
            self._use(found.config)
        for change in found.changes:
            self._dispatch(change)

    def _use(self, config: AgentConfig) -> None:
        """Take up the owner's changed terms. What needs other engines waits for the next start of the agent."""
        self._planning.config = config
        self._restart_needed = config.models != self._config.models and _engines_of(config) != _engines_of(self._config)
        asks = {}
        for engine in self._state.engines.values():
            model = config.models[engine.served.model] if engine.served.model < len(config.models) else None
            if model is not None and not self._restart_needed:
                ask = model.ask_usd_per_mtok.parse()
                asks[engine.served.key] = (ask.input, ask.cached_input, ask.output)
        power = config.power
        self._dispatch(
            events.TermsChanged(
                *(asks, power.idle_watts, power.load_watts, time.monotonic()),
                accepts_plans=config.plans.accept,
                data=config.data.policy,
            )
        )

    def _tell_abilities(self) -> None:
        if not self._client.connected:
            self._planning.forget()
            return
        abilities = self._planning.due(time.monotonic())
        if abilities is not None:
            self._client.send(abilities)

    def _tell_telemetry(self, *, force: bool) -> None:
        if not self._client.connected:
            self._told = None
            return
        now = time.monotonic()
        telemetry = Telemetry(
            sampled_at_ms=int(time.time() * 1000),
            devices=self._lookout.devices,
            running=self._state.running,
            available=self._state.available,
            unavailable_reason=self._state.unavailable_reason,
        )
        if force or now - self._told_at >= protocol.HEARTBEAT_S or _news(self._told, telemetry):
            self._told, self._told_at = telemetry, now
            self._client.send(telemetry)

    def _tell_owner(self) -> None:
        """Write the status when something happened, often while somebody looks or works, seldom otherwise."""
        last = self._status_written
        facts = self._facts()
        age_s = float("inf") if last is None else time.time() - last.written_at_s
        if facts != self._facts_told or age_s >= (BUSY_STATUS_S if self._state.attempts else STATUS_EVERY_S):
            self._facts_told = facts
            self._write_status()

    def _facts(self) -> tuple[object, ...]:
        """What an owner should not have to wait for."""
        agent = self._state
        return (
            *(self._client.connected, self._client.last_error, agent.available, agent.unavailable_reason),
            *(len(agent.reports), len(agent.attempts), agent.counters.completed, agent.counters.failed),
            *(
                tuple((item.phase, item.last_error, item.why) for item in agent.engines.values()),
                str(self._lookout.held),
            ),
            *((report.device_id, report.state, report.reason) for report in self._lookout.devices),
            *self._problems(),
        )

    def _write_status(self) -> None:
        self._status_written = self._status()
        try:
            folder.write_status(self._home, self._status_written)
            self._earnings.save()
        except OSError as error:  # a full disk must not stop the work
            log.warning("status_not_written reason=%r", str(error))

    def _status(self) -> folder.Status:
        agent = self._state
        return folder.Status(
            pid=os.getpid(),
            written_at_s=time.time(),
            started_at_s=self._started_at_s,
            node_id=self._identity.file.node_id,
            url=self._identity.file.url,
            connected=self._client.connected,
            gateway_id=self._client.gateway_id,
            last_error=self._client.last_error,
            available=agent.available,
            unavailable_reason=agent.unavailable_reason,
            offers=[_offer_status(engine, agent.busy(key)) for key, engine in agent.engines.items()],
            reports_waiting=len(agent.reports),
            counters=asdict(agent.counters),
            holds=[
                folder.HoldStatus(scope, verdict.action.value, verdict.reason)
                for scope, verdict in self._lookout.held.items()
            ],
            problems=self._problems(),
            devices=self._lookout.devices,
            attempts=[
                folder.AttemptStatus(entry.key, round(time.monotonic() - entry.arrived_at, 1), entry.sequence)
                for entry in agent.attempts.values()
            ],
            energy=[
                folder.EnergyStatus(device_id, *total) for device_id, total in self._lookout.energy.totals().items()
            ],
            earned_today_nano_usd=self._earnings.today(_today()).gross_nano_usd,
        )

    def _problems(self) -> list[str]:
        found = list(self._lookout.problems)
        if self._lookout.config_error:
            found.append(f"config.toml was changed and is not used: {self._lookout.config_error}")
        found += self._changed_weights.values()
        if self._restart_needed:
            found.append("config.toml names other models or engines: they count when the agent is started again")
        return found


def _exit_code(tasks: list[asyncio.Task[None]]) -> int:
    """0 after an orderly stop; 1, and a line in the log, if a task ended by itself."""
    for task in tasks:
        if not task.done() or task.cancelled():
            continue
        error = task.exception()
        if isinstance(error, TurnedAway):
            log.error("turned_away reason=%r", str(error))
        elif error is not None:
            log.error("agent_broke task=%s", task.get_name(), exc_info=error)
        return 1
    return 0


def _news(told: Telemetry | None, now: Telemetry) -> bool:
    if told is None or len(told.devices) != len(now.devices):
        return True
    if (told.running, told.available, told.unavailable_reason) != (now.running, now.available, now.unavailable_reason):
        return True
    return any(worth_sending(last, device) for last, device in zip(told.devices, now.devices, strict=True))


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From any thread; without a loop there is nothing to tell any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _today() -> date:
    return datetime.now().astimezone().date()


def _engines_of(config: AgentConfig) -> list[ModelTable]:
    """The models without their prices: what needs other engines when it changes."""
    free = AskTable(input="0", output="0")
    return [msgspec.structs.replace(model, ask_usd_per_mtok=free) for model in config.models]


def _sold(engine: EngineState) -> Sold:
    served = engine.served
    embeds = served.task == EMBED
    return Sold(
        variant=served.variant,
        device_id=served.device_id,
        ask_output_nano=served.input_nano_usd_per_mtok if embeds else served.output_nano_usd_per_mtok,
        slots=served.slots,
        decode_tokens_per_s=engine.prefill_tokens_per_s if embeds else engine.decode_tokens_per_s,
        stamp=(engine.phase, engine.generation),
        attached=served.attached,
    )


def _offer_status(engine: EngineState, busy: int) -> folder.OfferStatus:
    facts = engine.facts
    return folder.OfferStatus(
        variant_sha256=engine.served.variant,
        phase=engine.phase.value,
        engine=facts.name if facts else "",
        simulated=bool(facts and facts.simulated),
        slots=facts.slots if facts else engine.served.slots,
        busy=busy,
        context_per_slot=facts.context_per_slot if facts else engine.served.context_per_slot,
        last_error=engine.last_error,
        device_id=engine.served.device_id,
        protection=facts.protection if facts else "",
        decode_tokens_per_s=engine.decode_tokens_per_s,
        wanted=engine.wanted,
        why=engine.why,
        name=engine.served.name,
        task=engine.served.task,
    )
