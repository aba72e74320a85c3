"""The body of POST /v1/embeddings: strict, bounded, and made into a request that runs as any other does."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Struct

from agent.protocol import FLOAT_BYTES
from agent.sizing.variants import EMBED
from marketplace.catalog.service import PromptCount, VariantView
from marketplace.core.errors import BadRequest
from marketplace.gateway.bodies import ModelName, ProviderBody, ShortText
from marketplace.gateway.strict import InvalidBody, decode_strict

MAX_INPUTS: Final = 2_048
MAX_TOTAL_TOKENS: Final = 300_000
"""Of all inputs of one request."""
MAX_VECTOR_BYTES: Final = 32 * 1024 * 1024
"""Of one answer, as float32; as JSON it is up to five times as long."""
MAX_STORED_VECTOR_BYTES: Final = 2 * 1024 * 1024
"""Of an answer that is kept: of a batch's line, or under an Idempotency-Key."""

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Encoding = Literal["float", "base64"]


class WrongDimensions(InvalidBody):
    """Vectors of another length were asked for than the model has."""

    code = "unsupported_dimensions"


class TooManyVectors(BadRequest):
    """The answer would be larger than an answer may be."""

    code = "answer_too_large"


class InputTooLong(BadRequest):
    """An input does not fit any slot that serves the model, or all of them are too many tokens."""

    code = "context_length_exceeded"


class EmbeddingBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON object of an embeddings request: every field that is taken, and no other."""

    model: ModelName
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    provider: ProviderBody | None = None
    # Taken from unchanged clients and without effect here.
    user: Annotated[str, Meta(max_length=1_024)] | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=1_024)]], Meta(max_length=16)] | None = None
    safety_identifier: ShortText | None = None


class EmbeddingRequest(Struct, frozen=True):
    """An embeddings request that passed every check that needs no model."""

    task: ClassVar[str] = EMBED
    prompt_field: ClassVar[str] = "input"
    stream: ClassVar[bool] = False
    include_usage: ClassVar[bool] = False
    max_tokens: ClassVar[int] = 0
    choices: ClassVar[int] = 1
    service_tier: ClassVar[None] = None
    answer_schema: ClassVar[None] = None
    uses_tools: ClassVar[bool] = False

    model: str
    inputs: list[str | list[int]]
    encoding: Encoding
    dimensions: int | None = None
    """What the client expects; None: whatever the model has."""
    provider: ProviderBody | None = None

    @property
    def opening(self) -> list[dict[str, Any]]:
        """What tells conversations apart: of embeddings, the first input."""
        return [{"role": "user", "content": str(self.inputs[0])}]

    def engine_body(self, max_tokens: int) -> bytes:
        """The JSON that goes to the engine. An embedding has no output to bound."""
        return msgspec.json.encode({"input": self.inputs})

    def stored_body(self, inputs: tuple[int, ...]) -> bytes:
        """The same for a job that waits, with what its answer and its slot are found by."""
        body = {"input": self.inputs, "encoding_format": self.encoding, "longest_input_tokens": max(inputs)}
        return msgspec.json.encode(body)

    async def count(self, variant: VariantView) -> PromptCount:
        """Tokens of each input. Raises PromptTooLong, InvalidBody, WrongDimensions and TooManyVectors (400)."""
        if self.dimensions is not None and self.dimensions != variant.dimensions:
            raise WrongDimensions(
                f"{variant.model_id} makes vectors of {variant.dimensions} dimensions, and no shorter ones.",
                param="dimensions",
            )
        self._check_ids(variant.shape["vocabulary"])
        require_size(len(self.inputs), variant, MAX_VECTOR_BYTES)
        return await variant.count_inputs_async(self.inputs)

    def _check_ids(self, vocabulary: int) -> None:
        for index, each in enumerate(self.inputs):
            if not isinstance(each, str) and max(each) >= vocabulary:
                raise InvalidBody(
                    f"input[{index}] holds the token id {max(each)}, but this model's ids end at {vocabulary - 1}.",
                    param=f"input[{index}]",
                )


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """Parse the body of an embeddings request. Raises InvalidBody (400), naming the field where there is one."""
    parsed = decode_strict(body, EmbeddingBody)
    return EmbeddingRequest(
        model=parsed.model,
        inputs=_inputs(parsed.input),
        encoding=parsed.encoding_format or "float",
        dimensions=parsed.dimensions,
        provider=parsed.provider,
    )


def _inputs(given: str | list[Any]) -> list[str | list[int]]:
    """One or many inputs, as a list of them: a list of ids is one input. Raises InvalidBody."""
    if isinstance(given, str) or (given and all(isinstance(each, int) for each in given)):
        given = [given]
    if not given:
        raise InvalidBody("`input` is empty: send a text, or a list of them.", param="input")
    if len(given) > MAX_INPUTS:
        raise InvalidBody(f"`input` has {len(given)} entries; at most {MAX_INPUTS} go into one request.", param="input")
    kind = str if isinstance(given[0], str) else list
    for index, each in enumerate(given):
        if not isinstance(each, kind):
            raise InvalidBody(
                "`input` is a text, a list of texts, a list of token ids, or a list of lists of token ids, unmixed.",
                param=f"input[{index}]",
            )
        if not each:
            raise InvalidBody(f"input[{index}] is empty.", param=f"input[{index}]")
    return given


def require_room(inputs: tuple[int, ...], context: int) -> None:
    """Raise InputTooLong, naming the first input that has more tokens than a slot, or the sum."""
    longest = max(inputs)
    if longest > context:
        index = next(index for index, tokens in enumerate(inputs) if tokens > context)
        raise InputTooLong(
            f"input[{index}] has {inputs[index]} tokens, but this model's slots hold {context}. Shorten it, or split "
            "it into several inputs.",
            param=f"input[{index}]",
        )
    if sum(inputs) > MAX_TOTAL_TOKENS:
        raise InputTooLong(
            f"The inputs have {sum(inputs)} tokens together; at most {MAX_TOTAL_TOKENS} go into one request.",
            param="input",
        )


def require_size(inputs: int, variant: VariantView, limit_bytes: int) -> None:
    """Raise TooManyVectors if the answer's vectors would be larger than that."""
    most = limit_bytes // (variant.dimensions * FLOAT_BYTES)
    if inputs > most:
        kept = " where the answer is kept (a batch's line, or with an Idempotency-Key)"
        raise TooManyVectors(
            f"{inputs} vectors of {variant.dimensions} dimensions are more than one answer may hold"
            f"{kept if limit_bytes < MAX_VECTOR_BYTES else ''}: send at most {most} inputs in one request.",
            param="input",
        )
