"""Advice from rows to a node's socket and back, and who never gets any."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select, text

from agent.protocol import Abilities, DeviceTerms, Evict, Inventory, Load, PlanAnswer, RunnableReport, Welcome
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.core.valkey import connect as connect_valkey
from marketplace.fleet import plans
from marketplace.fleet.models import PlanStep
from marketplace.fleet.plans import EVICT, LOAD, Step
from marketplace.jobs import demand as notes
from marketplace.jobs.plan_round import plan_once
from tests.fleet_world import SHA256, Enrolled, add_variant, agent, enrol_node, gateway, telemetry, until

OTHER = "d" * 64
GIB = 1 << 30


@pytest.fixture
def variants(session_factory: SessionFactory) -> dict[str, UUID]:
    return {sha256: add_variant(session_factory, sha256) for sha256 in (SHA256, OTHER)}


@pytest.fixture
def node(session_factory: SessionFactory) -> Enrolled:
    return enrol_node(session_factory)


def runnable(sha256: str, **changes: Any) -> RunnableReport:
    facts: dict[str, Any] = {
        "variant_sha256": sha256,
        "device_id": "cpu",
        "loaded": False,
        "pinned": False,
        "here": True,
        "slots": 2,
        "context_per_slot": 2048,
        "input_nano_usd_per_mtok": 50_000_000,
        "cached_input_nano_usd_per_mtok": 10_000_000,
        "output_nano_usd_per_mtok": 200_000_000,
        "engine": "llama.cpp",
        "simulated": False,
        "needed_bytes": 4 * GIB,
        "decode_tokens_per_s": 40.0,
    }
    return RunnableReport(**{**facts, **changes})


def abilities(*entries: RunnableReport, accepts: bool = True) -> Abilities:
    return Abilities(accepts, list(entries), [DeviceTerms("cpu", 6 * GIB)])


def advise(factory: SessionFactory, node: Enrolled, variant_id: UUID, action: str) -> int:
    with transaction(factory) as session:
        plans.write_steps(session, uuid4(), [Step(node.node_id, "cpu", variant_id, action, "asked for")])
        return session.scalars(select(PlanStep.id).order_by(PlanStep.id.desc())).first() or 0


def state_of(factory: SessionFactory, step_id: int) -> tuple[str, str]:
    with factory() as session:
        step = session.get(PlanStep, step_id)
        assert step is not None
        return step.state, step.code


async def until_state(factory: SessionFactory, step_id: int, state: str) -> None:
    async with asyncio.timeout(15):
        while (await asyncio.to_thread(state_of, factory, step_id))[0] != state:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class TestAdvice:
    def test_reaches_the_node_and_its_answer_the_row(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def scene() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node, plans=True) as running:
                assert (await running.hear(Welcome)).plans
                evict = advise(session_factory, node, variants[SHA256], EVICT)
                load = advise(session_factory, node, variants[OTHER], LOAD)
                heard: Evict = await running.hear(Evict)
                assert (heard.step, heard.variant_sha256, heard.device_id) == (evict, SHA256, "cpu")
                asked: Load = await running.hear(Load)
                assert (asked.step, asked.variant_sha256, asked.reason) == (load, OTHER, "asked for")
                await running.say(PlanAnswer(evict, True), PlanAnswer(load, False, "memory", "no room"))
                await until_state(session_factory, evict, "accepted")
                await until_state(session_factory, load, "refused")
                assert state_of(session_factory, load) == ("refused", "memory")

        asyncio.run(scene())

    def test_is_never_sent_to_an_agent_that_does_not_know_it(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def scene() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                await running.hear(Welcome)
                step = advise(session_factory, node, variants[OTHER], LOAD)
                await home.fleet._advise()
                assert state_of(session_factory, step)[0] == "planned"
                assert not [frame for frame in running.frames if isinstance(frame, Load)]

        asyncio.run(scene())

    def test_of_another_node_is_not_answered_for(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        stranger = enrol_node(session_factory, owner="stranger", name="theirs")

        async def scene() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node, plans=True) as running:
                step = advise(session_factory, node, variants[OTHER], LOAD)
                await running.hear(Load)
                async with agent(home, stranger, plans=True) as other:
                    await other.hear(Welcome)
                    await other.say(PlanAnswer(step, False, "memory", "let me in your way"))
                    await other.say(telemetry())
                    await until(lambda: home.fleet._sessions[stranger.node_id].devices)
                    await home.fleet._advise()
                assert state_of(session_factory, step)[0] == "sent"

        asyncio.run(scene())

    def test_that_nobody_passed_on_is_void_after_a_while(
        self, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        step = advise(session_factory, node, variants[OTHER], LOAD)
        with transaction(session_factory) as session:
            assert plans.expire(session) == 0
            session.execute(text("update plan_steps set planned_at = now() - interval '3 minutes'"))
            assert plans.exchange(session, [node.node_id], []) == []
            assert plans.expire(session) == 1
        assert state_of(session_factory, step)[0] == "expired"


class TestARound:
    def test_advises_by_what_found_no_room(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def scene() -> None:
            client = connect_valkey(settings.valkey_url)
            async with gateway(settings, session_factory, variants) as home, agent(home, node, plans=True) as running:
                await running.hear(Welcome)
                await running.say(
                    telemetry(),
                    Inventory([]),
                    abilities(runnable(SHA256, loaded=True), runnable(OTHER), runnable("9" * 64)),
                )
                await until(lambda: home.fleet._sessions[node.node_id].ability is not None)
                await home.fleet._advise()
                assert await asyncio.to_thread(plan_once, session_factory, client) is not None
                assert _steps(session_factory) == [], "nothing is asked for"
                with transaction(session_factory) as session:
                    _refuse(session, variants[OTHER], requests=20)
                made = await asyncio.to_thread(plan_once, session_factory, client)
                assert made is not None
                assert _steps(session_factory) == [(EVICT, variants[SHA256]), (LOAD, variants[OTHER])]
                assert (await running.hear(Load)).needed_bytes == 4 * GIB
                again = await asyncio.to_thread(plan_once, session_factory, client)
                assert again is not None
                assert again.steps == 0, "what is under way is not asked again"

        asyncio.run(scene())


def _refuse(session: Any, variant_id: UUID, *, requests: int) -> None:
    minute = session.execute(text("select date_trunc('minute', now())")).scalar_one()
    total = notes.RefusalSum(requests=requests, prompt_tokens=100, max_output_tokens=requests * 200)
    notes.add_refusals(session, {notes.RefusalKey(minute, notes.NO_NODE, variant_id, "VARIANT"): total})


def _steps(factory: SessionFactory) -> list[tuple[str, UUID]]:
    with factory() as session:
        return [(step.action, step.variant_id) for step in session.scalars(select(PlanStep).order_by(PlanStep.id))]
