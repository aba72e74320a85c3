"""Agents that lie: a node is paid once, for what its renter got, and touches nobody else's answer."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI
from websockets.asyncio.client import connect

from agent import protocol
from agent.protocol import Accepted, Finished, Inventory, Run, Tokens, UsageReport
from tests.fleet_world import Enrolled, enrol_node, greet, offer_report, telemetry
from tests.gateway_world import WORDS, Behaviour, ScriptedAgent, answers, stalls
from tests.stack import Renter, Stack, until
from tests.witness import assert_invariants, wait_all_ended

MODEL = "scripted"
ANSWER = "".join(WORDS)
POURED = 6_500
"""Pieces of 750 bytes: a socket on the loopback takes up to 4 MB that nobody reads."""
CHAT: list[Any] = [{"role": "user", "content": "Say something about a fox."}]


@dataclass
class Read:
    """What a client read of one stream."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: str = ""
    request_id: str = ""


async def read(client: AsyncOpenAI, **changes: Any) -> Read:
    """Stream one chat to its end."""
    seen = Read()
    try:
        raw = await client.chat.completions.with_raw_response.create(
            **{
                "model": MODEL,
                "messages": CHAT,
                "max_tokens": 50,
                "stream": True,
                "stream_options": {"include_usage": True},
                **changes,
            }
        )
        seen.request_id = raw.headers["x-request-id"]
        async for chunk in raw.parse():
            if chunk.usage is not None:
                seen.usage = chunk.usage.model_dump()
            for choice in chunk.choices:
                seen.text += choice.delta.content or ""
                seen.finish_reason = choice.finish_reason or seen.finish_reason
    except APIError as error:
        seen.error = str(error.code)
    return seen


async def comes(condition: Callable[[], Any], *, within_s: float = 25.0) -> None:
    """Wait, off the event loop, until something holds."""
    await asyncio.to_thread(until, condition, "what the story waits for", within_s=within_s)


class Liars:
    """The stack with agents that a test plays, each with an offer of its own."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.agents: list[ScriptedAgent] = []
        self.renter: Renter = stack.renter()

    async def connect(
        self, behaviour: Behaviour, *, gateway: str = "gw-0", node: Enrolled | None = None, **offer: Any
    ) -> ScriptedAgent:
        enrolled = node or await asyncio.to_thread(
            enrol_node, self.stack.factory, owner=f"owner-{secrets.token_hex(4)}", name="liar"
        )
        url = self.stack.url(gateway).replace("http", "ws") + protocol.SOCKET_PATH
        connection = await connect(url, compression=None, proxy=None, close_timeout=1.0, max_size=None)
        await greet(connection, enrolled)
        agent = ScriptedAgent(enrolled, connection, behaviour)
        report = offer_report(**{"variant_sha256": "e" * 64, "prefix_cache_s": 0.0, **offer})
        self.agents.append(agent)
        await agent.say(telemetry(), Inventory([report], None, None))
        expected = len({each.node.node_id for each in self.agents})
        for name in ("gw-0", "gw-1"):
            await comes(lambda name=name: self.stack.seen_nodes(name, MODEL) == expected)
        return agent

    def client(self, gateway: str = "gw-0") -> AsyncOpenAI:
        return AsyncOpenAI(
            api_key=self.renter.secret, base_url=f"{self.stack.url(gateway)}/v1", max_retries=0, timeout=20.0
        )

    async def end(self) -> None:
        for agent in self.agents:
            await agent.close()


def play(stack: Stack, story: Callable[[Liars], Awaitable[None]]) -> Liars:
    """Tell a story, and send its agents home."""
    liars = Liars(stack)

    async def tell() -> None:
        try:
            await story(liars)
        finally:
            await liars.end()

    asyncio.run(tell())
    wait_all_ended(stack)
    return liars


def receipts(liars: Liars) -> list[tuple[str, int, int]]:
    """(outcome, tokens in, tokens out) of what the story's renter paid."""
    rows = liars.stack.rows(
        "select outcome, input_uncached_tokens + input_cached_tokens, output_visible_tokens + output_reasoning_tokens"
        " from receipts where renter_organisation_id = :renter order by at",
        renter=liars.renter.organisation_id,
    )
    return [(row[0], row[1], row[2]) for row in rows]


def outcomes(liars: Liars) -> list[str]:
    rows = liars.stack.rows(
        "select outcome from outcomes where organisation_id = :renter order by at", renter=liars.renter.organisation_id
    )
    return [row[0] for row in rows]


async def inflates(agent: ScriptedAgent, run: Run) -> None:
    """Ten words, and a bill for ten thousand of each class."""
    await agent.say(Accepted(run.attempt, run.epoch))
    await agent.say(
        *(Tokens(run.attempt, run.epoch, n, word, [100 + n, 200 + n, 300 + n]) for n, word in enumerate(WORDS))
    )
    usage = UsageReport(10_000, -5, 10_000, 10_000)
    await agent.say(Finished(run.attempt, run.epoch, len(WORDS), "stop", usage, -1.0, -1.0, float("inf"), b"s" * 64))


