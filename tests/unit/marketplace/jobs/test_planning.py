"""From facts to advice: who is told to load what, and who is left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from agent.protocol import DeviceTerms
from marketplace.fleet.plans import EVICT, LOAD, Ability, Recent, Runnable, Step
from marketplace.jobs.forecast import WINDOW_S, Asked
from marketplace.jobs.planning import Facts, question, steps
from marketplace.matching.planner import plan
from tests.fleet_world import offer_view

GIB = 1 << 30
NODE, OTHER_NODE = UUID(int=1), UUID(int=2)
SMALL, LARGE = UUID(int=11), UUID(int=12)


def runnable(variant_id: UUID, **changes: Any) -> Runnable:
    facts: dict[str, Any] = {
        "variant_id": variant_id,
        "device_id": "cpu",
        "loaded": False,
        "pinned": False,
        "here": True,
        "slots": 2,
        "context_per_slot": 2048,
        "engine": "llama.cpp",
        "rates": (50_000_000, 10_000_000, 200_000_000),
        "needed_bytes": 4 * GIB,
        "decode_tokens_per_s": 40.0,
    }
    return Runnable(**{**facts, **changes})


def ability(*entries: Runnable, accepts: bool = True, **terms: Any) -> Ability:
    return Ability(accepts, list(entries), [DeviceTerms(**{"device_id": "cpu", "memory_bytes": 6 * GIB, **terms})])


def asked(variant_id: UUID, **changes: Any) -> Asked:
    return Asked(variant_id, f"model-{variant_id.int}", **changes)


WANTED = asked(LARGE, refused=30, refused_bound_tokens=30 * 400)
TWO = ability(runnable(SMALL, loaded=True), runnable(LARGE))


def advice(abilities: dict[UUID, Ability], wanted: list[Asked], **more: Any) -> list[Step]:
    facts = Facts(abilities=abilities, offers=more.pop("offers", ()), asked=wanted, **more)
    put = question(facts)
    made = plan(put.devices, put.demands, horizon_s=1_800.0, circuits_w=put.circuits_w, solver=False)
    return steps(made, put, facts)


def told(found: list[Step]) -> list[tuple[str, UUID]]:
    return [(step.action, step.variant_id) for step in found]


def recent(action: str, variant_id: UUID, **changes: Any) -> Recent:
    facts: dict[str, Any] = {"node_id": NODE, "device_id": "cpu", "state": "accepted", "code": "", "age_s": 60.0}
    return Recent(variant_id=variant_id, action=action, **{**facts, **changes})


class TestAdvice:
    def test_is_to_load_what_is_asked_for_and_to_free_its_memory_first(self) -> None:
        found = advice({NODE: TWO}, [asked(SMALL), WANTED])
        assert told(found) == [(EVICT, SMALL), (LOAD, LARGE)]
        assert "model-12" in found[0].reason
        assert "30 requests found no room" in found[1].reason
        assert found[1].gain_nano
        assert found[1].needed_bytes == 4 * GIB

    def test_evicts_nothing_where_there_is_room(self) -> None:
        roomy = ability(*TWO.runnable, memory_bytes=16 * GIB)
        assert told(advice({NODE: roomy}, [asked(SMALL), WANTED])) == [(LOAD, LARGE)]

    def test_leaves_alone_what_earns_more(self) -> None:
        busy = asked(SMALL, answers=900, served_tokens=72_000, charged_nano=72_000 * 300)
        assert advice({NODE: TWO}, [busy, replace(WANTED, refused=1, refused_bound_tokens=100)]) == []

    def test_is_none_where_others_serve_the_demand(self) -> None:
        other = offer_view(node_id=OTHER_NODE, variant_id=LARGE, slots=8, decode_tokens_per_s=100.0)
        assert advice({NODE: TWO}, [asked(SMALL), WANTED], offers=[other]) == []

    def test_is_none_for_an_owner_who_takes_none(self) -> None:
        assert advice({NODE: ability(*TWO.runnable, accepts=False)}, [asked(SMALL), WANTED]) == []

    def test_is_none_for_hours_that_end_before_it_is_loaded(self) -> None:
        assert advice({NODE: ability(*TWO.runnable, offered_s=4.0)}, [asked(SMALL), WANTED]) == []

    def test_spares_what_the_owner_wants_always(self) -> None:
        fixed = ability(runnable(SMALL, loaded=True, pinned=True), runnable(LARGE))
        assert advice({NODE: fixed}, [asked(SMALL), WANTED]) == []

    def test_spares_what_serves_now(self) -> None:
        serving = offer_view(node_id=NODE, variant_id=SMALL, slots_busy=1)
        assert advice({NODE: TWO}, [asked(SMALL), WANTED], offers=[serving]) == []

    def test_prefers_the_node_that_has_the_weights(self) -> None:
        far = ability(runnable(LARGE, here=False))
        near = ability(runnable(LARGE))
        found = advice({NODE: far, OTHER_NODE: near}, [WANTED], sizes={LARGE: 8 * GIB})
        assert [step.node_id for step in found] == [OTHER_NODE]

    def test_is_for_the_cheaper_power_at_equal_speed(self) -> None:
        power = {"idle_watts": 20.0, "load_watts": 300.0}
        dear = ability(runnable(LARGE), nano_usd_per_kwh=400_000_000, **power)
        cheap = ability(runnable(LARGE), nano_usd_per_kwh=50_000_000, **power)
        assert [step.node_id for step in advice({NODE: dear, OTHER_NODE: cheap}, [WANTED])] == [OTHER_NODE]

    def test_is_one_load_a_node_at_a_time(self) -> None:
        third = UUID(int=13)
        roomy = ability(runnable(SMALL), runnable(LARGE), runnable(third), memory_bytes=64 * GIB)
        wanted = [replace(WANTED, variant_id=name) for name in (SMALL, LARGE, third)]
        assert len(advice({NODE: roomy}, wanted)) == 1

    def test_is_not_given_twice_while_the_first_is_on_its_way(self) -> None:
        assert advice({NODE: TWO}, [asked(SMALL), WANTED], recent=[recent(LOAD, LARGE, state="sent")]) == []


class TestAgainstThrashing:
    def test_what_came_by_a_plan_stays_for_a_while(self) -> None:
        came = recent(LOAD, SMALL)
        assert advice({NODE: TWO}, [asked(SMALL), WANTED], recent=[came]) == []
        assert advice({NODE: TWO}, [asked(SMALL), WANTED], recent=[replace(came, age_s=601.0)])

    def test_what_was_evicted_does_not_come_back_at_once(self) -> None:
        gone = recent(EVICT, LARGE)
        assert advice({NODE: TWO}, [asked(SMALL), WANTED], recent=[gone]) == []

    @pytest.mark.parametrize(("code", "again_after_s"), [("memory", 600.0), ("busy", 120.0)])
    def test_what_was_refused_is_not_asked_again_at_once(self, code: str, again_after_s: float) -> None:
        refused = recent(LOAD, LARGE, state="refused", code=code)
        soon, late = replace(refused, age_s=again_after_s - 1), replace(refused, age_s=again_after_s + 1)
        assert advice({NODE: TWO}, [asked(SMALL), WANTED], recent=[soon]) == []
        assert advice({NODE: TWO}, [asked(SMALL), WANTED], recent=[late])


class TestDemand:
    def test_counts_what_was_served_refused_and_waits(self) -> None:
        found = asked(
            *(SMALL,), answers=10, served_tokens=1_000, charged_nano=250_000, refused=5, refused_bound_tokens=10_000,
            queued=2, queued_bound_tokens=60,
        )  # fmt: skip
        assert found.tokens_per_s == pytest.approx((1_000 + 500 + 60) / WINDOW_S)
        assert found.nano_per_token == 250.0

    def test_of_what_was_never_sold_is_priced_by_its_lowest_ask(self) -> None:
        put = question(Facts(abilities={NODE: TWO}, offers=(), asked=[WANTED]))
        assert put.demands[0].nano_per_token == pytest.approx(200 + 2 * 50)
