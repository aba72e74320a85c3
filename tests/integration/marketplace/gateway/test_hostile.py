"""Requests that no client of ours would send: each gets OpenAI's error object with its request id, and no 5xx."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import pytest

from agent.protocol import ENROL_PATH, SOCKET_PATH, Run
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.fleet.wire import LINK_PATH
from marketplace.gateway import server
from tests.gateway_world import CHAT, WORDS, Renter, ScriptedAgent, World, add_renter, answers, stalls, world
from tests.vocabularies import MODEL_ID

HUGE = 10**40
ROLES = ["renter", "owner", "finance"]
ADDRESSES = [
    "/v1/usage/%00",
    "/v1/usage?zone=%00",
    "/v1/usage?end=0001-01-01",
    "/v1/usage?start=9999-12-31",
    "/v1/jobs/job_%00",
    "/v1/finance/statement?owner=%00",
    "/v1/finance/invoice?renter=a%00b",
    "/v1/finance/invoice?period=0001-01-01",
    "/v1/finance/report?period=9999&zone=Etc/GMT-14",
    f"/v1/finance/journals/{HUGE}",
    "/v1/finance/journals/0",
    f"/v1/finance/receipts?journal={HUGE}",
]
BODIES = [
    ("/v1/quote", b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
    ("/v1/quote", b'{"model":"m","messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}"),
    (ENROL_PATH, b'{"extra":' + b"[" * 3_000 + b"]" * 3_000 + b"}"),
    ("/v1/billing/refunds", b'{"key":"a\\u0000b"}'),
    ("/v1/billing/account", b'{"country":"DE","email":"\\u0000"}'),
    ("/v1/finance/write-offs", b'{"owner":"\\u0000","amount":"1","reason":"r","key":"k"}'),
    ("/v1/finance/promotions", b'{"renter":"r","amount":"1","reason":"\\u0000","key":"k"}'),
    ("/v1/finance/disputes/%00/accept", b""),
    (f"/v1/finance/webhooks/{HUGE}/replay", b""),
]
UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"


def assert_refused(path: str, head: bytes, body: bytes) -> None:
    assert 400 <= int(head.split()[1]) < 500, (path, body)
    assert b"x-request-id: req_" in head
    assert b"content-type: application/json" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def tell(settings: Settings, factory: SessionFactory, story: Callable[[World, Renter], Awaitable[None]]) -> None:
    renter = add_renter(factory, roles=ROLES)

    async def told() -> None:
        async with world(settings, factory) as market:
            await story(market, renter)

    asyncio.run(told())


async def dial(market: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection to the gateway."""
    host, port = market.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(market: World, request: str, *, more: bytes = b"") -> tuple[bytes, bytes]:
    """(head, body) of one answer to raw bytes, read until its connection closes."""
    reader, writer = await dial(market)
    try:
        writer.write(request.encode() + more)
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return head, body
    finally:
        writer.close()


def head_of(method: str, path: str, renter: Renter, *lines: str) -> str:
    """The beginning of a raw request."""
    fields = "".join(f"{line}\r\n" for line in lines)
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {renter.secret}\r\n{fields}"


class TestWhatCannotBe:
    def test_in_an_address_is_refused(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, renter: Renter) -> None:
            for path in ADDRESSES:
                head, body = await exchange(market, head_of("GET", path, renter, "Connection: close") + "\r\n")
                assert_refused(path, head, body)

        tell(settings, session_factory, story)

    def test_in_a_body_is_refused(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, renter: Renter) -> None:
            for path, sent in BODIES:
                lines = ("Connection: close", "Content-Type: application/json", f"Content-Length: {len(sent)}")
                head, body = await exchange(market, head_of("POST", path, renter, *lines) + "\r\n", more=sent)
                assert_refused(path, head, body)

        tell(settings, session_factory, story)


