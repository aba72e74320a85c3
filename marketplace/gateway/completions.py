"""Text completions: OpenAI's older request, a prompt that the model goes on from, and the answers of its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, Struct

from agent.protocol import Tokens
from agent.sizing.variants import CHAT
from marketplace.catalog.service import PromptCount, VariantView
from marketplace.gateway.answer import Logprobs, by_choice, gather, read_extra
from marketplace.gateway.bodies import (
    MAX_OUTPUT_TOKENS,
    Choices,
    LogitBias,
    ModelName,
    Penalty,
    Probability,
    ProviderBody,
    Seed,
    ServiceTier,
    Stop,
    StreamOptions,
    Temperature,
    TopK,
)
from marketplace.gateway.parse import check_logit_bias
from marketplace.gateway.sse import one_line, stream_head
from marketplace.gateway.strict import InvalidBody, decode_strict

MAX_LOGPROBS: Final = 5
OPTIONS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "seed",
    "logprobs",
    "logit_bias",
)
"""What an engine is told beside prompt and max_tokens."""
_encode = msgspec.json.Encoder().encode


class CompletionBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON object of a text completion: every field that is taken, and no other."""

    model: ModelName
    prompt: str | list[str | int | list[int]]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    top_k: TopK | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    logit_bias: LogitBias | None = None
    n: Choices | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    # Taken from unchanged clients and without effect here.
    user: Annotated[str, Meta(max_length=1_024)] | None = None
    service_tier: ServiceTier | None = None
    provider: ProviderBody | None = None


class CompletionRequest(Struct, frozen=True):
    """A text completion that passed every check."""

    task: ClassVar[str] = CHAT
    prompt_field: ClassVar[str] = "prompt"
    model: str
    prompt: str
    stream: bool
    include_usage: bool
    max_tokens: int | None
    """What the client asked as a bound on output; None: the model's default applies."""
    options: dict[str, Any]
    provider: ProviderBody | None = None
    choices: int = 1
    """Answers that are wanted: `n`."""
    service_tier: ServiceTier | None = None
    uses_tools: ClassVar[bool] = False

    @property
    def opening(self) -> list[dict[str, Any]]:
        """What tells conversations apart: of a text completion, its whole prompt."""
        return [{"role": "user", "content": self.prompt}]

    @property
    def answer_schema(self) -> None:
        """A text completion follows none."""
        return

    def engine_body(self, max_tokens: int) -> bytes:
        """The JSON that goes to the engine."""
        several = {"n": self.choices} if self.choices > 1 else {}
        return _encode({"prompt": self.prompt, "max_tokens": max_tokens, **several, **self.options})

    async def count(self, variant: VariantView) -> PromptCount:
        """The prompt's tokens. Raises PromptTooLong (400)."""
        return await variant.count_text_prompt_async(self.prompt)


def parse_completion(body: bytes) -> CompletionRequest:
    """Parse the body of a text completion. Raises InvalidBody (400), naming the field where there is one."""
    return to_completion(decode_strict(body, CompletionBody))


def to_completion(body: CompletionBody) -> CompletionRequest:
    """Check what spans several fields, and normalise. Raises InvalidBody (400)."""
    _refuse_unsupported(body)
    options: dict[str, Any] = {}
    for name in OPTIONS:
        value = getattr(body, name)
        if value is not None:
            options[name] = value
    check_logit_bias(options)
    return CompletionRequest(
        model=body.model,
        prompt=_single_prompt(body.prompt),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        max_tokens=body.max_tokens,
        options=options,
        provider=body.provider,
        choices=body.n or 1,
        service_tier=body.service_tier,
    )


def _refuse_unsupported(body: CompletionBody) -> None:
    if body.echo:
        raise InvalidBody("`echo` is not taken here: the prompt is not repeated, nor charged as output.", param="echo")
    if body.suffix is not None:
        raise InvalidBody("`suffix` is not taken here: a model goes on from the prompt only.", param="suffix")
    if body.best_of not in (None, body.n or 1):
        raise InvalidBody("`best_of` must be `n`: every answer that is made is given.", param="best_of")


