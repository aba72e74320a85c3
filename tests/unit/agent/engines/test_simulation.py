"""The stand-in's batch: timing by the formulas, faults by the seed, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest

from agent.engines.port import Done, Piece, Progress, Usage
from agent.engines.simulation import (
    Fault,
    FaultKind,
    Refused,
    SimEvent,
    Simulation,
    SimulationConfig,
    prompt_pieces,
)
from agent.sizing.speed import DEVICES


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def run(simulation: Simulation, limit: int = 100_000) -> float:
    """Drive it until nothing is left to do; the simulated seconds that this took."""
    elapsed = 0.0
    for _ in range(limit):
        step = simulation.begin()
        if step is None:
            return elapsed
        elapsed += step.duration_s
        simulation.finish(step)
    raise AssertionError("it does not end")


def answer(simulation: Simulation, text: str = "hi", max_tokens: int = 5, scope: str = "") -> list[SimEvent]:
    events: list[SimEvent] = []
    simulation.submit(chat(text), max_tokens, scope, events.append)
    run(simulation)
    return events


class TestAnswers:
    def test_an_answer_is_progress_then_tokens_then_its_end(self) -> None:
        events = answer(Simulation(SimulationConfig()))
        assert isinstance(events[0], Progress)
        assert [type(event) for event in events[1:]] == [Piece] * 5 + [Done]
        assert events[-1] == Done("length", Usage(6, 0, 5))

    def test_the_same_seed_and_prompt_give_the_same_answer(self) -> None:
        assert answer(Simulation(SimulationConfig(seed=3))) == answer(Simulation(SimulationConfig(seed=3)))
        assert answer(Simulation(SimulationConfig(seed=3))) != answer(Simulation(SimulationConfig(seed=4)))

    def test_answers_can_end_by_themselves(self) -> None:
        events = answer(Simulation(SimulationConfig(mean_output_tokens=3)), max_tokens=10_000)
        done = events[-1]
        assert isinstance(done, Done)
        assert done.finish_reason == "stop"

    def test_the_context_ends_an_answer(self) -> None:
        done = answer(Simulation(SimulationConfig(context_per_slot=16)), max_tokens=100)[-1]
        assert done == Done("length", Usage(6, 0, 10))

    def test_a_prompt_over_the_context_is_refused_as_engines_refuse_it(self) -> None:
        with pytest.raises(Refused) as caught:
            answer(Simulation(SimulationConfig(context_per_slot=16)), text="word " * 20)
        assert (caught.value.status, caught.value.kind) == (400, "exceed_context_size_error")

    def test_an_estimate_counts_words_and_marks(self) -> None:
        assert len(prompt_pieces(chat("one two, three!"))) == 5 + 5
        assert len(prompt_pieces({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]})) > 5
        assert prompt_pieces({"messages": None}) == []


class TestTiming:
    def test_batching_makes_many_cheaper_than_their_sum(self) -> None:
        one, many = Simulation(SimulationConfig(slots=16)), Simulation(SimulationConfig(slots=16))
        answer(one, max_tokens=1)
        one.submit(chat("hi"), 100, "", lambda _: None)
        alone = run(one)
        for _ in range(16):
            many.submit(chat("hi"), 100, "", lambda _: None)
        assert run(many) < 3 * alone

    def test_more_requests_than_slots_wait(self) -> None:
        simulation = Simulation(SimulationConfig(slots=2))
        for _ in range(5):
            simulation.submit(chat("hi"), 10, "", lambda _: None)
        simulation.begin()
        assert (simulation.running, simulation.waiting) == (2, 3)
        run(simulation)
        assert (simulation.running, simulation.waiting) == (0, 0)

    def test_a_faster_card_is_faster(self) -> None:
        times = {}
        for device in ("L40S", "H200"):
            simulation = Simulation(SimulationConfig(device=device))
            simulation.submit(chat("hi"), 50, "", lambda _: None)
            times[device] = run(simulation)
        ratio = DEVICES["H200"].bandwidth_bytes_per_s / DEVICES["L40S"].bandwidth_bytes_per_s
        assert times["L40S"] / times["H200"] == pytest.approx(ratio, rel=0.2)

    def test_fixed_paces_are_kept(self) -> None:
        simulation = Simulation(SimulationConfig(decode_tokens_per_s=100, prefill_tokens_per_s=1000, speedup=2))
        simulation.submit(chat("hi"), 101, "", lambda _: None)
        assert run(simulation) == pytest.approx((6 / 1000 + 100 / 100) / 2)

    def test_a_cached_prefix_is_not_worked_on_again_and_only_within_its_scope(self) -> None:
        simulation = Simulation(SimulationConfig())
        text = "word " * 100

        def cached(scope: str) -> int | None:
            done = answer(simulation, text, 1, scope)[-1]
            assert isinstance(done, Done)
            return done.usage.cached_tokens

        assert [cached(scope) for scope in ("a", "a", "b", "", "")] == [0, 96, 0, 0, 0]


class TestFaults:
    @pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.ERROR_EVENT, FaultKind.DIE])
    def test_a_stream_breaks_after_as_many_tokens_as_ordered(self, kind: FaultKind) -> None:
        simulation = Simulation(SimulationConfig())
        simulation.arm(Fault(kind, after_tokens=3))
        events = answer(simulation)
        assert [type(event) for event in events] == [Progress, Piece, Piece, Piece, Fault]
        assert simulation.running == 0
        assert isinstance(answer(simulation)[-1], Done), "only the next request meets it"

    @pytest.mark.parametrize(("kind", "status"), [(FaultKind.REJECT, 400), (FaultKind.ERROR, 500)])
    def test_a_request_is_refused_with_its_status(self, kind: FaultKind, status: int) -> None:
        simulation = Simulation(SimulationConfig())
        simulation.arm(Fault(kind))
        with pytest.raises(Refused) as caught:
            answer(simulation)
        assert caught.value.status == status

    def test_a_stalled_sequence_keeps_its_slot_and_says_nothing(self) -> None:
        simulation = Simulation(SimulationConfig(slots=2))
        simulation.arm(Fault(FaultKind.STALL, after_tokens=2))
        events: list[SimEvent] = []
        stalled = simulation.submit(chat("hi"), 5, "", events.append)
        assert isinstance(answer(simulation)[-1], Done)
        assert [type(event) for event in events] == [Progress, Piece, Piece]
        assert simulation.running == 1
        simulation.cancel(stalled)
        assert simulation.running == 0

    def test_ends_can_lie_or_say_nothing(self) -> None:
        simulation = Simulation(SimulationConfig())
        for kind in (FaultKind.EMPTY, FaultKind.BLANK, FaultKind.NO_USAGE, FaultKind.OVERCLAIM):
            simulation.arm(Fault(kind))
        assert answer(simulation)[1:] == [Done("stop", Usage(6, 0, 0))]
        assert answer(simulation)[-1] == Done("", Usage(6, 0, 0))
        assert answer(simulation)[-1] == Done("length", Usage())
        assert answer(simulation)[-1] == Done("length", Usage(6, 0, 50))

    def test_a_cancel_frees_the_slot_unless_the_engine_is_told_to_ignore_it(self) -> None:
        simulation = Simulation(SimulationConfig())
        for kind, left in ((None, 0), (FaultKind.IGNORE_CANCEL, 1)):
            if kind is not None:
                simulation.arm(Fault(kind))
            sequence = simulation.submit(chat("hi"), 50, "", lambda _: None)
            simulation.begin()
            simulation.cancel(sequence)
            assert simulation.running == left

    def test_seeded_faults_come_at_their_rate_and_at_the_same_requests(self) -> None:
        def outcomes() -> list[str]:
            simulation = Simulation(SimulationConfig(seed=9, fault_rate=0.3))
            ends = []
            for _ in range(200):
                try:
                    ends.append(type(answer(simulation, max_tokens=20)[-1]).__name__)
                except Refused:
                    ends.append("Refused")
            return ends

        first = outcomes()
        assert first == outcomes()
        assert 30 < sum(end != "Done" for end in first) < 90


class TestConfig:
    @pytest.mark.parametrize(
        "options",
        [
            {"slots": 0},
            {"device": "abacus"},
            {"speedup": 0.0},
            {"fault_rate": 1.5},
            {"fault_kinds": ("flood",)},
            {"decode_tokens_per_s": -1.0},
            {"context_per_slot": 0},
        ],
    )
    def test_what_cannot_be_is_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            SimulationConfig(**options)
