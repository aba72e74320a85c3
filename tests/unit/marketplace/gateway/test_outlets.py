"""A stream's pieces reach its client once each and in order, by whichever way they go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.protocol import Finished, Tokens, UsageReport
from marketplace.gateway.attempt import AttemptRun
from marketplace.gateway.outlets import StreamOutlet
from marketplace.gateway.sse import ChunkWriter
from tests.fleet_world import offer_view

ATTEMPT = b"a" * 16
PIECES = 12


class Client:
    """A server's two ways to one client, which may be slow."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bytes]] = []
        self.writable = True
        self.taking = asyncio.Event()
        self.taking.set()

    def write(self, part: bytes) -> None:
        self.events.append(("direct", part))

    async def send(self, message: Any) -> None:
        await self.taking.wait()
        if message["type"] == "http.response.body":
            self.events.append(("sent", message["body"]))

    def slow(self, *, slow: bool) -> None:
        self.writable = not slow
        (self.taking.clear if slow else self.taking.set)()

    @property
    def ways(self) -> list[str]:
        return [way for way, _ in self.events]

    @property
    def words(self) -> list[str]:
        text = b"".join(body for _, body in self.events).decode()
        return [line.split('"content":"')[1].split('"')[0] for line in text.split("\n") if '"content":"' in line]


def piece(number: int) -> Tokens:
    return Tokens(ATTEMPT, 1, number, f"w{number}")


def tell(
    story: Callable[[Client, StreamOutlet, AttemptRun], Awaitable[None]],
) -> tuple[Client, StreamOutlet, AttemptRun]:
    async def act() -> tuple[Client, StreamOutlet, AttemptRun]:
        client = Client()
        writer = ChunkWriter(completion_id="c", created=1, model="m", include_usage=False)
        outlet = StreamOutlet(
            client.send, [], [writer], header_wait_s=5, keepalive_s=5, slow_reader_s=5, now=0.0, body=client
        )
        run = AttemptRun(offer_view(), ATTEMPT, 1, 64)
        pump = asyncio.create_task(outlet.pump(run))
        await asyncio.sleep(0)
        await story(client, outlet, run)
        run.on_frame(Finished(ATTEMPT, 1, len(run.pieces), "stop", UsageReport(), 0.0, 1.0, 2.0))
        client.slow(slow=False)
        await asyncio.wait_for(pump, 5)
        return client, outlet, run

    return asyncio.run(act())


class TestDirectPieces:
    def test_only_the_first_wakes_the_pump(self) -> None:
        async def story(_: Client, __: StreamOutlet, run: AttemptRun) -> None:
            for number in range(3):
                run.on_frame(piece(number))
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        client, outlet, run = tell(story)
        assert client.ways == ["sent", "direct", "direct"]
        assert client.words == ["w0", "w1", "w2"]
        assert len(outlet.delivered(run)) == 3

    def test_what_a_slow_client_has_not_taken_is_not_delivered(self) -> None:
        async def story(client: Client, outlet: StreamOutlet, run: AttemptRun) -> None:
            run.on_frame(piece(0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            client.slow(slow=True)
            run.on_frame(piece(1))
            await asyncio.sleep(0)
            assert len(outlet.delivered(run)) == 1

        client, outlet, run = tell(story)
        assert client.ways == ["sent", "sent"]
        assert len(outlet.delivered(run)) == 2

    @given(
        steps=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=PIECES, max_size=PIECES),
    )
    def test_whatever_the_client_does_the_order_is_kept(self, steps: list[tuple[bool, int]]) -> None:
        async def story(client: Client, _: StreamOutlet, run: AttemptRun) -> None:
            for number, (slow, turns) in enumerate(steps):
                client.slow(slow=slow)
                run.on_frame(piece(number))
                for _turn in range(turns):
                    await asyncio.sleep(0)

        client, outlet, run = tell(story)
        assert client.words == [f"w{number}" for number in range(PIECES)]
        assert len(outlet.delivered(run)) == PIECES
