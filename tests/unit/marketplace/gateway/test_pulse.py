"""Leases are kept while work goes on, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from agent.protocol import Renew, Tokens
from marketplace.core.errors import Unavailable
from marketplace.core.settings import Settings
from marketplace.fleet.links import NodeUnreachable
from marketplace.gateway.attempt import AttemptRun
from marketplace.gateway.outcomes import Ending
from marketplace.gateway.pulse import Pulse
from marketplace.jobs.hot import Checkpoint, Checkpointed
from tests.fleet_world import offer_view


class Writer:
    """Answers checkpoints as told."""

    def __init__(self, answer: Checkpointed | Exception) -> None:
        self.answer = answer
        self.records: list[Checkpoint] = []

    async def submit(self, record: Checkpoint) -> Checkpointed:
        self.records.append(record)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Nodes:
    """Takes frames and renewals."""

    def __init__(self) -> None:
        self.sent: list[tuple[UUID, Any]] = []
        self.renewed: list[UUID] = []
        self.reachable = True

    def send(self, node_id: UUID, frame: Any) -> None:
        if not self.reachable:
            raise NodeUnreachable("gone")
        self.sent.append((node_id, frame))

    async def renew(self, offer: Any, attempt_id: UUID, ttl_s: float) -> None:
        self.renewed.append(attempt_id)


class Beat:
    """What the pulse watches."""

    def __init__(self, number: int = 1, offer: Any = None) -> None:
        self.run: AttemptRun | None = AttemptRun(offer or offer_view(), bytes([number]) * 16, 1, 8)
        self.ticks = 0
        self.stopped: Ending | None = None

    def tick(self, now: float) -> None:
        self.ticks += 1

    def stop(self, ending: Ending) -> None:
        self.stopped = ending


def tell(
    story: Callable[[Pulse, Writer, Nodes], Awaitable[None]],
    answer: Checkpointed | Exception = Checkpointed(True, False),  # noqa: B008  # frozen
) -> None:
    async def run() -> None:
        writer, nodes = Writer(answer), Nodes()
        settings = Settings(_env_file=None, lease_s=0.3, checkpoint_s=0.05)  # type: ignore[call-arg]
        await story(Pulse(settings, writer, nodes, nodes), writer, nodes)

    asyncio.run(run())


class TestACheckpoint:
    def test_tells_the_count_and_renews_one_node_with_one_frame(self) -> None:
        async def story(pulse: Pulse, writer: Writer, nodes: Nodes) -> None:
            offer = offer_view()
            beats = [Beat(1, offer), Beat(2, offer), Beat(3)]
            for beat in beats:
                pulse.join(beat)
            run = beats[0].run
            assert run is not None
            run.on_frame(Tokens(run.attempt_id, 1, 0, "a"))
            await pulse.checkpoint()
            assert sorted(record.accepted_tokens for record in writer.records) == [0, 0, 1]
            assert sorted(len(frame.attempts) for _, frame in nodes.sent) == [1, 2]
            assert all(isinstance(frame, Renew) and frame.lease_ms == 300 for _, frame in nodes.sent)
            assert run.lease_until > asyncio.get_running_loop().time()

        tell(story)

    def test_of_a_lease_that_is_gone_stops_the_attempt(self) -> None:
        async def story(pulse: Pulse, writer: Writer, nodes: Nodes) -> None:
            beat = Beat()
            pulse.join(beat)
            await pulse.checkpoint()
            assert beat.run is not None
            assert beat.run.ending is Ending.LEASE_LOST
            assert nodes.sent == []

        tell(story, Checkpointed(False, False))

    def test_hears_that_the_renter_cancelled(self) -> None:
        async def story(pulse: Pulse, writer: Writer, nodes: Nodes) -> None:
            beat = Beat()
            pulse.join(beat)
            await pulse.checkpoint()
            assert beat.run is not None
            assert beat.run.ending is Ending.CANCELLED

        tell(story, Checkpointed(True, True))

    def test_that_cannot_be_written_stops_the_attempt_only_once_its_lease_may_be_over(self) -> None:
        async def story(pulse: Pulse, writer: Writer, nodes: Nodes) -> None:
            beat = Beat()
            assert beat.run is not None
            beat.run.lease_until = asyncio.get_running_loop().time() + 0.1
            pulse.join(beat)
            await pulse.checkpoint()
            assert beat.run.ending is None
            assert nodes.sent == []
            await asyncio.sleep(0.12)
            await pulse.checkpoint()
            assert beat.run.ending is Ending.LEASE_LOST

        tell(story, Unavailable("away"))

    def test_leaves_what_has_ended_alone(self) -> None:
        async def story(pulse: Pulse, writer: Writer, nodes: Nodes) -> None:
            beat = Beat()
            assert beat.run is not None
            beat.run.stop(Ending.FINISHED)
            pulse.join(beat)
            await pulse.checkpoint()
            assert writer.records == []

        tell(story, Checkpointed(False, False))

    def test_bears_a_node_that_cannot_be_reached(self) -> None:
        async def story(pulse: Pulse, writer: Writer, nodes: Nodes) -> None:
            nodes.reachable = False
            beat = Beat()
            pulse.join(beat)
            await pulse.checkpoint()
            assert beat.run is not None
            assert beat.run.ending is None

        tell(story)


class TestThePulse:
    def test_beats_until_it_is_stopped_and_renews_slots(self) -> None:
        async def story(pulse: Pulse, writer: Writer, nodes: Nodes) -> None:
            beat = Beat()
            pulse.join(beat)
            pulse.start()
            await asyncio.sleep(0.4)
            await pulse.stop()
            beats = (beat.ticks, len(writer.records), len(nodes.renewed))
            assert all(count >= 1 for count in beats)
            await asyncio.sleep(0.15)
            assert (beat.ticks, len(writer.records), len(nodes.renewed)) == beats

        tell(story)

    def test_survives_a_beat_that_fails(self) -> None:
        async def story(pulse: Pulse, writer: Writer, nodes: Nodes) -> None:
            pulse.join(Beat())
            pulse.start()
            await asyncio.sleep(0.3)
            await pulse.stop()
            assert len(writer.records) >= 2

        tell(story, RuntimeError("a defect"))

    def test_says_when_nothing_runs_any_more(self) -> None:
        async def story(pulse: Pulse, writer: Writer, nodes: Nodes) -> None:
            beat = Beat()
            pulse.join(beat)
            assert not await pulse.wait_idle(0.01)
            pulse.stop_all(Ending.PLATFORM)
            assert beat.stopped is Ending.PLATFORM
            asyncio.get_running_loop().call_later(0.02, pulse.leave, beat)
            assert await pulse.wait_idle(1.0)
            assert pulse.active == 0

        tell(story)
