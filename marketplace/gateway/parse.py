"""A chat's body, checked where a rule spans several fields, and normalised: content parts joined, `developer` is
`system`, so that the count of tokens and the engine see the very same messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import msgspec
from msgspec import Struct

from agent.sizing.variants import CHAT
from marketplace.catalog.service import PromptCount, VariantView
from marketplace.gateway.bodies import ChatBody, Message, ProviderBody, ServiceTier, TextPart, Tool
from marketplace.gateway.strict import InvalidBody, decode_strict

OFFLOAD_BYTES: Final = 64 * 1024
"""Larger bodies are parsed off the event loop (see gateway.chat)."""
ENGINE_FIELDS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "seed",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
)
"""What an engine is told beside messages and max_tokens. Nothing else of a body leaves the gateway."""


class Inference(Protocol):
    """A checked request to run a model, whichever endpoint it came to."""

    task: ClassVar[str]
    """What the variant must be for: `chat` or `embed`."""
    prompt_field: ClassVar[str]
    """The field of the body that its prompt came in."""

    @property
    def model(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    @property
    def include_usage(self) -> bool: ...

    @property
    def max_tokens(self) -> int | None:
        """What the client asked as a bound on output; None: the model's default applies."""
        ...

    @property
    def choices(self) -> int:
        """Answers that are wanted, each within the bound on output."""
        ...

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON Schema that the answer is to follow, if one was given."""
        ...

    @property
    def opening(self) -> list[dict[str, Any]]:
        """What tells conversations apart, as messages."""
        ...

    @property
    def provider(self) -> ProviderBody | None:
        """Where it may run; None: the key's default, or anywhere."""
        ...

    @property
    def service_tier(self) -> ServiceTier | None:
        """What the client asked for; None: it said nothing, which is the default."""
        ...

    @property
    def uses_tools(self) -> bool:
        """True if the variant must know tools."""
        ...

    def engine_body(self, max_tokens: int) -> bytes:
        """The JSON that goes to the engine."""
        ...

    async def count(self, variant: VariantView) -> PromptCount:
        """The prompt's tokens. Raises PromptTooLong and what else the variant cannot take (400)."""
        ...


class ChatRequest(Struct, frozen=True):
    """A chat request that passed every check, normalised."""

    task: ClassVar[str] = CHAT
    prompt_field: ClassVar[str] = "messages"
    model: str
    messages: list[dict[str, Any]]
    """Plain objects: `content` is one string (or absent beside tool calls), `developer` became `system`."""
    tools: list[dict[str, Any]] | None
    stream: bool
    include_usage: bool
    max_tokens: int | None
    """What the client asked as a bound on output; None: the model's default applies."""
    options: dict[str, Any]
    """ENGINE_FIELDS that were given."""
    provider: ProviderBody | None = None
    choices: int = 1
    """Answers that are wanted: `n`."""
    service_tier: ServiceTier | None = None

    @property
    def uses_tools(self) -> bool:
        """True if the variant must know tools."""
        return bool(self.tools)

    def engine_body(self, max_tokens: int) -> bytes:
        """The JSON that goes to the engine: allow-listed fields, and always a bound on output."""
        several = {"n": self.choices} if self.choices > 1 else {}
        return msgspec.json.encode({"messages": self.messages, "max_tokens": max_tokens, **several, **self.options})

    @property
    def opening(self) -> list[dict[str, Any]]:
        """What tells conversations apart."""
        return self.messages

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The schema of `response_format`, if there is one."""
        return schema_of(self.options)

    async def count(self, variant: VariantView) -> PromptCount:
        """The prompt's tokens, by the variant's template. Raises what `VariantView.count_prompt` does."""
        return await variant.count_prompt_async(self.messages, self.tools)


def parse_chat(body: bytes) -> ChatRequest:
    """Parse the body of a chat request. Raises InvalidBody (400), naming the field where there is one."""
    return to_request(decode_strict(body, ChatBody))


def to_request(body: ChatBody) -> ChatRequest:
    """Check what spans several fields, and normalise. Raises InvalidBody (400)."""
    messages = plain_messages(body.messages)
    options = _options(body)
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=options.get("tools"),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        max_tokens=_output_bound(body),
        options=options,
        provider=body.provider,
        choices=body.n or 1,
        service_tier=body.service_tier,
    )


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain objects, normalised. Raises InvalidBody (400)."""
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    return [_plain_message(message) for message in messages]


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as plain objects; None where there are none."""
    return [msgspec.to_builtins(tool) for tool in tools] if tools else None


def _check_message(message: Message, path: str) -> None:
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidBody(f"`{path}.tool_call_id` is missing.", param=f"{path}.tool_call_id")
    if message.tool_calls and message.role != "assistant":
        raise InvalidBody(f"`{path}.tool_calls` belongs to an assistant message.", param=f"{path}.tool_calls")
    if message.reasoning_content is not None and message.role != "assistant":
        field = f"{path}.reasoning_content"
        raise InvalidBody(f"`{field}` belongs to an assistant message.", param=field)
    if message.content is None and not (message.role == "assistant" and (message.tool_calls or message.refusal)):
        raise InvalidBody(f"`{path}.content` is missing.", param=f"{path}.content")


def _plain_message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    if isinstance(content, list):
        # The way llama.cpp joins text parts, done here so that the count cannot differ from it.
        content = "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
    if content is None and message.refusal is not None:
        content = message.refusal
    if content is not None:
        plain["content"] = content
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["content"] = content or ""
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
            for call in message.tool_calls
        ]
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _options(body: ChatBody) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in ENGINE_FIELDS:
        value = getattr(body, name)
        if value is not None:
            options[name] = value if isinstance(value, int | float | str) else msgspec.to_builtins(value)
    if not options.get("tools"):
        options.pop("tools", None)
        if options.pop("tool_choice", "none") not in ("none", "auto"):
            raise InvalidBody("`tool_choice` needs `tools`.", param="tool_choice")
        options.pop("parallel_tool_calls", None)
    if "top_logprobs" in options and not options.get("logprobs"):
        raise InvalidBody("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    check_logit_bias(options)
    return options


def schema_of(engine_body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON Schema that an engine is told to follow; None where there is none."""
    wanted = engine_body.get("response_format")
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return None
    schema: dict[str, Any] | None = wanted["json_schema"].get("schema")
    return schema


def choices_of(engine_body: Mapping[str, Any]) -> int:
    """How many answers a stored body asks for."""
    wanted: int = engine_body.get("n", 1)
    return wanted


def check_logit_bias(options: dict[str, Any]) -> None:
    """Raise InvalidBody unless the keys of `logit_bias` are token ids."""
    for token in options.get("logit_bias", ()):
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise InvalidBody(f"`logit_bias` has a key that is no token id: {token[:40]!r}.", param="logit_bias")


def _output_bound(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidBody(
            "`max_tokens` and `max_completion_tokens` differ; send one of them.", param="max_completion_tokens"
        )
    return new if new is not None else old
