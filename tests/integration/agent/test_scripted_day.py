"""A day of a machine with eight cards on the stand-in driver: what is offered after each event, and why not more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import events
from agent import home as folder
from agent.config import AgentConfig, OwnerTable
from agent.daemon import _sold
from agent.engines.port import EngineFacts, Piece
from agent.lookout import Lookout
from agent.protocol import Failed, Finished
from agent.records import EnginePhase
from agent.state import AgentState
from agent.telemetry.nvml import LOST_LOOK_S, REOPEN_MAX_S, NvmlSource
from agent.terms import CircuitTable
from tests.agent_doubles import VARIANT, run_frame, served
from tests.fakes import nvml

CARDS = 8
ENGINE_PID = os.getpid()
FACTS = EngineFacts("scripted", "1", 2, 1024, True, 0.0, ENGINE_PID)


class Machine:
    """The agent's whole mind over the real bindings: lookout, policy and state machine; time is ours."""

    def __init__(self, home: Path, path: Path) -> None:
        self.now = 10_000.0
        self.home = home
        self.script = nvml.Script(path, [nvml.card(number, power_mw=150_000) for number in range(CARDS)])
        self.script.write()
        self.config = AgentConfig(owner=OwnerTable(return_s=10.0), circuits=[CircuitTable(watts=2_000)])
        self.source = NvmlSource(root=home, clock=lambda: self.now)
        self.lookout = Lookout(home, self.config, [self.source], root=Path("/"), clock=lambda: self.now)
        self.agent = AgentState([served(device_id=card.uuid) for card in self.script.cards], lambda payload: b"signed")
        self.stopped: list[tuple[str, bool]] = []
        self.reports: list[Any] = []
        self.feed(events.Connected(self.now))

    def feed(self, event: events.Event) -> None:
        for instruction in self.agent.handle(event):
            match instruction:
                case events.StartEngine(key, generation):
                    self.feed(events.EngineReady(key, generation, FACTS, self.now))
                case events.StopEngine(key, at_once):
                    self.stopped.append((key, at_once))
                case events.Send(frame) if isinstance(frame, Finished | Failed):
                    self.reports.append(frame)

    def look(self, seconds: float = 1.0) -> None:
        """Time passes, a second at a time at first, and the agent looks."""
        self.now += seconds
        sold = [_sold(engine) for engine in self.agent.engines.values()]
        for change in self.lookout.look(sold, [ENGINE_PID]).changes:
            self.feed(change)
        self.feed(events.Tick(self.now))

    def happen(self, looks: int = 2) -> None:
        """The script changed: the agent looks."""
        self.script.write()
        for _ in range(looks):
            self.look()

    def rest(self, seconds: float) -> None:
        """Let quiet time pass."""
        for _ in range(3):
            self.look(seconds / 3)

    @property
    def offered(self) -> set[int]:
        """Numbers of the cards that are offered now."""
        if not self.agent.available:
            return set()
        return {self.number(offer.device_id) for offer in self.agent.inventory().offers}

    def number(self, uuid: str) -> int:
        return next(card.number for card in self.script.cards if card.uuid == uuid)

    def why(self, number: int) -> str:
        held = self.lookout.held.get(self.script.cards[number].uuid)
        return "" if held is None else f"{held.action}: {held.reason}"

    def work(self, number: int, attempt: bytes) -> None:
        """Have the card make an answer."""
        frame = run_frame(attempt, device_id=self.script.cards[number].uuid, deadline_ms=10**9, lease_ms=3_600_000)
        self.feed(events.GatewaySaid(frame, self.now))
        self.feed(events.PieceCame(attempt, Piece("x"), self.now))
        assert attempt in self.agent.attempts

    def outcome(self, attempt: bytes) -> str:
        return next((getattr(r, "code", "done") for r in self.reports if r.attempt == attempt), "runs")


ALL = set(range(CARDS))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if nvml.compiler() is None:
        pytest.skip("no C compiler: the stand-in libnvidia-ml.so.1 cannot be built")
    nvml.load()
    path = tmp_path / "nvml.txt"
    monkeypatch.setenv(nvml.SCRIPT_VARIABLE, str(path))
    made = Machine(tmp_path, path)
    yield made
    made.source.close()


