"""The catalogue in a process's memory: which variants are sold, by which names, and how their tokens are counted.

Variants never change once imported, so a refresh only fetches what is new. A variant whose stored tokenizer or template
is damaged is left out, and logged; the others are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from agent.sizing.variants import CHAT
from marketplace.catalog.models import Model, Variant
from marketplace.catalog.prices import set_price
from marketplace.catalog.template import ChatTemplate, Message, TemplateError, Tool
from marketplace.catalog.tokenizer import INLINE_CHARACTERS, OracleTokenizer, TextTokenizer, TokenizerError, unpack
from marketplace.core.database import SessionFactory
from marketplace.core.errors import BadRequest, NotFound
from marketplace.core.logs import get_logger

__all__ = ["Catalog", "PromptCount", "PromptTooLong", "UnknownModel", "VariantView", "set_price"]

log = get_logger(__name__)
REFRESH_S: Final = 5.0
MAX_VARIANTS: Final = 10_000
MAX_SUGGESTIONS: Final = 3
MAX_MODEL_CHARACTERS: Final = 256
SHORT_HASH_CHARACTERS: Final = 12


class UnknownModel(NotFound):
    """No variant has this name. `nearest` holds names that look like it."""

    code = "model_not_found"


class PromptTooLong(BadRequest):
    """More tokens than any slot of this model may hold. Nothing is charged."""

    code = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class PromptCount:
    """A prompt as the engine will see it."""

    tokens: int
    ids: list[int]
    """For proving prefixes. Not to be changed."""
    inputs: tuple[int, ...] = ()
    """Of an embeddings request, the tokens of each input; their sum is `tokens`. Empty: one prompt."""


@dataclass(frozen=True, slots=True)
class VariantView:
    """One variant, and how to count for it. Counting is exact: it gives the engine's own ids."""

    id: UUID
    model_id: str
    display_name: str
    sha256: str
    size_bytes: int
    quantisation: str
    training_context: int
    default_max_output: int
    shape: Mapping[str, Any]
    created_at: datetime
    tokenizer_kind: str
    supports_tools: bool
    max_token_characters: int
    """Length of the longest token: a text cannot have fewer tokens than its length divided by this."""
    begin_ids: tuple[int, ...]
    """What the engine puts before every prompt."""
    end_ids: tuple[int, ...]
    task: str
    """`chat` or `embed`."""
    weights_sha256: str
    dimensions: int
    """Of its vectors; 0 where it makes none."""
    pooling: str
    _tokenizer: TextTokenizer = field(repr=False, compare=False)
    _template: ChatTemplate | None = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The name that means exactly this variant: `model@` and the start of its hash."""
        return f"{self.model_id}@{self.sha256[:SHORT_HASH_CHARACTERS]}"

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
        """The prompt's text. Raises UnsupportedMessages and UnsupportedTools (400)."""
        if self._template is None:
            raise BadRequest(f"{self.model_id} embeds texts: it has no chat template.", param="model")
        return self._template.render(messages, tools)

    def count_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> PromptCount:
        """Tokens of a chat's prompt. About 1 ms per 1,000 tokens, and blocking.

        Raises UnsupportedMessages, UnsupportedTools and PromptTooLong (400).
        """
        return self._count_rendered(self.render(messages, tools))

    async def count_prompt_async(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> PromptCount:
        """`count_prompt`, off the event loop where it would take more than half a millisecond."""
        if self._tokenizer.blocking or _content_characters(messages) > INLINE_CHARACTERS or tools:
            return await asyncio.to_thread(self.count_prompt, messages, tools)
        return self.count_prompt(messages, tools)

    def count_text_prompt(self, text: str) -> PromptCount:
        """Tokens of a text that the model goes on from, without a template; special tokens count as such, as the engine
        reads them. Blocking. Raises PromptTooLong."""
        return self._count_rendered(text, "prompt")

    async def count_text_prompt_async(self, text: str) -> PromptCount:
        """`count_text_prompt`, off the event loop where it would take more than half a millisecond."""
        if self._tokenizer.blocking or len(text) > INLINE_CHARACTERS:
            return await asyncio.to_thread(self.count_text_prompt, text)
        return self.count_text_prompt(text)

    def count_inputs(self, inputs: Sequence[str | Sequence[int]]) -> PromptCount:
        """Tokens of each input of an embeddings request, as the engine reads it; token ids are taken as they are.
        Blocking. Raises PromptTooLong, naming the input."""
        counts = []
        for index, each in enumerate(inputs):
            count = self._count_rendered(each, f"input[{index}]").tokens if isinstance(each, str) else len(each)
            counts.append(count)
        return PromptCount(sum(counts), [], tuple(counts))

    async def count_inputs_async(self, inputs: Sequence[str | Sequence[int]]) -> PromptCount:
        """`count_inputs`, off the event loop where it would take more than half a millisecond."""
        if self._tokenizer.blocking or sum(map(len, inputs)) > INLINE_CHARACTERS:
            return await asyncio.to_thread(self.count_inputs, inputs)
        return self.count_inputs(inputs)

    def count_text(self, text: str) -> int:
        """Tokens of a piece of an answer; spelled-out special tokens are plain text. Blocking."""
        return self._tokenizer.count(text, special=False)

    async def count_text_async(self, text: str) -> int:
        """`count_text`, off the event loop where it would take more than half a millisecond."""
        if self._tokenizer.blocking or len(text) > INLINE_CHARACTERS:
            return await asyncio.to_thread(self.count_text, text)
        return self.count_text(text)

    def _count_rendered(self, prompt: str, field: str = "messages") -> PromptCount:
        if len(prompt) > self.training_context * self.max_token_characters:
            # Proven without counting: even the longest token, over and over, would not bring it down to the context.
            raise PromptTooLong(
                f"This model's context is {self.training_context} tokens; the prompt has "
                f"{len(prompt)} characters, which is more in any case.",
                param=field,
            )
        ids = [*self.begin_ids, *self._tokenizer.encode(prompt, special=True), *self.end_ids]
        return PromptCount(len(ids), ids)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Everything that is sold, in one immutable piece: readers never see half a refresh."""

    by_id: Mapping[UUID, VariantView]
    by_sha256: Mapping[str, VariantView]
    by_name: Mapping[str, VariantView]
    models: tuple[str, ...]


class Catalog:
    """The catalogue of one process. Look-ups are plain dictionary reads; `load` and `refresh` block."""

    def __init__(self, session_factory: SessionFactory) -> None:
        self._session_factory = session_factory
        self._snapshot = _snapshot(())
        self._broken: set[UUID] = set()
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None

    def load(self) -> int:
        """Read everything. Returns the number of variants sold. Raises SQLAlchemyError if the database is away."""
        self.refresh()
        return len(self._snapshot.by_id)

    def refresh(self) -> int:
        """Fetch variants that are new. Returns how many. Raises SQLAlchemyError if the database is away."""
        with self._lock, self._session_factory() as session:
            known = self._snapshot.by_id
            ids = session.scalars(select(Variant.id).order_by(Variant.created_at, Variant.id).limit(MAX_VARIANTS)).all()
            missing = [id_ for id_ in ids if id_ not in known and id_ not in self._broken]
            gone = len(known.keys() - set(ids))
            if not missing and not gone:
                return 0
            fresh = {}
            for id_ in missing:
                row = session.execute(
                    select(Variant, Model).join(Model, Model.id == Variant.model_id).where(Variant.id == id_)
                ).one_or_none()
                view = None if row is None else self._view(row[0], row[1])
                if view is not None:
                    fresh[id_] = view
            self._snapshot = _snapshot([view for id_ in ids if (view := known.get(id_) or fresh.get(id_))])
            return len(fresh)

    async def start(self) -> None:
        """Load, then refresh every few seconds until `stop`."""
        await asyncio.to_thread(self.load)
        self._task = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        """End the refreshing, and the child processes of tokenizers that have one."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the child processes of tokenizers that have one. They start again when needed."""
        for view in self.all():
            if isinstance(view._tokenizer, OracleTokenizer):
                view._tokenizer.close()

    def all(self) -> list[VariantView]:
        """Every variant, oldest first."""
        return list(self._snapshot.by_id.values())

    def by_id(self, variant_id: UUID) -> VariantView | None:
        """The variant with this id."""
        return self._snapshot.by_id.get(variant_id)

    def by_sha256(self, sha256: str) -> VariantView | None:
        """The variant with this hash (hex), which offers name it by."""
        return self._snapshot.by_sha256.get(sha256.lower())

    def resolve(self, model: str) -> VariantView:
        """The variant that a request means.

        `model` is a model's id (its oldest variant), `id:quantisation` (such as `...:q4_1`), or `id@` and the first 12
        or more hex digits of the file's SHA-256. Raises UnknownModel with the nearest names.
        """
        found = self._snapshot.by_name.get(model.lower()) or self._by_hash(model)
        if found is None:
            raise self._unknown(model)
        return found

    def _by_hash(self, model: str) -> VariantView | None:
        model_id, at, digits = model.lower().partition("@")
        if not at or len(digits) < SHORT_HASH_CHARACTERS:
            return None
        matches = [
            view
            for sha256, view in self._snapshot.by_sha256.items()
            if sha256.startswith(digits) and view.model_id.lower() == model_id
        ]
        return matches[0] if len(matches) == 1 else None

    def _unknown(self, model: str) -> UnknownModel:
        shown = model[:MAX_MODEL_CHARACTERS]
        near = difflib.get_close_matches(shown.lower(), self._snapshot.by_name, n=MAX_SUGGESTIONS, cutoff=0.4)
        nearest = [self._snapshot.by_name[name].model_id if ":" not in name else name for name in near]
        nearest = list(dict.fromkeys(nearest)) or list(self._snapshot.models[:MAX_SUGGESTIONS])
        hint = f" Nearest: {', '.join(nearest)}." if nearest else " No model is offered here yet."
        return UnknownModel(f"The model {shown!r} does not exist.{hint}", param="model", nearest=nearest)

    def _view(self, variant: Variant, model: Model) -> VariantView | None:
        try:
            return _view(variant, model)
        except (TokenizerError, TemplateError, KeyError, TypeError) as error:
            log.error("variant_unusable", variant_id=str(variant.id), error=str(error))
            self._broken.add(variant.id)
            return None

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                added = await asyncio.to_thread(self.refresh)
            except (SQLAlchemyError, OSError) as error:
                log.warning("catalog_refresh_failed", error=type(error).__name__)
                continue
            if added:
                log.info("catalog_refreshed", added=added, variants=len(self._snapshot.by_id))


def _view(variant: Variant, model: Model) -> VariantView:
    special = variant.special_tokens
    template = None
    if variant.task == CHAT:
        template = ChatTemplate(
            variant.chat_template,
            bos_token=special["bos_token"],
            eos_token=special["eos_token"],
            adds_bos=special["add_bos"],
        )
    return VariantView(
        id=variant.id,
        model_id=variant.model_id,
        display_name=model.display_name,
        sha256=variant.sha256,
        size_bytes=variant.size_bytes,
        quantisation=variant.quantisation,
        training_context=variant.training_context,
        default_max_output=variant.default_max_output,
        shape=MappingProxyType(variant.shape),
        created_at=variant.created_at,
        tokenizer_kind=variant.tokenizer_kind,
        supports_tools=template is not None and template.capabilities.tools,
        max_token_characters=special["max_token_characters"],
        begin_ids=(special["bos_id"],) if special["add_bos"] else (),
        end_ids=(special["eos_id"],) if special["add_eos"] else (),
        task=variant.task,
        weights_sha256=variant.weights_sha256 or variant.sha256,
        dimensions=variant.dimensions or 0,
        pooling=variant.pooling or "",
        _tokenizer=unpack(variant.tokenizer_kind, variant.tokenizer),
        _template=template,
    )


def _snapshot(views: Sequence[VariantView]) -> _Snapshot:
    by_name: dict[str, VariantView] = {}
    for view in views:
        by_name.setdefault(view.model_id.lower(), view)
        by_name.setdefault(f"{view.model_id}:{view.quantisation}".lower(), view)
    return _Snapshot(
        by_id=MappingProxyType({view.id: view for view in views}),
        by_sha256=MappingProxyType({view.sha256: view for view in views}),
        by_name=MappingProxyType(by_name),
        models=tuple(dict.fromkeys(view.model_id for view in views)),
    )


def _content_characters(messages: Sequence[Message]) -> int:
    """Roughly how long the prompt will be, without rendering it."""
    total = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, Sequence):
            total += sum(len(part.get("text") or "") for part in content if isinstance(part, Mapping))
        total += 16
    return total
