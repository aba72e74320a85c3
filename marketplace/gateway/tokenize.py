"""POST /v1/tokenize: a text or a chat as the model's own tokenizer and template read it."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from marketplace.catalog.service import PromptCount, VariantView
from marketplace.gateway.bodies import MAX_MESSAGES, MAX_TOOLS, Message, ModelName, Tool
from marketplace.gateway.parse import plain_messages, plain_tools
from marketplace.gateway.strict import InvalidBody, decode_strict


class TokenizeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """One of `prompt`, `messages` and `input` (an embedding's text), as the endpoint that will run it takes them."""

    model: ModelName
    prompt: str | None = None
    input: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    return_tokens: bool = True
    """False leaves the ids out."""


def parse_tokenize(body: bytes) -> TokenizeBody:
    """Parse the body. Raises InvalidBody (400), naming the field where there is one."""
    parsed = decode_strict(body, TokenizeBody)
    given = [name for name in ("prompt", "messages", "input") if getattr(parsed, name) is not None]
    if len(given) != 1:
        raise InvalidBody("Send one of `prompt`, `messages` and `input`.", param=given[-1] if given else "prompt")
    if parsed.tools and parsed.messages is None:
        raise InvalidBody("`tools` goes with `messages`.", param="tools")
    return parsed


async def tokenize(variant: VariantView, asked: TokenizeBody) -> dict[str, Any]:
    """Count, and show the ids. Raises PromptTooLong and what the template cannot take (400)."""
    counted = await _count(variant, asked)
    answer: dict[str, Any] = {
        "object": "tokenization",
        "model": asked.model,
        "count": counted.tokens,
        "max_model_len": variant.training_context,
    }
    if asked.return_tokens:
        answer["tokens"] = counted.ids
    return answer


async def _count(variant: VariantView, asked: TokenizeBody) -> PromptCount:
    if asked.messages is None:
        # An embedding's text is read as a prompt is: without a template, with the model's own begin and end.
        return await variant.count_text_prompt_async(asked.prompt or asked.input or "")
    return await variant.count_prompt_async(plain_messages(asked.messages), plain_tools(asked.tools))
