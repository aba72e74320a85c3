"""The JSON objects that renters send, field by field and bounded: what is not named here is refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from agent.protocol import MAX_CHOICES

MAX_MESSAGES: Final = 2_048
MAX_TOOLS: Final = 128
MAX_OUTPUT_TOKENS: Final = 1_048_576

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
