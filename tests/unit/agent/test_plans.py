"""What an agent does with a plan's advice, and what it does not do for anybody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from agent import events, protocol
from agent.config import AgentConfig, PlansTable
from agent.engines.port import EngineFacts
from agent.planning import Planning
from agent.plans import Room
from agent.policy import Policy
from agent.protocol import DeviceReport, Evict, Inventory, Load, PlanAnswer
from agent.records import EnginePhase, LoadMode
from agent.sizing.fit import MIB
from agent.state import AgentState
from agent.terms import Terms
from tests.agent_doubles import VARIANT, run_frame, served

if TYPE_CHECKING:
    from agent.lookout import Lookout

OTHER = "b" * 64
FACTS = EngineFacts("scripted", "1", 2, 1024, True, 0.0, 7)
GIB = 1 << 30
ROOM = Room(accepts=True, free_bytes=8 * GIB)


def agent_of(**modes: str) -> AgentState:
    """Two models, `a` ready and connected; each loaded as it is said."""
    loads = {"a": "start", "b": "plan", **modes}
    agent = AgentState(
        [
            served(load=LoadMode(loads["a"]), needed_bytes=2 * GIB),
            served(OTHER, load=LoadMode(loads["b"]), needed_bytes=3 * GIB),
        ],
        lambda payload: b"signed",
    )
    agent.handle(events.OwnerChanged(True, "", 0.0, 0.0))
    agent.handle(events.EngineReady(VARIANT, 1, FACTS, 0.0))
    agent.handle(events.Connected(0.0))
    return agent


def load(variant: str = OTHER, **changes: Any) -> Load:
    return Load(**{"step": 7, "variant_sha256": variant, "device_id": "cpu", "reason": "asked for", **changes})


def evict(variant: str = VARIANT) -> Evict:
    return Evict(step=8, variant_sha256=variant, device_id="cpu", reason="its memory is needed")


def advise(
    agent: AgentState, frame: Load | Evict, room: Room = ROOM, now: float = 1_000.0
) -> tuple[PlanAnswer, list[events.Instruction]]:
    out = agent.handle(events.PlanCame(frame, room, now))
    (answer,) = [item.frame for item in out if isinstance(item, events.Send) and isinstance(item.frame, PlanAnswer)]
    return answer, out


def starts(out: list[events.Instruction]) -> list[str]:
    return [item.key for item in out if isinstance(item, events.StartEngine)]


class TestAModelOfAPlan:
    def test_is_not_loaded_before_one_asks_for_it(self) -> None:
        agent = agent_of()
        assert starts(agent.handle(events.Tick(5.0))) == []
        assert agent.engines[OTHER].phase is EnginePhase.OFF

    def test_is_loaded_on_advice_and_offered(self) -> None:
        agent = agent_of()
        answer, out = advise(agent, load())
        assert (answer.step, answer.accepted, answer.code) == (7, True, "")
        assert starts(out) == [OTHER]
        out = agent.handle(events.EngineReady(OTHER, 1, FACTS, 1_002.0))
        told = [item.frame for item in out if isinstance(item, events.Send) and isinstance(item.frame, Inventory)]
        assert {offer.variant_sha256 for offer in told[-1].offers} == {VARIANT, OTHER}
        assert agent.engines[OTHER].why == "asked for"

    def test_said_twice_is_loaded_once(self) -> None:
        agent = agent_of()
        advise(agent, load())
        answer, out = advise(agent, load())
        assert answer.accepted
        assert starts(out) == []

    def test_that_does_not_start_is_given_up(self) -> None:
        agent = agent_of()
        _, out = advise(agent, load())
        now, tries = 1_000.0, 0
        while tries < 50:
            for item in out:
                if isinstance(item, events.StartEngine):
                    tries += 1
                    agent.handle(events.EngineFailed(OTHER, item.generation, "no such file", now))
            now += 60.0
            out = agent.handle(events.Tick(now))
            if not out:
                break
        assert tries == 3
        assert not agent.engines[OTHER].wanted
        assert advise(agent, load(), now=now)[0].accepted, "advice may try again"

    def test_goes_when_its_owner_takes_no_plans_any_more(self) -> None:
        agent = agent_of()
        advise(agent, evict())
        advise(agent, load(), now=1_001.0)
        agent.handle(events.EngineReady(OTHER, 1, FACTS, 1_002.0))
        agent.handle(events.TermsChanged({}, None, None, 1_003.0, accepts_plans=False))
        out = agent.handle(events.Tick(1_004.0))
        assert events.StopEngine(OTHER, False) in out
        assert starts(out) == [VARIANT], "what is loaded from the start comes back"


class TestAnEviction:
    def test_frees_what_does_not_serve(self) -> None:
        agent = agent_of()
        answer, out = advise(agent, evict())
        assert answer.accepted
        assert events.StopEngine(VARIANT, False) in out
        assert agent.inventory().offers == []
        assert starts(agent.handle(events.Tick(1_005.0))) == [], "and it stays so"

    def test_never_takes_what_serves(self) -> None:
        agent = agent_of()
        agent.handle(events.GatewaySaid(run_frame(b"x", lease_ms=3_000_000, deadline_ms=3_000_000), 999.0))
        answer, out = advise(agent, evict())
        assert (answer.accepted, answer.code) == (False, "serving")
        assert not [item for item in out if isinstance(item, events.StopEngine)]
        assert agent.engines[VARIANT].wanted

    def test_never_takes_what_the_owner_wants_always(self) -> None:
        assert advise(agent_of(a="always"), evict())[0].code == "not_allowed"

    def test_waits_until_a_model_has_stayed_for_a_while(self) -> None:
        agent = agent_of()
        room = Room(accepts=True, least_stay_s=600.0)
        assert advise(agent, evict(), room, now=599.0)[0].code == "resident"
        assert advise(agent, evict(), room, now=600.0)[0].accepted


class TestAdviceIsRefused:
    @pytest.mark.parametrize(
        ("room", "code"),
        [
            (Room(accepts=False, free_bytes=8 * GIB), "not_allowed"),
            (Room(accepts=True, free_bytes=2 * GIB), "memory"),
            (Room(accepts=True, free_bytes=8 * GIB, disk="no room"), "disk"),
            (Room(accepts=True, free_bytes=8 * GIB, least_stay_s=600.0, stays_s=300.0), "owner_active"),
            (Room(accepts=True, loads_at_once=0), "busy"),
        ],
    )
    def test_by_what_the_machine_has(self, room: Room, code: str) -> None:
        agent = agent_of()
        answer, out = advise(agent, load(), room)
        assert (answer.accepted, answer.code) == (False, code)
        assert answer.code in protocol.PLAN_REFUSALS
        assert answer.message
        assert starts(out) == []

    def test_for_a_model_that_the_owner_does_not_list(self) -> None:
        assert advise(agent_of(), load("c" * 64))[0].code == "not_allowed"
        assert advise(agent_of(), load(device_id="GPU-1"))[0].code == "not_allowed"

    def test_while_the_owner_has_the_machine(self) -> None:
        agent = agent_of()
        agent.handle(events.OwnerChanged(False, "somebody plays", 0.0, 999.0))
        answer, _ = advise(agent, load())
        assert (answer.code, answer.message) == ("owner_active", "somebody plays")

    def test_when_the_catalogue_says_more_than_is_free(self) -> None:
        agent = agent_of()
        agent.engines[OTHER].served = served(OTHER, load=LoadMode.PLAN)
        assert advise(agent, load(needed_bytes=9 * GIB))[0].code == "memory"

    def test_and_what_is_not_known_refuses_nothing(self) -> None:
        assert advise(agent_of(), load(), Room(accepts=True))[0].accepted


class TestWhatCouldRun:
    def planning(self, **config: Any) -> Planning:
        lookout = SimpleNamespace(
            devices=[DeviceReport("cpu", "a processor", "cpu", memory_total_bytes=8 * GIB, memory_used_bytes=GIB)],
            policy=Policy(Terms()),
            held={},
        )
        table = AgentConfig(plans=PlansTable(**{"accept": True, **config}))
        return Planning(table, cast("Lookout", lookout), agent_of(), {})

    def test_is_not_told_to_a_gateway_that_does_not_know_the_frame(self) -> None:
        planning = self.planning()
        assert planning.due(0.0) is None
        planning.gateway_plans = True
        assert planning.due(0.0) is not None

    def test_is_not_told_for_an_owner_who_takes_no_plans(self) -> None:
        planning = self.planning(accept=False)
        planning.gateway_plans = True
        assert planning.due(0.0) is None

    def test_is_told_again_after_a_minute_or_when_it_changed(self) -> None:
        planning = self.planning()
        planning.gateway_plans = True
        first = planning.due(0.0)
        assert first is not None
        assert [(entry.variant_sha256, entry.loaded) for entry in first.runnable] == [(VARIANT, True), (OTHER, False)]
        assert planning.due(30.0) is None
        assert planning.due(61.0) is not None
        planning._state.engines[OTHER].wanted = True
        assert planning.due(70.0) is not None

    def test_leaves_out_the_memory_that_the_owner_keeps(self) -> None:
        (terms,) = self.planning().abilities().devices
        assert terms.memory_bytes == 8 * GIB - (512 + 256) * MIB

    def test_counts_memory_that_is_about_to_be_free(self) -> None:
        planning = self.planning()
        agent = planning._state
        stopping = cast("Any", {key: SimpleNamespace(stopped=asyncio.Event()) for key in agent.engines})
        before = planning.room(load(), stopping).free_bytes
        advise(agent, evict())
        assert before is not None
        assert planning.room(load(), stopping).free_bytes == before + 2 * GIB