async def talks_on(agent: ScriptedAgent, run: Run) -> None:
    """Goes on after its end, and ends three times."""
    await answers(agent, run)
    await agent.tokens(run, (" and", " more"), start=len(WORDS))
    await agent.finish(run, len(WORDS) + 2, "stop")
    await agent.finish(run, len(WORDS), "length")
    await agent.fail(run, len(WORDS), "engine_died")


class TestALiarWhoAnswers:
    @pytest.mark.parametrize("gateway", ["gw-0", "gw-1"], ids=["here", "over the link"])
    def test_is_paid_for_what_was_read_and_not_for_what_it_claims(self, stack: Stack, gateway: str) -> None:
        seen: list[Read] = []

        async def story(liars: Liars) -> None:
            await liars.connect(inflates)
            seen.append(await read(liars.client(gateway)))

        liars = play(stack, story)
        assert (seen[0].text, seen[0].finish_reason) == (ANSWER, "stop")
        ((outcome, prompt, output),) = receipts(liars)
        assert (outcome, prompt < 100, output <= len(WORDS) * 1.02 + 2) == ("complete", True, True)
        assert_invariants(stack)

    @pytest.mark.parametrize("gateway", ["gw-0", "gw-1"], ids=["here", "over the link"])
    def test_that_goes_on_after_its_end_is_not_heard(self, stack: Stack, gateway: str) -> None:
        seen: list[Read] = []

        async def story(liars: Liars) -> None:
            await liars.connect(talks_on)
            seen.extend([await read(liars.client(gateway)) for _ in range(3)])
            await asyncio.sleep(0.3)

        liars = play(stack, story)
        assert [each.text for each in seen] == [ANSWER] * 3
        assert [output for _, _, output in receipts(liars)] == [len(WORDS)] * 3
        assert outcomes(liars) == ["complete"] * 3
        assert_invariants(stack)


class TestAnOldEpoch:
    def test_changes_nothing(self, stack: Stack) -> None:
        seen: list[Read] = []

        async def speaks_for_others(agent: ScriptedAgent, run: Run) -> None:
            for epoch in (0, run.epoch - 1, run.epoch + 1, 2**40):
                await agent.say(
                    Tokens(run.attempt, epoch, 0, "FORGED"),
                    Finished(run.attempt, epoch, 0, "stop", UsageReport(1, 0, 1, 0), 0.0, 1.0, 1.0, b""),
                )
            await answers(agent, run)

        async def story(liars: Liars) -> None:
            await liars.connect(speaks_for_others)
            seen.append(await read(liars.client()))

        liars = play(stack, story)
        assert seen[0].text == ANSWER
        assert receipts(liars)[0][2] == len(WORDS)
        assert_invariants(stack)

    def test_that_arrives_after_the_job_moved_on_is_not_accepted(self, stack: Stack) -> None:
        """The first node refuses in time and answers late, in the old epoch and in the new one: two nodes, one job."""
        seen: list[Read] = []

        async def story(liars: Liars) -> None:
            ran: list[tuple[ScriptedAgent, Run]] = []

            async def one_of_two(agent: ScriptedAgent, run: Run) -> None:
                ran.append((agent, run))
                if len(ran) == 1:
                    await agent.fail(run, 0, "engine_error")
                    return
                first, old = ran[0]
                for attempt, epoch in ((old.attempt, old.epoch), (run.attempt, run.epoch), (old.attempt, run.epoch)):
                    await first.say(
                        Accepted(attempt, epoch),
                        *(Tokens(attempt, epoch, n, "FORGED ") for n in range(5)),
                        Finished(attempt, epoch, 5, "stop", UsageReport(9, 0, 5, 0), 0.0, 1.0, 1.0, b""),
                    )
                await asyncio.sleep(0.3)
                await answers(agent, run)

            await liars.connect(one_of_two, gateway="gw-0")
            await liars.connect(one_of_two, gateway="gw-1")
            seen.append(await read(liars.client("gw-1")))
            assert len({run.epoch for _, run in ran}) == 2

        liars = play(stack, story)
        assert (seen[0].text, seen[0].finish_reason) == (ANSWER, "stop")
        assert [output for _, _, output in receipts(liars)] == [len(WORDS)]
        assert_invariants(stack)


async def gap(agent: ScriptedAgent, run: Run) -> None:
    await agent.tokens(run, WORDS[:3])
    await agent.tokens(run, WORDS[3:], start=7)
    await agent.finish(run, len(WORDS))


async def miscounts(agent: ScriptedAgent, run: Run) -> None:
    await agent.tokens(run, WORDS)
    await agent.finish(run, len(WORDS) + 5)


