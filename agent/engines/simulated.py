"""The stand-in as a program: OpenAI's chat over HTTP, on a Unix socket or loopback, timed by agent.engines.simulation.

Started by the agent it is configured on stdin as every engine child; by hand:

    python -m agent.engines.simulated --port 8081 --slots 32 --device "H100 SXM"

It is labelled simulated wherever it shows, and is never sold. Faults are armed by POST /faults with
{"kind": ..., "after_tokens": 0, "count": 1}. The HTTP is the little that engines are asked for, written on bare
asyncio so that ten thousand chunks a second cost a fraction of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from agent.engines.embed_wire import Input
from agent.engines.port import Done, Piece, Progress, Usage
from agent.engines.simulated_vectors import embed, text_of
from agent.engines.simulation import (
    MODEL_NAME,
    Fault,
    FaultKind,
    Refused,
    SimEvent,
    Simulation,
    SimulationConfig,
)

VERSION: Final = "simulated-1"
MAX_HEAD_BYTES: Final = 32 * 1024
MAX_BODY_BYTES: Final = 8 * 1024 * 1024
MAX_ARMED_AT_ONCE: Final = 1000
DEFAULT_MAX_TOKENS: Final = 256
DEATH_STATUS: Final = 70

_STATUS_TEXT: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    413: "Content Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_encode: Final = msgspec.json.Encoder().encode


class Pacer:
    """Drives a simulation in real time. Lateness is made up for: a step begins where the last one should have ended."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._wake = asyncio.Event()

    def poke(self) -> None:
        """There is something to do."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            step = self.simulation.begin()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                due = loop.time()
                continue
            due += step.duration_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.simulation.finish(step)


class Server:
    """The HTTP surface of one simulation."""

    def __init__(self, simulation: Simulation, api_key: str = "") -> None:
        self.simulation = simulation
        self.pacer = Pacer(simulation)
        self.api_key = api_key

    def connection(self) -> Connection:
        """A protocol for one client, as asyncio's servers ask for it."""
        return Connection(self)

    def models(self) -> dict[str, object]:
        """The answer of /v1/models."""
        limit = self.simulation.config.context_per_slot
        card = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "simulated", "max_model_len": limit}
        return {"object": "list", "data": [card]}

    def metrics(self) -> str:
        """The two gauges that tell whether it works, under vLLM's names."""
        return (
            f"vllm:num_requests_running {float(self.simulation.running)}\n"
            f"vllm:num_requests_waiting {float(self.simulation.waiting)}\n"
        )

    def arm(self, body: bytes) -> None:
        """Arm what POST /faults asks for. Raises Refused."""
        try:
            order = msgspec.json.decode(body, type=_Order)
            fault = Fault(FaultKind(order.kind), order.after_tokens)
        except (msgspec.DecodeError, ValueError) as error:
            raise Refused(400, "invalid_request_error", str(error)) from None
        for _ in range(min(order.count, MAX_ARMED_AT_ONCE)):
            self.simulation.arm(fault)


class _Order(msgspec.Struct):
    kind: str
    after_tokens: int = 0
    count: int = 1


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Chat(msgspec.Struct):
    messages: list[dict[str, Any]] = []
    prompt: str | None = None
    """Of a text completion, which has no messages."""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    cache_salt: str = ""
    return_token_ids: bool = False
    return_progress: bool = False


class _Embeddings(msgspec.Struct):
    input: str | list[Input]
    cache_salt: str = ""


