"""Routes: fences, bounds, and how they end."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from agent.protocol import (
    Accepted,
    Failed,
    Finished,
    GatewayFrame,
    Refused,
    ReportAck,
    ResumePoint,
    Run,
    RunningAttempt,
    Tokens,
    UsageReport,
    Void,
)
from marketplace.fleet import links as module
from marketplace.fleet.links import AttemptFrame, GoneReason, Links, NodeUnreachable, Route
from marketplace.matching.types import OfferView
from tests.fleet_world import offer_view

OFFER = offer_view()
NODE = OFFER.node_id


class Wire:
    """A carrier that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[GatewayFrame] = []
        self.open: list[Route] = []
        self.full = False

    def send(self, node_id: UUID, frame: GatewayFrame) -> bool:
        if not self.full:
            self.sent.append(frame)
        return not self.full

    def opened(self, route: Route) -> None:
        self.open.append(route)

    def closed(self, route: Route) -> None:
        self.open.remove(route)


class Sink:
    def __init__(self) -> None:
        self.frames: list[AttemptFrame] = []
        self.gone: list[GoneReason] = []

    def on_frame(self, frame: AttemptFrame) -> None:
        self.frames.append(frame)

    def on_gone(self, reason: GoneReason) -> None:
        self.gone.append(reason)


class World:
    def __init__(self) -> None:
        self.wire = Wire()
        self.full: list[UUID] = []
        self.links = Links(lambda node_id, _: self.wire if node_id == NODE else None, self.full.append)

    def run(self, *, epoch: int = 3, offer: OfferView = OFFER) -> tuple[bytes, Sink]:
        attempt_id, sink = uuid4(), Sink()
        self.links.open(offer, attempt_id, sink)
        self.links.send(NODE, Run(attempt_id.bytes, epoch, "a" * 64, b"{}", 1, 4, 15_000, 60_000))
        return attempt_id.bytes, sink

    def take(self, frame: AttemptFrame, node_id: UUID | None = NODE) -> bool:
        return self.links.dispatch(self.wire, node_id, frame)


@pytest.fixture
def world() -> World:
    return World()


def piece(attempt: bytes, sequence: int, epoch: int = 3) -> Tokens:
    return Tokens(attempt, epoch, sequence, "x")


def end(attempt: bytes, sequence: int) -> Finished:
    return Finished(attempt, 3, sequence, "stop", UsageReport(), 0.0, None, 1.0)


class TestARoute:
    def test_takes_frames_up_to_the_report_and_swallows_what_follows(self, world: World) -> None:
        attempt, sink = world.run()
        frames: list[AttemptFrame] = [Accepted(attempt, 3), piece(attempt, 0), piece(attempt, 1), end(attempt, 2)]
        assert all(world.take(frame) for frame in frames)
        assert world.take(end(attempt, 2))
        assert world.take(piece(attempt, 2))
        assert world.take(Failed(attempt, 3, 2, "engine_died", "", UsageReport()))
        assert sink.frames == frames
        assert sink.gone == []

    @pytest.mark.parametrize("epoch", [2, 4])
    def test_knows_no_other_epoch(self, world: World, epoch: int) -> None:
        attempt, sink = world.run()
        assert not world.take(piece(attempt, 0, epoch))
        assert sink.frames == []

    def test_takes_nothing_before_the_attempt_was_sent(self, world: World) -> None:
        attempt_id, sink = uuid4(), Sink()
        world.links.open(OFFER, attempt_id, sink)
        assert not world.take(piece(attempt_id.bytes, 0, epoch=1))

    def test_listens_to_its_own_node_and_carrier_only(self, world: World) -> None:
        attempt, sink = world.run()
        assert not world.take(piece(attempt, 0), node_id=uuid4())
        assert not world.links.dispatch(Wire(), NODE, piece(attempt, 0))
        assert sink.frames == []

    @pytest.mark.parametrize(
        "lie",
        [
            lambda attempt: Tokens(attempt, 3, 1, "gap"),
            lambda attempt: Tokens(attempt, 3, 0, "x" * (module.MAX_TEXT_CHARS + 1)),
            lambda attempt: Tokens(attempt, 3, 0, "x", [0] * (module.MAX_IDS + 1)),
            lambda attempt: Tokens(attempt, 3, 0, "x", [], False, b"x" * (module.MAX_EXTRA_BYTES + 1)),
            lambda attempt: end(attempt, 1),
        ],
    )
    def test_ends_with_the_nodes_lie(self, world: World, lie: object) -> None:
        attempt, sink = world.run()
        assert callable(lie)
        assert world.take(lie(attempt))
        assert sink.gone == [GoneReason.PROTOCOL]
        assert sink.frames == []
        assert world.wire.sent[-1] == Void(attempt, 3)
        assert world.wire.open == []

    def test_bounds_the_number_of_pieces_by_what_was_asked(self, world: World) -> None:
        attempt, sink = world.run()
        for sequence in range(200):
            world.take(piece(attempt, sequence))
        assert len(sink.frames) == 2 * 4 + module.SPARE_PIECES
        assert sink.gone == [GoneReason.PROTOCOL]

    def test_survives_a_sink_that_breaks(self, world: World) -> None:
        broken = Sink()
        attempt_id = uuid4()
        world.links.open(OFFER, attempt_id, broken)
        world.links.send(NODE, Run(attempt_id.bytes, 3, "a" * 64, b"{}", 1, 4, 15_000, 60_000))
        other, sink = world.run()

        def fail(_: AttemptFrame) -> None:
            raise RuntimeError("a bug")

        broken.on_frame = fail  # type: ignore[method-assign]
        assert world.take(piece(attempt_id.bytes, 0))
        assert broken.gone == [GoneReason.STOPPING]
        assert world.take(piece(other, 0))
        assert sink.frames == [piece(other, 0)]

    def test_is_closed_once_and_silently(self, world: World) -> None:
        attempt, sink = world.run()
        world.links.close(UUID(bytes=attempt))
        world.links.close(UUID(bytes=attempt))
        assert not world.take(piece(attempt, 0))
        assert sink.gone == []
        assert world.wire.open == []

    def test_that_has_its_report_does_not_hear_that_the_node_is_gone(self, world: World) -> None:
        attempt, sink = world.run()
        world.take(end(attempt, 0))
        world.links.lose(world.links.routes[attempt], GoneReason.NODE_GONE)
        assert sink.gone == []
        assert attempt not in world.links.routes


