"""OpenAI's streamed chat and its older text completion, from the client's side: the body that we send, the chunks that
we believe. Pure. A body with `prompt` is a text completion, every other one a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

import msgspec

from agent.engines.port import Done, EngineError, EngineEvent, EngineRequest, Piece, Progress, Usage

FORWARDED_FIELDS: Final = frozenset(
    {
        "messages",
        "prompt",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
    }
)
"""Engines obey far more than this (adapters, slots, grammars, files): nothing else of a stranger's body reaches one."""

FINISH_REASONS: Final = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}
MAX_MESSAGE_CHARS: Final = 300
SPARE_PIECES: Final = 64
PIECES_PER_TOKEN: Final = 4
"""A tool call's token may become several deltas; an engine far beyond this does not stop where it was told to."""

_NOTHING: Final = frozenset({b"", b"null", b"[]"})
_REJECTED_STATUSES: Final = frozenset({400, 404, 405, 413, 415, 422})
_OVERFLOW: Final = re.compile(
    r"context (length|size|window)|exceed_context_size|maximum context|max_model_len|longer than the model"
    r"|max_new_tokens|input (is )?too long|prompt is too long",
    re.IGNORECASE,
)
"""How llama.cpp, vLLM, SGLang, TGI and their like word it."""


class _TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Logprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[_TopLogprob] = []
    id: int | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None
    # A text completion's own shape, which llama.cpp does not use.
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Progress(msgspec.Struct):
    total: int
    processed: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_progress: _Progress | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: int | str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | str | None = None
    message: str = ""


_chunk_decoder: Final = msgspec.json.Decoder(_Chunk)
_error_decoder: Final = msgspec.json.Decoder(_Error | str)
_error_body_decoder: Final = msgspec.json.Decoder(_ErrorBody)
_encoder: Final = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of engine differs from the others. The rest is OpenAI's shape."""

    name: str
    health_path: str = "/health"
    busy_gauges: tuple[str, ...] = ()
    """Prometheus gauges at /metrics whose sum is the number of requests inside. Empty: the engine does not say."""
    extra_body: dict[str, object] = field(default_factory=dict)
    """Fields that make it say more."""
    ids_in_logprobs: bool = False
    """Token ids come as `id` in logprobs, so these are asked for even if the renter did not."""
    scope_field: str | None = None
    """The field that separates tenants in its prefix cache. None: it has none, or the adapter separates otherwise."""
    counts_prompt: bool = True
    """False: its prompt_tokens is an estimate, and is not reported."""
    truncates: bool = False
    """True: it cuts a prompt that is too long, and says nothing. Then its count of the prompt is compared with ours."""
    context_path: str = ""
    """Where it tells the context of one request, in tokens, as `context_key` somewhere in its JSON."""
    context_key: str = ""
    load_path: str = ""
    """Where it tells its requests in JSON, if not at /metrics, as the sum of `load_keys`."""
    load_keys: tuple[str, ...] = ()
    inputs_at_once: int = 32
    """How many inputs of an embeddings request it is asked at a time. An engine that batches by itself is slow with
    one; one whose slots are counted here gets one, since each input takes a slot."""
    tokenise_path: str = "/tokenize"
    abort_path: str = ""
    """Where a request is aborted by the name in `abort_field` of its body, besides closing the connection."""
    abort_field: str = ""
    sleep: tuple[str, str] = ("", "")
    """(path, JSON body) that frees the memory while the server lives; empty: it cannot."""
    wake: tuple[str, str] = ("", "")


def path_of(request: EngineRequest) -> str:
    """Where the request goes."""
    return "/v1/completions" if is_completion(request) else "/v1/chat/completions"


def is_completion(request: EngineRequest) -> bool:
    """True for a text completion, False for a chat."""
    return "prompt" in request.body


def build_body(request: EngineRequest, dialect: Dialect, model: str, extra: dict[str, object]) -> bytes:
    """The JSON that goes to the engine: allowed fields of the request, then what is ours to say."""
    body: dict[str, object] = {name: value for name, value in request.body.items() if name in FORWARDED_FIELDS}
    body |= dialect.extra_body
    body |= extra
    body |= {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.max_output_tokens,
    }
    if dialect.ids_in_logprobs and not body.get("tools"):
        # With top_logprobs 0 the ids are left out; 1 costs about 3% of a small model's decode time. With tools the
        # combination is refused.
        wanted = max(1, _asked_logprobs(request) or 0)
        body |= {"logprobs": wanted} if is_completion(request) else {"logprobs": True, "top_logprobs": wanted}
    return _encoder.encode(body)


def _asked_logprobs(request: EngineRequest) -> int | None:
    """How many alternatives the renter wants beside each token; None: no logprobs at all."""
    asked = request.body.get("logprobs")
    if is_completion(request):
        return asked if isinstance(asked, int) and not isinstance(asked, bool) else None
    if asked is not True:
        return None
    count = request.body.get("top_logprobs")
    return count if isinstance(count, int) else 0


