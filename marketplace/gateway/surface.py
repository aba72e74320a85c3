"""What differs between the endpoints that run a model: how a request is read, and the shape of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from msgspec import DecodeError, Raw, Struct
from msgspec.json import decode

from agent.sizing.variants import CHAT as CHAT_TASK
from agent.sizing.variants import EMBED as EMBED_TASK
from marketplace.catalog.service import PromptCount, VariantView
from marketplace.gateway.answer import completion
from marketplace.gateway.completions import TextWriter, parse_completion, text_completion
from marketplace.gateway.embeddings.request import parse_embedding
from marketplace.gateway.parse import Inference, parse_chat
from marketplace.gateway.sse import ChunkWriter
from marketplace.jobs.sweeping import CHAT_ENDPOINT, EMBEDDINGS_ENDPOINT, TEXT_ENDPOINT


class Writer(Protocol):
    """Writes the chunks of one choice of a streamed answer."""

    def text(self, text: str) -> bytes: ...

    def reasoning(self, text: str) -> bytes: ...

    def delta(self, members: dict[str, Any], logprobs: Any = None) -> bytes: ...

    def note_check(self, check: dict[str, Any]) -> None: ...

    def finish(self, reason: str) -> bytes: ...

    def usage(self, usage: dict[str, Any]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Surface:
    """One such endpoint. `endpoint` is its path, and what its outcome rows say."""

    endpoint: str
    id_prefix: str
    parse: Callable[[bytes], Inference]
    writer: Callable[..., Writer]
    """Called with completion_id, created, model, include_usage, index, service_tier."""
    whole: Callable[..., dict[str, Any]]
    """Called with completion_id, created, model, pieces, finish_reasons, usage."""
    task: str = CHAT_TASK
    """What a model must be for."""

    def writers(
        self,
        choices: int,
        *,
        completion_id: str,
        created: int,
        model: str,
        include_usage: bool,
        service_tier: str | None = None,
    ) -> list[Writer]:
        """A writer for each choice of one streamed answer."""
        return [
            self.writer(
                completion_id=completion_id,
                created=created,
                model=model,
                include_usage=include_usage,
                index=index,
                service_tier=service_tier,
            )
            for index in range(choices)
        ]

    def answer_id(self, request_id: str) -> str:
        """The id that the client sees in the answer."""
        return f"{self.id_prefix}{request_id.removeprefix('req_')}"


def _writes_no_text(**_: Any) -> Any:
    """Vectors are never streamed, and embeddings.vectors writes their list."""
    raise AssertionError("an embeddings answer was to be written as text")


CHAT: Final = Surface(CHAT_ENDPOINT, "chatcmpl-", parse_chat, ChunkWriter, completion)
TEXT: Final = Surface(TEXT_ENDPOINT, "cmpl-", parse_completion, TextWriter, text_completion)
EMBEDDINGS: Final = Surface(EMBEDDINGS_ENDPOINT, "embd-", parse_embedding, _writes_no_text, _writes_no_text, EMBED_TASK)
SURFACES: Final = {surface.endpoint: surface for surface in (CHAT, TEXT, EMBEDDINGS)}


class _Kind(Struct):
    prompt: Raw = Raw()
    messages: Raw = Raw()
    input: Raw = Raw()


def parse_any(body: bytes) -> Inference:
    """Parse a body that may be a text completion's, which has a `prompt`, an embeddings request's, which has an
    `input`, or a chat's. Raises InvalidBody (400)."""
    try:
        kind = decode(body, type=_Kind)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        # The strict parser says what is wrong.
        return CHAT.parse(body)
    if bytes(kind.messages):
        return CHAT.parse(body)
    return (TEXT if bytes(kind.prompt) else EMBEDDINGS if bytes(kind.input) else CHAT).parse(body)


async def count_stored(variant: VariantView, engine_body: Mapping[str, Any]) -> PromptCount:
    """The prompt's tokens of a body as an engine gets it. Raises what counting raises."""
    if "input" in engine_body:
        return await variant.count_inputs_async(engine_body["input"])
    if "prompt" in engine_body:
        return await variant.count_text_prompt_async(engine_body["prompt"])
    return await variant.count_prompt_async(engine_body.get("messages", []), engine_body.get("tools"))


def surface_of(engine_body: Mapping[str, Any]) -> Surface:
    """The surface of a body as an engine gets it: what a stored job is run by."""
    if "input" in engine_body:
        return EMBEDDINGS
    return TEXT if "prompt" in engine_body else CHAT
