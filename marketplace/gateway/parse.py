"""Request bodies: strict, bounded, decoded once. Whatever is wrong becomes a 400 or 413 that names the field.

Refused: unknown fields, duplicate keys, NaN and numbers out of range, invalid UTF-8 and lone surrogates, NUL, deep
nesting, absurd sizes. What passes is normalised (content parts joined, `developer` is `system`), so that the count of
tokens and the engine see the very same messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from agent.protocol import MAX_CHOICES
from agent.sizing.variants import CHAT
from marketplace.catalog.service import PromptCount, VariantView
from marketplace.core.errors import BadRequest

MAX_DEPTH: Final = 64
"""Nested arrays and objects, in all."""
MAX_MESSAGES: Final = 2_048
MAX_TOOLS: Final = 128
MAX_OUTPUT_TOKENS: Final = 1_048_576
OFFLOAD_BYTES: Final = 64 * 1024
"""Larger bodies are parsed off the event loop (see gateway.request)."""

T = TypeVar("T")
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
ShortText = Annotated[str, Meta(max_length=256)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=0, le=1_000_000)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=16)]
ServiceTier = Literal["auto", "default", "flex"]
FLEX: Final = "flex"
LogitBias = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1_024)]


class InvalidBody(BadRequest):
    """The body is not what this endpoint takes."""


class _Strict(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class TextPart(_Strict, frozen=True, tag_field="type", tag="text"):
    text: str


class RefusalPart(_Strict, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class CalledFunction(_Strict, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class ToolCall(_Strict, frozen=True):
    id: ShortText
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(_Strict, frozen=True):
    """One message as a client sends it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: ShortText | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    """Of an answer that is sent back: the template decides whether the model sees it again."""
    # Members of answers, which clients send back as they came; there is nothing in them here.
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class Function(_Strict, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict, frozen=True):
    type: Literal["function"]
    function: Function


class NamedFunction(_Strict, frozen=True):
    name: ShortText


class NamedTool(_Strict, frozen=True):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(_Strict, frozen=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(_Strict, frozen=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(_Strict, frozen=True):
    name: ShortText
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Strict, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class StreamOptions(_Strict, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class MaxPriceBody(_Strict, frozen=True):
    """USD per million tokens, as numbers or decimal strings; read exactly."""

    prompt: Decimal | None = None
    completion: Decimal | None = None


ProviderNames = Annotated[list[ShortText], Meta(max_length=100)]


class ProviderBody(_Strict, frozen=True):
    """OpenRouter's `provider` object, with regions beside."""

    order: ProviderNames | None = None
    only: ProviderNames | None = None
    ignore: ProviderNames | None = None
    allow_fallbacks: bool | None = None
    require_parameters: bool | None = None
    """Always so here: whatever is not passed on to an engine is refused."""
    quantizations: Annotated[list[ShortText], Meta(max_length=16)] | None = None
    sort: Literal["price", "throughput", "latency"] | None = None
    max_price: MaxPriceBody | None = None
    data_collection: Literal["allow", "deny"] | None = None
    """`deny`: only nodes whose owners declare that nothing is kept or trained with, and none on probation."""
    regions: Annotated[list[ShortText], Meta(max_length=32)] | None = None


class ChatBody(_Strict, frozen=True):
    """The JSON object of a chat request: every field that is taken, and no other."""

    model: ModelName
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    top_k: TopK | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    logit_bias: LogitBias | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    service_tier: ServiceTier | None = None
    # Taken from unchanged clients and without effect here: nothing is stored, text is the only mode.
    user: Annotated[str, Meta(max_length=1_024)] | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=1_024)]], Meta(max_length=16)] | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    store: Literal[False] | None = None
    provider: ProviderBody | None = None
    # Fields of OpenAI's that are not taken here: some clients name them all, and null asks for nothing.
    audio: None = None
    function_call: None = None
    functions: None = None
    prediction: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


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


@lru_cache(maxsize=16)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode_strict(body: bytes, kind: type[T]) -> T:
    """Decode JSON into a msgspec type with every refusal of this module. Raises InvalidBody (400)."""
    try:
        value: T = _decoder(kind).decode(body)  # type: ignore[arg-type]  # a type is hashable
        if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
            _refuse_depth(body)
        _duplicates.decode(body.decode())
    except RecursionError:
        raise InvalidBody(f"The body nests deeper than {MAX_DEPTH} levels.") from None
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except msgspec.DecodeError as error:
        # msgspec reports a lone surrogate at the end of a string as truncation.
        raise InvalidBody(f"The body is not valid JSON in UTF-8: {error}.") from None
    except ValueError as error:
        # Python's own bound on the digits of an integer.
        raise InvalidBody(f"The body is not valid JSON: {error}.") from None
    if b"\\u0000" in body and _holds_nul(msgspec.json.decode(body)):
        raise InvalidBody("The body contains a NUL character (\\u0000), which is not text.")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen = {key for key, _ in pairs}
    if len(seen) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidBody(f"The key {twice[:80]!r} appears twice in one object.", param=twice[:80])


_duplicates: Final = json.JSONDecoder(object_pairs_hook=_refuse_duplicates)


def _refuse_depth(body: bytes) -> None:
    """Brackets inside strings do not count, hence the walk over the decoded value."""
    level: list[Any] = [msgspec.json.decode(body)]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    if any(isinstance(value, dict | list) for value in level):
        raise InvalidBody(f"The body nests deeper than {MAX_DEPTH} levels.")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _holds_nul(value: Any) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if "\0" in item:
                return True
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return False


_NOT_TAKEN: Final = "`{}` is not a field that is taken here."
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`", re.DOTALL)
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)


def _explain(message: str) -> InvalidBody:
    """msgspec's message, with the field as OpenAI's `param`."""
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    text = message[: found.start()] if found else message
    for pattern, sentence in ((_UNKNOWN, _NOT_TAKEN), (_MISSING, "`{}` is missing.")):
        if named := pattern.match(message):
            field = f"{path}.{named.group(1)}" if path else named.group(1)
            return InvalidBody(sentence.format(field[:160]), param=field[:160])
    if text.startswith("Expected `null`, got"):
        return InvalidBody(_NOT_TAKEN.format(path[:160]), param=path[:160])
    return InvalidBody(f"`{path[:160]}`: {text}." if path else f"{text}.", param=path[:160] or None)


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
