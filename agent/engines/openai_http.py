"""The adapter for any engine that speaks OpenAI's streamed chat over HTTP: vLLM, SGLang, llama.cpp, the stand-in.

`HttpEngine` is the common half: it asks, reads, cancels, and tells whose fault a failure is. `AttachedEngine` uses it
on a server that somebody else runs. Engines that we run ourselves build on it in agent.engines.managed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from agent.engines import embed_wire
from agent.engines.chat_wire import ChatReader, Dialect, build_body, path_of, status_error
from agent.engines.dialects import DIALECTS, find_number, recognise
from agent.engines.port import STOP_GRACE_S, Done, EngineError, EngineEvent, EngineFacts, EngineRequest, Usage
from agent.engines.sse import SseDecoder, SseError

PROBE_TIMEOUT_S: Final = 2.0
CONNECT_TIMEOUT_S: Final = 5.0
MAX_ERROR_BODY_BYTES: Final = 64 * 1024
MAX_PROBE_BODY_BYTES: Final = 1024 * 1024
NOT_READY_POLL_S: Final = 1.0
COMMAND_TIMEOUT_S: Final = 5.0
WAKE_TIMEOUT_S: Final = 60.0
CUT_SHARE: Final = 0.1
CUT_TOKENS: Final = 16
"""An engine's count of a prompt may be less than ours by this much (templates differ) without being a cut."""

_BROKEN: Final = (aiohttp.ClientError, OSError, RuntimeError)
"""What aiohttp raises when a connection ends; RuntimeError where its session was closed under a reader by `stop`."""