class Connection(asyncio.Protocol):
    """One client's connection: requests one after another, one answer at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.abandon()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > MAX_HEAD_BYTES + MAX_BODY_BYTES:
            self.abort()
            return
        self._serve()

    def answered(self) -> None:
        """The answer is complete: the next request may follow."""
        self._answer = None
        self._serve()

    def write(self, data: bytes) -> None:
        """Send raw bytes, if the client is still there."""
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        """Break off as a dying engine does."""
        if self._transport is not None:
            self._transport.abort()

    def _serve(self) -> None:
        while self._answer is None and self._transport is not None:
            try:
                request = self._next_request()
                if request is None:
                    return
                self._route(*request)
            except Refused as refusal:
                error = {"message": refusal.message, "type": refusal.kind, "code": refusal.status}
                self._send(refusal.status, _encode({"error": error}))

    def _next_request(self) -> tuple[str, str, bytes] | None:
        """Method, path and body of the next request that is complete. Raises Refused after giving up the rest."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                self._give_up(400, "the head is too large")
            return None
        request_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = headers.get("content-length", "0")
        if not length.isdigit() or "transfer-encoding" in headers:
            self._give_up(400, "a body needs a Content-Length")
        if int(length) > MAX_BODY_BYTES:
            self._give_up(413, "the body is too large")
        if len(self._buffer) < end + 4 + int(length):
            return None
        body = self._buffer[end + 4 : end + 4 + int(length)]
        self._buffer = self._buffer[end + 4 + int(length) :]
        method, path, *_ = [*request_line.split(" "), "", ""]
        self._authorise(path, headers.get("authorization", ""))
        return method, path.partition("?")[0], body

    def _give_up(self, status: int, message: str) -> None:
        self._buffer = b""
        raise Refused(status, "invalid_request_error", message)

    def _authorise(self, path: str, authorization: str) -> None:
        key = self._server.api_key
        if key and path != "/health" and not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
            raise Refused(401, "authentication_error", "wrong key")

    def _route(self, method: str, path: str, body: bytes) -> None:
        server = self._server
        match method, path:
            case "GET", "/health":
                self._send(200, b'{"status":"ok","simulated":true}')
            case "GET", "/version":
                self._send(200, _encode({"version": VERSION}))
            case "GET", "/v1/models":
                self._send(200, _encode(server.models()))
            case "GET", "/metrics":
                self._send(200, server.metrics().encode(), "text/plain")
            case "POST", "/faults":
                server.arm(body)
                self._send(200, b"{}")
            case "POST", "/v1/chat/completions":
                self._chat(body)
            case "POST", "/v1/completions":
                self._chat(body)
            case "POST", "/v1/embeddings":
                self._embeddings(body)
            case _:
                raise Refused(404, "not_found_error", f"there is no {method} {path} here")

    def _chat(self, body: bytes) -> None:
        try:
            chat = msgspec.json.decode(body, type=_Chat)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(400, "invalid_request_error", str(error)) from None
        limit = chat.max_completion_tokens or chat.max_tokens or DEFAULT_MAX_TOKENS
        answer = StreamedAnswer(self, chat) if chat.stream else WholeAnswer(self, chat)
        sequence = self._server.simulation.submit(
            {"messages": chat.messages} if chat.prompt is None else {"prompt": chat.prompt},
            max(1, limit),
            chat.cache_salt,
            answer.hear,
        )
        answer.on_abandon = lambda: self._server.simulation.cancel(sequence)
        self._answer = answer
        answer.open()
        self._server.pacer.poke()

    def _embeddings(self, body: bytes) -> None:
        try:
            asked = msgspec.json.decode(body, type=_Embeddings)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(400, "invalid_request_error", str(error)) from None
        inputs: list[Input] = [asked.input] if isinstance(asked.input, str) else asked.input
        answer = EmbeddingsAnswer(self, _Chat(), inputs, self._server.simulation.dimensions)
        text = " ".join(text_of(each) for each in inputs)
        # Read as a prompt, and nothing written: the one token is what ends it.
        sequence = self._server.simulation.submit({"prompt": text}, 1, asked.cache_salt, answer.hear)
        answer.on_abandon = lambda: self._server.simulation.cancel(sequence)
        self._answer = answer
        answer.open()
        self._server.pacer.poke()

    def _send(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.write(_head(status, content_type, f"Content-Length: {len(body)}") + body)


class Answer(ABC):
    """One chat's answer on its way out."""

    def __init__(self, connection: Connection, chat: _Chat) -> None:
        self._connection = connection
        self._chat = chat
        self._id = "chatcmpl-" + secrets.token_hex(12)
        self._created = int(time.time())
        self.on_abandon: Callable[[], None] = lambda: None

    @abstractmethod
    def open(self) -> None:
        """Begin."""

    @abstractmethod
    def hear(self, event: SimEvent) -> None:
        """What the simulation says."""

    def abandon(self) -> None:
        """The client is gone."""
        self.on_abandon()

    def _suffer(self, fault: Fault) -> None:
        if fault.kind is FaultKind.DIE:
            os._exit(DEATH_STATUS)
        self._connection.abort()


class StreamedAnswer(Answer):
    """Server-sent events, one a token."""

    def open(self) -> None:
        """Head and role."""
        kind = "chat.completion.chunk" if self._chat.prompt is None else "text_completion"
        base = f'data: {{"id":"{self._id}","object":"{kind}","created":{self._created},'
        self._prefix = (base + f'"model":"{MODEL_NAME}",').encode()
        self._connection.write(_head(200, "text/event-stream", "Transfer-Encoding: chunked"))
        if self._chat.prompt is None:
            self._event(b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]')

    def hear(self, event: SimEvent) -> None:
        """Write what it means as events."""
        if isinstance(event, Piece):
            ids = (
                b',"token_ids":' + _encode(event.token_ids) if self._chat.return_token_ids and event.token_ids else b""
            )
            text = _encode(event.text)
            said = b'"delta":{"content":' + text + b"}" if self._chat.prompt is None else b'"text":' + text
            self._event(b'"choices":[{"index":0,' + said + b',"finish_reason":null' + ids + b"}]")
        elif isinstance(event, Progress):
            if self._chat.return_progress:
                progress = {"total": event.total_tokens, "processed": event.processed_tokens}
                self._event(b'"choices":[],"prompt_progress":' + _encode(progress))
        elif isinstance(event, Done):
            self._end(event)
        elif event.kind is FaultKind.ERROR_EVENT:
            self._raw(b'data: {"error":{"message":"simulated failure","type":"server_error","code":500}}\n\n')
            self._close()
        else:
            self._suffer(event)

    def _end(self, done: Done) -> None:
        if not done.finish_reason:
            self._close()
            return
        said = b'"delta":{}' if self._chat.prompt is None else b'"text":""'
        self._event(b'"choices":[{"index":0,' + said + b',"finish_reason":"' + done.finish_reason.encode() + b'"}]')
        options = self._chat.stream_options
        if options is not None and options.include_usage and done.usage.completion_tokens is not None:
            self._event(b'"choices":[],"usage":' + _encode(_usage(done.usage)))
        self._raw(b"data: [DONE]\n\n")
        self._close()

    def _close(self) -> None:
        self._connection.write(b"0\r\n\r\n")
        self._connection.answered()

    def _event(self, fields: bytes) -> None:
        self._raw(self._prefix + fields + b"}\n\n")

    def _raw(self, data: bytes) -> None:
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))