class ChatReader:
    """Turns one answer's event payloads into events of the port. Feed in order, then ask for `done()`."""

    def __init__(self, request: EngineRequest, dialect: Dialect) -> None:
        self._dialect = dialect
        self._top_logprobs = _asked_logprobs(request)
        self._pieces_left = request.max_output_tokens * PIECES_PER_TOKEN + SPARE_PIECES
        self._ids: list[int] = []
        self._finish = ""
        self._usage = Usage()
        self.ended = False
        """True once the engine said [DONE]."""

    def feed(self, payload: bytes) -> Iterator[EngineEvent]:
        """Yield what one payload says. Raises EngineError for an error event and for what is no chunk."""
        if payload == b"[DONE]":
            self.ended = True
            return
        try:
            chunk = _chunk_decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError("engine_error", f"the engine sent something that is no chunk: {error}") from None
        if bytes(chunk.error) not in _NOTHING:
            raise _stream_error(bytes(chunk.error))
        if chunk.prompt_progress is not None:
            yield Progress(chunk.prompt_progress.processed, chunk.prompt_progress.total)
        if chunk.usage is not None:
            self._usage = self._read_usage(chunk.usage)
        for choice in chunk.choices[:1]:
            yield from self._read_choice(choice)

    def done(self) -> Done:
        """How the answer ended, as far as the engine said."""
        return Done(self._finish, self._usage)

    @property
    def finished(self) -> bool:
        """True if the engine gave a finish reason that we know."""
        return bool(self._finish)

    def _read_choice(self, choice: _Choice) -> Iterator[Piece]:
        self._ids += _token_ids(choice)
        delta = choice.delta
        content = delta.content or choice.text
        extra = self._extra(choice)
        thought = delta.reasoning_content or delta.reasoning
        if thought:
            yield self._piece(thought, reasoning=True, extra=b"" if content else extra)
        if content or (extra and not thought):
            yield self._piece(content or "", reasoning=False, extra=extra)
        if choice.finish_reason:
            self._finish = FINISH_REASONS.get(choice.finish_reason, "")

    def _piece(self, text: str, *, reasoning: bool, extra: bytes) -> Piece:
        self._pieces_left -= 1
        if self._pieces_left < 0:
            raise EngineError("engine_error", "the engine does not stop at max_tokens")
        # llama.cpp sends a character of several tokens with the last of their ids only, which would not decode to it.
        ids = () if self._dialect.ids_in_logprobs and not text.isascii() else tuple(self._ids)
        self._ids = []
        return Piece(text, ids, reasoning, extra)

    def _extra(self, choice: _Choice) -> bytes:
        fields: dict[str, object] = {}
        if bytes(choice.delta.tool_calls) not in _NOTHING:
            fields["tool_calls"] = choice.delta.tool_calls
        entries = _entries(choice.logprobs)
        if self._top_logprobs is not None and entries:
            content = [_public_logprob(entry, self._top_logprobs) for entry in entries]
            fields["logprobs"] = {"content": content, "refusal": None}
        return _encoder.encode(fields) if fields else b""

    def _read_usage(self, usage: _Usage) -> Usage:
        prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
        return Usage(
            prompt_tokens=usage.prompt_tokens if self._dialect.counts_prompt else None,
            cached_tokens=prompt.cached_tokens if prompt else None,
            completion_tokens=usage.completion_tokens,
            reasoning_tokens=completion.reasoning_tokens if completion else None,
        )


def _token_ids(choice: _Choice) -> list[int]:
    if choice.token_ids:
        return choice.token_ids
    if choice.logprobs is None or not choice.logprobs.content:
        return []
    return [entry.id for entry in choice.logprobs.content if entry.id is not None]


def _entries(logprobs: _Logprobs | None) -> list[_Logprob]:
    """Log probabilities in a chat's shape, whichever they came in."""
    if logprobs is None:
        return []
    if logprobs.content is not None or not logprobs.tokens:
        return logprobs.content or []
    known = logprobs.token_logprobs or []
    top = logprobs.top_logprobs or []
    return [
        _Logprob(token, own, top_logprobs=[_TopLogprob(*pair) for pair in (beside or {}).items()])
        for token, own, beside in zip_longest(logprobs.tokens, known, top[: len(known)])
        if token is not None and own is not None
    ]


def _public_logprob(entry: _Logprob, top: int) -> dict[str, Any]:
    alternatives = [{"token": t.token, "logprob": t.logprob, "bytes": t.bytes} for t in entry.top_logprobs[:top]]
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes, "top_logprobs": alternatives}


def _stream_error(payload: bytes) -> EngineError:
    try:
        error = _error_decoder.decode(payload)
    except msgspec.DecodeError:
        return EngineError("engine_error", "the engine broke off without saying why")
    if isinstance(error, str):
        return EngineError("engine_error", error[:MAX_MESSAGE_CHARS])
    status = error.code if isinstance(error.code, int) else 500
    return _classified(status, error)


def status_error(status: int, body: bytes) -> EngineError:
    """What an answer that is not 200 means: whose fault it is, in the port's codes."""
    try:
        parsed = _error_body_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        parsed = _ErrorBody()
    error = parsed.error if parsed.error is not None else parsed.message
    return _classified(status, error if isinstance(error, _Error) else _Error(message=error))


def _classified(status: int, error: _Error) -> EngineError:
    message = (error.message or f"the engine answered {status}")[:MAX_MESSAGE_CHARS]
    if status not in _REJECTED_STATUSES:
        return EngineError("engine_error", message)
    overflow = error.type == "exceed_context_size_error" or _OVERFLOW.search(message)
    return EngineError("context_overflow" if overflow else "engine_rejected", message)
