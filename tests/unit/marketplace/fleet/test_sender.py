"""The outgoing side of a socket."""

from __future__ import annotations

import asyncio

import pytest

from agent.protocol import ReportAck, Run, Void, decode_from_gateway
from marketplace.fleet import sender as module
from marketplace.fleet.sender import FrameSender


def ack(number: int) -> ReportAck:
    return ReportAck(number.to_bytes(16, "big"), 1)


def drain(*frames: object, close: bool = True) -> list[list[object]]:
    """The messages that leave for these frames."""
    messages: list[list[object]] = []

    async def story() -> None:
        async def write(message: bytes) -> None:
            messages.append(list(decode_from_gateway(message)))

        sender = FrameSender(write)
        for frame in frames:
            assert sender.put(frame)
        sender.close()
        assert not sender.put(ack(99))
        await sender.run()

    asyncio.run(story())
    return messages


def test_frames_of_one_turn_leave_as_one_message_in_order() -> None:
    frames = [ack(number) for number in range(50)]
    assert drain(*frames) == [frames]


def test_large_bodies_are_split_over_messages() -> None:
    bodies = [Run(bytes(16), 1, "a", b"x" * 700_000, 1, 1, 1, 1) for _ in range(3)]
    assert [len(message) for message in drain(*bodies)] == [1, 1, 1]


def test_a_queue_that_is_full_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async def write(_: bytes) -> None:
            await asyncio.sleep(0)

        sender = FrameSender(write)
        assert [sender.put(Void(bytes(16), 1)) for _ in range(4)] == [True, True, True, False]

    monkeypatch.setattr(module, "MAX_FRAMES", 3)
    asyncio.run(story())


def test_bodies_count_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async def write(_: bytes) -> None:
            await asyncio.sleep(0)

        sender = FrameSender(write)
        assert sender.put(Run(bytes(16), 1, "a", b"x" * 900, 1, 1, 1, 1))
        assert not sender.put(Run(bytes(16), 1, "a", b"x" * 900, 1, 1, 1, 1))

    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 1_500)
    asyncio.run(story())


def test_only_what_has_to_wait_takes_the_way_that_can() -> None:
    at_once: list[bytes] = []
    waited: list[bytes] = []
    answers = iter((True, False, True))

    def write_now(message: bytes) -> bool:
        if not next(answers):
            return False
        at_once.append(message)
        return True

    async def story() -> None:
        async def write(message: bytes) -> None:
            waited.append(message)

        sender = FrameSender(write, write_now)
        for number in range(3):
            sender.put(Run(number.to_bytes(16, "big"), 1, "a", b"x" * 700_000, 1, 1, 1, 1))
        sender.close()
        await sender.run()

    asyncio.run(story())
    told = [decode_from_gateway(message)[0] for message in (at_once[0], *waited, *at_once[1:])]
    assert [frame.attempt[-1] for frame in told if isinstance(frame, Run)] == [0, 1, 2]


def test_a_peer_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async def write(_: bytes) -> None:
            await asyncio.Event().wait()

        sender = FrameSender(write)
        sender.put(ack(1))
        await sender.run()

    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.02)
    with pytest.raises(TimeoutError):
        asyncio.run(story())