class WholeAnswer(Answer):
    """One JSON object at the end."""

    def __init__(self, connection: Connection, chat: _Chat) -> None:
        super().__init__(connection, chat)
        self._text: list[str] = []

    def open(self) -> None:
        """Nothing goes out before the end."""

    def hear(self, event: SimEvent) -> None:
        """Gather, and send at the end."""
        if isinstance(event, Piece):
            self._text.append(event.text)
        elif isinstance(event, Done):
            body = _encode(self._completion(event))
            self._connection.write(_head(200, "application/json", f"Content-Length: {len(body)}") + body)
            self._connection.answered()
        elif isinstance(event, Fault):
            self._suffer(event)

    def _completion(self, done: Done) -> dict[str, object]:
        text = "".join(self._text)
        chat = self._chat.prompt is None
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {
            "id": self._id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self._created,
            "model": MODEL_NAME,
            "choices": [{"index": 0, **said, "finish_reason": done.finish_reason or None}],
            "usage": _usage(done.usage),
        }


class EmbeddingsAnswer(Answer):
    """Vectors of all inputs, once they are read."""

    def __init__(self, connection: Connection, chat: _Chat, inputs: list[Input], dimensions: int) -> None:
        super().__init__(connection, chat)
        self._inputs = inputs
        self._dimensions = dimensions

    def open(self) -> None:
        """Nothing is sent before the end."""

    def hear(self, event: SimEvent) -> None:
        """Wait for the end."""
        if isinstance(event, Done):
            body = _encode(self._listing(event.usage.prompt_tokens or 0))
            self._connection.write(_head(200, "application/json", f"Content-Length: {len(body)}") + body)
            self._connection.answered()
        elif isinstance(event, Fault):
            self._suffer(event)

    def _listing(self, tokens: int) -> dict[str, object]:
        vectors = [embed(each, self._dimensions).tolist() for each in self._inputs]
        data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": MODEL_NAME, "usage": usage}


def _usage(usage: Usage) -> dict[str, object]:
    prompt, made = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
    }


def _head(status: int, content_type: str, extra: str) -> bytes:
    text = _STATUS_TEXT.get(status, "Error")
    return f"HTTP/1.1 {status} {text}\r\nContent-Type: {content_type}\r\n{extra}\r\n\r\n".encode()


async def serve(
    server: Server, *, socket: str | None = None, port: int = 0, ready: Callable[[str], Awaitable[None]]
) -> None:
    """Serve until cancelled; `ready` hears the address. Raises OSError if it cannot listen there."""
    loop = asyncio.get_running_loop()
    if socket is not None:
        listener = await loop.create_unix_server(server.connection, socket, backlog=256)
        address = f"unix://{socket}"
    else:
        listener = await loop.create_server(server.connection, "127.0.0.1", port, backlog=256)
        address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        await ready(address)
        await server.pacer.run()


def _as_child() -> None:
    from agent.engines.child import give_up, prepare, say  # noqa: PLC0415 - touches the process, so only in a child

    options = prepare()
    options.pop("protection")
    socket, key = options.pop("socket"), options.pop("api_key")

    async def ready(address: str) -> None:
        say(ready=True, version=VERSION, address=address)

    try:
        server = Server(Simulation(msgspec.convert(options, SimulationConfig)), key)
        asyncio.run(serve(server, socket=socket, ready=ready))
    except (ValueError, OSError) as error:
        give_up(str(error))


def _by_hand(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="agent.engines.simulated", description="A simulated engine; not for sale.")
    parser.add_argument("--socket", help="listen on this Unix socket")
    parser.add_argument("--port", type=int, default=0, help="or on this port of 127.0.0.1; 0 takes a free one")
    for name, value in msgspec.structs.asdict(SimulationConfig()).items():
        if isinstance(value, (int, float, str)):
            parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    options = vars(parser.parse_args(arguments))
    socket, port = options.pop("socket"), options.pop("port")

    async def ready(address: str) -> None:
        sys.stdout.write(f"simulated engine at {address}\n")
        sys.stdout.flush()

    try:
        asyncio.run(serve(Server(Simulation(SimulationConfig(**options))), socket=socket, port=port, ready=ready))
    except KeyboardInterrupt:
        return
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _by_hand(sys.argv[1:])
    else:
        _as_child()