class TestLinks:
    def test_refuse_a_node_that_is_nowhere(self, world: World) -> None:
        with pytest.raises(NodeUnreachable):
            world.links.open(offer_view(), uuid4(), Sink())
        with pytest.raises(NodeUnreachable):
            world.links.send(uuid4(), ReportAck(b"a" * 16, 1))

    def test_say_so_when_the_socket_takes_nothing(self, world: World) -> None:
        world.wire.full = True
        with pytest.raises(NodeUnreachable):
            world.run()

    def test_refuse_one_attempt_twice(self, world: World) -> None:
        attempt, _ = world.run()
        with pytest.raises(ValueError, match="already routed"):
            world.links.open(OFFER, UUID(bytes=attempt), Sink())

    def test_are_bounded(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_ROUTES", 2)
        world.run()
        world.run()
        with pytest.raises(NodeUnreachable):
            world.run()

    def test_hear_that_an_agent_had_no_slot_left(self, world: World) -> None:
        attempt, sink = world.run()
        refused = Refused(attempt, 3, "slot_taken", "")
        world.take(refused)
        assert world.full == [OFFER.offer_id]
        assert sink.frames == [refused]


class TestABreak:
    def parked(self, world: World) -> tuple[bytes, Sink]:
        attempt, sink = world.run()
        world.take(piece(attempt, 0))
        world.take(piece(attempt, 1))
        assert world.links.park(world.links.routes[attempt], until=103.0)
        return attempt, sink

    def test_is_outlived_by_an_answer_that_goes_on_where_it_was(self, world: World) -> None:
        attempt, sink = self.parked(world)
        assert world.wire.open == []
        newer = Wire()
        points, unknown = world.links.resume(newer, NODE, [RunningAttempt(attempt, 3)])
        assert (points, unknown) == ([ResumePoint(attempt, 3, 2)], [])
        assert not world.take(piece(attempt, 2)), "the older socket is no way any more"
        assert world.links.dispatch(newer, NODE, piece(attempt, 2))
        assert world.links.dispatch(newer, NODE, end(attempt, 3))
        assert [getattr(frame, "sequence", -1) for frame in sink.frames] == [0, 1, 2, 3]
        assert sink.gone == []

    def test_that_skips_a_piece_is_no_resumption(self, world: World) -> None:
        attempt, sink = self.parked(world)
        newer = Wire()
        world.links.resume(newer, NODE, [RunningAttempt(attempt, 3)])
        world.links.dispatch(newer, NODE, piece(attempt, 3))
        assert sink.gone == [GoneReason.PROTOCOL]

    def test_is_given_up_in_time(self, world: World) -> None:
        _, sink = self.parked(world)
        world.links.expire_parked(102.9)
        assert sink.gone == []
        world.links.expire_parked(103.0)
        assert sink.gone == [GoneReason.NODE_GONE]
        assert world.links.routes == {}

    def test_is_no_reason_to_wait_for_an_answer_that_has_not_begun(self, world: World) -> None:
        attempt, _ = world.run()
        assert not world.links.park(world.links.routes[attempt], until=103.0)

    @pytest.mark.parametrize("epoch", [2, 4])
    def test_revives_no_other_epoch(self, world: World, epoch: int) -> None:
        attempt, sink = self.parked(world)
        points, unknown = world.links.resume(Wire(), NODE, [RunningAttempt(attempt, epoch)])
        assert (points, unknown) == ([], [RunningAttempt(attempt, epoch)])
        assert sink.gone == [GoneReason.REPLACED], "the node has not what we wait for"

    def test_gives_an_answer_to_no_other_node(self, world: World) -> None:
        attempt, sink = self.parked(world)
        points, unknown = world.links.resume(Wire(), uuid4(), [RunningAttempt(attempt, 3)])
        assert (points, len(unknown)) == ([], 1)
        assert sink.gone == []

    def test_leaves_nothing_to_an_agent_that_forgot(self, world: World) -> None:
        _, sink = self.parked(world)
        assert world.links.resume(Wire(), NODE, []) == ([], [])
        assert sink.gone == [GoneReason.REPLACED]

    def test_carries_no_frame_meanwhile(self, world: World) -> None:
        attempt, _ = self.parked(world)
        with pytest.raises(NodeUnreachable):
            world.links.send(NODE, ReportAck(attempt, 3))
        world.links.close(UUID(bytes=attempt))
        assert world.links.resume(Wire(), NODE, [RunningAttempt(attempt, 3)]) == ([], [RunningAttempt(attempt, 3)])
