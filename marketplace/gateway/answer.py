"""What an attempt has produced so far, and the objects that OpenAI's clients read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from agent.protocol import Tokens
from marketplace.core.amounts import usd
from marketplace.metering.pricing import Priced
from marketplace.metering.tokens import TokenCounts

MAX_EXTRA_BYTES: Final = 256 * 1024


class _DeltaFunction(Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class _DeltaCall(Struct, frozen=True, omit_defaults=True):
    index: Annotated[int, Meta(ge=0, lt=128)]
    id: str | None = None
    type: Literal["function"] | None = None
    function: _DeltaFunction | None = None


class _TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[_TopLogprob] = []


class Logprobs(Struct, frozen=True):
    """Log probabilities of a piece, token by token."""

    content: list[_TokenLogprob] | None = None


class Extra(Struct, frozen=True):
    """What a node may add to a piece of text; whatever else it sends is dropped."""

    tool_calls: list[_DeltaCall] = []
    logprobs: Logprobs | None = None


class BadExtraError(Exception):
    """A node sent something that is no part of an answer."""


_extras = msgspec.json.Decoder(Extra)


def read_extra(raw: bytes) -> Extra:
    """Decode a Tokens frame's `extra`. Raises BadExtraError for anything else."""
    if len(raw) > MAX_EXTRA_BYTES:
        raise BadExtraError("the extra part of a piece is too large")
    try:
        return _extras.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadExtraError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Texts:
    """The text of some pieces, and the token ids that came with it where every piece had them."""

    visible: str
    reasoning: str
    visible_ids: list[int] | None
    reasoning_ids: list[int] | None
    called: str
    """Names and arguments of tool calls: generated text too."""


def by_choice(pieces: Sequence[Tokens], choices: int) -> list[Sequence[Tokens]]:
    """The pieces of each of so many answers to one request."""
    if choices == 1:
        return [pieces]
    return [[piece for piece in pieces if piece.choice == index] for index in range(choices)]


def gather(pieces: Sequence[Tokens]) -> Texts:
    """Join pieces. Ids are None as soon as one piece with text lacks them. Raises BadExtraError."""
    visible: list[str] = []
    reasoning: list[str] = []
    called: list[str] = []
    ids: dict[bool, list[int] | None] = {False: [], True: []}
    for piece in pieces:
        (reasoning if piece.reasoning else visible).append(piece.text)
        known = ids[piece.reasoning]
        if piece.extra:
            called += _called(read_extra(piece.extra))
        if known is not None and (piece.token_ids or not piece.text):
            known.extend(piece.token_ids)
        else:
            ids[piece.reasoning] = None
    return Texts("".join(visible), "".join(reasoning), ids[False] or None, ids[True] or None, "".join(called))


def _called(extra: Extra) -> list[str]:
    functions = [call.function for call in extra.tool_calls if call.function is not None]
    return [part for function in functions for part in (function.name, function.arguments) if part]


def message_of(pieces: Sequence[Tokens]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The assistant's whole message and its log probabilities. Raises BadExtraError."""
    texts = gather(pieces)
    message: dict[str, Any] = {"role": "assistant", "content": texts.visible, "refusal": None}
    if texts.reasoning:
        message["reasoning_content"] = texts.reasoning
    calls: dict[int, dict[str, Any]] = {}
    logprobs: list[Any] = []
    for piece in pieces:
        if not piece.extra:
            continue
        extra = read_extra(piece.extra)
        for call in extra.tool_calls:
            _merge_call(calls, call)
        if extra.logprobs is not None:
            logprobs += msgspec.to_builtins(extra.logprobs.content or [])
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        message["content"] = texts.visible or None
    return message, {"content": logprobs} if logprobs else None


def _merge_call(calls: dict[int, dict[str, Any]], delta: _DeltaCall) -> None:
    call = calls.setdefault(delta.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] = call["id"] or delta.id or ""
    if delta.function is not None:
        call["function"]["name"] += delta.function.name or ""
        call["function"]["arguments"] += delta.function.arguments or ""


def completion(
    *,
    completion_id: str,
    created: int,
    model: str,
    pieces: Sequence[Tokens],
    finish_reasons: Sequence[str | None],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """A whole chat completion, as an answer that is not streamed; a finish reason a choice. Raises BadExtraError."""
    answers = zip(by_choice(pieces, len(finish_reasons)), finish_reasons, strict=True)
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_choice_object(index, own, reason) for index, (own, reason) in enumerate(answers)],
        "usage": usage,
    }


def _choice_object(index: int, pieces: Sequence[Tokens], finish_reason: str | None) -> dict[str, Any]:
    message, logprobs = message_of(pieces)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def usage_object(tokens: TokenCounts, priced: Priced | None) -> dict[str, Any]:
    """OpenAI's usage, with what it cost in USD as decimal strings. `priced` None: nothing was charged."""
    usage: dict[str, Any] = {
        "prompt_tokens": tokens.input,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.input + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.input_cached},
        "completion_tokens_details": {"reasoning_tokens": tokens.output_reasoning},
        "cost": usd(priced.gross_nano if priced else 0),
    }
    if priced:
        usage["cost_details"] = {
            "input": usd(priced.input_uncached_nano),
            "cached_input": usd(priced.input_cached_nano),
            "output": usd(priced.output_visible_nano),
            "reasoning": usd(priced.output_reasoning_nano),
        }
    return usage
