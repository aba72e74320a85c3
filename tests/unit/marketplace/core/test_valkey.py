"""The pipe of script calls: what happens when more wait than may."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from marketplace.core import valkey
from marketplace.core.valkey import Script, ValkeyDownError, ValkeyPipe

SCRIPT = Script("return 1")


class TestThePipe:
    def test_refuses_what_is_too_much_as_if_valkey_were_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(valkey, "MAX_WAITING", 2)

        async def story() -> None:
            pipe = ValkeyPipe(cast("Any", None))
            # Nothing is sent within this turn of the loop: these two wait.
            calls = [asyncio.ensure_future(pipe.run(SCRIPT, [], [])) for _ in range(2)]
            pipe._waiting.extend(cast("Any", [None, None]))
            with pytest.raises(ValkeyDownError, match="too many calls wait"):
                await pipe.run(SCRIPT, [], [])
            pipe._waiting.clear()
            for call in calls:
                call.cancel()

        asyncio.run(story())


class Wire:
    """The transport of a line: answers each write with what it was told to."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self._line: Any = None

    def set_protocol(self, line: Any) -> None:
        self._line = line

    def write(self, _: bytes) -> None:
        for answer in self._answers:
            asyncio.get_running_loop().call_soon(self._line.data_received, answer)


def asked(*answers: bytes, commands: int = 2) -> tuple[Any, bool]:
    """What came of asking a line, and whether it may be asked again."""

    async def story() -> tuple[Any, bool]:
        line = valkey._Line(cast("Any", SimpleNamespace(_writer=SimpleNamespace(transport=Wire(*answers)))))
        try:
            replies: Any = await line.ask([("PING",)] * commands, 0.2)
        except (OSError, TimeoutError) as error:
            replies = type(error)
        return replies, line.open

    return asyncio.run(story())


class TestALine:
    def test_puts_replies_together_from_pieces(self) -> None:
        assert asked(b"$3\r\nab", b"c\r\n", b":7\r\n") == ([b"abc", 7], True)

    def test_is_of_no_use_after_bytes_that_nobody_asked_for(self) -> None:
        assert asked(b":1\r\n:2\r\n:3\r\n") == ([1, 2], False)

    def test_is_of_no_use_after_what_is_no_reply(self) -> None:
        assert asked(b"HTTP/1.1 400 Bad Request\r\n") == (ConnectionError, False)

    def test_is_of_no_use_once_a_reply_is_late(self) -> None:
        assert asked(b":1\r\n") == (TimeoutError, False)
