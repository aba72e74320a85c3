"""The daemon with a real WebSocket to a scripted gateway, over an engine that plays scripts."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import msgspec
import pytest

from agent import home as folder
from agent import protocol
from agent.config import parse
from agent.protocol import Accepted, Cancel, Failed, Finished, Inventory, Refused, Renew, Telemetry, Tokens, Void
from tests.agent_doubles import VARIANT, Rig, ScriptedGateway, play, run_frame


class TestAnAnswer:
    def test_streams_in_order_and_ends_with_a_signed_receipt(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a", {"say": ["Hi", " there", "!"]}))
            assert (await rig.gateway.expect(Accepted)).attempt == b"a"
            finished = await rig.gateway.expect(Finished)
            assert [frame.sequence for frame in rig.gateway.of(Tokens)] == [0, 1, 2]
            assert rig.gateway.text(b"a") == "Hi there!"
            assert (finished.finish_reason, finished.sequence, finished.usage.completion_tokens) == ("stop", 3, 3)
            payload = protocol.receipt_payload(
                *(b"a", 1, 3, "stop", finished.usage, hashlib.sha256(b"Hi there!").digest())
            )
            rig.key.public_key().verify(finished.signature, payload)

        play(tmp_path, scene)

    def test_of_two_attempts_travel_over_one_socket(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            words = [f"w{number} " for number in range(40)]
            await rig.gateway.send(
                run_frame(b"a", {"say": words, "gap_s": 0.002}), run_frame(b"b", {"say": words, "gap_s": 0.002})
            )
            for _ in range(2):
                await rig.gateway.expect(Finished)
            assert rig.gateway.text(b"a") == rig.gateway.text(b"b") == "".join(words)
            assert len(rig.gateway.hellos) == 1

        play(tmp_path, scene)

    def test_of_many_pieces_travels_in_few_messages(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            before = rig.gateway.messages
            await rig.gateway.send(run_frame(b"a", {"say": ["x"] * 300}))
            await rig.gateway.expect(Finished)
            assert len(rig.gateway.of(Tokens)) == 300
            assert rig.gateway.messages - before < 60

        play(tmp_path, scene)

    def test_stops_reading_the_engine_while_the_gateway_does_not_read(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            rig.gateway.reading.clear()
            await rig.gateway.send(run_frame(b"a", {"say": ["x" * 4_000], "times": 6_000}))
            await asyncio.sleep(0.5)
            assert rig.daemon is not None
            produced = rig.daemon._state.counters.pieces
            await asyncio.sleep(0.2)
            assert rig.daemon._state.counters.pieces == produced < 6_000
            rig.gateway.reading.set()
            finished = await rig.gateway.expect(Finished, timeout_s=10)
            assert finished.sequence == 6_000

        play(tmp_path, scene)

    def test_without_a_finish_reason_is_a_failure(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a", {"say": [], "end": ""}), run_frame(b"b", {"end": ""}))
            codes = {(await rig.gateway.expect(Failed)).code for _ in range(2)}
            assert codes == {"engine_empty", "engine_error"}

        play(tmp_path, scene)

    def test_whose_body_is_not_json_fails_as_the_requests_fault(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(msgspec.structs.replace(run_frame(b"a"), body=b"{nope"))
            failed = await rig.gateway.expect(Failed)
            assert protocol.FAILURES[failed.code] == "request"

        play(tmp_path, scene)


class TestSeveralAnswers:
    def test_are_made_one_after_the_other_in_one_slot_and_signed_together(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            assert rig.gateway.hellos[0].choices
            await rig.gateway.send(msgspec.structs.replace(run_frame(b"a", {"say": ["Hi", "!"]}), choices=3))
            finished = await rig.gateway.expect(Finished)
            pieces = rig.gateway.of(Tokens)
            assert [(piece.sequence, piece.choice, piece.text) for piece in pieces] == [
                (2 * choice + at, choice, word) for choice in range(3) for at, word in enumerate(("Hi", "!"))
            ]
            assert finished.finish_reasons == ["stop"] * 3
            assert finished.usage.completion_tokens == 6
            digest = hashlib.sha256(b"Hi!" * 3).digest()
            payload = protocol.receipt_payload(b"a", 1, 6, "stop stop stop", finished.usage, digest)
            rig.key.public_key().verify(finished.signature, payload)
            assert len(rig.gateway.of(Accepted)) == 1

        play(tmp_path, scene)

    def test_of_which_one_has_no_reason_are_a_failure(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(msgspec.structs.replace(run_frame(b"a", {"say": ["x"], "end": ""}), choices=2))
            assert (await rig.gateway.expect(Failed)).code == "engine_error"
            assert len(rig.gateway.of(Tokens)) == 1

        play(tmp_path, scene)

    def test_stop_all_with_one_cancel(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            script = {"say": ["x"], "then": "hang"}
            await rig.gateway.send(msgspec.structs.replace(run_frame(b"a", script), choices=2))
            await rig.gateway.expect(Tokens)
            await rig.gateway.send(Cancel(b"a", 1, "client"))
            assert (await rig.gateway.expect(Finished)).finish_reason == "cancelled"
            assert {piece.choice for piece in rig.gateway.of(Tokens)} == {0}

        play(tmp_path, scene)


class TestRefusals:
    def test_say_why(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            hanging = {"say": ["x"], "then": "hang"}
            await rig.gateway.send(run_frame(b"a", hanging), run_frame(b"b", hanging), run_frame(b"c"))
            assert (await rig.gateway.expect(Refused)).code == "slot_taken"
            await rig.gateway.send(run_frame(b"d", variant_sha256="b" * 64))
            assert (await rig.gateway.expect(Refused)).code == "not_serving"
            await rig.gateway.send(run_frame(b"e", prompt_tokens=1_000, max_output_tokens=25))
            assert (await rig.gateway.expect(Refused)).code == "context_overflow"
            folder.set_paused(rig.home, True)
            await rig.gateway.expect_that(Telemetry, lambda telemetry: not telemetry.available)
            await rig.gateway.send(run_frame(b"f"))
            assert (await rig.gateway.expect(Refused)).code == "owner_active"

        play(tmp_path, scene)


class TestACancel:
    def test_stops_the_engine_and_is_reported_after_the_proof(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a", {"say": ["x"], "then": "hang"}))
            await rig.gateway.expect(Tokens)
            await rig.gateway.send(Cancel(b"a", 1, "client left"))
            finished = await rig.gateway.expect(Finished)
            assert (finished.finish_reason, finished.sequence) == ("cancelled", 1)
            assert (rig.engine.working, rig.engine.closed) == (0, 1)

        play(tmp_path, scene)

    def test_that_arrives_with_its_run_still_ends_in_one_report(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a", {"then": "hang"}), Cancel(b"a", 1, "at once"))
            finished = await rig.gateway.expect(Finished)
            assert (finished.finish_reason, finished.sequence) == ("cancelled", 0)
            assert rig.engine.requests == []

        play(tmp_path, scene)

    def test_of_an_old_epoch_changes_nothing(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a", {"say": ["x"] * 5, "gap_s": 0.01}, epoch=2), Cancel(b"a", 1, "late"))
            assert (await rig.gateway.expect(Finished)).finish_reason == "stop"

        play(tmp_path, scene)

    def test_that_the_engine_ignores_restarts_the_engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent.supervisor.VERIFY_S", 0.1)

        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a", {"say": ["x"], "then": "hang"}))
            await rig.gateway.expect(Tokens)
            await rig.gateway.send(Cancel(b"a", 1, "client left"))
            assert (await rig.gateway.expect(Finished)).finish_reason == "cancelled"
            await rig.gateway.expect_that(Inventory, lambda inventory: not inventory.offers)
            await rig.offer()
            assert len(rig.engines) == 2
            assert rig.engines[0].stopped

        play(tmp_path, scene, deaf=True)

    def test_by_void_leaves_no_report(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a", {"say": ["x"], "then": "hang"}))
            await rig.gateway.expect(Tokens)
            await rig.gateway.send(Void(b"a", 1), run_frame(b"b"))
            assert (await rig.gateway.expect(Finished)).attempt == b"b"
            assert rig.gateway.of(Failed) == []

        play(tmp_path, scene)


class TestALease:
    def test_that_is_not_renewed_stops_the_work(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            hanging = {"say": ["x"], "then": "hang"}
            await rig.gateway.send(run_frame(b"a", hanging, lease_ms=100), run_frame(b"b", hanging, lease_ms=100))
            await rig.gateway.send(Renew([protocol.RunningAttempt(b"b", 1)], 60_000))
            failed = await rig.gateway.expect(Failed)
            assert (failed.attempt, failed.code) == (b"a", "lease_expired")
            assert rig.engine.working == 1

        play(tmp_path, scene)


class TestADeadEngine:
    def test_fails_its_attempts_withdraws_the_offer_and_comes_back(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            hanging = {"say": ["x"], "then": "hang"}
            await rig.gateway.send(run_frame(b"a", hanging), run_frame(b"b", hanging))
            await rig.gateway.expect(Tokens)
            await rig.gateway.expect(Tokens)
            rig.engine.dead.set()
            codes = {(await rig.gateway.expect(Failed)).code for _ in range(2)}
            assert codes == {"engine_died"}
            await rig.gateway.expect_that(Inventory, lambda inventory: not inventory.offers)
            await rig.offer()
            await rig.gateway.send(run_frame(b"c"))
            assert (await rig.gateway.expect(Finished)).attempt == b"c"
            assert len(rig.engines) == 2

        play(tmp_path, scene)

    def test_that_dies_idle_is_noticed_without_a_request(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent.supervisor.PROCESS_CHECK_S", 0.02)

        async def scene(rig: Rig) -> None:
            rig.engine.dead.set()
            await rig.gateway.expect_that(Inventory, lambda inventory: not inventory.offers)

        play(tmp_path, scene)


class TestAnEngineThatDoesNotStart:
    def test_is_tried_again_and_the_owner_reads_why(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with Rig(tmp_path, start_error="not enough memory") as rig:
                rig.begin()
                await rig.gateway.expect(Telemetry)
                await asyncio.sleep(1.2)
                status = folder.read_status(rig.home)
                assert status is not None
                assert status.offers[0].last_error == "not enough memory"
                rig.engine_options = {}
                await rig.offer()
                assert rig.engines[0].stopped

        asyncio.run(act())

    def test_for_ever_does_not_keep_the_agent_from_stopping(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with Rig(tmp_path, slow_start=True) as rig:
                rig.begin()
                await rig.gateway.expect(Telemetry)
                asked = time.monotonic()
                assert await rig.stop() == 0
                assert time.monotonic() - asked < 2
                assert rig.engine.stopped

        asyncio.run(act())

    def test_because_its_adapter_is_broken_costs_only_the_engine(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with Rig(tmp_path, no_such_option=1) as rig:
                rig.begin()
                await rig.gateway.expect(Telemetry)
                await asyncio.sleep(0.1)
                rig.engine_options = {}
                await rig.offer()

        asyncio.run(act())


class TestALostConnection:
    def test_stops_running_work_and_resends_what_was_not_acknowledged(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            rig.gateway.acknowledge = False
            await rig.gateway.send(run_frame(b"a"), run_frame(b"b", {"say": ["x"], "then": "hang"}))
            first = await rig.gateway.expect(Finished)
            await rig.gateway.drop()
            await rig.offer()
            hello = rig.gateway.hellos[-1]
            assert b"a" in {attempt.attempt for attempt in hello.attempts}
            assert await rig.gateway.expect(Finished) == first
            failed = await rig.gateway.expect(Failed)
            assert (failed.attempt, failed.code) == (b"b", "lease_expired")
            assert rig.engine.working == 0
            await rig.gateway.send(protocol.ReportAck(b"a", 1), protocol.ReportAck(b"b", 1))
            rig.gateway.acknowledge = True
            await rig.gateway.send(run_frame(b"c"))
            await rig.gateway.expect(Finished)
            assert rig.daemon is not None
            await rig.daemon._until(lambda: rig.daemon is not None and rig.daemon._state.at_rest, 2)
            assert rig.daemon._state.reports == {}

        play(tmp_path, scene)

    def test_to_a_gateway_that_restarts_is_made_again(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            port = int(rig.gateway.url.rsplit(":", 1)[1])
            await rig.gateway.close()
            second = ScriptedGateway(rig.key.public_key())
            await second.listen(port)
            try:
                await second.expect_that(Inventory, lambda inventory: bool(inventory.offers))
                await second.send(run_frame(b"z"))
                assert (await second.expect(Finished)).attempt == b"z"
            finally:
                await second.close()

        play(tmp_path, scene)

    def test_with_a_revoked_key_ends_the_agent(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(protocol.Goodbye("revoked", "this node was retired", -1.0))
            assert rig.task is not None
            assert await asyncio.wait_for(rig.task, 5) == 1
            assert rig.engine.stopped

        play(tmp_path, scene)


class TestTheOwner:
    def test_gets_the_machine_back_at_once_and_gives_it_again(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a", {"say": ["x"], "then": "hang"}))
            await rig.gateway.expect(Tokens)
            asked = time.monotonic()
            folder.set_paused(rig.home, True)
            assert (await rig.gateway.expect(Failed)).code == "owner_preempted"
            assert time.monotonic() - asked < 3
            await rig.gateway.expect_that(Inventory, lambda inventory: not inventory.offers)
            assert rig.engine.stopped
            folder.set_paused(rig.home, False)
            await rig.offer()

        play(tmp_path, scene)


class TestAChangedFile:
    def test_of_terms_and_asks_counts_at_once(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            text = "[[models]]\nweights = 'x'\n[models.ask_usd_per_mtok]\ninput = '0.07'\noutput = '0.30'\n"
            rig.daemon._config = parse(text.replace("0.30", "0.20"))  # type: ignore[union-attr]
            (tmp_path / "config.toml").write_text(text)
            told = await rig.gateway.expect_that(
                Inventory, lambda told: bool(told.offers) and told.offers[0].output_nano_usd_per_mtok == 300_000_000
            )
            assert told.offers[0].input_nano_usd_per_mtok == 70_000_000
            (tmp_path / "config.toml").write_text("[owner]\nquiet_hours = ['mon-sun 00:00-24:00']\n" + text)
            closed = await rig.gateway.expect_that(Telemetry, lambda telemetry: not telemetry.available)
            assert closed.unavailable_reason == "inside the owner's quiet hours"

        play(tmp_path, scene)

    def test_that_cannot_be_used_changes_nothing_and_is_told(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            (tmp_path / "config.toml").write_text("[owner]\nhours = ['sometimes']\n")
            await asyncio.sleep(1.3)
            status = folder.read_status(rig.home)
            assert status is not None
            assert status.available
            assert "is not used" in status.problems[0]

        play(tmp_path, scene)


class TestStopping:
    def test_fails_what_runs_as_the_owners_doing_and_says_goodbye(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a", {"say": ["x"], "then": "hang"}))
            await rig.gateway.expect(Tokens)
            assert await rig.stop() == 0
            assert (await rig.gateway.expect(Failed)).code == "agent_stopping"
            assert (await rig.gateway.expect(protocol.Goodbye)).code == "stopping"
            assert rig.engine.stopped
            assert rig.source.closed

        play(tmp_path, scene)

    def test_lets_answers_finish_within_the_grace(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with Rig(tmp_path) as rig:
                rig.config = msgspec.structs.replace(rig.config, stop_grace_s=5.0)
                await rig.start()
                await rig.gateway.send(run_frame(b"a", {"say": ["x"] * 20, "gap_s": 0.02}))
                await rig.gateway.expect(Tokens)
                assert await rig.stop() == 0
                assert (await rig.gateway.expect(Finished)).sequence == 20

        asyncio.run(act())


class TestTelemetry:
    def test_goes_on_change_and_not_otherwise(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await asyncio.sleep(1.2)
            count = len(rig.gateway.of(Telemetry))
            await asyncio.sleep(1.2)
            assert len(rig.gateway.of(Telemetry)) == count
            rig.source.report = msgspec.structs.replace(rig.source.report, memory_used_bytes=3 << 30)
            await rig.gateway.expect_that(
                Telemetry, lambda telemetry: telemetry.devices[0].memory_used_bytes == 3 << 30, timeout_s=3
            )

        play(tmp_path, scene)


class TestTheStatusFile:
    def test_tells_what_the_agent_does(self, tmp_path: Path) -> None:
        async def scene(rig: Rig) -> None:
            await rig.gateway.send(run_frame(b"a"))
            await rig.gateway.expect(Finished)
            await asyncio.sleep(1.1)
            status = folder.read_status(rig.home)
            assert status is not None
            assert status.connected
            assert status.available
            assert status.counters["completed"] == 1
            assert [(offer.variant_sha256, offer.phase, offer.simulated) for offer in status.offers] == [
                (VARIANT, "ready", True)
            ]

        play(tmp_path, scene)
