"""Frames cut out of the stream: the library's own messages, replies and refusals, however the bytes come."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from marketplace.fleet.socket import LISTEN
from marketplace.gateway.sockets import DirectSocketProtocol

LIMIT_BYTES = 70_000
HANDSHAKE = (
    b"GET /agent HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def get_extra_info(self, _: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Socket:
    """A protocol after its handshake, with an application that listens."""

    def __init__(self) -> None:
        self.messages: list[bytes | None] = []
        self.wire = Wire()
        self.greeted = asyncio.Event()
        self.ended = asyncio.Event()
        self.end: dict[str, Any] = {}
        config = Config(
            self._app,
            interface="asgi3",
            log_config=None,
            ws_max_size=LIMIT_BYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=None,
        )
        self.protocol = DirectSocketProtocol(config=config, server_state=ServerState(), app_state={})
        self.protocol.connection_made(cast("Any", self.wire))
        self.listening = asyncio.Event()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        self.greeted.set()
        await self.listening.wait()
        scope["extensions"][LISTEN]["listen"](self.messages.append)
        self.end = await receive()
        self.ended.set()

    async def open(self, *, listening: bool = True) -> Socket:
        self.protocol.data_received(HANDSHAKE)
        await asyncio.wait_for(self.greeted.wait(), 5)
        if listening:
            await self.listen()
        self.wire.written = b""
        return self

    async def listen(self) -> None:
        self.listening.set()
        await asyncio.sleep(0)

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.protocol.data_received(piece)


def frame(opcode: Opcode, data: bytes, *, fin: bool = True, mask: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=mask)


def binary(data: bytes) -> bytes:
    return frame(Opcode.BINARY, data)


def opened(*, listening: bool = True) -> Any:
    return Socket().open(listening=listening)


payloads = st.one_of(st.binary(max_size=40), st.sampled_from([125, 126, 127, 65_535, 65_536]).map(bytes))
messages = st.one_of(
    payloads.map(lambda data: ([binary(data)], [data], b"")),
    st.binary(max_size=20).map(lambda data: ([frame(Opcode.PING, data)], [], frame(Opcode.PONG, data, mask=False))),
    st.text(max_size=10).map(lambda text: ([frame(Opcode.TEXT, text.encode())], [None], b"")),
    st.tuples(st.binary(max_size=20), st.binary(max_size=20)).map(
        lambda halves: (
            [frame(Opcode.BINARY, halves[0], fin=False), frame(Opcode.PING, b""), frame(Opcode.CONT, halves[1])],
            [halves[0] + halves[1]],
            frame(Opcode.PONG, b"", mask=False),
        )
    ),
)  # fmt: skip


class TestAnyStream:
    @given(parts=st.lists(messages, max_size=8), cuts=st.lists(st.integers(0, 200_000), max_size=6))
    def test_whatever_pieces_it_comes_in_the_messages_and_replies_are_the_same(
        self, parts: list[Any], cuts: list[int]
    ) -> None:
        async def act() -> None:
            socket = await opened()
            stream = b"".join(piece for frames, _, _ in parts for piece in frames)
            edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
            socket.feed(*(stream[start:end] for start, end in pairwise(edges)))
            assert socket.messages == [message for _, expected, _ in parts for message in expected]
            assert socket.wire.written == b"".join(reply for _, _, reply in parts)
            assert not socket.wire.closed

        asyncio.run(act())

    def test_byte_by_byte(self) -> None:
        async def act() -> None:
            socket = await opened()
            stream = binary(b"one") + frame(Opcode.PING, b"p") + binary(b"x" * 300)
            socket.feed(*(stream[at : at + 1] for at in range(len(stream))))
            assert socket.messages == [b"one", b"x" * 300]

        asyncio.run(act())


class TestBeforeTheApplicationListens:
    def test_what_came_is_handed_over_first_and_in_order(self) -> None:
        async def act() -> None:
            socket = await opened(listening=False)
            half = binary(b"third")
            socket.feed(binary(b"first") + binary(b"second") + half[:4])
            assert socket.messages == []
            await socket.listen()
            assert socket.messages == [b"first", b"second"]
            socket.feed(half[4:])
            assert socket.messages == [b"first", b"second", b"third"]

        asyncio.run(act())


class TestSending:
    @pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
    def test_a_message_is_the_frame_that_the_library_would_send(self, size: int) -> None:
        async def act() -> None:
            socket = await opened()
            await socket.protocol.send({"type": "websocket.send", "bytes": bytes(size)})
            assert socket.wire.written == frame(Opcode.BINARY, bytes(size), mask=False)

        asyncio.run(act())

    def test_after_the_close_nothing_is_sent(self) -> None:
        async def act() -> None:
            socket = await opened()
            socket.feed(frame(Opcode.CLOSE, b"\x03\xe8"))
            socket.wire.written = b""
            with pytest.raises(OSError):
                await socket.protocol.send({"type": "websocket.send", "bytes": b"late"})
            assert socket.wire.written == b""

        asyncio.run(act())


class TestWhatMayNotBe:
    @pytest.mark.parametrize(
        "wrong",
        [
            frame(Opcode.BINARY, b"unmasked", mask=False),
            frame(Opcode.BINARY, b"x" * (LIMIT_BYTES + 1)),
            frame(Opcode.BINARY, b"begun", fin=False) + binary(b"another within it"),
            b"\xc2" + binary(b"reserved bit")[1:],
            b"\x83" + binary(b"no such opcode")[1:],
            frame(Opcode.CONT, b"of nothing"),
        ],
        # Masks are random, and names must not be.
        ids=["unmasked", "too long", "within another", "reserved bit", "no such opcode", "nothing to go on from"],
    )
    def test_it_ends_the_connection_and_hands_over_nothing(self, wrong: bytes) -> None:
        async def act() -> None:
            socket = await opened()
            socket.feed(binary(b"good"), wrong, binary(b"after"))
            assert socket.messages == [b"good"]
            assert socket.wire.closed
            assert socket.wire.written[0] == 0x88, "a close frame says why"
            await asyncio.wait_for(socket.ended.wait(), 5)
            assert socket.end["type"] == "websocket.disconnect"

        asyncio.run(act())

    @pytest.mark.parametrize("last", [frame(Opcode.CLOSE, b"\x03\xe8"), b"\x83" + binary(b"no such opcode")[1:]])
    def test_nothing_counts_that_came_with_the_end_and_behind_it(self, last: bytes) -> None:
        async def act() -> None:
            socket = await opened()
            socket.feed(binary(b"good") + last + binary(b"after"))
            assert socket.messages == [b"good"]
            await asyncio.wait_for(socket.ended.wait(), 5)

        asyncio.run(act())

    def test_a_frame_that_our_own_close_cuts_in_two_stays_whole(self) -> None:
        async def act() -> None:
            socket = await opened()
            half = binary(b"on its way")
            socket.feed(half[:5])
            await socket.protocol.send({"type": "websocket.close", "code": 1008})
            socket.feed(half[5:] + frame(Opcode.CLOSE, b"\x03\xf0"))
            await asyncio.wait_for(socket.ended.wait(), 5)
            assert socket.end["code"] == 1008

        asyncio.run(act())

    def test_a_close_is_answered_and_told(self) -> None:
        async def act() -> None:
            socket = await opened()
            socket.feed(binary(b"last") + frame(Opcode.CLOSE, b"\x03\xe8"), binary(b"after"))
            assert socket.messages == [b"last"]
            await asyncio.wait_for(socket.ended.wait(), 5)
            assert socket.end["code"] == 1000

        asyncio.run(act())
