"""Batches of frames, bounded, in order, with back-pressure."""

from __future__ import annotations

import asyncio

from agent import protocol
from agent.outbox import HIGH_WATER_FRAMES, MAX_BATCH_BYTES, MAX_BATCH_FRAMES, Outbox, size_bound_bytes
from agent.protocol import Inventory, OfferReport, Tokens


def token(number: int, text: str = "x") -> Tokens:
    return Tokens(b"a" * 16, 1, number, text)


class TestAnOutbox:
    def test_keeps_the_order_over_batches(self) -> None:
        async def act() -> None:
            outbox = Outbox()
            for number in range(2_000):
                outbox.put(token(number))
            taken = []
            while batch := outbox.take():
                assert len(batch) <= MAX_BATCH_FRAMES
                taken += batch
            assert [frame.sequence for frame in taken] == list(range(2_000))

        asyncio.run(act())

    def test_makes_messages_that_fit(self) -> None:
        async def act() -> None:
            outbox = Outbox()
            for number in range(40):
                outbox.put(token(number, "\N{GRINNING FACE}" * 60_000))
            while batch := outbox.take():
                assert len(protocol.encode(list(batch))) < protocol.MAX_MESSAGE_BYTES

        asyncio.run(act())

    def test_makes_producers_wait_until_it_has_drained(self) -> None:
        async def act() -> None:
            outbox = Outbox()
            for number in range(HIGH_WATER_FRAMES):
                outbox.put(token(number))
            assert outbox.congested
            waiting = asyncio.create_task(outbox.room())
            outbox.take()
            await asyncio.sleep(0)
            assert not waiting.done()
            outbox.take()
            await asyncio.wait_for(waiting, 1)
            assert not outbox.congested

        asyncio.run(act())

    def test_lets_producers_go_when_the_connection_is_over(self) -> None:
        async def act() -> None:
            outbox = Outbox()
            for number in range(HIGH_WATER_FRAMES):
                outbox.put(token(number))
            outbox.release()
            await asyncio.wait_for(outbox.room(), 1)
            assert len(outbox) == 0

        asyncio.run(act())


class TestTheSizeBound:
    def test_is_never_below_the_encoded_size(self) -> None:
        offer = OfferReport(
            "a" * 64, "GPU-" + "b" * 36, 8, 4096, 1, 1, 1, "llama.cpp", "b" * 40, False, True, 300.0, 1.0, 1.0
        )
        frames = [
            token(2**40, "\N{GRINNING FACE}" * 50),
            Tokens(b"a" * 16, 2**31, 5, "", [2**40] * 100, True, b"{}" * 500),
            Inventory([offer] * 16, 10.0, 20.0),
            protocol.Failed(
                b"a" * 16, 1, 1, "engine_error", "\N{GRINNING FACE}" * 500, protocol.UsageReport(1, 1, 1, 1)
            ),
        ]
        for frame in frames:
            assert len(protocol.encode([frame])) <= size_bound_bytes(frame) < MAX_BATCH_BYTES