async def floods(agent: ScriptedAgent, run: Run) -> None:
    for start in range(0, run.max_output_tokens * 4, 10):
        await agent.tokens(run, WORDS, start=start)
    await agent.finish(run, run.max_output_tokens * 4)


async def forges_a_chunk(agent: ScriptedAgent, run: Run) -> None:
    await agent.tokens(run, WORDS[:2])
    await agent.say(Tokens(run.attempt, run.epoch, 2, "", [], False, b'{"content":"x"}],"usage":{"cost":0}'))
    await agent.finish(run, 3)


async def huge_frame(agent: ScriptedAgent, run: Run) -> None:
    await agent.tokens(run, WORDS[:2])
    await agent.say(Tokens(run.attempt, run.epoch, 2, "x" * (5 * 1024 * 1024)))


async def garbage(agent: ScriptedAgent, run: Run) -> None:
    await agent.tokens(run, WORDS[:2])
    await agent.connection.send(b"\xc1\xc1\xc1")


class TestALiarWhoBreaksTheProtocol:
    @pytest.mark.parametrize("lie", [gap, miscounts, floods, forges_a_chunk, huge_frame, garbage])
    def test_ends_its_own_answer_and_is_paid_nothing(self, stack: Stack, lie: Behaviour) -> None:
        seen: list[Read] = []

        async def story(liars: Liars) -> None:
            liar = await liars.connect(lie)
            seen.append(await read(liars.client("gw-1")))
            seen.append(
                await read(liars.client("gw-0")) if not liar.connection.close_code else Read(error="node_failed")
            )

        liars = play(stack, story)
        assert all(each.error in ("node_failed", "no_capacity") for each in seen), seen
        assert receipts(liars) == []
        assert_invariants(stack)

    def test_costs_its_neighbours_nothing(self, stack: Stack) -> None:
        seen: list[Read] = []

        async def story(liars: Liars) -> None:
            await liars.connect(answers, gateway="gw-1")
            noise = await liars.connect(stalls, gateway="gw-0")
            for _ in range(20):
                stray = secrets.token_bytes(16)
                await noise.say(
                    Tokens(stray, 1, 0, "STRAY"),
                    Finished(stray, 1, 1, "stop", UsageReport(1, 0, 1, 0), 0.0, 1.0, 1.0, b""),
                )
            noise.abort()
            await asyncio.sleep(0.3)
            seen.extend(await asyncio.gather(*(read(liars.client(f"gw-{n % 2}")) for n in range(2))))

        play(stack, story)
        assert [each.text for each in seen] == [ANSWER] * 2
        assert_invariants(stack)


class TestASecondSocketOfOneNode:
    def test_takes_over_and_the_first_one_is_paid_nothing_more(self, stack: Stack) -> None:
        seen: list[Read] = []

        async def story(liars: Liars) -> None:
            first = await liars.connect(stalls, gateway="gw-0")
            reading = asyncio.create_task(read(liars.client("gw-0")))
            await comes(lambda: first.runs)
            await asyncio.sleep(0.3)
            await liars.connect(answers, gateway="gw-1", node=first.node)
            seen.append(await reading)
            await asyncio.sleep(1.2)  # it failed an answer, and rests
            seen.append(await read(liars.client("gw-0")))
            await asyncio.wait_for(first.connection.wait_closed(), 5)

        liars = play(stack, story)
        assert seen[0].error == "node_failed"
        assert (seen[0].text, seen[1].text) == ("".join(WORDS[:3]), ANSWER)
        assert outcomes(liars) == ["node_failed", "complete"]
        assert_invariants(stack)


class TestASlowReader:
    def test_is_cut_and_pays_for_what_was_delivered(self, stack: Stack) -> None:
        async def pours(agent: ScriptedAgent, run: Run) -> None:
            """More than fits between here and a client that does not read."""
            await agent.say(Accepted(run.attempt, run.epoch))
            for start in range(0, POURED, 50):
                await agent.tokens(run, ("€" * 250,) * 50, start=start)
                await asyncio.sleep(0.01)
            await agent.cancelled(run)
            await agent.finish(run, POURED, "cancelled")

        async def story(liars: Liars) -> None:
            await liars.connect(pours, context_per_slot=8192)
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", stack.ports["gw-0"]))
            body = (
                b'{"model":"scripted","stream":true,"max_tokens":7000,"messages":[{"role":"user","content":"Pour."}]}'
            )
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {liars.renter.secret}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            await comes(lambda: outcomes(liars))
            connection.close()

        liars = play(stack, story)
        assert outcomes(liars) == ["slow_reader"]
        ((outcome, _, output),) = receipts(liars)
        assert (outcome, 0 < output <= 7000) == ("slow_reader", True)
        assert_invariants(stack)