class HttpEngine:
    """Half an engine: everything that is HTTP. Needs `_open` from whoever knows where the server is."""

    def __init__(self, dialect: Dialect, *, stall_timeout_s: float) -> None:
        self._dialect = dialect
        self._stall_timeout_s = stall_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._model = dialect.name
        self._streams = 0
        """Answers that are being read now."""
        self._facts: EngineFacts | None = None
        self._aborts: set[asyncio.Future[bytes | None]] = set()

    @property
    def facts(self) -> EngineFacts:
        """What `start` found. Raises EngineError before it."""
        if self._facts is None:
            raise EngineError("engine_error", "the engine is not started")
        return self._facts

    def _open(self, base_url: str, connector: aiohttp.BaseConnector, api_key: str | None) -> None:
        """Use this server from now on. The connector must close connections after use: one that is taken up again
        right after a finished stream fails about once in twelve."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(base_url, connector=connector, headers=headers, timeout=timeout)

    async def _close(self) -> None:
        session, self._session = self._session, None
        for task in tuple(self._aborts):
            task.cancel()
        if session is not None:
            await session.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineError("engine_died", "the engine is not running")
        return self._session

    async def _has_died(self) -> bool:
        """True if the server's process is known to be gone."""
        return False

    @contextmanager
    def _seated(self, request: EngineRequest) -> Iterator[dict[str, object]]:
        """Hold what the request occupies while it runs; gives the body's fields that keep its scope apart."""
        if self._dialect.scope_field is None:
            yield {}
        else:
            yield {self._dialect.scope_field: request.cache_scope or secrets.token_hex(16)}

    async def healthy(self) -> bool:
        """True if the server answers its health check within two seconds."""
        return self._session is not None and await self._probe(self._dialect.health_path) is not None

    async def idle(self) -> bool:
        """True if the engine works on nothing beyond the answers that are being read here now.

        Engines that do not say how many requests they work on are believed to stop when a connection closes.
        """
        if self._dialect.load_path:
            return await self._idle_by_json()
        if not self._dialect.busy_gauges:
            return True
        text = await self._probe("/metrics")
        if text is None:
            return False
        inside = [_gauge(text, name) for name in self._dialect.busy_gauges]
        known = [value for value in inside if value is not None]
        return bool(known) and sum(known) <= self._streams

    async def _idle_by_json(self) -> bool:
        text = await self._probe(self._dialect.load_path)
        known = [find_number(text or "", key) for key in self._dialect.load_keys]
        counted = [value for value in known if value is not None]
        return bool(counted) and sum(counted) <= self._streams

    async def load(self) -> tuple[int | None, int | None]:
        """Requests that the engine runs and that wait in it; None where it does not say."""
        dialect = self._dialect
        if dialect.load_path:
            text = await self._probe(dialect.load_path) or ""
            found: list[float | None] = [find_number(text, key) for key in dialect.load_keys]
        else:
            text = await self._probe("/metrics") or "" if dialect.busy_gauges else ""
            found = [_gauge(text, name) for name in dialect.busy_gauges]
        running, waiting = (*found, None, None)[:2]
        return None if running is None else int(running), None if waiting is None else int(waiting)

    async def count_tokens(self, text: str) -> int | None:
        """How many tokens the engine makes of a text, by its own tokenizer; None where it does not offer that."""
        if not self._dialect.tokenise_path:
            return None
        body = msgspec.json.encode({"model": self._model, "prompt": text, "content": text, "add_special_tokens": False})
        answer = await self._command(self._dialect.tokenise_path, body)
        try:
            tokens = msgspec.json.decode(answer or b"", type=_Tokenised)
        except msgspec.DecodeError:
            return None
        return tokens.count if tokens.count is not None else len(tokens.tokens) if tokens.tokens is not None else None

    async def _command(self, path: str, body: bytes) -> bytes | None:
        """Body of a POST's answer, or None if it is not 200 in time."""
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                async with self._http().post(path, data=body, headers=headers) as response:
                    answer = await response.content.read(MAX_PROBE_BODY_BYTES)
                    return answer if response.status == 200 else None
        except (TimeoutError, EngineError, *_BROKEN):
            return None

    async def _probe(self, path: str) -> str | None:
        """Body of a GET, or None if it does not answer 200 in time."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._http().get(path) as response:
                body = await response.content.read(MAX_PROBE_BODY_BYTES)
                while chunk := await response.content.read(MAX_PROBE_BODY_BYTES - len(body)):
                    body += chunk
                return body.decode("utf-8", errors="replace") if response.status == 200 else None
        except (TimeoutError, EngineError, *_BROKEN):
            return None

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        """Stream one answer. Raises EngineError. Closing the iterator stops the engine's work on it."""
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        if embed_wire.is_embedding(request):
            async with aclosing(self._embed(request, deadline)) as events:
                async for event in events:
                    yield event
            return
        with self._seated(request) as extra:
            name = secrets.token_hex(16) if self._dialect.abort_field else ""
            named = {**extra, self._dialect.abort_field: name} if name else extra
            body = build_body(request, self._dialect, self._model, named)
            response = await self._post(path_of(request), body, deadline, request.traceparent)
            self._streams += 1
            complete = False
            try:
                reader, decoder = ChatReader(request, self._dialect), SseDecoder()
                while not reader.ended and (payloads := await self._read(response, decoder, deadline)) is not None:
                    for payload in payloads:
                        for event in reader.feed(payload):
                            yield event
                if not reader.finished and await self._has_died():
                    raise EngineError("engine_died", "the engine's process ended")
                done = reader.done()
                self._check_whole(request, done.usage.prompt_tokens)
                complete = bool(done.finish_reason)
                yield done
            finally:
                self._streams -= 1
                response.close()
                if name and not complete:
                    self._abort(name)

    async def _embed(self, request: EngineRequest, deadline: float) -> AsyncGenerator[EngineEvent, None]:
        """Vectors, a group of inputs at a time: an attempt takes one slot, and a cancel stops what is left."""
        inputs = embed_wire.inputs_of(request)
        counted: int | None = 0
        with self._seated(request):
            self._streams += 1
            try:
                for start, group in embed_wire.groups(inputs, self._dialect.inputs_at_once):
                    body = embed_wire.build_body(group, self._model)
                    response = await self._post(embed_wire.PATH, body, deadline, request.traceparent)
                    try:
                        answer = await self._read_whole(response, deadline)
                    finally:
                        response.close()
                    vectors, usage = embed_wire.read_answer(answer, start, len(group))
                    told = usage.prompt_tokens
                    counted = counted + told if counted is not None and told is not None else None
                    yield vectors
            finally:
                self._streams -= 1
        self._check_whole(request, counted)
        yield Done("stop", Usage(prompt_tokens=counted, cached_tokens=0, completion_tokens=0))

    async def _read_whole(self, response: aiohttp.ClientResponse, deadline: float) -> bytes:
        """The body of an answer, within MAX_ANSWER_BYTES."""
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                async with self._bounded(deadline):
                    piece = await response.content.readany()
                if not piece:
                    return b"".join(parts)
                size += len(piece)
                if size > embed_wire.MAX_ANSWER_BYTES:
                    raise EngineError("engine_error", "the engine's answer is too large")
                parts.append(piece)
        except TimeoutError:
            raise EngineError("engine_timeout", "the engine stopped sending") from None
        except _BROKEN as error:
            raise await self._broken(error) from None

    def _check_whole(self, request: EngineRequest, counted: int | None) -> None:
        """Raise EngineError if the engine worked on less of the prompt than it was given."""
        wanted = request.prompt_tokens
        if self._dialect.truncates and counted is not None and counted < wanted * (1 - CUT_SHARE) - CUT_TOKENS:
            message = f"the server cut the prompt of {wanted} tokens to {counted}: give it a longer context"
            raise EngineError("engine_error", message)

    def _abort(self, name: str) -> None:
        """Have the engine abort a request, beside closing its connection. Nobody waits: `idle` proves it."""
        body = msgspec.json.encode({self._dialect.abort_field: name})
        task = asyncio.ensure_future(self._command(self._dialect.abort_path, body))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _post(self, path: str, body: bytes, deadline: float, traceparent: str) -> aiohttp.ClientResponse:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if traceparent:
            headers["traceparent"] = traceparent
        try:
            async with self._bounded(deadline):
                response = await self._http().post(path, data=body, headers=headers)
                if response.status == 200:
                    return response
                try:
                    detail = await response.content.read(MAX_ERROR_BODY_BYTES)
                finally:
                    response.close()
        except TimeoutError:
            raise EngineError("engine_timeout", "the engine did not answer in time") from None
        except _BROKEN as error:
            raise await self._broken(error) from None
        raise status_error(response.status, detail)

    async def _read(self, response: aiohttp.ClientResponse, decoder: SseDecoder, deadline: float) -> list[bytes] | None:
        """The payloads of what arrived meanwhile; None at the end of the stream."""
        try:
            async with self._bounded(deadline):
                piece = await response.content.readany()
            return decoder.feed(piece) if piece else None
        except TimeoutError:
            raise EngineError("engine_timeout", "the engine stopped sending") from None
        except SseError as error:
            raise EngineError("engine_error", str(error)) from None
        except _BROKEN as error:
            raise await self._broken(error) from None

    def _bounded(self, deadline: float) -> asyncio.Timeout:
        """The request's own end, or a silence that is too long: whichever comes first."""
        return asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + self._stall_timeout_s))

    async def _broken(self, error: Exception) -> EngineError:
        if await self._has_died():
            return EngineError("engine_died", "the engine's process ended")
        return EngineError("engine_error", f"the connection to the engine broke: {type(error).__name__}")


