"""The agent as a state machine without I/O: events in, instructions out.

`AgentState.handle(event)` is the only way in. Times are monotonic seconds that the caller passes, so that every run can
be replayed. The shell around it (daemon.py) carries instructions out and owes these answers:

- each StartWork is answered by exactly one WorkEnded, WorkBroke or WorkStopped, also after StopWork;
- each StartEngine by one EngineReady or EngineFailed of the same generation, unless StopEngine came first;
- each VerifyIdle by one IdleVerified.

Rules kept here: never more attempts than slots; sequences without gaps; a lease that ends stops the engine's work; a
frame with another epoch changes nothing; a report is repeated until the gateway has it; nothing new while the owner has
the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from agent import plans
from agent.engines.port import Piece, Usage
from agent.events import (
    Connected,
    Delivered,
    Disconnected,
    EngineFailed,
    EngineReady,
    Event,
    GatewaySaid,
    IdleVerified,
    Instruction,
    OwnerChanged,
    PieceCame,
    PlanCame,
    Send,
    SendTelemetry,
    StartEngine,
    StartWork,
    StopEngine,
    Stopping,
    StopWork,
    TermsChanged,
    Tick,
    VectorsCame,
    VerifyIdle,
    WorkBegan,
    WorkBroke,
    WorkEnded,
    WorkStopped,
)
from agent.protocol import (
    FLOAT_BYTES,
    MAX_CHOICES,
    MAX_VECTORS_BYTES,
    RESUME_S,
    Accepted,
    Cancel,
    DataPolicy,
    Failed,
    Finished,
    Inventory,
    Load,
    OfferReport,
    PlanAnswer,
    Refused,
    Renew,
    ReportAck,
    Resume,
    Run,
    RunningAttempt,
    Tokens,
    UsageReport,
    Vectors,
    Void,
    receipt_payload,
    signed_reason,
)
from agent.records import (
    RESEND_FIRST_S,
    STOP_MESSAGES,
    AttemptPhase,
    AttemptState,
    Counters,
    EnginePhase,
    EngineState,
    Hold,
    LoadMode,
    PendingReport,
    Served,
    StopCause,
    engine_key,
)

MAX_REPORTS: Final = 4_096
"""Unacknowledged reports kept; beyond it the oldest is dropped."""
MAX_TEXT_CHARS: Final = 64 * 1024
"""Of one Tokens frame; a longer piece travels as several."""
MAX_EXTRA_BYTES: Final = 512 * 1024
MAX_MESSAGE_CHARS: Final = 500
RESEND_MAX_S: Final = 60.0
RESTART_FIRST_S: Final = 1.0
RESTART_MAX_S: Final = 60.0
RESTART_FORGIVEN_AFTER_S: Final = 120.0
"""An engine that served this long starts over with the shortest pause."""
TIMEOUT_MARGIN_S: Final = 5.0
"""The engine's own timeout lies this far behind the deadline, so that the deadline is what ends an attempt."""
RESUME_ANSWER_S: Final = 1.0
"""How long after Welcome a report waits for the gateway to say from where it wants the answer."""
PIECES_KEPT_S: Final = 30.0
"""How long an answer is kept for a report that is not acknowledged."""
MAX_LEASE_S: Final = 3_600.0
SPEED_WEIGHT: Final = 0.2
MEASURED_TOKENS: Final = 32
"""Fewer tokens than this say little about how fast an engine reads."""
SPEED_STEP: Final = 0.25
"""A measured speed is told again when it moved by this share, and no sooner than SPEED_PAUSE_S."""
SPEED_PAUSE_S: Final = 10.0


