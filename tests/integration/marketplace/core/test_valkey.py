"""The pipe of script calls on a real Valkey: replies reach who asked, whatever happens to the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import redis

from marketplace.core import valkey
from marketplace.core.valkey import MAX_BATCH, Script, ValkeyDownError, ValkeyPipe, connect_async

ECHO = Script("return ARGV[1]")
FAILS = Script("return redis.call('HGET', KEYS[1])")


def on_a_pipe(url: str, story: Callable[[ValkeyPipe], Awaitable[None]], *, timeout_s: float = 5.0) -> None:
    async def act() -> None:
        pipe = ValkeyPipe(connect_async(url), timeout_s=timeout_s)
        try:
            await story(pipe)
        finally:
            await pipe.close()

    asyncio.run(act())


async def echo(pipe: ValkeyPipe, number: int) -> int:
    return int(await pipe.run(ECHO, [], [number]))


class TestReplies:
    def test_reach_their_callers_when_more_ask_than_go_at_once(self, valkey_url: str) -> None:
        async def story(pipe: ValkeyPipe) -> None:
            asked = list(range(2 * MAX_BATCH + 7))
            assert await asyncio.gather(*(echo(pipe, number) for number in asked)) == asked

        on_a_pipe(valkey_url, story)

    def test_a_large_one_comes_whole(self, valkey_url: str) -> None:
        async def story(pipe: ValkeyPipe) -> None:
            text = b"x" * 3_000_000
            assert await pipe.run(ECHO, [], [text]) == text
            assert await echo(pipe, 1) == 1

        on_a_pipe(valkey_url, story)

    def test_a_script_that_fails_refuses_its_own_call_alone(self, valkey_url: str) -> None:
        async def story(pipe: ValkeyPipe) -> None:
            before, failed, after = await asyncio.gather(
                echo(pipe, 1), pipe.run(FAILS, ["k"], []), echo(pipe, 2), return_exceptions=True
            )
            assert (before, after) == (1, 2)
            assert isinstance(failed, ValkeyDownError)
            assert not pipe.down

        on_a_pipe(valkey_url, story)


class TestTheConnection:
    def test_is_made_anew_where_valkey_closed_it_meanwhile(self, valkey_url: str) -> None:
        async def story(pipe: ValkeyPipe) -> None:
            assert await echo(pipe, 1) == 1
            line = pipe._line
            assert line is not None
            with redis.Redis.from_url(valkey_url) as other:
                other.client_kill_filter(_type="normal", skipme=True)
            for _ in range(5_000):
                if not line.open:
                    break
                await asyncio.sleep(0.001)
            assert await echo(pipe, 2) == 2

        on_a_pipe(valkey_url, story)

    def test_scripts_that_valkey_forgot_are_told_again(self, valkey_url: str) -> None:
        async def story(pipe: ValkeyPipe) -> None:
            assert await echo(pipe, 1) == 1
            with redis.Redis.from_url(valkey_url) as other:
                other.script_flush()
            assert await asyncio.gather(echo(pipe, 2), echo(pipe, 3)) == [2, 3]

        on_a_pipe(valkey_url, story)

    def test_a_reply_that_comes_too_late_is_nobody_elses(
        self, valkey_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(valkey, "RETRY_AFTER_S", 0.0)

        async def story(pipe: ValkeyPipe) -> None:
            assert await echo(pipe, 1) == 1
            with redis.Redis.from_url(valkey_url) as other:
                other.client_pause(1_000)
                with pytest.raises(ValkeyDownError):
                    await echo(pipe, 2)
                # Answered once the pause is over, as is what was given up.
                other.ping()
            assert await echo(pipe, 3) == 3

        on_a_pipe(valkey_url, story, timeout_s=0.5)
