"""The agent's state machine under random events: what must always hold, checked after every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent import events, protocol, records
from agent.engines.port import EngineFacts, Piece, Usage
from agent.protocol import Accepted, Failed, Finished, Inventory, Refused, Run, RunningAttempt, Tokens
from agent.records import EnginePhase, Served
from agent.state import AgentState

VARIANTS = ("a" * 64, "b" * 64)
SLOTS = {"a" * 64: 1, "b" * 64: 3}
CONTEXT = 512
RARELY = st.integers(0, 11).map(lambda number: number == 11)


def _served(variant: str) -> Served:
    return Served(variant, "cpu", SLOTS[variant], CONTEXT, 3, 2, 5)


class AgentMachine(RuleBasedStateMachine):
    """Plays gateway, engines, owner and clock, and keeps the shell's promises."""

    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.agent = AgentState([_served(variant) for variant in VARIANTS], lambda payload: b"s" * 64)
        self.working: dict[bytes, str] = {}
        """Attempts whose work the shell has started and not ended: attempt -> variant."""
        self.stopping: set[bytes] = set()
        self.starting: dict[str, int] = {}
        self.verifying: dict[str, int] = {}
        self.connected = False
        self.draining = False
        self.sent: dict[bytes, list[Any]] = {}
        self.answered: Counter[bytes] = Counter()
        self.voided: set[bytes] = set()
        self.told: Inventory | None = None
        self.next_attempt = 0

    @initialize()
    def begin(self) -> None:
        self.feed(events.OwnerChanged(True, "", 0.0, self.now))
        for variant in VARIANTS:
            self.bring_up(variant)
        self.connect()

    def bring_up(self, variant: str) -> None:
        facts = EngineFacts("scripted", "1", SLOTS[variant], CONTEXT, True, 0.0, None)
        self.feed(events.EngineReady(variant, self.starting.pop(variant), facts, self.now))

    # --- the shell ------------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        for instruction in self.agent.handle(event):
            self.carry_out(instruction)

    def carry_out(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.Send(frame):
                self.take(frame)
            case events.StartWork(attempt=attempt, key=variant):
                engine = self.agent.engines[variant]
                assert engine.phase is EnginePhase.READY, "work for an engine that does not serve"
                assert self.agent.available, "work while the owner has the machine"
                assert attempt not in self.working, "started twice"
                self.working[attempt] = variant
            case events.StopWork(attempt):
                if attempt in self.working:
                    self.stopping.add(attempt)
            case events.StartEngine(variant, generation):
                assert self.agent.available
                self.starting[variant] = generation
            case events.StopEngine(variant):
                self.starting.pop(variant, None)
                self.verifying.pop(variant, None)
            case events.VerifyIdle(variant, generation):
                self.verifying[variant] = generation

    def take(self, frame: Any) -> None:
        if isinstance(frame, Inventory):
            self.told = frame
            return
        history = self.sent.setdefault(frame.attempt, [])
        if isinstance(frame, Tokens):
            assert not any(isinstance(old, Finished | Failed) for old in history), "tokens after the report"
            expected = sum(isinstance(old, Tokens) for old in history)
            assert frame.sequence == expected, "a gap in the sequence"
        if isinstance(frame, Finished | Failed):
            reports = [old for old in history if isinstance(old, Finished | Failed)]
            assert all(old == frame for old in reports), "two different reports of one attempt"
            assert frame.sequence == sum(isinstance(old, Tokens) for old in history)
            if isinstance(frame, Failed):
                assert frame.code in protocol.FAILURES
            self.answered[frame.attempt] = 1
        if isinstance(frame, Refused):
            assert frame.code in protocol.REFUSALS
            assert not any(isinstance(old, Accepted) for old in history)
        if isinstance(frame, Accepted):
            assert not any(isinstance(old, Accepted) for old in history), "accepted twice"
        history.append(frame)

    def end_work(self, attempt: bytes) -> None:
        del self.working[attempt]
        self.stopping.discard(attempt)

    # --- the gateway ----------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected, self.told = True, None
        self.feed(events.Connected(self.now))

    @precondition(lambda self: self.connected)
    @rule(really=RARELY)
    def disconnect(self, really: bool) -> None:
        if not really:
            return
        self.connected = False
        self.feed(events.Disconnected(self.now))

    @precondition(lambda self: self.connected)
    @rule(
        target=attempts,
        variant=st.sampled_from((*VARIANTS, *VARIANTS, *VARIANTS, "c" * 64)),
        tokens=st.sampled_from((1, CONTEXT, CONTEXT, CONTEXT + 1)),
        lease_ms=st.sampled_from((0, 2_000, 20_000)),
        deadline_ms=st.sampled_from((0, 10_000, 60_000, 60_000)),
    )
    def run_new(self, variant: str, tokens: int, lease_ms: int, deadline_ms: int) -> bytes:
        self.next_attempt += 1
        attempt = self.next_attempt.to_bytes(16, "big")
        self.feed(events.GatewaySaid(Run(attempt, 1, variant, b"{}", 0, tokens, lease_ms, deadline_ms), self.now))
        assert attempt in self.sent, "a Run without an answer"
        return attempt

    @precondition(lambda self: self.connected)
    @rule(attempt=attempts, epoch=st.integers(1, 2))
    def run_again(self, attempt: bytes, epoch: int) -> None:
        if not any(isinstance(frame, Accepted) for frame in self.sent[attempt]):
            return
        before = dict(self.working)
        self.feed(events.GatewaySaid(Run(attempt, epoch, VARIANTS[0], b"{}", 0, 1, 9_000, 9_000), self.now))
        assert self.working == before, "work began twice"

    @precondition(lambda self: self.connected)
    @rule(attempt=attempts, epoch=st.integers(1, 2))
    def cancel(self, attempt: bytes, epoch: int) -> None:
        self.feed(events.GatewaySaid(protocol.Cancel(attempt, epoch, "left"), self.now))

    @precondition(lambda self: self.connected)
    @rule(attempt=attempts)
    def void(self, attempt: bytes) -> None:
        self.voided.add(attempt)
        self.feed(events.GatewaySaid(protocol.Void(attempt, 1), self.now))
        assert attempt not in self.agent.reports

    @precondition(lambda self: self.connected)
    @rule(attempt=attempts, epoch=st.integers(1, 2))
    def acknowledge(self, attempt: bytes, epoch: int) -> None:
        kept = attempt in self.agent.reports
        self.feed(events.GatewaySaid(protocol.ReportAck(attempt, epoch), self.now))
        assert (attempt in self.agent.reports) == (kept and epoch != 1)

    @precondition(lambda self: self.connected)
    @rule(attempt=attempts, lease_ms=st.integers(0, 20_000))
    def renew(self, attempt: bytes, lease_ms: int) -> None:
        self.feed(events.GatewaySaid(protocol.Renew([RunningAttempt(attempt, 1)], lease_ms), self.now))

    # --- the engines ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.working)
    @rule(data=st.data(), text=st.text(max_size=5))
    def piece(self, data: st.DataObject, text: str) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.working)))
        self.feed(events.PieceCame(attempt, Piece(text, (1,) * len(text)), self.now))

    @precondition(lambda self: self.working)
    @rule(data=st.data(), reason=st.sampled_from(("stop", "length", "")))
    def end(self, data: st.DataObject, reason: str) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.working)))
        self.end_work(attempt)
        self.feed(events.WorkEnded(attempt, reason, Usage(), self.now))

    @precondition(lambda self: self.working)
    @rule(data=st.data(), code=st.sampled_from(("engine_error", "engine_died", "engine_timeout", "engine_rejected")))
    def break_(self, data: st.DataObject, code: str) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.working)))
        self.end_work(attempt)
        self.feed(events.WorkBroke(attempt, code, "broken", self.now))

    @precondition(lambda self: self.stopping)
    @rule(data=st.data())
    def stopped(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.stopping)))
        self.end_work(attempt)
        self.feed(events.WorkStopped(attempt, self.now))

    @precondition(lambda self: self.starting)
    @rule(data=st.data(), fails=RARELY)
    def started(self, data: st.DataObject, fails: bool) -> None:
        variant = data.draw(st.sampled_from(sorted(self.starting)))
        if fails:
            self.feed(events.EngineFailed(variant, self.starting.pop(variant), "no memory", self.now))
        else:
            self.bring_up(variant)

    @rule(variant=st.sampled_from(VARIANTS), stale=st.booleans(), really=RARELY)
    def died(self, variant: str, stale: bool, really: bool) -> None:
        engine = self.agent.engines[variant]
        if engine.phase is not EnginePhase.READY or not really:
            return
        self.feed(events.EngineFailed(variant, engine.generation - stale, "killed", self.now))
        assert (engine.phase is EnginePhase.READY) == stale

    @precondition(lambda self: self.verifying)
    @rule(data=st.data(), idle=st.booleans())
    def verified(self, data: st.DataObject, idle: bool) -> None:
        variant = data.draw(st.sampled_from(sorted(self.verifying)))
        self.feed(events.IdleVerified(variant, self.verifying.pop(variant), idle, self.now))

    # --- owner and clock ------------------------------------------------------------------------------------------

    @rule(taken=RARELY, grace_s=st.sampled_from((0.0, 5.0)))
    def owner(self, taken: bool, grace_s: float) -> None:
        self.feed(events.OwnerChanged(not taken, "busy", grace_s, self.now))

    @precondition(lambda self: not self.draining)
    @rule(grace_s=st.sampled_from((0.0, 5.0)))
    def drain(self, grace_s: float) -> None:
        # Rare, or most runs would end here.
        if self.now < 120:
            return
        self.draining = True
        self.feed(events.Stopping(grace_s, self.now))

    @rule(seconds=st.sampled_from((0.1, 0.1, 1.0, 1.0, 6.0, 30.0)))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.feed(events.Tick(self.now))

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def no_more_attempts_than_slots(self) -> None:
        for variant in VARIANTS:
            assert self.agent.busy(variant) <= SLOTS[variant]

    @invariant()
    def every_accepted_attempt_runs_or_is_reported_or_void(self) -> None:
        for attempt, history in self.sent.items():
            if any(isinstance(frame, Accepted) for frame in history):
                assert attempt in self.agent.attempts or self.answered[attempt] or attempt in self.voided

    @invariant()
    def every_attempt_has_work_or_waits_for_its_proof(self) -> None:
        for attempt, known in self.agent.attempts.items():
            if known.phase is records.AttemptPhase.VERIFYING:
                variant = known.run.variant_sha256
                others = self.agent._in_phase(
                    self.agent.engines[variant], records.AttemptPhase.RUNNING, records.AttemptPhase.STOPPING
                )
                assert variant in self.verifying or others, "a slot that nothing will free"
            else:
                assert attempt in self.working
                assert (attempt in self.stopping) == (known.phase is records.AttemptPhase.STOPPING)

    @invariant()
    def the_gateway_knows_what_is_served(self) -> None:
        if self.connected:
            assert self.told == self.agent.inventory()

    @invariant()
    def nothing_runs_on_an_engine_that_does_not_serve(self) -> None:
        for known in self.agent.attempts.values():
            assert self.agent.engines[known.run.variant_sha256].phase is EnginePhase.READY

    @invariant()
    def an_engine_is_wanted_exactly_while_the_owner_allows(self) -> None:
        if self.agent.available:
            assert all(engine.phase is not EnginePhase.OFF for engine in self.agent.engines.values())
        elif not self.agent.attempts:
            assert all(engine.phase is EnginePhase.OFF for engine in self.agent.engines.values())

    def teardown(self) -> None:
        """Once faults stop, everything comes to rest in bounded time."""
        self.draining = True
        self.feed(events.Stopping(0.0, self.now))
        for attempt in sorted(self.working):
            self.end_work(attempt)
            self.feed(events.WorkStopped(attempt, self.now))
        assert self.agent.attempts == {}
        assert all(engine.phase is EnginePhase.OFF for engine in self.agent.engines.values())
        if not self.connected:
            self.connect()
        for attempt, report in list(self.agent.reports.items()):
            self.feed(events.GatewaySaid(protocol.ReportAck(attempt, report.frame.epoch), self.now))
        assert self.agent.at_rest


TestAgentMachine = AgentMachine.TestCase
TestAgentMachine.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