def _single_prompt(prompt: str | list[str | int | list[int]]) -> str:
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise InvalidBody(
                "`prompt` must be one text: neither token ids nor several prompts are taken in one request.",
                param="prompt",
            )
        prompt = prompt[0]
    if not prompt:
        raise InvalidBody("`prompt` is empty.", param="prompt")
    return prompt


# --- answers ------------------------------------------------------------------------------------------------------


def text_completion(
    *,
    completion_id: str,
    created: int,
    model: str,
    pieces: Sequence[Tokens],
    finish_reasons: Sequence[str | None],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """A whole text completion, as an answer that is not streamed; a finish reason a choice. Raises BadExtraError."""
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            _choice_object(index, own, reason)
            for index, (own, reason) in enumerate(
                zip(by_choice(pieces, len(finish_reasons)), finish_reasons, strict=True)
            )
        ],
        "usage": usage,
    }


def _choice_object(index: int, pieces: Sequence[Tokens], finish_reason: str | None) -> dict[str, Any]:
    texts = gather(pieces)
    found = [read_extra(piece.extra).logprobs for piece in pieces if piece.extra]
    logprobs, _ = legacy_logprobs([one for one in found if one is not None], 0)
    text = texts.reasoning + texts.visible
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def legacy_logprobs(found: Sequence[Logprobs], offset: int) -> tuple[dict[str, Any] | None, int]:
    """Log probabilities in a text completion's shape, and the offset, in characters of the answer, after them. None
    where there are none."""
    entries = [entry for logprobs in found for entry in logprobs.content or []]
    if not entries:
        return None, offset
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{top.token: top.logprob for top in entry.top_logprobs} for entry in entries],
        "text_offset": offsets,
    }, offset


class TextWriter:
    """Writes the chunks of one choice of a text completion, as sse.ChunkWriter does for a chat. Not shared between
    requests."""

    __slots__ = ("_offset", "_start", "_tail", "_usage_head")

    def __init__(
        self,
        *,
        completion_id: str,
        created: int,
        model: str,
        include_usage: bool,
        index: int = 0,
        service_tier: str | None = None,
    ) -> None:
        head = stream_head(completion_id, "text_completion", created, model, service_tier)
        self._start = head + b',"choices":[{"index":%d,"text":' % index
        self._usage_head = head + b',"choices":[],"usage":'
        self._tail = (b"]," + b'"usage":null}\n\n') if include_usage else b"]}\n\n"
        self._offset = 0

    def text(self, text: str) -> bytes:
        """One chunk of the answer."""
        return self._chunk(text, b"null", b"null")

    reasoning = text
    """A text completion knows no reasoning apart: whatever a node calls so is a part of its text."""

    def delta(self, members: dict[str, Any], logprobs: Logprobs | None = None) -> bytes:
        """One chunk of text with its log probabilities; what else a chat's delta may have is left out."""
        shown, self._offset = legacy_logprobs([logprobs] if logprobs is not None else [], self._offset)
        said = members.get("content") or members.get("reasoning_content") or ""
        return self._chunk(said, one_line(_encode(shown)), b"null")

    def note_check(self, check: dict[str, Any]) -> None:
        """A text completion follows no schema: there is nothing to say about one."""

    def finish(self, reason: str) -> bytes:
        """The chunk that ends the answer."""
        return self._chunk("", b"null", _encode(reason))

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk before [DONE], for clients that asked for usage."""
        return self._usage_head + _encode(usage) + b"}\n\n"

    def _chunk(self, text: str, logprobs: bytes, reason: bytes) -> bytes:
        said = one_line(_encode(text))
        return b'%b%b,"logprobs":%b,"finish_reason":%b}%b' % (self._start, said, logprobs, reason, self._tail)
