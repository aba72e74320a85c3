"""Real sockets between agents and gateways, on real stores."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select, update
from websockets.asyncio.client import connect

from agent import protocol
from agent.protocol import Failed, Finished, Goodbye, Inventory, ReportAck, Run, Tokens, UsageReport, Void, Welcome
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.core.valkey import connect as connect_valkey
from marketplace.fleet.links import GoneReason, NodeUnreachable
from marketplace.fleet.models import EnergySample, Node, OfferedInterval
from marketplace.fleet.service import MAX_REFUSALS_TOLD, Fleet
from marketplace.fleet.snapshot import read_fleet
from marketplace.matching.types import Filter, OfferView
from tests.fleet_world import (
    SHA256,
    Agent,
    Enrolled,
    Gateway,
    Recorder,
    add_variant,
    agent,
    demand,
    device,
    enrol_node,
    gateway,
    offer_report,
    telemetry,
    until,
)

EPOCH = 1


@pytest.fixture
def variants(session_factory: SessionFactory) -> dict[str, UUID]:
    return {SHA256: add_variant(session_factory)}


@pytest.fixture
def node(session_factory: SessionFactory) -> Enrolled:
    return enrol_node(session_factory)


async def show_offer(fleet: Fleet, running: Agent, variant_id: UUID, **changes: object) -> OfferView:
    await running.hear(Welcome)
    await running.say(telemetry(), Inventory([offer_report(**changes)], 10.0, 40.0))
    await until(lambda: fleet.view.offers(variant_id))
    return fleet.view.offers(variant_id)[0]


def run_frame(attempt_id: UUID, *, max_output_tokens: int = 8) -> Run:
    return Run(attempt_id.bytes, EPOCH, SHA256, b"{}", 5, max_output_tokens, 15_000, 60_000)


def tokens(attempt_id: UUID, sequence: int, *, epoch: int = EPOCH, text: str = "word ") -> Tokens:
    return Tokens(attempt_id.bytes, epoch, sequence, text, [sequence])


def finished(attempt_id: UUID, sequence: int) -> Finished:
    return Finished(attempt_id.bytes, EPOCH, sequence, "stop", UsageReport(5, 0, sequence, 0), 0.0, 1.0, 2.0, b"s")


def open_attempt(fleet: Fleet, offer: OfferView) -> tuple[UUID, Recorder]:
    attempt_id, sink = uuid4(), Recorder()
    fleet.links.open(offer, attempt_id, sink)
    fleet.links.send(offer.node_id, run_frame(attempt_id))
    return attempt_id, sink


class TestANodeThatConnects:
    def test_is_shown_with_its_offer_and_its_time_is_counted(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                offer = await show_offer(home.fleet, running, variants[SHA256])
                assert (offer.slots, offer.slots_busy, offer.context_per_slot) == (2, 0, 2048)
                assert offer.memory_free_bytes == 6 << 30
                assert offer.owner_organisation_id == node.organisation_id
                ranked = home.fleet.rank(demand(variant_id=variants[SHA256]))
                assert [found.offer_id for found in ranked.offers] == [offer.offer_id]
                await running.close()
                await until(lambda: not home.fleet.view.offers(variants[SHA256]))
                await until(lambda: ended_intervals(session_factory) == [True])

        asyncio.run(story())
        with session_factory() as session:
            row = session.execute(select(Node)).scalar_one()
            assert row.last_seen_at is not None
            assert (row.declared_idle_mw, row.declared_load_mw) == (10_000, 40_000)

    @pytest.mark.parametrize("reason", ["a game runs", "no text\0"])
    def test_is_not_offered_while_its_owner_uses_it(
        self,
        settings: Settings,
        session_factory: SessionFactory,
        variants: dict[str, UUID],
        node: Enrolled,
        reason: str,
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                await show_offer(home.fleet, running, variants[SHA256])
                await running.say(telemetry(available=False, reason=reason))
                wanted = demand(variant_id=variants[SHA256])
                await until(lambda: not home.fleet.rank(wanted).offers)
                assert home.fleet.rank(wanted).refusal.refused == {Filter.UNAVAILABLE: 1}
                await until(lambda: ended_intervals(session_factory) == [True])
                await running.say(telemetry())
                await until(lambda: home.fleet.rank(wanted).offers)
                await until(lambda: ended_intervals(session_factory) == [True, False])

        asyncio.run(story())

    def test_gets_its_unknown_weights_listed_once_the_catalogue_has_them(
        self,
        settings: Settings,
        session_factory: SessionFactory,
        node: Enrolled,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("marketplace.fleet.service.STORE_EVERY_S", 0.1)
        known: dict[str, UUID] = {}

        async def story() -> None:
            async with gateway(settings, session_factory, known) as home, agent(home, node) as running:
                await running.hear(Welcome)
                await running.say(telemetry(), Inventory([offer_report()]))
                await asyncio.sleep(0.3)
                assert home.fleet.view.all_offers() == []
                known[SHA256] = add_variant(session_factory)
                await until(home.fleet.view.all_offers)

        asyncio.run(story())

    def test_has_its_declared_energy_written_and_labelled(
        self,
        settings: Settings,
        session_factory: SessionFactory,
        variants: dict[str, UUID],
        node: Enrolled,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("marketplace.fleet.service.STORE_EVERY_S", 0.1)

        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                await show_offer(home.fleet, running, variants[SHA256])
                await asyncio.sleep(0.5)

        asyncio.run(story())
        with session_factory() as session:
            sample = session.execute(select(EnergySample)).scalar_one()
        seconds = (sample.ended_at - sample.started_at).total_seconds()
        assert sample.source == "declared"
        assert seconds > 0.3
        assert sample.energy_mj == pytest.approx(30_000 * seconds, rel=0.01)

    def test_has_its_time_counted_again_after_somebody_ended_it(
        self,
        settings: Settings,
        session_factory: SessionFactory,
        variants: dict[str, UUID],
        node: Enrolled,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("marketplace.fleet.service.STORE_EVERY_S", 0.1)

        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                await show_offer(home.fleet, running, variants[SHA256])
                with transaction(session_factory) as session:
                    session.execute(update(OfferedInterval).values(ended_at=OfferedInterval.seen_at))
                await until(lambda: ended_intervals(session_factory) == [True, False])

        asyncio.run(story())


class TestAnImpostor:
    @pytest.mark.parametrize("what", ["key", "version", "node"])
    def test_is_told_why_and_not_to_come_back(
        self, what: str, settings: Settings, session_factory: SessionFactory, node: Enrolled
    ) -> None:
        other = enrol_node(session_factory, name="other")
        greeting = {"key": {"key": other.key}, "version": {"version": 99}, "node": {}}[what]
        claimed = Enrolled(uuid4(), node.organisation_id, node.key) if what == "node" else node

        async def story() -> Goodbye:
            async with gateway(settings, session_factory, {}) as home, agent(home, claimed, **greeting) as running:
                goodbye: Goodbye = await running.hear(Goodbye)
                await until(lambda: running.closed)
                assert home.fleet.nodes_connected == 0
                return goodbye

        goodbye = asyncio.run(story())
        assert goodbye.code == {"key": "bad_signature", "version": "wrong_version", "node": "unknown_node"}[what]
        assert goodbye.retry_after_s < 0

    def test_whose_version_is_no_text_is_not_taken_for_a_database_that_is_away(
        self, settings: Settings, session_factory: SessionFactory, node: Enrolled
    ) -> None:
        async def story() -> None:
            async with (
                gateway(settings, session_factory, {}) as home,
                connect(home.agent_url, compression=None, proxy=None) as connection,
            ):
                await connection.recv()
                await connection.send(
                    protocol.encode([protocol.Hello(protocol.VERSION, str(node.node_id), b"", "1\0", [])])
                )
                message = await connection.recv()
                assert isinstance(message, bytes)
                (goodbye,) = protocol.decode_from_gateway(message)
                assert isinstance(goodbye, Goodbye)
                assert (goodbye.code, "version" in goodbye.message) == ("bad_message", True)

        asyncio.run(story())

    def test_that_never_greets_is_cut(
        self, settings: Settings, session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("marketplace.fleet.socket.HELLO_TIMEOUT_S", 0.1)

        async def story() -> None:
            async with (
                gateway(settings, session_factory, {}) as home,
                connect(home.agent_url, compression=None, proxy=None) as connection,
            ):
                await connection.recv()
                message = await connection.recv()
                assert isinstance(message, bytes)
                (goodbye,) = protocol.decode_from_gateway(message)
                assert isinstance(goodbye, Goodbye)
                assert goodbye.code == "hello_timeout"

        asyncio.run(story())


class TestAnAttempt:
    def test_gets_its_frames_in_order_and_its_report_is_acknowledged(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                offer = await show_offer(home.fleet, running, variants[SHA256])
                attempt_id, sink = open_attempt(home.fleet, offer)
                run = await running.hear(Run)
                assert run == run_frame(attempt_id)
                await running.say(tokens(attempt_id, 0), tokens(attempt_id, 1))
                await running.say(finished(attempt_id, 2), finished(attempt_id, 2), tokens(attempt_id, 2))
                await until(lambda: len(sink.frames) == 3)
                home.fleet.links.send(node.node_id, ReportAck(attempt_id.bytes, EPOCH))
                home.fleet.links.close(attempt_id)
                await running.hear(ReportAck)
                # The report again, for the acknowledgement may be lost: taken off the agent's hands.
                await running.say(finished(attempt_id, 2))
                await running.hear(ReportAck)
                assert [type(frame) for frame in sink.frames] == [Tokens, Tokens, Finished]
                assert sink.gone == []

        asyncio.run(story())

    def test_hears_that_its_node_vanished(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                offer = await show_offer(home.fleet, running, variants[SHA256])
                _, sink = open_attempt(home.fleet, offer)
                await running.hear(Run)
                running.abort()
                await until(lambda: sink.gone == [GoneReason.NODE_GONE])
                with pytest.raises(NodeUnreachable):
                    home.fleet.links.open(offer, uuid4(), Recorder())

        asyncio.run(story())

    def test_is_lost_when_the_agent_opens_a_newer_socket(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as first:
                offer = await show_offer(home.fleet, first, variants[SHA256])
                attempt_id, sink = open_attempt(home.fleet, offer)
                running = [protocol.RunningAttempt(attempt_id.bytes, EPOCH)]
                async with agent(home, node, attempts=running) as second:
                    goodbye = await first.hear(Goodbye)
                    assert goodbye.code == "replaced"
                    assert sink.gone == [GoneReason.REPLACED]
                    assert await second.hear(Void) == Void(attempt_id.bytes, EPOCH)
                    await show_offer(home.fleet, second, variants[SHA256])
                    await until(lambda: first.closed)
                    await asyncio.sleep(0.1)
                    assert home.fleet.nodes_connected == 1
                    assert len(home.fleet.view.offers(variants[SHA256])) == 1
                    assert ended_intervals(session_factory) == [True, False]

        asyncio.run(story())

    def test_outlives_a_short_break_of_its_nodes_socket(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home:
                async with agent(home, node, resumes=True) as first:
                    offer = await show_offer(home.fleet, first, variants[SHA256])
                    attempt_id, sink = open_attempt(home.fleet, offer)
                    await first.hear(Run)
                    await first.say(tokens(attempt_id, 0), tokens(attempt_id, 1))
                    await until(lambda: len(sink.frames) == 2)
                    first.abort()
                    await until(lambda: home.fleet.nodes_connected == 0)
                running = [protocol.RunningAttempt(attempt_id.bytes, EPOCH), protocol.RunningAttempt(b"x" * 16, EPOCH)]
                async with agent(home, node, attempts=running, resumes=True) as second:
                    resumed = await second.hear(protocol.Resume)
                    assert resumed.attempts == [protocol.ResumePoint(attempt_id.bytes, EPOCH, 2)]
                    assert (await second.hear(Void)).attempt == b"x" * 16
                    await second.say(tokens(attempt_id, 2), finished(attempt_id, 3))
                    await until(lambda: len(sink.frames) == 4)
                    assert sink.gone == []

        asyncio.run(story())

    def test_is_given_up_if_its_node_does_not_come_back(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home:
                async with agent(home, node, resumes=True) as first:
                    offer = await show_offer(home.fleet, first, variants[SHA256])
                    attempt_id, sink = open_attempt(home.fleet, offer)
                    await first.hear(Run)
                    await first.say(tokens(attempt_id, 0))
                    await until(lambda: len(sink.frames) == 1)
                    first.abort()
                await asyncio.sleep(0.5)
                assert sink.gone == []
                await until(lambda: sink.gone == [GoneReason.NODE_GONE], within_s=protocol.RESUME_S + 3)

        asyncio.run(story())


class TestALyingAgent:
    def test_cannot_speak_for_another_nodes_attempt(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        liar = enrol_node(session_factory, owner="crook", name="liar")

        async def story() -> None:
            async with (
                gateway(settings, session_factory, variants) as home,
                agent(home, node) as honest,
                agent(home, liar) as crook,
            ):
                offer = await show_offer(home.fleet, honest, variants[SHA256])
                attempt_id, sink = open_attempt(home.fleet, offer)
                await crook.hear(Welcome)
                await crook.say(tokens(attempt_id, 0, text="forged"))
                assert await crook.hear(Void) == Void(attempt_id.bytes, EPOCH)
                await honest.say(tokens(attempt_id, 0, text="true"))
                await until(lambda: sink.frames)
                assert sink.frames == [tokens(attempt_id, 0, text="true")]

        asyncio.run(story())

    @pytest.mark.parametrize("lie", ["gap", "repeat", "too_many", "too_long", "short_report"])
    def test_loses_an_attempt_that_it_tells_wrongly(
        self, lie: str, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                offer = await show_offer(home.fleet, running, variants[SHA256])
                attempt_id, sink = open_attempt(home.fleet, offer)
                await running.say(
                    *{
                        "gap": [tokens(attempt_id, 1)],
                        "repeat": [tokens(attempt_id, 0), tokens(attempt_id, 0)],
                        "too_many": [tokens(attempt_id, sequence) for sequence in range(100)],
                        "too_long": [tokens(attempt_id, 0, text="x" * 70_000)],
                        "short_report": [tokens(attempt_id, 0), finished(attempt_id, 0)],
                    }[lie]
                )
                await until(lambda: sink.gone == [GoneReason.PROTOCOL])
                assert not any(isinstance(frame, Finished) for frame in sink.frames)
                assert await running.hear(Void) == Void(attempt_id.bytes, EPOCH)

        asyncio.run(story())

    def test_cannot_revive_an_old_epoch(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                offer = await show_offer(home.fleet, running, variants[SHA256])
                attempt_id, sink = open_attempt(home.fleet, offer)
                await running.say(tokens(attempt_id, 0, epoch=EPOCH - 1), tokens(attempt_id, 0))
                await until(lambda: sink.frames)
                assert sink.frames == [tokens(attempt_id, 0)]

        asyncio.run(story())

    @pytest.mark.parametrize("noise", ["garbage", "text", "flood", "strays", "second_greeting"])
    def test_is_dismissed_when_it_sends_what_no_agent_sends(
        self, noise: str, settings: Settings, session_factory: SessionFactory, node: Enrolled
    ) -> None:
        async def story() -> Goodbye:
            async with gateway(settings, session_factory, {}) as home, agent(home, node) as running:
                await running.hear(Welcome)
                if noise == "garbage":
                    await running.connection.send(b"\xc1 not msgpack")
                elif noise == "text":
                    await running.connection.send("hello")
                elif noise == "flood":
                    await running.say(*(telemetry() for _ in range(200)))
                elif noise == "strays":
                    await running.say(*(tokens(uuid4(), 0) for _ in range(4_000)))
                else:
                    await running.say(protocol.Hello(1, str(node.node_id), b"", "test"))
                goodbye: Goodbye = await running.hear(Goodbye)
                await until(lambda: running.closed and home.fleet.nodes_connected == 0)
                return goodbye

        expected = "flood" if noise in ("flood", "strays") else "bad_message"
        assert asyncio.run(story()).code == expected

    def test_cannot_sell_what_is_not_for_sale(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        strict = settings.model_copy(update={"allow_simulated": False})

        async def story() -> None:
            async with gateway(strict, session_factory, variants) as home, agent(home, node) as running:
                await running.hear(Welcome)
                good = offer_report(device_id="good")
                bad = [
                    offer_report(simulated=True),
                    offer_report(slots=0, device_id="a"),
                    offer_report(slots=10**12, device_id="b"),
                    offer_report(context_per_slot=-1, device_id="c"),
                    offer_report(output_nano_usd_per_mtok=-5, device_id="d"),
                    offer_report(output_nano_usd_per_mtok=2**62, device_id="e"),
                    offer_report(variant_sha256="f" * 64, device_id="f"),
                    offer_report(device_id="x\0y"),
                ]
                await running.say(telemetry(device(memory_used_bytes=2**63, power_mw=-7)), Inventory([*bad, good]))
                await until(home.fleet.view.all_offers)
                (offer,) = home.fleet.view.all_offers()
                assert offer.device_id == "good"

        asyncio.run(story())

    def test_that_falls_silent_is_gone(
        self,
        settings: Settings,
        session_factory: SessionFactory,
        variants: dict[str, UUID],
        node: Enrolled,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("marketplace.fleet.service.SILENT_S", 0.3)
        monkeypatch.setattr("marketplace.fleet.service.HOUSEKEEP_EVERY_S", 0.05)

        async def story() -> None:
            async with gateway(settings, session_factory, variants) as home, agent(home, node) as running:
                offer = await show_offer(home.fleet, running, variants[SHA256])
                _, sink = open_attempt(home.fleet, offer)
                goodbye = await running.hear(Goodbye)
                assert goodbye.code == "silent"
                assert sink.gone == [GoneReason.NODE_GONE]
                await until(lambda: home.fleet.nodes_connected == 0)

        asyncio.run(story())


def ended_intervals(factory: SessionFactory) -> list[bool]:
    """Of each interval, oldest first, whether it has ended."""
    with transaction(factory) as session:
        rows = session.execute(select(OfferedInterval.ended_at).order_by(OfferedInterval.id))
        return [ended_at is not None for (ended_at,) in rows]


class TestTwoGateways:
    def test_one_serves_from_a_node_that_is_connected_to_the_other(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with (
                gateway(settings, session_factory, variants, "gw-a") as home,
                gateway(settings, session_factory, variants, "gw-b") as caller,
                agent(home, node) as running,
            ):
                await show_offer(home.fleet, running, variants[SHA256])
                offer = await reachable(caller, "gw-a", variants[SHA256])
                attempt_id, sink = open_attempt(caller.fleet, offer)
                assert await running.hear(Run) == run_frame(attempt_id)
                await until(lambda: home.fleet.view.offers(variants[SHA256])[0].slots_busy == 1)
                await running.say(tokens(attempt_id, 0), tokens(attempt_id, 1), finished(attempt_id, 2))
                await until(lambda: len(sink.frames) == 3)
                caller.fleet.links.send(node.node_id, ReportAck(attempt_id.bytes, EPOCH))
                caller.fleet.links.close(attempt_id)
                assert await running.hear(ReportAck) == ReportAck(attempt_id.bytes, EPOCH)
                await until(lambda: home.fleet.view.offers(variants[SHA256])[0].slots_busy == 0)
                with connect_valkey(settings.valkey_url) as client:
                    (seen,) = read_fleet(client)
                assert (seen.offer_id, seen.gateway_id, seen.node_id) == (offer.offer_id, "gw-a", node.node_id)

        asyncio.run(story())

    def test_the_death_of_the_homes_gateway_is_no_fault_of_the_node(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with (
                gateway(settings, session_factory, variants, "gw-a") as home,
                gateway(settings, session_factory, variants, "gw-b") as caller,
                agent(home, node) as running,
            ):
                await show_offer(home.fleet, running, variants[SHA256])
                offer = await reachable(caller, "gw-a", variants[SHA256])
                _, sink = open_attempt(caller.fleet, offer)
                await running.hear(Run)
                await home.kill()
                await until(lambda: sink.gone == [GoneReason.LINK_LOST])

        asyncio.run(story())

    def test_the_death_of_the_callers_gateway_stops_the_work_on_the_node(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with (
                gateway(settings, session_factory, variants, "gw-a") as home,
                gateway(settings, session_factory, variants, "gw-b") as caller,
                agent(home, node) as running,
            ):
                await show_offer(home.fleet, running, variants[SHA256])
                offer = await reachable(caller, "gw-a", variants[SHA256])
                attempt_id, _ = open_attempt(caller.fleet, offer)
                await running.hear(Run)
                await caller.kill()
                assert await running.hear(Void) == Void(attempt_id.bytes, EPOCH)
                await until(lambda: home.fleet.view.offers(variants[SHA256])[0].slots_busy == 0)

        asyncio.run(story())

    def test_a_failure_on_the_node_reaches_the_other_gateway(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with (
                gateway(settings, session_factory, variants, "gw-a") as home,
                gateway(settings, session_factory, variants, "gw-b") as caller,
                agent(home, node) as running,
            ):
                await show_offer(home.fleet, running, variants[SHA256])
                offer = await reachable(caller, "gw-a", variants[SHA256])
                failed_id, failed_sink = open_attempt(caller.fleet, offer)
                lost_id, lost_sink = open_attempt(caller.fleet, offer)
                await running.hear(Run)
                await running.hear(Run)
                failure = Failed(failed_id.bytes, EPOCH, 0, "engine_died", "gone", UsageReport())
                await running.say(failure)
                await until(lambda: failed_sink.frames == [failure])
                running.abort()
                await until(lambda: lost_sink.gone == [GoneReason.NODE_GONE])
                assert lost_id.bytes not in caller.fleet.links.routes
                await until(lambda: not caller.fleet.view.offers(variants[SHA256]))

        asyncio.run(story())

    def test_a_gateway_that_does_not_know_the_secret_is_refused(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        stranger = settings.model_copy(update={"cluster_secret": type(settings.cluster_secret)("another")})

        async def story() -> None:
            async with (
                gateway(settings, session_factory, variants, "gw-a") as home,
                gateway(stranger, session_factory, variants, "gw-b") as caller,
                agent(home, node) as running,
            ):
                await show_offer(home.fleet, running, variants[SHA256])
                await until(lambda: caller.fleet.view.gateways() == {"gw-a": home.fleet._settings.own_url})
                await asyncio.sleep(1.0)
                assert caller.fleet.view.offers(variants[SHA256]) == []

        asyncio.run(story())

    def test_the_later_connection_of_a_node_ends_the_earlier_one_elsewhere(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with (
                gateway(settings, session_factory, variants, "gw-a") as old,
                gateway(settings, session_factory, variants, "gw-b") as new,
                agent(old, node) as first,
            ):
                await show_offer(old.fleet, first, variants[SHA256])
                async with agent(new, node) as second:
                    await second.hear(Welcome)
                    await second.say(telemetry(), Inventory([offer_report()]))
                    goodbye = await first.hear(Goodbye)
                    assert goodbye.code == "replaced"
                    await until(lambda: old.fleet.view.home_of(node.node_id) == "gw-b")
                    assert new.fleet.view.home_of(node.node_id) == "gw-b"
                    await until(lambda: ended_intervals(session_factory)[-1] is False)

        asyncio.run(story())

    def test_a_draining_gateway_is_chosen_no_more(
        self, settings: Settings, session_factory: SessionFactory, variants: dict[str, UUID], node: Enrolled
    ) -> None:
        async def story() -> None:
            async with (
                gateway(settings, session_factory, variants, "gw-a") as home,
                gateway(settings, session_factory, variants, "gw-b") as caller,
                agent(home, node) as running,
            ):
                await show_offer(home.fleet, running, variants[SHA256])
                await reachable(caller, "gw-a", variants[SHA256])
                await home.fleet.drain()
                await until(lambda: not caller.fleet.view.offers(variants[SHA256]))

        asyncio.run(story())


async def reachable(caller: Gateway, home: str, variant_id: UUID) -> OfferView:
    """The offer as another gateway sees it, once its link is up."""
    await until(lambda: caller.fleet.view.offers(variant_id) and caller.fleet._peers.linked(home))
    return caller.fleet.view.offers(variant_id)[0]


class TestManyOffersThatCannotBe:
    def test_are_told_in_few_lines(
        self, settings: Settings, session_factory: SessionFactory, node: Enrolled, capfd: pytest.CaptureFixture[str]
    ) -> None:
        async def story() -> None:
            async with gateway(settings, session_factory, {}) as home, agent(home, node) as running:
                await running.say(Inventory([offer_report(device_id=f"card-{number}") for number in range(500)]))
                await until(lambda: any(session.refused for session in home.fleet._sessions.values()))

        capfd.readouterr()
        asyncio.run(story())
        said = "".join(capfd.readouterr())
        assert said.count("offer_refused") == MAX_REFUSALS_TOLD
