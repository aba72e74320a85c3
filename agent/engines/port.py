"""What the agent asks of any engine, and what an engine may answer. Adapters implement it; nothing else is imported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final, Protocol

STOP_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request for an engine. `body` is a parsed OpenAI chat request of allow-listed fields; one with `prompt` is a
    text completion, one with `input` wants embeddings, which come as Embedded events."""

    body: dict[str, object]
    max_output_tokens: int
    cache_scope: str
    """Prefixes may be reused only within one scope."""
    timeout_s: float
    prompt_tokens: int = 0
    """As the gateway counted them; 0: not told."""
    traceparent: str = ""
    """For an engine that makes spans of its own; empty: not traced."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The engine works on the prompt: proof of life before the first token."""

    processed_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer."""

    text: str
    token_ids: tuple[int, ...] = ()
    """Empty where the engine does not say."""
    reasoning: bool = False
    extra: bytes = b""
    """JSON of other delta fields (tool_calls), or of `logprobs` if asked, in OpenAI's shape."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors of the next inputs of an embeddings request, in their order."""

    first_index: int
    dimensions: int
    data: bytes
    """float32, little-endian, one vector after another, each of length 1."""


@dataclass(frozen=True, slots=True)
class Usage:
    """None: the engine does not say. 0 is a value."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Last event of a stream. An empty finish_reason means that the engine closed without one: an error."""

    finish_reason: str
    usage: Usage = field(default_factory=Usage)


EngineEvent = Progress | Piece | Embedded | Done


class EngineError(Exception):
    """An engine failed. `code` is one of agent.protocol.FAILURES."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Known once an engine is ready."""

    name: str
    version: str
    slots: int
    context_per_slot: int
    simulated: bool
    prefix_cache_s: float
    pid: int | None
    task: str = "chat"
    """`chat` or `embed`."""
    protection: str = ""
    """What keeps its process from the owner's files and from the network; empty: nothing beyond its own key."""


class Engine(Protocol):
    """One running engine with one variant loaded."""

    @property
    def facts(self) -> EngineFacts: ...

    async def start(self) -> EngineFacts:
        """Start and load; returns when it serves. Raises EngineError with what the engine's own log says."""
        ...

    async def healthy(self) -> bool:
        """True if the process lives and answers. Bounded by two seconds."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        """Stream one answer. Raises EngineError. Closing the iterator (aclose) stops the engine's work on it."""
        ...

    async def idle(self) -> bool:
        """True if no request is being worked on but those whose iterators are open here: what proves that a cancel
        reached the engine. Cautious: False also where the engine does not answer in two seconds."""
        ...

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End it: SIGTERM, then SIGKILL after `grace_s`; with 0 SIGKILL at once. Frees its memory. Never raises."""
        ...