class TestADay:
    def test_from_morning_to_night(self, machine: Machine) -> None:
        cards = machine.script.cards

        # Morning: everything works.
        machine.happen()
        assert machine.offered == ALL
        assert {engine.phase for engine in machine.agent.engines.values()} == {EnginePhase.READY}

        # A card falls off the bus under an answer: its job moves on as the node's failure, the others never notice.
        machine.work(0, b"on-0")
        machine.work(1, b"on-1")
        cards[0].lost = 15
        machine.happen(1)
        assert machine.offered == ALL - {0}
        assert machine.why(0).startswith("evict: the GPU fell off the bus")
        assert (machine.outcome(b"on-0"), machine.outcome(b"on-1")) == ("engine_died", "runs")
        machine.look()
        assert machine.offered == ALL - {0}, "no crash loop"

        # It is reset, and found again.
        cards[0].lost = 0
        machine.happen()
        assert machine.offered == ALL - {0}
        machine.rest(LOST_LOOK_S + 3)
        assert machine.offered == ALL

        # An Xid says that another one's memory failed; it still answers, and gets no work.
        machine.script.events.append((2, 48))
        machine.happen(1)
        assert machine.offered == ALL - {2}
        assert "Xid 48" in machine.why(2)

        # A program's own fault is nobody's.
        machine.script.events.append((3, 31))
        machine.happen(1)
        assert machine.offered == ALL - {2}

        # The owner splits a card: refused, without a guess at its parts.
        cards[3].figures["mig"] = 1
        machine.happen(1)
        assert machine.offered == ALL - {2, 3}
        assert "MIG" in machine.why(3)
        cards[3].figures["mig"] = 0
        machine.happen(1)
        assert machine.offered == ALL - {2}

        # Somebody computes on a card: its engine is killed at the second sample, within its second.
        machine.work(4, b"on-4")
        cards[4].compute = {1: 2 * nvml.GIB}
        machine.happen(1)
        assert machine.offered == ALL - {2}, "one sample may be a passer-by"
        machine.look(0.2)
        assert machine.offered == ALL - {2, 4}
        assert machine.outcome(b"on-4") == "owner_preempted"
        assert machine.stopped[-1] == (f"{VARIANT}@{cards[4].uuid}", True)
        cards[4].compute = {}
        machine.happen()
        assert machine.offered == ALL - {2, 4}, "quiet time first"
        machine.rest(12)
        assert machine.offered == ALL - {2}

        # Heat on one card.
        cards[5].figures["temperature"] = 99
        machine.happen()
        assert machine.offered == ALL - {2, 5}
        cards[5].figures["temperature"] = 60
        machine.happen()
        machine.rest(12)
        assert machine.offered == ALL - {2}

        # Figures come and go, limits change by themselves: work goes on.
        cards[6].errors = {"nvmlDeviceGetPowerUsage": 3, "nvmlDeviceGetUtilizationRates": 999}
        cards[6].figures["power_limit_mw"] = 300_000
        machine.happen()
        assert machine.offered == ALL - {2}
        report = next(report for report in machine.lookout.devices if report.device_id == cards[6].uuid)
        assert (report.power_mw, report.utilisation_pct, report.power_source) == (None, None, "unknown")
        assert report.power_limit_mw == 300_000
        cards[6].errors = {}

        # A driver of the bad series garbles the process lists: dropped and told, no eviction by nonsense.
        for card in cards:
            card.figures["wide_records"] = 1
            card.compute = {ENGINE_PID: 1, 70_000: 1, 70_001: 1}
        machine.happen(3)
        assert machine.offered == ALL - {2}
        assert "garbled" in machine.lookout.devices[0].reason
        for card in cards:
            del card.figures["wide_records"]
            card.compute = {}

        # The circuit is over its watts: cards rest from the last, one at a time.
        for card in cards:
            card.figures["power_mw"] = 300_000
        machine.happen(2)
        assert machine.offered == ALL - {2, 7}
        for card in cards:
            card.figures["power_mw"] = 150_000
        machine.happen()
        machine.rest(15)
        assert machine.offered == ALL - {2}

        # The owner plays: everything at once, and back afterwards.
        folder.ask(machine.home, "evict")
        machine.look()
        assert machine.offered == set()
        assert {engine.phase for engine in machine.agent.engines.values()} == {EnginePhase.OFF}
        assert machine.agent.unavailable_reason == "paused by the owner"
        folder.ask(machine.home, "")
        machine.look()
        assert machine.offered == ALL - {2}

        # The driver is upgraded underneath: what runs goes on, nothing new, tried slowly, and the owner is told.
        machine.work(1, b"late-1")
        machine.script.errors, machine.script.init = {"*": 18}, 18
        machine.happen()
        assert machine.offered == set()
        assert machine.outcome(b"late-1") == "runs"
        assert "reboot" in machine.lookout.problems[0]
        assert machine.agent.engines[f"{VARIANT}@{cards[1].uuid}"].phase is EnginePhase.READY

        # Reboot of the driver: other order, one card fewer. Nothing depends on the index.
        machine.script.errors, machine.script.init = {}, 0
        machine.script.order = [7, 6, 5, 4, 3, 1, 0]
        machine.script.write()
        machine.rest(REOPEN_MAX_S + 3)
        assert machine.offered == ALL - {2}
        assert "fell off the bus" in machine.why(2)

        # Every answer that was taken ended in exactly one report, or runs.
        assert {report.attempt for report in machine.reports} == {b"on-0", b"on-1", b"on-4"}
        assert machine.outcome(b"on-1") == "owner_preempted"
        assert machine.outcome(b"late-1") == "runs"

        # A container whose devices were taken: every call answers 999, and only a new process can help.
        machine.script.errors, machine.script.init = {"*": 999}, 999
        machine.happen(4)
        assert machine.offered == set()
        for _ in range(20):
            machine.look(REOPEN_MAX_S)
        assert machine.lookout.needs_restart
