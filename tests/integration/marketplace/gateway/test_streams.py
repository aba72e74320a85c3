"""How a stream behaves on the wire: headers that wait, keep-alives, slow readers, deadlines, strange characters."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy import text

from agent.protocol import Accepted, Run, Tokens, Void
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.core.valkey import connect as connect_valkey
from marketplace.jobs.tasks import sweep
from tests.gateway_world import CHAT, MODEL_ID, WORDS, Renter, ScriptedAgent, World, add_renter, stalls, until, world

ANSWER = "".join(WORDS)


def late(delay_s: float) -> Any:
    """Answers after a while."""

    async def behave(agent: ScriptedAgent, run: Run) -> None:
        await agent.say(Accepted(run.attempt, run.epoch))
        await asyncio.sleep(delay_s)
        await agent.tokens(run)
        await agent.finish(run, len(WORDS))

    return behave


async def raw_stream(market: World, renter: Renter, **changes: Any) -> bytes:
    """The bytes of a streamed answer."""
    body = {"model": MODEL_ID, "messages": CHAT, "stream": True, **changes}
    headers = {"authorization": f"Bearer {renter.secret}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{market.url}/v1/chat/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert response.headers["x-request-id"].startswith("req_")
        return await response.read()


class TestTheWire:
    def test_has_data_lines_comments_one_finish_and_one_end(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, header_wait_s=0.1, keepalive_s=0.3) as market:
                await market.connect(late(1.2))
                raw = await raw_stream(market, renter, stream_options={"include_usage": True})
                events = raw.split(b"\n\n")
                assert events.pop() == b""
                comments = [event for event in events if event.startswith(b": ")]
                assert 2 <= len(comments) <= 5
                data = [event for event in events if not event.startswith(b": ")]
                assert all(event.startswith(b"data: ") and b"\n" not in event for event in data)
                assert data.pop() == b"data: [DONE]"
                chunks = [json.loads(event[6:]) for event in data]
                assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
                assert chunks[-1]["choices"] == []
                assert chunks[-1]["usage"]["completion_tokens"] == len(WORDS)
                assert all(chunk["usage"] is None for chunk in chunks[:-1])
                reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
                assert reasons == [None] * len(WORDS) + ["stop"]
                assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1

        asyncio.run(story())

    def test_reads_well_for_the_official_client_although_keep_alives_come_between(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, header_wait_s=0.1, keepalive_s=0.3) as market:
                await market.connect(late(0.9))
                stream = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                assert text == ANSWER

        asyncio.run(story())

    def test_escapes_what_breaks_lines_and_passes_everything_else(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        strange = ("a\u2028b\u2029c", "\x00\x07", "\r\n\n", 'quote " and \\', "😀", "data: [DONE]\n\n")

        async def speaks(agent: ScriptedAgent, run: Run) -> None:
            await agent.tokens(run, strange)
            await agent.finish(run, len(strange))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(speaks)
                raw = await raw_stream(market, renter)
                assert b"\\u2028" in raw
                assert "\u2028".encode() not in raw
                events = [event[6:] for event in raw.split(b"\n\n") if event]
                assert events.pop() == b"[DONE]"
                deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
                assert "".join(deltas) == "".join(strange)
                done = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert done.choices[0].message.content == "".join(strange)
                await market.settled()
                assert market.books.outcomes() == ["complete"] * 2

        asyncio.run(story())

    def test_carries_reasoning_and_tool_calls_apart(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":'}}
        rest = {"index": 0, "function": {"arguments": '"fox"}'}}

        async def reasons(agent: ScriptedAgent, run: Run) -> None:
            extras = [json.dumps({"tool_calls": [part]}).encode() for part in (call, rest)]
            await agent.say(
                Tokens(run.attempt, run.epoch, 0, "Let me think", reasoning=True),
                Tokens(run.attempt, run.epoch, 1, "", extra=extras[0]),
                Tokens(run.attempt, run.epoch, 2, "", extra=extras[1]),
            )
            await agent.finish(run, 3, "tool_calls")

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(reasons)
                done = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                message = done.choices[0].message
                assert done.choices[0].finish_reason == "tool_calls"
                assert message.tool_calls is not None
                assert message.tool_calls[0].to_dict()["function"] == {"name": "look", "arguments": '{"at":"fox"}'}
                assert (message.model_extra or {})["reasoning_content"] == "Let me think"
                raw = await raw_stream(market, renter)
                deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in raw.split(b"\n\n")[:-2]]
                assert deltas[0] == {"role": "assistant", "reasoning_content": "Let me think"}
                assert [delta["tool_calls"][0] for delta in deltas[1:3]] == [call, rest]
                await market.settled()
                for receipt in market.books.receipts():
                    assert receipt.output_reasoning_tokens == 3
                    assert receipt.output_visible_tokens > 0
                assert market.books.broken_rules() == []

        asyncio.run(story())


class TestWhatTheNodeMayNotDo:
    @pytest.mark.parametrize(
        "extra", [b"{", b'{"tool_calls":7}', b'{"tool_calls":[{"index":-1}]}', b'{"logprobs":{"content":[{}]}}']
    )
    def test_extras_that_are_no_part_of_an_answer_break_the_attempt(
        self, settings: Settings, session_factory: SessionFactory, extra: bytes
    ) -> None:
        renter = add_renter(session_factory)

        async def lies(agent: ScriptedAgent, run: Run) -> None:
            await agent.say(Tokens(run.attempt, run.epoch, 0, "x", extra=extra))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(lies)
                with pytest.raises(openai.APIStatusError) as caught:
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert caught.value.status_code == 502
                await market.settled()
                assert market.books.outcomes() == ["node_failed"]

        asyncio.run(story())

    def test_an_answer_beyond_its_bound_breaks_the_attempt(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def talks(agent: ScriptedAgent, run: Run) -> None:
            await agent.tokens(run, (" word",) * 60)
            await agent.finish(run, 60)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(talks)
                with pytest.raises(openai.APIStatusError):
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=10)
                await market.settled()
                assert market.books.outcomes() == ["node_failed"]
                assert market.books.receipts() == []

        asyncio.run(story())

    def test_fields_in_extras_beyond_the_known_ones_are_dropped(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def slips(agent: ScriptedAgent, run: Run) -> None:
            extra = json.dumps({"role": "system", "usage": {"cost": "0"}, "tool_calls": []}).encode()
            await agent.say(Tokens(run.attempt, run.epoch, 0, "hello", extra=extra))
            await agent.finish(run, 1)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(slips)
                raw = await raw_stream(market, renter)
                assert b'"cost"' not in raw
                assert b'"system"' not in raw

        asyncio.run(story())


class TestAClock:
    def test_that_runs_out_mid_stream_charges_what_was_delivered_and_ends_with_an_error(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, request_timeout_s=1.0) as market:
                agent = await market.connect(stalls)
                raw = await raw_stream(market, renter)
                assert b'"code":"deadline_exceeded"' in raw
                assert b"[DONE]" not in raw
                assert b'"finish_reason":"' not in raw
                assert agent.cancels
                await market.settled()
                assert market.books.outcomes() == ["deadline"]
                assert market.books.receipts()[0].output_visible_tokens == 3
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_that_runs_out_without_streaming_hands_over_what_was_paid_for(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, request_timeout_s=1.0) as market:
                await market.connect(stalls)
                done = await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT)
                assert done.choices[0].message.content == "".join(WORDS[:3])
                assert done.choices[0].finish_reason == "length"
                await market.settled()
                assert market.books.outcomes() == ["deadline"]

        asyncio.run(story())

    def test_that_runs_out_before_the_first_token_costs_nothing(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, request_timeout_s=0.8) as market:
                await market.connect(late(30.0))
                agent = market.agents[0]

                async def stops(agent: ScriptedAgent, run: Run) -> None:
                    await agent.cancelled(run)
                    await agent.finish(run, 0, "cancelled")

                agent.behaviour = stops
                with pytest.raises(openai.APIStatusError) as caught:
                    await market.client(renter).chat.completions.create(model=MODEL_ID, messages=CHAT, stream=True)
                assert caught.value.status_code == 504
                await market.settled()
                assert market.books.outcomes() == ["expired"]
                assert market.books.receipts() == []

        asyncio.run(story())

    def test_keeps_a_lease_alive_beyond_its_length_while_the_answer_comes(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, lease_s=0.9, checkpoint_s=0.2) as market:
                agent = await market.connect(late(1.6))
                raw = await raw_stream(market, renter)
                assert raw.endswith(b"[DONE]\n\n")
                renewals = [frame for frame in agent.frames if type(frame).__name__ == "Renew"]
                assert len(renewals) >= 4
                await market.settled()
                assert market.books.outcomes() == ["complete"]

        asyncio.run(story())


class TestASlowReader:
    def test_is_cut_and_pays_for_what_it_took(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)
        word = " word" * 600

        async def floods(agent: ScriptedAgent, run: Run) -> None:
            for index in range(650):
                await agent.say(Tokens(run.attempt, run.epoch, index, word))
            await agent.cancelled(run)
            await agent.finish(run, 650, "cancelled")

        async def story() -> None:
            async with world(settings, session_factory, slow_reader_s=0.5, send_buffer_bytes=8_192) as market:
                agent = await market.connect(floods, context_per_slot=8_192)
                narrow = socket.socket()
                narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                narrow.setblocking(False)
                await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", market.settings.port))
                reader, writer = await asyncio.open_connection(sock=narrow, limit=1_024)
                body = json.dumps({"model": MODEL_ID, "messages": CHAT, "stream": True, "max_tokens": 8_000}).encode()
                writer.write(
                    f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {renter.secret}\r\n"
                    f"content-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                await reader.readexactly(15)
                await until(lambda: agent.cancels)
                assert agent.cancels[0].reason == "slow_reader"
                await market.settled()
                assert market.books.outcomes() == ["slow_reader"]
                (receipt,) = market.books.receipts()
                assert 0 < receipt.output_visible_tokens <= 8_000
                assert market.books.broken_rules() == []
                began = time.monotonic()
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1 << 30)
                assert time.monotonic() - began < 5
                writer.close()

        asyncio.run(story())


class TestALeaseThatSomebodyElseEnded:
    def test_stops_the_node_and_tells_the_client_and_is_paid_once(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, checkpoint_s=0.3) as market:
                agent = await market.connect(stalls)
                reading = asyncio.create_task(raw_stream(market, renter))
                await until(lambda: any(attempt.accepted_tokens for attempt in market.books.attempts()))
                await asyncio.to_thread(take_leases_away, market)
                raw = await reading
                assert b'"code":"platform_failed"' in raw
                assert b"[DONE]" not in raw
                await until(lambda: any(isinstance(frame, Void) for frame in agent.frames))
                await market.settled()
                assert market.books.outcomes() == ["platform_failed"]
                (receipt,) = market.books.receipts()
                assert (receipt.charge_nano, receipt.output_visible_tokens) == (0, 3)
                assert receipt.loss_nano > 0
                assert market.books.broken_rules() == []

        asyncio.run(story())


def take_leases_away(market: World) -> None:
    """What a sweeper does once the database's clock has passed them."""
    with transaction(market.factory) as session:
        session.execute(text("update attempts set lease_expires_at = now() - interval '1 s' where state = 'leased'"))
    sweep(market.factory, connect_valkey(market.settings.valkey_url), market.settings)
