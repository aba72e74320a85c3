"""The state machine's decisions that a random walk meets too seldom."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from agent import events, protocol, records, state
from agent.engines.port import Embedded, EngineFacts, Piece, Usage
from agent.protocol import Failed, Finished, Inventory, Refused, Tokens, Vectors
from agent.records import EnginePhase
from agent.state import AgentState
from tests.agent_doubles import VARIANT, run_frame, served

FACTS = EngineFacts("scripted", "1", 2, 1024, True, 0.0, 7)


def ready(now: float = 0.0) -> AgentState:
    agent = AgentState([served()], lambda payload: b"signed")
    agent.handle(events.OwnerChanged(True, "", 0.0, now))
    agent.handle(events.EngineReady(VARIANT, 1, FACTS, now))
    agent.handle(events.Connected(now))
    return agent


def frames(instructions: list[events.Instruction], kind: type[Any]) -> list[Any]:
    return [item.frame for item in instructions if isinstance(item, events.Send) and isinstance(item.frame, kind)]


def start(agent: AgentState, attempt: bytes = b"a", now: float = 0.0, **changes: Any) -> None:
    out = agent.handle(events.GatewaySaid(run_frame(attempt, **changes), now))
    assert any(isinstance(item, events.StartWork) for item in out)
    agent.handle(events.WorkBegan(attempt, now))


class TestTimes:
    def test_are_measured_from_arrival_and_from_the_engines_start(self) -> None:
        agent = ready()
        agent.handle(events.GatewaySaid(run_frame(b"a"), 10.0))
        agent.handle(events.WorkBegan(b"a", 10.25))
        agent.handle(events.PieceCame(b"a", Piece("x"), 11.0))
        report = frames(agent.handle(events.WorkEnded(b"a", "stop", Usage(8, 0, 1, 0), 12.25)), Finished)[0]
        assert (report.queued_ms, report.ttft_ms, report.busy_ms) == (250.0, 1000.0, 2000.0)

    def test_of_an_answer_without_tokens_have_no_first_token(self) -> None:
        agent = ready()
        start(agent)
        report = frames(agent.handle(events.WorkEnded(b"a", "stop", Usage(8, 0, 0, 0), 1.0)), Finished)[0]
        assert report.ttft_ms is None
        assert report.usage.completion_tokens == 0


class TestPieces:
    def test_that_are_long_travel_as_several_frames(self) -> None:
        agent = ready()
        start(agent)
        text = "ab" * state.MAX_TEXT_CHARS
        sent = frames(agent.handle(events.PieceCame(b"a", Piece(text, (1, 2)), 1.0)), Tokens)
        assert "".join(frame.text for frame in sent) == text
        assert [frame.sequence for frame in sent] == [0, 1]
        assert [frame.token_ids for frame in sent] == [[1, 2], []]

    def test_with_lone_surrogates_can_be_sent(self) -> None:
        agent = ready()
        start(agent)
        sent = frames(agent.handle(events.PieceCame(b"a", Piece("ok \ud83d"), 1.0)), Tokens)
        assert protocol.decode_from_agent(protocol.encode(sent)) == sent

    def test_that_are_oversized_end_the_attempt(self) -> None:
        agent = ready()
        start(agent)
        out = agent.handle(events.PieceCame(b"a", Piece("", extra=b"x" * (state.MAX_EXTRA_BYTES + 1)), 1.0))
        assert frames(out, Failed)[0].code == "engine_error"
        assert events.StopWork(b"a") in out

    def test_that_are_empty_are_not_sent(self) -> None:
        agent = ready()
        start(agent)
        assert agent.handle(events.PieceCame(b"a", Piece(""), 1.0)) == []


class TestADeadline:
    def test_stops_the_attempt_as_a_cancel_does(self) -> None:
        agent = ready()
        start(agent, deadline_ms=5_000, lease_ms=60_000)
        assert agent.handle(events.Tick(4.9)) == []
        assert agent.handle(events.Tick(5.0)) == [events.StopWork(b"a")]
        agent.handle(events.WorkStopped(b"a", 5.1))
        report = frames(agent.handle(events.IdleVerified(VARIANT, 1, True, 5.2)), Finished)[0]
        assert report.finish_reason == "cancelled"


class TestReports:
    def test_are_repeated_with_growing_pauses_until_acknowledged(self) -> None:
        agent = ready()
        start(agent)
        agent.handle(events.WorkEnded(b"a", "stop", Usage(), 0.0))
        sent_at = [now for now in range(1, 200) if frames(agent.handle(events.Tick(float(now))), Finished)]
        assert sent_at[:4] == [5, 10, 20, 40]
        assert max(later - earlier for earlier, later in itertools.pairwise(sent_at)) <= 60
        agent.handle(events.GatewaySaid(protocol.ReportAck(b"a", 1), 200.0))
        assert agent.at_rest

    def test_are_bounded_and_the_oldest_goes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(state, "MAX_REPORTS", 3)
        agent = ready()
        for number in range(5):
            attempt = bytes([number])
            start(agent, attempt)
            agent.handle(events.WorkEnded(attempt, "stop", Usage(), 0.0))
        assert list(agent.reports) == [b"\x02", b"\x03", b"\x04"]
        assert agent.counters.reports_dropped == 2


class TestAnEngineThatKeepsDying:
    def test_is_started_with_growing_pauses(self) -> None:
        agent = ready()
        now, starts = 1.0, []
        agent.handle(events.EngineFailed(VARIANT, 1, "killed", now))
        while len(starts) < 8:
            now += 0.5
            for item in agent.handle(events.Tick(now)):
                if isinstance(item, events.StartEngine):
                    starts.append(now)
                    agent.handle(events.EngineFailed(VARIANT, item.generation, "killed", now))
        pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
        assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]

    def test_is_forgiven_after_it_served_for_long(self) -> None:
        agent = ready()
        engine = agent.engines[VARIANT]
        engine.failures = 5
        agent.handle(events.EngineFailed(VARIANT, 1, "killed", 1_000.0))
        assert engine.retry_at == 1_001.0

    def test_withdraws_the_offer_until_it_serves_again(self) -> None:
        agent = ready()
        told = frames(agent.handle(events.EngineFailed(VARIANT, 1, "killed", 1.0)), Inventory)
        assert told[-1].offers == []
        agent.handle(events.Tick(2.0))
        told = frames(agent.handle(events.EngineReady(VARIANT, 2, FACTS, 3.0)), Inventory)
        assert len(told[-1].offers) == 1


class TestAProof:
    def test_is_put_off_while_other_work_keeps_the_engine_busy(self) -> None:
        agent = ready()
        start(agent, b"a")
        start(agent, b"b")
        agent.handle(events.GatewaySaid(protocol.Cancel(b"a", 1, "left"), 1.0))
        out = agent.handle(events.WorkStopped(b"a", 1.1))
        assert frames(out, Finished)[0].attempt == b"a"
        assert not any(isinstance(item, events.VerifyIdle) for item in out)
        out = agent.handle(events.WorkEnded(b"b", "stop", Usage(), 2.0))
        assert events.VerifyIdle(VARIANT, 1) in out

    def test_that_fails_while_new_work_runs_blames_nobody(self) -> None:
        agent = ready()
        start(agent, b"a")
        agent.handle(events.GatewaySaid(protocol.Cancel(b"a", 1, "left"), 1.0))
        assert events.VerifyIdle(VARIANT, 1) in agent.handle(events.WorkStopped(b"a", 1.1))
        start(agent, b"b", 1.2)
        out = agent.handle(events.IdleVerified(VARIANT, 1, False, 11.0))
        assert frames(out, Finished)[0].attempt == b"a"
        assert agent.engines[VARIANT].phase is EnginePhase.READY
        assert events.VerifyIdle(VARIANT, 1) in agent.handle(events.WorkEnded(b"b", "stop", Usage(), 12.0))


class TestSpeeds:
    def test_are_measured_and_told_when_they_moved(self) -> None:
        agent = ready()
        start(agent, b"a", 0.0)
        for number in range(11):
            agent.handle(events.PieceCame(b"a", Piece("x"), 1.0 + number / 10))
        agent.handle(events.WorkEnded(b"a", "stop", Usage(100, 0, 11, 0), 2.1))
        offer = frames(agent.handle(events.Tick(3.0)), Inventory)[0].offers[0]
        assert offer.prefill_tokens_per_s == pytest.approx(100.0)
        assert offer.decode_tokens_per_s == pytest.approx(10.0)
        assert frames(agent.handle(events.Tick(30.0)), Inventory) == []


class TestDefects:
    def test_show_as_impossible_transitions(self) -> None:
        agent = ready()
        with pytest.raises(records.ImpossibleTransition, match="ready -> starting"):
            agent.engines[VARIANT].move(EnginePhase.STARTING)

    def test_of_the_configuration_are_refused(self) -> None:
        with pytest.raises(ValueError, match="same weights"):
            AgentState([served(), served()], lambda payload: b"")


class TestReplicas:
    def test_of_one_variant_take_work_in_turn(self) -> None:
        agent = two_cards()
        said = [agent.handle(events.GatewaySaid(run_frame(name), 2.0)) for name in (b"a", b"b", b"c", b"d", b"e")]
        keys = [next((i.key for i in out if isinstance(i, events.StartWork)), "") for out in said]
        assert sorted(keys[:4]) == [f"{VARIANT}@GPU-0"] * 2 + [f"{VARIANT}@GPU-1"] * 2
        assert refusals(said[4]) == ["slot_taken"]

    def test_named_by_the_gateway_are_obeyed(self) -> None:
        agent = two_cards()
        for name in (b"a", b"b"):
            (start,) = [
                i
                for i in agent.handle(events.GatewaySaid(run_frame(name, device_id="GPU-1"), 2.0))
                if isinstance(i, events.StartWork)
            ]
            assert start.key == f"{VARIANT}@GPU-1"
        assert refusals(agent.handle(events.GatewaySaid(run_frame(b"c", device_id="GPU-1"), 2.0))) == ["slot_taken"]
        assert refusals(agent.handle(events.GatewaySaid(run_frame(b"d", device_id="GPU-9"), 2.0))) == ["not_serving"]


class TestAHoldOnOneDevice:
    def test_evicts_its_engine_alone_and_at_once(self) -> None:
        agent = two_cards()
        agent.handle(events.GatewaySaid(run_frame(b"a", device_id="GPU-0"), 2.0))
        agent.handle(events.GatewaySaid(run_frame(b"b", device_id="GPU-1"), 2.0))
        out = agent.handle(events.OwnerChanged(False, "a game runs", 0.0, 3.0, scope="GPU-0"))
        assert events.StopEngine(f"{VARIANT}@GPU-0", at_once=True) in out
        assert [i.frame.code for i in out if isinstance(i, events.Send) and isinstance(i.frame, Failed)] == [
            "owner_preempted"
        ]
        assert list(agent.attempts) == [b"b"]
        assert [offer.device_id for offer in agent.inventory().offers] == ["GPU-1"]
        assert agent.available
        out = agent.handle(events.OwnerChanged(True, "", 0.0, 9.0, scope="GPU-0"))
        assert events.StartEngine(f"{VARIANT}@GPU-0", 2) in out

    def test_that_drains_lets_running_work_end(self) -> None:
        agent = two_cards()
        agent.handle(events.GatewaySaid(run_frame(b"a", device_id="GPU-0"), 2.0))
        out = agent.handle(events.OwnerChanged(False, "hot", 30.0, 3.0, scope="GPU-0"))
        assert not any(isinstance(i, events.StopEngine) for i in out)
        out = agent.handle(events.WorkEnded(b"a", "stop", Usage(), 5.0))
        assert events.StopEngine(f"{VARIANT}@GPU-0", at_once=False) in out

    def test_that_pauses_keeps_the_engine_loaded(self) -> None:
        agent = two_cards()
        out = agent.handle(events.OwnerChanged(False, "dear power", 0.0, 3.0, scope="GPU-0", keep_loaded=True))
        assert not any(isinstance(i, events.StopEngine) for i in out)
        assert [offer.device_id for offer in agent.inventory().offers] == ["GPU-1"]
        refused = agent.handle(events.GatewaySaid(run_frame(b"a", device_id="GPU-0"), 4.0))
        assert refusals(refused) == ["owner_active"]
        out = agent.handle(events.OwnerChanged(True, "", 0.0, 5.0, scope="GPU-0"))
        assert not any(isinstance(i, events.StartEngine) for i in out), "it is loaded"

    def test_for_a_lost_card_is_the_nodes_failure(self) -> None:
        agent = two_cards()
        agent.handle(events.GatewaySaid(run_frame(b"a", device_id="GPU-0"), 2.0))
        out = agent.handle(events.OwnerChanged(False, "lost", 0.0, 3.0, scope="GPU-0", fault=True))
        assert [i.frame.code for i in out if isinstance(i, events.Send) and isinstance(i.frame, Failed)] == [
            "engine_died"
        ]

    def test_on_a_variant_concerns_all_its_replicas(self) -> None:
        agent = two_cards()
        agent.handle(events.OwnerChanged(False, "under the floor", 0.0, 3.0, scope=VARIANT, keep_loaded=True))
        assert agent.inventory().offers == []
        assert agent.available


def two_cards() -> AgentState:
    agent = AgentState([served(device_id=f"GPU-{number}") for number in range(2)], lambda payload: b"signed")
    agent.handle(events.Connected(0.0))
    for key in agent.handle(events.OwnerChanged(True, "", 0.0, 0.0)):
        if isinstance(key, events.StartEngine):
            agent.handle(events.EngineReady(key.key, key.generation, FACTS, 1.0))
    return agent


def refusals(out: list[events.Instruction]) -> list[str]:
    return [i.frame.code for i in out if isinstance(i, events.Send) and isinstance(i.frame, Refused)]


class TestABreak:
    def broken(self) -> AgentState:
        agent = ready()
        start(agent)
        for word in ("one", "two", "three"):
            agent.handle(events.PieceCame(b"a", Piece(word), 1.0))
        agent.handle(events.Disconnected(2.0))
        return agent

    def resume(self, agent: AgentState, sequence: int, now: float = 3.0) -> list[events.Instruction]:
        agent.handle(events.Connected(now))
        return agent.handle(events.GatewaySaid(protocol.Resume([protocol.ResumePoint(b"a", 1, sequence)]), now))

    def test_is_outlived_by_an_answer_that_goes_on_where_the_gateway_is(self) -> None:
        agent = self.broken()
        assert frames(agent.handle(events.PieceCame(b"a", Piece("four"), 2.5)), Tokens) == []
        again = frames(self.resume(agent, 1), Tokens)
        assert [(piece.sequence, piece.text) for piece in again] == [(1, "two"), (2, "three"), (3, "four")]
        live = frames(agent.handle(events.PieceCame(b"a", Piece("five"), 4.0)), Tokens)
        assert [piece.sequence for piece in live] == [4]
        assert frames(agent.handle(events.WorkEnded(b"a", "stop", Usage(), 5.0)), Finished)[0].sequence == 5

    def test_loses_nothing_of_an_answer_that_ended_meanwhile(self) -> None:
        agent = self.broken()
        assert frames(agent.handle(events.WorkEnded(b"a", "stop", Usage(), 2.5)), Finished) == []
        out = self.resume(agent, 2)
        assert [piece.sequence for piece in frames(out, Tokens)] == [2]
        assert frames(out, Finished)[0].sequence == 3
        assert out.index(next(i for i in out if isinstance(i, events.Send) and isinstance(i.frame, Finished))) == 1

    def test_that_the_gateway_gave_up_ends_the_work(self) -> None:
        agent = self.broken()
        agent.handle(events.Connected(3.0))
        out = agent.handle(events.GatewaySaid(protocol.Void(b"a", 1), 3.0))
        assert events.StopWork(b"a") in out

    def test_that_lasts_ends_the_work(self) -> None:
        agent = self.broken()
        assert events.StopWork(b"a") not in agent.handle(events.Tick(4.9))
        assert events.StopWork(b"a") in agent.handle(events.Tick(2.0 + protocol.RESUME_S))

    def test_ends_an_answer_that_has_not_begun(self) -> None:
        agent = ready()
        start(agent)
        assert events.StopWork(b"a") in agent.handle(events.Disconnected(2.0))

    def test_resumes_no_other_epoch(self) -> None:
        agent = self.broken()
        agent.handle(events.Connected(3.0))
        point = protocol.ResumePoint(b"a", 2, 0)
        assert agent.handle(events.GatewaySaid(protocol.Resume([point]), 3.0)) == []

    def test_sends_an_unacknowledged_report_again_even_if_nobody_resumes_it(self) -> None:
        agent = ready()
        start(agent)
        agent.handle(events.PieceCame(b"a", Piece("one"), 1.0))
        agent.handle(events.WorkEnded(b"a", "stop", Usage(), 1.5))
        agent.handle(events.Disconnected(2.0))
        assert frames(agent.handle(events.Connected(3.0)), Finished) == []
        assert len(frames(agent.handle(events.Tick(3.0 + state.RESUME_ANSWER_S)), Finished)) == 1


class TestVectors:
    DIMENSIONS = 1_024

    def vectors(self, count: int, first: int = 0) -> Embedded:
        return Embedded(first, self.DIMENSIONS, bytes(count * self.DIMENSIONS * 4))

    def test_travel_in_frames_of_a_bounded_size(self) -> None:
        agent = ready()
        start(agent, inputs=100, longest_input_tokens=8)
        sent = frames(agent.handle(events.VectorsCame(b"a", self.vectors(100), 1.0)), Vectors)
        assert [frame.sequence for frame in sent] == [0, 1]
        assert [frame.first_index for frame in sent] == [0, 64]
        assert all(len(frame.data) <= protocol.MAX_VECTORS_BYTES for frame in sent)
        report = frames(agent.handle(events.WorkEnded(b"a", "stop", Usage(8, 0, 0, 0), 2.0)), Finished)[0]
        assert report.sequence == 2

    def test_are_said_again_after_a_break(self) -> None:
        agent = ready()
        start(agent, inputs=3, longest_input_tokens=8)
        agent.handle(events.VectorsCame(b"a", self.vectors(2), 1.0))
        agent.handle(events.Disconnected(1.1))
        agent.handle(events.VectorsCame(b"a", self.vectors(1, 2), 1.2))
        agent.handle(events.Connected(1.3))
        point = protocol.ResumePoint(b"a", 1, 1)
        sent = frames(agent.handle(events.GatewaySaid(protocol.Resume([point]), 1.4)), Vectors)
        assert [(frame.sequence, frame.first_index) for frame in sent] == [(1, 2)]

    def test_after_a_cancel_are_dropped(self) -> None:
        agent = ready()
        start(agent, inputs=3, longest_input_tokens=8)
        agent.handle(events.GatewaySaid(protocol.Cancel(b"a", 1, "client_gone"), 1.0))
        assert agent.handle(events.VectorsCame(b"a", self.vectors(1), 1.1)) == []

    def test_need_a_slot_for_the_longest_input_and_not_for_all_together(self) -> None:
        agent = ready()
        start(agent, prompt_tokens=50_000, max_output_tokens=0, inputs=100, longest_input_tokens=1_000)
        out = agent.handle(
            events.GatewaySaid(run_frame(b"b", max_output_tokens=0, inputs=1, longest_input_tokens=1_025), 0.0)
        )
        assert [frame.code for frame in frames(out, Refused)] == ["context_overflow"]

    def test_tell_how_fast_the_engine_reads(self) -> None:
        agent = ready()
        start(agent, prompt_tokens=1_000, max_output_tokens=0, inputs=2, longest_input_tokens=600)
        agent.handle(events.VectorsCame(b"a", self.vectors(1), 1.0))
        agent.handle(events.VectorsCame(b"a", self.vectors(1, 1), 4.0))
        agent.handle(events.WorkEnded(b"a", "stop", Usage(1_000, 0, 0, 0), 4.0))
        (engine,) = agent.engines.values()
        assert (engine.prefill_tokens_per_s, engine.decode_tokens_per_s) == (250.0, None)