class TestAWishForASocket:
    @pytest.mark.parametrize(
        "key", ["", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"], ids=["without key", "whole"]
    )
    def test_where_there_is_none_is_answered_as_a_request(
        self, settings: Settings, session_factory: SessionFactory, key: str
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            for path, status in (("/v1/chat/completions", 405), ("/nowhere", 404), ("/v1/models", 200)):
                reader, writer = await dial(market)
                writer.write((head_of("GET", path, renter) + UPGRADE + key + "\r\n").encode())
                async with asyncio.timeout(10):
                    head = await reader.readuntil(b"\r\n\r\n")
                assert int(head.split()[1]) == status, head
                assert b"content-type: application/json" in head
                assert b"x-request-id: req_" in head
                writer.close()

        tell(settings, session_factory, story)

    @pytest.mark.parametrize(
        ("method", "lines", "status"),
        [
            ("GET", UPGRADE, 400),
            ("GET", UPGRADE + "Sec-WebSocket-Key: short\r\n", 400),
            ("GET", UPGRADE.replace("13", "7") + "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", 400),
            ("GET", "Connection: close\r\n", 404),
            ("POST", "Connection: close\r\nContent-Length: 2\r\n", 404),
        ],
        ids=["no key", "a bad key", "another version", "no wish", "a body"],
    )
    def test_that_is_broken_gets_the_error_object_where_the_sockets_are(
        self, settings: Settings, session_factory: SessionFactory, method: str, lines: str, status: int
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            for path in (SOCKET_PATH, LINK_PATH):
                more = b"{}" if method == "POST" else b""
                head, body = await exchange(market, head_of(method, path, renter) + lines + "\r\n", more=more)
                assert_refused(path, head, body)
                assert int(head.split()[1]) == status

        tell(settings, session_factory, story)


class TestBytesThatAreNoHttp:
    def test_amid_a_stream_end_it_without_a_second_answer_inside(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            agent = await market.connect(stalls)
            sent = json.dumps({"model": MODEL_ID, "messages": CHAT, "stream": True}).encode()
            reader, writer = await dial(market)
            head = head_of("POST", "/v1/chat/completions", renter, f"Content-Length: {len(sent)}")
            writer.write(f"{head}\r\n".encode() + sent)
            async with asyncio.timeout(10):
                seen = await reader.readuntil(WORDS[0].encode())
                writer.write(b"\x16\x03\x01 this is no request\r\n\r\n")
                seen += await reader.read()
            writer.close()
            assert seen.count(b"HTTP/1.1") == 1
            assert agent.runs
            await market.settled()
            assert market.books.outcomes() == ["cancelled"]

        tell(settings, session_factory, story)

    def test_in_a_body_are_answered_once(
        self, settings: Settings, session_factory: SessionFactory, capfd: pytest.CaptureFixture[str]
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            for path in ("/v1/quote", "/v1/chat/completions"):
                lines = ("Transfer-Encoding: chunked", "Content-Type: application/json")
                head, body = await exchange(market, head_of("POST", path, renter, *lines) + "\r\nno size\r\n")
                assert head.startswith(b"HTTP/1.1 400")
                assert json.loads(body)["error"]["type"] == "invalid_request_error"
            await asyncio.sleep(0.1)

        tell(settings, session_factory, story)
        assert "Traceback" not in "".join(capfd.readouterr())


class TestAClientWhoHasSentItsNextRequestAlready:
    def test_and_leaves_amid_the_first_answer_has_left(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            await market.connect(stalls)
            sent = json.dumps({"model": MODEL_ID, "messages": CHAT, "stream": True}).encode()
            reader, writer = await dial(market)
            head = head_of("POST", "/v1/chat/completions", renter, f"Content-Length: {len(sent)}")
            writer.write(f"{head}\r\n".encode() + sent)
            async with asyncio.timeout(10):
                await reader.readuntil(WORDS[0].encode())
                writer.write((head_of("GET", "/v1/models", renter) + "\r\n").encode())
                await asyncio.sleep(0.2)
                writer.close()
                await market.settled()
            assert market.books.outcomes() == ["cancelled"]

        tell(settings, session_factory, story)

    def test_gets_each_answer_in_its_turn(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, renter: Renter) -> None:
            asked = [f"/nowhere/{number}" for number in range(server.MAX_AHEAD + 4)]
            requests = "".join(head_of("GET", path, renter) + "\r\n" for path in asked)
            last = head_of("GET", "/last", renter, "Connection: close") + "\r\n"
            head, body = await exchange(market, requests + last)
            seen = head + body
            places = [seen.index(f"GET {path} here".encode()) for path in (*asked, "/last")]
            assert places == sorted(places)

        tell(settings, session_factory, story)


class TestARequestThatDoesNotArrive:
    @pytest.fixture(autouse=True)
    def impatience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "PATIENCE_S", 0.3)

    @pytest.mark.parametrize(
        "sent",
        [
            "",
            "GET /v1/models HTTP/1.1\r\nHost: x\r\n",
            "POST /v1/quote HTTP/1.1\r\nContent-Length: 9\r\nAuthorization: Bearer {}\r\n\r\n{{",
        ],
        ids=["nothing", "half a head", "half a body"],
    )
    def test_is_not_awaited_for_ever(self, settings: Settings, session_factory: SessionFactory, sent: str) -> None:
        async def story(market: World, renter: Renter) -> None:
            head, body = await exchange(market, sent.format(renter.secret))
            assert head.startswith(b"HTTP/1.1 408 Request Timeout")
            assert_refused(sent, head, body)

        tell(settings, session_factory, story)

    def test_is_told_from_one_that_comes_slowly_and_from_an_answer_that_takes_its_time(
        self, settings: Settings, session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "MIN_BODY_BYTES", 2)

        async def answers_late(agent: ScriptedAgent, run: Run) -> None:
            await asyncio.sleep(1.0)
            await answers(agent, run)

        async def story(market: World, renter: Renter) -> None:
            await market.connect(answers_late)
            sent = json.dumps({"model": MODEL_ID, "messages": CHAT}).encode()
            reader, writer = await dial(market)
            head = head_of("POST", "/v1/chat/completions", renter, f"Content-Length: {len(sent)}", "Connection: close")
            writer.write(f"{head}\r\n".encode())
            for at in range(0, len(sent), 8):
                writer.write(sent[at : at + 8])
                await asyncio.sleep(0.1)
            async with asyncio.timeout(10):
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()

        tell(settings, session_factory, story)


class TestAHeadWithoutEnd:
    @pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind a stream"])
    def test_is_refused_before_it_fills_the_memory(
        self, settings: Settings, session_factory: SessionFactory, behind: bool
    ) -> None:
        async def story(market: World, renter: Renter) -> None:
            await market.connect(stalls)
            reader, writer = await dial(market)
            if behind:
                sent = json.dumps({"model": MODEL_ID, "messages": CHAT, "stream": True}).encode()
                head = head_of("POST", "/v1/chat/completions", renter, f"Content-Length: {len(sent)}")
                writer.write(f"{head}\r\n".encode() + sent)
                await reader.readuntil(WORDS[0].encode())
            writer.write(head_of("GET", "/v1/models", renter).encode())
            with contextlib.suppress(ConnectionError):
                for _ in range(64):
                    writer.write(b"X: " + b"x" * 4_096 + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.002)
            seen = b""
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(10):
                    seen = await reader.read()
            assert (b"HTTP/1.1 431" in seen) != behind or not seen
            assert writer.transport.is_closing()
            writer.close()
            await market.settled()

        tell(settings, session_factory, story)