class AgentState:
    """All that the agent knows about its work. `sign` is Ed25519 with the node's key."""

    def __init__(
        self,
        served: list[Served],
        sign: Callable[[bytes], bytes],
        *,
        declared_idle_watts: float | None = None,
        declared_load_watts: float | None = None,
        data: DataPolicy | None = None,
    ) -> None:
        self.engines = {item.key: EngineState(item, wanted=item.load is not LoadMode.PLAN) for item in served}
        if len(self.engines) != len(served):
            raise ValueError("two models of the configuration have the same weights on the same device")
        self.attempts: dict[bytes, AttemptState] = {}
        self.reports: dict[bytes, PendingReport] = {}
        self.counters = Counters()
        self.connected = False
        self.holds: dict[str, Hold] = {}
        """By scope."""
        self.draining = False
        self._sign = sign
        self._watts = (declared_idle_watts, declared_load_watts)
        self._data = data
        self._end_at: float | None = None
        """When a stopping agent ends what still runs."""
        self._told: Inventory | None = None
        self._ended: dict[bytes, None] = {}
        self._speeds_at = float("-inf")
        self._out: list[Instruction] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            PieceCame: self._piece_came,
            VectorsCame: self._vectors_came,
            GatewaySaid: self._gateway_said,
            WorkBegan: self._work_began,
            WorkEnded: self._work_ended,
            WorkBroke: self._work_broke,
            WorkStopped: self._work_stopped,
            EngineReady: self._engine_ready,
            EngineFailed: self._engine_failed,
            IdleVerified: self._idle_verified,
            OwnerChanged: self._owner_changed,
            TermsChanged: self._terms_changed,
            PlanCame: self._plan_came,
            Connected: self._on_connected,
            Disconnected: self._on_disconnected,
            Stopping: self._on_stopping,
            Tick: self._on_tick,
        }
        self._frame_handlers: dict[type, Callable[[Any, float], None]] = {
            Run: self._run,
            Renew: self._renew,
            Resume: self._resume,
            Cancel: self._cancel,
            Void: self._void,
            ReportAck: self._ack,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; the instructions are to be carried out in order, before the next event."""
        self._out = []
        self._handlers[type(event)](event)
        if self.holds or self.draining:
            self._yield_if_due(event.now)
        return self._out

    @property
    def available(self) -> bool:
        """True if new work may be sent."""
        return not self.unavailable_reason

    @property
    def unavailable_reason(self) -> str:
        """Why the whole node takes no work; empty if it does."""
        if self.draining:
            return "the agent is stopping"
        hold = self.holds.get("")
        return hold.reason or "the owner has the machine" if hold is not None else ""

    def held(self, engine: EngineState) -> Hold | None:
        """What keeps this engine from new work, the whole machine first."""
        return next((self.holds[scope] for scope in engine.served.scopes if scope in self.holds), None)

    @property
    def running(self) -> int:
        """Attempts that occupy a slot."""
        return len(self.attempts)

    @property
    def at_rest(self) -> bool:
        """True if no attempt runs and no report waits for its acknowledgement."""
        return not self.attempts and not self.reports

    def known_attempts(self) -> list[RunningAttempt]:
        """For Hello: attempts that occupy a slot or hold a report."""
        running = [RunningAttempt(attempt, state.run.epoch) for attempt, state in self.attempts.items()]
        return running + [RunningAttempt(attempt, report.frame.epoch) for attempt, report in self.reports.items()]

    def inventory(self) -> Inventory:
        """What is served now."""
        return Inventory(
            offers=[
                _offer(engine)
                for engine in self.engines.values()
                if engine.phase is EnginePhase.READY and engine.wanted and not self._held_apart(engine)
            ],
            declared_idle_watts=self._watts[0],
            declared_load_watts=self._watts[1],
            data=self._data,
        )

    def _held_apart(self, engine: EngineState) -> bool:
        """True if this engine is held where the machine as a whole is not (that travels with telemetry)."""
        return any(scope in self.holds for scope in engine.served.scopes if scope)

    # --- the connection -------------------------------------------------------------------------------------------

    def _on_connected(self, event: Connected) -> None:
        self.connected = True
        self._told = None
        self._tell_inventory()
        self._out.append(SendTelemetry())
        for report in self.reports.values():
            if report.pieces:
                # If the gateway still wants the answer it says from where, and a report before that would skip pieces.
                report.resend_at = event.now + RESUME_ANSWER_S
            else:
                self._resend(report, event.now)

    def _on_disconnected(self, event: Disconnected) -> None:
        """An answer that has begun goes on for a moment: the gateway may take it up again. One that has not is made
        elsewhere by now."""
        self.connected = False
        for attempt_id, attempt in self.attempts.items():
            if attempt.sequence:
                attempt.away_until = event.now + RESUME_S
            else:
                self._stop(attempt_id, StopCause.LEASE_EXPIRED)
        for report in self.reports.values():
            report.pieces_until = min(report.pieces_until, event.now + RESUME_S)

    def _resume(self, frame: Resume, now: float) -> None:
        for point in frame.attempts:
            attempt = self._current(point.attempt, point.epoch)
            report = self.reports.get(point.attempt)
            if attempt is not None and attempt.away_until is not None:
                attempt.away_until = None
                self._say_again(attempt.pieces, point.sequence)
            elif report is not None and report.frame.epoch == point.epoch:
                self._say_again(report.pieces, point.sequence)
                self._resend(report, now)

    def _say_again(self, pieces: list[Tokens | Vectors], sequence: int) -> None:
        self._out.extend(Send(piece) for piece in pieces[max(sequence, 0) :])

    def _tell_inventory(self) -> None:
        inventory = self.inventory()
        if self.connected and inventory != self._told:
            self._told = inventory
            self._out.append(Send(inventory))

    # --- frames ---------------------------------------------------------------------------------------------------

    def _gateway_said(self, event: GatewaySaid) -> None:
        handler = self._frame_handlers.get(type(event.frame))
        if handler is not None:
            handler(event.frame, event.now)

    def _run(self, frame: Run, now: float) -> None:
        report = self.reports.get(frame.attempt)
        if report is not None:
            self._resend(report, now)
        if frame.attempt in self.attempts or frame.attempt in self._ended:
            return
        chosen = self._choose(frame)
        if isinstance(chosen, tuple):
            self.counters.refused += 1
            self._out.append(Send(Refused(frame.attempt, frame.epoch, *chosen)))
            return
        deadline_s = frame.deadline_ms / 1000
        self.counters.accepted += 1
        self.attempts[frame.attempt] = AttemptState(
            run=frame,
            served=chosen.served,
            arrived_at=now,
            lease_until=now + _lease_s(frame.lease_ms),
            deadline_at=now + deadline_s,
        )
        self._out.append(Send(Accepted(frame.attempt, frame.epoch)))
        self._out.append(
            StartWork(
                attempt=frame.attempt,
                key=chosen.served.key,
                body=frame.body,
                max_output_tokens=frame.max_output_tokens,
                cache_scope=frame.cache_scope,
                timeout_s=deadline_s + TIMEOUT_MARGIN_S,
                prompt_tokens=frame.prompt_tokens,
                choices=min(frame.choices, MAX_CHOICES),
                traceparent=frame.traceparent,
            )
        )

    def _choose(self, frame: Run) -> EngineState | tuple[str, str]:
        """The replica that runs it, or (code, message) of protocol.REFUSALS."""
        if not self.available:
            return "draining" if self.draining else "owner_active", self.unavailable_reason
        replicas = [
            engine
            for engine in self.engines.values()
            if engine.served.variant == frame.variant_sha256 and frame.device_id in ("", engine.served.device_id)
        ]
        ready = [
            engine
            for engine in replicas
            if engine.phase is EnginePhase.READY and engine.wanted and self.held(engine) is None
        ]
        if not ready:
            hold = next((hold for engine in replicas if (hold := self.held(engine)) is not None), None)
            if hold is not None and hold.cause is not StopCause.DEVICE_LOST:
                return "owner_active", hold.reason
            return "not_serving", "this variant is not loaded here"
        wanted = frame.longest_input_tokens or frame.prompt_tokens + frame.max_output_tokens
        fitting = [engine for engine in ready if wanted <= _context(engine)]
        if not fitting:
            return "context_overflow", f"{wanted} tokens asked, a slot has {max(map(_context, ready))}"
        roomy = max(fitting, key=self._free)
        if self._free(roomy) < 1:
            return "slot_taken", f"all {_slots(roomy)} slots are taken"
        return roomy

    def _free(self, engine: EngineState) -> int:
        return _slots(engine) - self.busy(engine.served.key)

    def _renew(self, frame: Renew, now: float) -> None:
        for renewed in frame.attempts:
            attempt = self._current(renewed.attempt, renewed.epoch)
            if attempt is not None:
                attempt.lease_until = now + _lease_s(frame.lease_ms)

    def _cancel(self, frame: Cancel, now: float) -> None:
        report = self.reports.get(frame.attempt)
        if report is not None and report.frame.epoch == frame.epoch:
            self._resend(report, now)
        elif self._current(frame.attempt, frame.epoch) is not None:
            self._stop(frame.attempt, StopCause.CANCELLED)

    def _void(self, frame: Void, _now: float) -> None:
        report = self.reports.get(frame.attempt)
        if report is not None and report.frame.epoch == frame.epoch:
            del self.reports[frame.attempt]
        attempt = self._current(frame.attempt, frame.epoch)
        if attempt is not None:
            self._stop(frame.attempt, StopCause.VOID)
            attempt.cause = StopCause.VOID  # also of one that is being stopped for another reason

    def _ack(self, frame: ReportAck, now: float) -> None:
        report = self.reports.get(frame.attempt)
        if report is not None and report.frame.epoch == frame.epoch:
            del self.reports[frame.attempt]
            if isinstance(report.frame, Finished) and report.frame.sequence:
                self._out.append(Delivered(report.served, report.frame.usage))

    def _current(self, attempt_id: bytes, epoch: int) -> AttemptState | None:
        attempt = self.attempts.get(attempt_id)
        return attempt if attempt is not None and attempt.run.epoch == epoch else None

    # --- work -----------------------------------------------------------------------------------------------------

    def _work_began(self, event: WorkBegan) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is not None:
            attempt.began_at = event.now

    def _piece_came(self, event: PieceCame) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is None or attempt.phase is not AttemptPhase.RUNNING:
            return
        piece = event.piece
        if not piece.text and not piece.extra and not piece.token_ids:
            return
        if attempt.first_piece_at is None:
            attempt.first_piece_at = event.now
        attempt.last_piece_at = event.now
        attempt.token_ids += len(piece.token_ids)
        if len(piece.extra) > MAX_EXTRA_BYTES:
            self.engines[attempt.key].doubtful = True
            self._out.append(StopWork(event.attempt))
            self._fail(attempt, "engine_error", "the engine sent an oversized piece", event.now)
            return
        head = Piece(piece.text[:MAX_TEXT_CHARS], piece.token_ids, piece.reasoning, piece.extra)
        self._append(attempt, head, event.choice)
        for start in range(MAX_TEXT_CHARS, len(piece.text), MAX_TEXT_CHARS):
            rest = Piece(piece.text[start : start + MAX_TEXT_CHARS], reasoning=piece.reasoning)
            self._append(attempt, rest, event.choice)

    def _vectors_came(self, event: VectorsCame) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is None or attempt.phase is not AttemptPhase.RUNNING:
            return
        if attempt.first_piece_at is None:
            attempt.first_piece_at = event.now
        attempt.last_piece_at = event.now
        vectors = event.vectors
        size_bytes = vectors.dimensions * FLOAT_BYTES
        at_once = max(1, MAX_VECTORS_BYTES // size_bytes)
        for start in range(0, len(vectors.data) // size_bytes, at_once):
            data = vectors.data[start * size_bytes : (start + at_once) * size_bytes]
            run = attempt.run
            frame = Vectors(
                *(run.attempt, run.epoch, attempt.sequence, vectors.first_index + start, vectors.dimensions, data)
            )
            attempt.digest.update(data)
            self._say(attempt, frame)

    def _append(self, attempt: AttemptState, piece: Piece, choice: int) -> None:
        text = piece.text
        try:
            data = text.encode()
        except UnicodeEncodeError:  # a lone surrogate out of some engine's JSON: neither wire nor client can carry it
            data = text.encode("utf-8", "replace")
            text = data.decode()
        attempt.digest.update(data)
        run = attempt.run
        frame = Tokens(
            run.attempt,
            run.epoch,
            attempt.sequence,
            text,
            list(piece.token_ids),
            piece.reasoning,
            piece.extra,
            choice,
        )
        self._say(attempt, frame)

    def _say(self, attempt: AttemptState, frame: Tokens | Vectors) -> None:
        self.counters.pieces += 1
        attempt.pieces.append(frame)
        if attempt.away_until is None:
            self._out.append(Send(frame))
        attempt.sequence += 1

    def _work_ended(self, event: WorkEnded) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is None:
            return
        attempt.stopped_at = event.now
        if event.finish_reason:
            self._measure(attempt, event.usage)
            usage = _usage_report(event.usage)
            self._finish(attempt, event.finish_reason, usage, event.now, event.finish_reasons)
        elif attempt.sequence == 0:
            self._fail(attempt, "engine_empty", "the engine closed without an answer", event.now, event.usage)
        else:
            self._fail(attempt, "engine_error", "the engine closed without a finish reason", event.now, event.usage)

    def _work_broke(self, event: WorkBroke) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is None:
            return
        attempt.stopped_at = event.now
        engine = self.engines[attempt.key]
        if attempt.phase is AttemptPhase.STOPPING:
            self._conclude(attempt, event.now)
        else:
            self._fail(attempt, event.code, event.message, event.now)
        if event.code == "engine_died":
            self._engine_down(engine, event.message, event.now)
        elif event.code == "engine_timeout":
            engine.doubtful = True
            self._verify_if_empty(engine)

    def _work_stopped(self, event: WorkStopped) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is None or attempt.phase is not AttemptPhase.STOPPING:
            return
        attempt.stopped_at = event.now
        engine = self.engines[attempt.key]
        engine.doubtful = True
        attempt.move(AttemptPhase.VERIFYING)
        if engine.phase is not EnginePhase.READY or self._in_phase(engine, AttemptPhase.RUNNING):
            # A dead engine needs no proof; a busy one cannot give it: it comes when the engine has nothing left to do.
            self._conclude(attempt, event.now)
        else:
            self._verify_if_empty(engine)

    def _stop(self, attempt_id: bytes, cause: StopCause) -> None:
        attempt = self.attempts[attempt_id]
        if attempt.phase is not AttemptPhase.RUNNING:
            return
        attempt.move(AttemptPhase.STOPPING)
        attempt.cause = cause
        self._out.append(StopWork(attempt_id))

    def _conclude(self, attempt: AttemptState, now: float) -> None:
        """Report a stopped attempt as its cause wants it."""
        if attempt.cause is StopCause.VOID:
            self._release(attempt)
        elif attempt.cause in (StopCause.CANCELLED, StopCause.DEADLINE, None):
            self._finish(attempt, "cancelled", UsageReport(), now)
        else:
            self._fail(attempt, attempt.cause.value, STOP_MESSAGES[attempt.cause], now)

    def _finish(
        self,
        attempt: AttemptState,
        finish_reason: str,
        usage: UsageReport,
        now: float,
        finish_reasons: Sequence[str] = (),
    ) -> None:
        if attempt.cause is StopCause.VOID:
            self._release(attempt)
            return
        if finish_reason == "cancelled":
            self.counters.cancelled += 1
        else:
            self.counters.completed += 1
        run = attempt.run
        signed = signed_reason(finish_reason, finish_reasons)
        payload = receipt_payload(run.attempt, run.epoch, attempt.sequence, signed, usage, attempt.digest.digest())
        self._report(
            attempt,
            Finished(
                attempt=run.attempt,
                epoch=run.epoch,
                sequence=attempt.sequence,
                finish_reason=finish_reason,
                usage=usage,
                queued_ms=_ms(attempt.arrived_at, attempt.began_at),
                ttft_ms=None if attempt.first_piece_at is None else _ms(attempt.arrived_at, attempt.first_piece_at),
                busy_ms=_ms(attempt.began_at, attempt.stopped_at),
                signature=self._sign(payload),
                finish_reasons=list(finish_reasons),
            ),
            now,
        )

    def _fail(self, attempt: AttemptState, code: str, message: str, now: float, usage: Usage | None = None) -> None:
        if attempt.cause is StopCause.VOID:
            self._release(attempt)
            return
        self.counters.failed += 1
        run = attempt.run
        frame = Failed(
            attempt=run.attempt,
            epoch=run.epoch,
            sequence=attempt.sequence,
            code=code,
            message=message[:MAX_MESSAGE_CHARS],
            usage=UsageReport() if usage is None else _usage_report(usage),
            busy_ms=_ms(attempt.began_at, attempt.stopped_at or now),
        )
        self._report(attempt, frame, now)

    def _report(self, attempt: AttemptState, frame: Finished | Failed, now: float) -> None:
        while len(self.reports) >= MAX_REPORTS:
            self.reports.pop(next(iter(self.reports)))
            self.counters.reports_dropped += 1
        away_until = attempt.away_until
        waits = away_until is not None and now < away_until
        self.reports[frame.attempt] = PendingReport(
            frame,
            attempt.served,
            resend_at=away_until if away_until is not None and waits else now + RESEND_FIRST_S,
            pieces=attempt.pieces,
            pieces_until=now + PIECES_KEPT_S if away_until is None else away_until,
        )
        if not waits:
            self._out.append(Send(frame))
        self._release(attempt)

    def _release(self, attempt: AttemptState) -> None:
        """Free the slot. The attempt's name is remembered for a while: a late copy of its Run starts nothing."""
        del self.attempts[attempt.run.attempt]
        self._ended[attempt.run.attempt] = None
        while len(self._ended) > MAX_REPORTS:
            self._ended.pop(next(iter(self._ended)))
        self._verify_if_empty(self.engines[attempt.key])

    def _resend(self, report: PendingReport, now: float) -> None:
        report.resend_at = now + report.pause_s
        report.pause_s = min(report.pause_s * 2, RESEND_MAX_S)
        self._out.append(Send(report.frame))

    # --- engines --------------------------------------------------------------------------------------------------

    def busy(self, key: str) -> int:
        """Slots of this engine that are taken."""
        return sum(1 for attempt in self.attempts.values() if attempt.key == key)

    def _in_phase(self, engine: EngineState, *phases: AttemptPhase) -> list[AttemptState]:
        key = engine.served.key
        return [a for a in self.attempts.values() if a.key == key and a.phase in phases]

    def _verify_if_empty(self, engine: EngineState) -> None:
        """Once a doubtful engine has nothing left that it should do, have it prove that it does nothing."""
        if not engine.doubtful or engine.verifying or engine.phase is not EnginePhase.READY:
            return
        if not self._in_phase(engine, AttemptPhase.RUNNING, AttemptPhase.STOPPING):
            engine.verifying = True
            self._out.append(VerifyIdle(engine.served.key, engine.generation))

    def _idle_verified(self, event: IdleVerified) -> None:
        engine = self.engines[event.key]
        if event.generation != engine.generation or not engine.verifying:
            return
        engine.verifying = False
        engine.doubtful = not event.idle
        waiting = self._in_phase(engine, AttemptPhase.VERIFYING)
        # Work that came meanwhile explains a busy engine: then the question is asked again after it.
        inconclusive = bool(self._in_phase(engine, AttemptPhase.RUNNING, AttemptPhase.STOPPING))
        if not event.idle and not inconclusive:
            self._engine_down(engine, "the engine went on working after a cancel", event.now)
            return
        for attempt in waiting:
            self._conclude(attempt, event.now)

    def _start_engine(self, engine: EngineState) -> None:
        engine.move(EnginePhase.STARTING)
        engine.generation += 1
        engine.doubtful = engine.verifying = False
        self._out.append(StartEngine(engine.served.key, engine.generation))

    def _engine_ready(self, event: EngineReady) -> None:
        engine = self.engines[event.key]
        if event.generation != engine.generation or engine.phase is not EnginePhase.STARTING:
            return
        engine.move(EnginePhase.READY)
        engine.facts = event.facts
        engine.ready_at = event.now
        engine.last_error = ""
        engine.prefill_tokens_per_s = engine.prefill_tokens_per_s or event.prefill_tokens_per_s
        engine.decode_tokens_per_s = engine.decode_tokens_per_s or event.decode_tokens_per_s
        engine.told_speeds = (engine.prefill_tokens_per_s, engine.decode_tokens_per_s)
        self._tell_inventory()
        self._out.append(SendTelemetry())

    def _engine_failed(self, event: EngineFailed) -> None:
        engine = self.engines[event.key]
        if event.generation == engine.generation and engine.phase in (EnginePhase.STARTING, EnginePhase.READY):
            self._engine_down(engine, event.message, event.now)

    def _engine_down(self, engine: EngineState, message: str, now: float) -> None:
        """The engine is dead or useless: end its process, fail what it ran, withdraw the offer, try again later."""
        if engine.phase not in (EnginePhase.STARTING, EnginePhase.READY):
            return
        if engine.phase is EnginePhase.READY and now - engine.ready_at >= RESTART_FORGIVEN_AFTER_S:
            engine.failures = 0
        engine.move(EnginePhase.RESTING)
        engine.retry_at = now + min(RESTART_FIRST_S * 2**engine.failures, RESTART_MAX_S)
        engine.failures = min(engine.failures + 1, 16)
        engine.last_error = message[:MAX_MESSAGE_CHARS]
        self.counters.engine_restarts += 1
        if engine.served.load is LoadMode.PLAN and engine.failures >= plans.TRIES:
            engine.wanted = False  # it was advice, and does not work here
        self._let_go(engine, now, "engine_died", message)

    def _engine_off(self, engine: EngineState, cause: StopCause, now: float, *, at_once: bool) -> None:
        if engine.phase is not EnginePhase.OFF:
            engine.move(EnginePhase.OFF)
            self._let_go(engine, now, cause.value, STOP_MESSAGES[cause], at_once=at_once)

    def _let_go(self, engine: EngineState, now: float, code: str, message: str, *, at_once: bool = False) -> None:
        """The engine's process ends: so does all its work."""
        engine.facts = None
        engine.doubtful = engine.verifying = False
        self._out.append(StopEngine(engine.served.key, at_once))
        for attempt in self._in_phase(engine, *AttemptPhase):
            attempt.stopped_at = attempt.stopped_at or now
            if attempt.phase is not AttemptPhase.VERIFYING:
                self._out.append(StopWork(attempt.run.attempt))
            if attempt.phase is AttemptPhase.RUNNING:
                self._fail(attempt, code, message, now)
            else:
                self._conclude(attempt, now)
        self._tell_inventory()
        self._out.append(SendTelemetry())

    def _measure(self, attempt: AttemptState, usage: Usage) -> None:
        """Keep running averages of what this engine really does, for the matcher's predictions."""
        engine = self.engines[attempt.key]
        if attempt.began_at is None or attempt.first_piece_at is None or attempt.last_piece_at is None:
            return
        if attempt.run.choices > 1:
            return  # the prompts between its answers would read as slow decoding
        if attempt.run.inputs:
            self._measure_embedding(engine, attempt, attempt.last_piece_at - attempt.began_at)
            return
        uncached = (usage.prompt_tokens or 0) - (usage.cached_tokens or 0)
        prefill_s = attempt.first_piece_at - attempt.began_at
        if uncached >= MEASURED_TOKENS and prefill_s > 0:
            engine.prefill_tokens_per_s = _blend(engine.prefill_tokens_per_s, uncached / prefill_s)
        decoded = (usage.completion_tokens or attempt.sequence) - 1
        decode_s = attempt.last_piece_at - attempt.first_piece_at
        if decoded >= 8 and decode_s > 0:
            engine.decode_tokens_per_s = _blend(engine.decode_tokens_per_s, decoded / decode_s)

    @staticmethod
    def _measure_embedding(engine: EngineState, attempt: AttemptState, took_s: float) -> None:
        """Embeddings are all prefill: the whole of the request's time is the speed at which it reads."""
        if attempt.run.prompt_tokens >= MEASURED_TOKENS and took_s > 0:
            engine.prefill_tokens_per_s = _blend(engine.prefill_tokens_per_s, attempt.run.prompt_tokens / took_s)

    # --- owner, end, time -------------------------------------------------------------------------------------------

    def _owner_changed(self, event: OwnerChanged) -> None:
        if event.available:
            self.holds.pop(event.scope, None)
        else:
            self._hold(event)
        if self.draining:
            return
        self._out.append(SendTelemetry())
        if event.scope:
            self._tell_inventory()
        self._start_wanted_engines(event.now)
        self._yield_if_due(event.now)

    def _hold(self, event: OwnerChanged) -> None:
        cause = StopCause.DEVICE_LOST if event.fault else StopCause.OWNER_PREEMPTED
        until = float("inf") if event.keep_loaded else event.now + event.grace_s
        known = self.holds.get(event.scope)
        if known is not None and not event.keep_loaded:
            until = min(until, known.until)
        self.holds[event.scope] = Hold(event.reason, until, event.grace_s <= 0, cause)

    def _terms_changed(self, event: TermsChanged) -> None:
        """New asks count for what is offered from now on; what runs keeps the price that was pinned to it."""
        for key, (full, cached, output) in event.asks.items():
            engine = self.engines.get(key)
            if engine is not None:
                engine.served = replace(
                    engine.served,
                    input_nano_usd_per_mtok=full,
                    cached_input_nano_usd_per_mtok=cached,
                    output_nano_usd_per_mtok=output,
                )
        self._watts = (event.idle_watts, event.load_watts)
        self._data = event.data
        if not event.accepts_plans:
            for engine in self.engines.values():
                engine.wanted, engine.why = engine.served.load is not LoadMode.PLAN, ""
        self._tell_inventory()

    def _plan_came(self, event: PlanCame) -> None:
        frame = event.frame
        engine = self.engines.get(engine_key(frame.variant_sha256, frame.device_id))
        refused = plans.refusal(frame, engine, event.room, self._standing_of(engine), event.now)
        self._out.append(Send(PlanAnswer(frame.step, refused is None, *(refused or ("", "")))))
        if refused is not None or engine is None:
            self.counters.plans_refused += 1
            return
        self.counters.plans_followed += 1
        engine.why = frame.reason[:MAX_MESSAGE_CHARS]
        if isinstance(frame, Load):
            if not engine.wanted:
                engine.wanted, engine.failures, engine.retry_at = True, 0, event.now
            self._start_wanted_engines(event.now)
        else:
            engine.wanted = False
            self._drop_unwanted(event.now)

    def _standing_of(self, engine: EngineState | None) -> plans.Standing:
        hold = self.held(engine) if engine is not None else None
        return plans.Standing(
            held=self.unavailable_reason or (hold.reason if hold is not None else ""),
            busy=0 if engine is None else self.busy(engine.served.key),
            loading=sum(1 for other in self.engines.values() if other.phase is EnginePhase.STARTING),
        )

    def _drop_unwanted(self, now: float) -> None:
        """Free the memory of engines that no plan wants any more, once nothing runs in them."""
        for engine in self.engines.values():
            if not engine.wanted and engine.phase is not EnginePhase.OFF and not self.busy(engine.served.key):
                self._engine_off(engine, StopCause.PLANNED, now, at_once=False)

    def _on_stopping(self, event: Stopping) -> None:
        grace_s = 0.0 if self.draining else event.grace_s
        self.draining = True
        self._end_at = event.now + grace_s
        self._out.append(SendTelemetry())
        self._yield_if_due(event.now)

    def _yield_if_due(self, now: float) -> None:
        """Free the memory of engines that are held once nothing runs in them, or once their grace is over."""
        for engine in self.engines.values():
            if engine.phase is EnginePhase.OFF:
                continue
            holds = [self.holds[scope] for scope in engine.served.scopes if scope in self.holds]
            holds = [hold for hold in holds if not hold.keep_loaded]
            if holds and (not self.busy(engine.served.key) or now >= min(hold.until for hold in holds)):
                due = min(holds, key=lambda hold: hold.until)
                self._engine_off(engine, due.cause, now, at_once=due.at_once)
            elif self._end_at is not None and (not self.attempts or now >= self._end_at):
                self._engine_off(engine, StopCause.AGENT_STOPPING, now, at_once=False)

    def _start_wanted_engines(self, now: float) -> None:
        if not self.available:
            return
        for engine in self.engines.values():
            if not engine.wanted or self.held(engine) is not None:
                continue
            resting = engine.phase is EnginePhase.RESTING and now >= engine.retry_at
            if engine.phase is EnginePhase.OFF or resting:
                self._start_engine(engine)

    def _on_tick(self, event: Tick) -> None:
        now = event.now
        for attempt_id, attempt in self.attempts.items():
            if now >= attempt.deadline_at:
                self._stop(attempt_id, StopCause.DEADLINE)
            elif now >= attempt.lease_until or (attempt.away_until is not None and now >= attempt.away_until):
                self._stop(attempt_id, StopCause.LEASE_EXPIRED)
        self._yield_if_due(now)
        self._drop_unwanted(now)
        self._start_wanted_engines(now)
        for report in self.reports.values():
            if now >= report.pieces_until:
                report.pieces = []
        if not self.connected:
            return
        for report in self.reports.values():
            if now >= report.resend_at:
                self._resend(report, now)
        self._tell_speeds(now)

    def _tell_speeds(self, now: float) -> None:
        if now < self._speeds_at or not any(_speeds_moved(engine) for engine in self.engines.values()):
            return
        self._speeds_at = now + SPEED_PAUSE_S
        for engine in self.engines.values():
            engine.told_speeds = (engine.prefill_tokens_per_s, engine.decode_tokens_per_s)
        self._tell_inventory()


def _offer(engine: EngineState) -> OfferReport:
    served, facts = engine.served, engine.facts
    assert facts is not None  # a ready engine has told its facts
    prefill, decode = engine.told_speeds
    return OfferReport(
        variant_sha256=served.variant,
        device_id=served.device_id,
        slots=facts.slots,
        context_per_slot=facts.context_per_slot,
        input_nano_usd_per_mtok=served.input_nano_usd_per_mtok,
        cached_input_nano_usd_per_mtok=served.cached_input_nano_usd_per_mtok,
        output_nano_usd_per_mtok=served.output_nano_usd_per_mtok,
        engine=facts.name,
        engine_version=facts.version,
        simulated=facts.simulated,
        warm=True,
        prefix_cache_s=facts.prefix_cache_s,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
    )


def _slots(engine: EngineState) -> int:
    return engine.facts.slots if engine.facts is not None else 0


def _context(engine: EngineState) -> int:
    return engine.facts.context_per_slot if engine.facts is not None else 0


def _usage_report(usage: Usage) -> UsageReport:
    return UsageReport(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def _lease_s(lease_ms: int) -> float:
    return min(max(lease_ms, 0) / 1000, MAX_LEASE_S)


def _ms(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(end - start, 0.0) * 1000


def _blend(average: float | None, measured: float) -> float:
    return measured if average is None else average + SPEED_WEIGHT * (measured - average)


def _speeds_moved(engine: EngineState) -> bool:
    pairs = zip(engine.told_speeds, (engine.prefill_tokens_per_s, engine.decode_tokens_per_s), strict=True)
    return any(now is not None and (told is None or abs(now - told) > SPEED_STEP * told) for told, now in pairs)
