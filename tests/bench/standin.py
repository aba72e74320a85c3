"""A process that stands in for twenty agents, or for one engine behind a bare relay. `python -m tests.bench.standin`.

It speaks the real wire and paces its chunks by one clock: each stream gets its share of the chunk rate that was asked
for, frames of one socket that fall due together travel together, as a real agent's do within two milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent import protocol
from agent.protocol import (
    Accepted,
    Cancel,
    Challenge,
    DeviceReport,
    Finished,
    Hello,
    Inventory,
    OfferReport,
    ReportAck,
    Run,
    Telemetry,
    Tokens,
    UsageReport,
    Welcome,
)
from tests.bench.engine import first_after_s

TICK_S = 0.002
WORD = " word"


@dataclass
class Stream:
    """One attempt in progress."""

    run: Run
    limit: int
    started: float
    rate: float
    sent: int = 0
    text: Any = field(default_factory=hashlib.sha256)


@dataclass
class Options:
    """What the bench asks of every stand-in."""

    rate: float
    """Chunks a second of one stream; 0: as fast as possible."""
    slots: int
    context: int
    sha256: str
    first_s: float = 0.0
    """The mean time to an answer's first chunk."""


class StandIn:
    """One agent's socket."""

    def __init__(self, node_id: str, key: Ed25519PrivateKey, options: Options) -> None:
        self._node_id = node_id
        self._key = key
        self._options = options
        self._streams: dict[bytes, Stream] = {}

    async def serve(self, session: aiohttp.ClientSession, url: str) -> None:
        """Connect and serve until the socket closes."""
        async with session.ws_connect(f"{url}{protocol.SOCKET_PATH}", compress=0, max_msg_size=0) as socket:
            ticker = asyncio.create_task(self._tick(socket))
            try:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        await self._receive(socket, protocol.decode_from_gateway(message.data))
            finally:
                ticker.cancel()

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse, frames: list[Any]) -> None:
        out: list[Any] = []
        for frame in frames:
            match frame:
                case Challenge():
                    payload = protocol.hello_payload(frame.nonce, self._node_id, frame.gateway_id)
                    out.append(Hello(protocol.VERSION, self._node_id, self._key.sign(payload), "bench"))
                case Welcome():
                    out += [self._inventory(), self._telemetry()]
                case Run():
                    out.append(Accepted(frame.attempt, frame.epoch))
                    begins = time.monotonic() + first_after_s(self._options.first_s)
                    stream = Stream(frame, frame.max_output_tokens, begins, self._options.rate)
                    self._streams[frame.attempt] = stream
                    out += self._due(stream, time.monotonic())
                case Cancel():
                    if stream := self._streams.pop(frame.attempt, None):
                        out.append(self._end(stream, "cancelled"))
                case ReportAck():
                    self._streams.pop(frame.attempt, None)
        if out:
            await socket.send_bytes(protocol.encode(out))

    async def _tick(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        beat = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            out: list[Any] = []
            for stream in list(self._streams.values()):
                out += self._due(stream, now)
            if now - beat > 5:
                beat = now
                out.append(self._telemetry())
            if out:
                await socket.send_bytes(protocol.encode(out))

    def _due(self, stream: Stream, now: float) -> list[Any]:
        if stream.sent >= stream.limit or now < stream.started:
            return []
        due = stream.limit if stream.rate == 0 else min(stream.limit, 1 + int((now - stream.started) * stream.rate))
        run = stream.run
        frames: list[Any] = [Tokens(run.attempt, run.epoch, sequence, WORD) for sequence in range(stream.sent, due)]
        for _ in range(due - stream.sent):
            stream.text.update(WORD.encode())
        stream.sent = due
        if due == stream.limit:
            frames.append(self._end(stream, "length"))
        return frames

    def _end(self, stream: Stream, reason: str) -> Finished:
        run = stream.run
        usage = UsageReport(run.prompt_tokens, 0, stream.sent, 0)
        payload = protocol.receipt_payload(run.attempt, run.epoch, stream.sent, reason, usage, stream.text.digest())
        busy_ms = (time.monotonic() - stream.started) * 1000
        return Finished(run.attempt, run.epoch, stream.sent, reason, usage, 0.0, 0.1, busy_ms, self._key.sign(payload))

    def _inventory(self) -> Inventory:
        return Inventory(
            [
                OfferReport(
                    variant_sha256=self._options.sha256,
                    device_id="cpu",
                    slots=self._options.slots,
                    context_per_slot=self._options.context,
                    input_nano_usd_per_mtok=50_000_000,
                    cached_input_nano_usd_per_mtok=10_000_000,
                    output_nano_usd_per_mtok=200_000_000,
                    engine="stand-in",
                    engine_version="1",
                    simulated=True,
                    warm=True,
                    prefix_cache_s=0.0,
                )
            ]
        )

    def _telemetry(self) -> Telemetry:
        device = DeviceReport("cpu", "stand-in", "cpu", memory_total_bytes=2**36, memory_used_bytes=2**30)
        return Telemetry(int(time.time() * 1000), [device], len(self._streams), True)


async def _agents(url: str, nodes: list[dict[str, str]], options: Options) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        agents = [
            StandIn(node["node_id"], Ed25519PrivateKey.from_private_bytes(bytes.fromhex(node["key"])), options)
            for node in nodes
        ]
        await asyncio.gather(*[agent.serve(session, url) for agent in agents])


class RelayedEngine:
    """The same pacing behind the bare relay: JSON in, text frames out, no money and no typed frames."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._streams: dict[int, tuple[int, float, int]] = {}

    async def serve(self, url: str) -> None:
        """Connect and serve until the socket closes."""
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/engine", compress=0) as socket:
            ticker = asyncio.create_task(self._tick(socket))
            try:
                async for message in socket:
                    number, body = msgspec.msgpack.decode(message.data)
                    limit = msgspec.json.decode(body)["max_tokens"]
                    self._streams[number] = (limit, time.monotonic(), 0)
                    await self._send(socket, [number])
            finally:
                ticker.cancel()

    async def _tick(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._send(socket, list(self._streams))

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, numbers: list[int]) -> None:
        now = time.monotonic()
        out: list[tuple[int, bytes]] = []
        for number in numbers:
            limit, started, sent = self._streams[number]
            due = limit if self._rate == 0 else min(limit, 1 + int((now - started) * self._rate))
            for index in range(sent, due):
                chunk = {"choices": [{"index": 0, "delta": {"content": WORD}, "finish_reason": None}], "n": index}
                out.append((number, b"data: " + msgspec.json.encode(chunk) + b"\n\n"))
            self._streams[number] = (limit, started, due)
            if due == limit:
                out.append((number, b""))
                del self._streams[number]
        if out:
            await socket.send_bytes(msgspec.msgpack.encode(out))


def main() -> None:
    """Options come as JSON on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("agents", "relayed"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    told = json.loads(arguments.file.read_text())
    try:
        if arguments.kind == "agents":
            asyncio.run(_agents(told["url"], told["nodes"], Options(**told["options"])))
        else:
            asyncio.run(RelayedEngine(told["rate"]).serve(told["url"]))
    except (KeyboardInterrupt, aiohttp.ClientError):
        sys.exit(0)


if __name__ == "__main__":
    main()