def _gauge(text: str, name: str) -> float | None:
    """Sum of a gauge's samples over its labels; None if it is not there."""
    samples = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+]+)", text, re.MULTILINE)
    return sum(float(sample) for sample in samples) if samples else None


@dataclass(frozen=True, slots=True)
class Attachment:
    """A server that runs already."""

    base_url: str
    dialect: Dialect | None
    """None: find out by what its metrics are called."""
    slots: int
    context_per_slot: int
    api_key: str | None = None
    served_model: str | None = None
    task: str = "chat"
    prefix_cache_s: float = 0.0
    load_timeout_s: float = 600.0
    stall_timeout_s: float = 120.0


class AttachedEngine(HttpEngine):
    """An engine that the owner runs by himself. Stopping it here only lets go of it."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(attachment.dialect or DIALECTS["generic"], stall_timeout_s=attachment.stall_timeout_s)
        self._attachment = attachment

    async def start(self) -> EngineFacts:
        """Wait until the server answers, and learn its model and context. Raises EngineError."""
        wish = self._attachment
        await self._close()
        self._open(wish.base_url, aiohttp.TCPConnector(force_close=True, limit=0), wish.api_key)
        listing = await self._first_listing()
        self._dialect = wish.dialect or await recognise(self._probe)
        self._model, longest = _served(listing, wish.served_model)
        await self._wake()
        told = await self._told_context() or longest
        self._facts = EngineFacts(
            name=self._dialect.name,
            version=await self._version(),
            slots=wish.slots,
            context_per_slot=min(wish.context_per_slot, told or wish.context_per_slot),
            simulated=False,
            prefix_cache_s=wish.prefix_cache_s,
            pid=None,
            task=wish.task,
            protection="",
        )
        return self._facts

    async def _told_context(self) -> int | None:
        """What the server says that one request may use."""
        path = self._dialect.context_path
        text = await self._probe(path) if path else None
        value = find_number(text or "", self._dialect.context_key)
        return int(value) if value is not None and value >= 1 else None

    async def _wake(self) -> None:
        """Have a server that we put to sleep take its memory again, and load its model."""
        path, body = self._dialect.wake
        if path:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAKE_TIMEOUT_S):
                    await self._command(path, body.replace("MODEL", self._model).encode())

    async def _first_listing(self) -> str:
        """The server's list of models, as soon as it gives one."""
        give_up_at = asyncio.get_running_loop().time() + self._attachment.load_timeout_s
        while asyncio.get_running_loop().time() < give_up_at:
            listing = await self._probe("/v1/models")
            if listing is not None:
                return listing
            await asyncio.sleep(NOT_READY_POLL_S)
        await self._close()
        raise EngineError("engine_timeout", f"no server answers at {self._attachment.base_url}")

    async def _version(self) -> str:
        """vLLM says it at /version, Ollama at /api/version; others are `unknown`."""
        text = await self._probe("/version") or await self._probe("/api/version")
        try:
            answer: Any = msgspec.json.decode(text or "{}")
        except msgspec.DecodeError:
            return "unknown"
        version = answer.get("version") if isinstance(answer, dict) else None
        return version[:40] if isinstance(version, str) else "unknown"

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Let go of the server; its process is the owner's. Asked to, it frees the card's memory. Never raises."""
        path, body = self._dialect.sleep
        if path and self._session is not None and self._facts is not None:
            await self._command(path, body.replace("MODEL", self._model).encode())
        await self._close()


class _Tokenised(msgspec.Struct):
    count: int | None = None
    tokens: list[object] | None = None


class _ServedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Listing(msgspec.Struct):
    data: list[_ServedModel]


def _served(listing: str, wanted: str | None) -> tuple[str, int | None]:
    """The served model's name and its context in tokens, if told. Raises EngineError if it cannot be the one meant."""
    try:
        models = msgspec.json.decode(listing, type=_Listing).data
    except msgspec.DecodeError:
        raise EngineError("engine_error", "the server's list of models is not OpenAI's") from None
    matching = [model for model in models if wanted in {None, model.id}]
    if len(matching) != 1:
        names = ", ".join(model.id for model in models[:10]) or "none"
        raise EngineError("engine_error", f"the server serves {names}; name one of them as served_model")
    return matching[0].id, matching[0].max_model_len
