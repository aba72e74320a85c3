"""How the connection greets, pauses and leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent import protocol
from agent.client import RETRY_ASKED_MAX_S, RETRY_MAX_S, Client, TurnedAway, pause_s
from agent.identity import Identity, IdentityFile
from tests.agent_doubles import NODE_ID, ScriptedGateway


class Notes:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.events: list[str] = []
        self.attempts = [protocol.RunningAttempt(b"a", 1)]
        self.connected = asyncio.Event()

    def known_attempts(self) -> list[protocol.RunningAttempt]:
        return self.attempts

    def on_connected(self, welcome: protocol.Welcome) -> None:
        self.events.append("connected")
        self.connected.set()

    def on_frames(self, frames: Sequence[protocol.GatewayFrame]) -> None:
        self.frames += frames

    def on_disconnected(self, reason: str) -> None:
        self.events.append("disconnected")
        self.connected.clear()


def client_of(gateway: ScriptedGateway, notes: Notes) -> Client:
    key = Ed25519PrivateKey.generate()
    gateway.public_key = key.public_key()
    file = IdentityFile(node_id=NODE_ID, organisation="owner", url=gateway.url, name="box")
    return Client(gateway.url + "/", Identity(file, key), "0.1", notes)


class TestTheGreeting:
    def test_proves_the_key_and_names_known_attempts(self) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                notes = Notes()
                task = asyncio.create_task(client_of(gateway, notes).run())
                hello = await gateway.expect(protocol.Hello)
                assert (hello.node_id, hello.agent_version, hello.attempts) == (NODE_ID, "0.1", notes.attempts)
                await asyncio.wait_for(notes.connected.wait(), 2)
                task.cancel()
                await asyncio.wait({task})
                assert notes.events == ["connected", "disconnected"]

        asyncio.run(act())

    def test_that_is_turned_away_is_not_tried_again(self) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                gateway.farewell = protocol.Goodbye("revoked", "this node was retired", -1)
                with pytest.raises(TurnedAway, match="retired"):
                    await asyncio.wait_for(client_of(gateway, Notes()).run(), 5)

        asyncio.run(act())

    def test_that_was_replaced_comes_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent.client.REPLACED_PAUSE_S", 0.01)

        async def act() -> None:
            async with ScriptedGateway() as gateway:
                notes = Notes()
                client = client_of(gateway, notes)
                task = asyncio.create_task(client.run())
                await asyncio.wait_for(notes.connected.wait(), 2)
                await gateway.expect(protocol.Hello)
                await gateway.send(protocol.Goodbye("replaced", "A newer socket is open.", -1.0))
                await gateway.expect(protocol.Hello, timeout_s=5)
                task.cancel()
                await asyncio.wait({task})

        asyncio.run(act())

    def test_with_another_protocol_version_waits_instead_of_hammering(self) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                gateway.version = 99
                client = client_of(gateway, Notes())
                task = asyncio.create_task(client.run())
                await asyncio.sleep(0.3)
                assert "protocol 99" in client.last_error
                assert gateway.hellos == []
                task.cancel()
                await asyncio.wait({task})

        asyncio.run(act())


class TestLeaving:
    def test_sends_what_waits_then_goodbye_and_ends(self) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                notes = Notes()
                client = client_of(gateway, notes)
                task = asyncio.create_task(client.run())
                await asyncio.wait_for(notes.connected.wait(), 2)
                for number in range(100):
                    client.send(protocol.Tokens(b"a", 1, number, "x"))
                await client.leave("stopping", "done")
                await asyncio.wait_for(task, 3)
                assert len(gateway.of(protocol.Tokens)) == 100
                assert isinstance(gateway.frames[-1], protocol.Goodbye)

        asyncio.run(act())


class TestPauses:
    def test_grow_are_jittered_and_bounded(self) -> None:
        rng = random.Random(1)
        for failures in range(40):
            samples = [pause_s(failures, None, rng) for _ in range(50)]
            assert 0 < min(samples) <= max(samples) <= RETRY_MAX_S
            assert len(set(samples)) > 40
        assert max(pause_s(1, None, rng) for _ in range(100)) <= 1.0

    def test_are_as_long_as_the_gateway_asks_within_reason(self) -> None:
        rng = random.Random(1)
        assert pause_s(0, 20.0, rng) == 20.0
        assert pause_s(0, 1e9, rng) == RETRY_ASKED_MAX_S


class TestNoise:
    def test_that_is_not_a_frame_costs_only_the_connection(self, tmp_path: Path) -> None:
        async def act() -> None:
            async with ScriptedGateway() as gateway:
                notes = Notes()
                task = asyncio.create_task(client_of(gateway, notes).run())
                await asyncio.wait_for(notes.connected.wait(), 2)
                assert gateway._socket is not None
                await gateway._socket.send_bytes(b"\xc1\xff garbage")
                await gateway.expect(protocol.Hello)
                await gateway.expect(protocol.Hello, timeout_s=5)
                assert notes.events[:2] == ["connected", "disconnected"]
                task.cancel()
                await asyncio.wait({task})

        asyncio.run(act())
