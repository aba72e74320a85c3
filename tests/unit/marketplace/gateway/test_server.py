"""What leaves a connection, and what is heard of its client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from marketplace.gateway.http import BODY, Receive, Scope, Send, read_body, send_json
from marketplace.gateway.server import JsonHttpProtocol

ASK = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]}

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Wire:
    """A transport that keeps each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def get_extra_info(self, _: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def serve(app: App, story: Callable[[JsonHttpProtocol, Wire], Awaitable[None]]) -> None:
    """Connect a client to an application, and end the connection after the story."""

    async def act() -> None:
        config = Config(app, interface="asgi3", log_config=None, server_header=False, date_header=False)
        config.load()
        protocol = JsonHttpProtocol(config=config, server_state=ServerState(), app_state={})
        wire = Wire()
        protocol.connection_made(cast("Any", wire))
        try:
            await story(protocol, wire)
        finally:
            protocol.connection_lost(None)

    asyncio.run(act())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class TestTheHead:
    def test_leaves_with_the_first_part_of_the_body(self) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(HEAD)
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            scope["extensions"][BODY]["body"].write(b"two")
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def story(protocol: JsonHttpProtocol, wire: Wire) -> None:
            protocol.data_received(ASK)
            await turns()
            head = b"HTTP/1.1 200 OK\r\nx-a: b\r\ntransfer-encoding: chunked\r\n\r\n"
            assert wire.writes == [head + b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"]

        serve(app, story)

    def test_does_not_wait_for_a_body_that_comes_later(self) -> None:
        goes_on = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(HEAD)
            await goes_on.wait()
            await send({"type": "http.response.body", "body": b"one", "more_body": False})

        async def story(protocol: JsonHttpProtocol, wire: Wire) -> None:
            protocol.data_received(ASK)
            await turns()
            assert len(wire.writes) == 1
            assert wire.writes[0].endswith(b"\r\n\r\n")
            goes_on.set()
            await turns()
            assert wire.writes[1:] == [b"3\r\none\r\n0\r\n\r\n"]

        serve(app, story)

    def test_answers_of_requests_sent_ahead_keep_their_order(self) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await read_body(scope, receive, 10)
            await send_json(send, 200, {"path": scope["path"]})

        async def story(protocol: JsonHttpProtocol, wire: Wire) -> None:
            protocol.data_received(b"".join(ASK.replace(b"/x", b"/%d" % number) for number in range(4)))
            await turns(40)
            assert [write[-len(b'{"path":"/0"}') :] for write in wire.writes] == [
                b'{"path":"/%d"}' % number for number in range(4)
            ]

        serve(app, story)

    def test_leaves_before_a_connection_that_is_not_kept_is_closed(self) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 204, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def story(protocol: JsonHttpProtocol, wire: Wire) -> None:
            protocol.data_received(ASK)
            await turns()
            assert wire.writes[0].startswith(b"HTTP/1.1 204 ")
            assert wire.closed

        serve(app, story)


class TestAClientThatLeaves:
    def test_is_heard_of_in_the_call_that_brings_it(self) -> None:
        heard: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope["extensions"][BODY]["body"].when_gone(lambda: heard.append("gone"))
            await asyncio.Event().wait()

        async def story(protocol: JsonHttpProtocol, wire: Wire) -> None:
            protocol.data_received(ASK)
            await turns()
            assert not heard
            protocol.connection_lost(None)
            assert heard == ["gone"]

        serve(app, story)

    def test_and_had_left_before_is_heard_of_at_once(self) -> None:
        heard: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            scope["extensions"][BODY]["body"].when_gone(lambda: heard.append("gone"))

        async def story(protocol: JsonHttpProtocol, wire: Wire) -> None:
            protocol.data_received(ASK)
            await turns()
            protocol.connection_lost(None)
            await turns()
            assert heard == ["gone"]

        serve(app, story)

    def test_after_its_answer_was_whole_is_no_news(self) -> None:
        heard: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            body = scope["extensions"][BODY]["body"]
            body.when_gone(lambda: heard.append("gone"))
            await send_json(send, 200, {})

        async def story(protocol: JsonHttpProtocol, wire: Wire) -> None:
            protocol.data_received(ASK)
            await turns()
            protocol.connection_lost(None)
            await turns()
            assert not heard

        serve(app, story)
