"""A stand-in for a GPU's engine: continuous batching, timed by the roofline of agent.sizing.speed. Pure, no clock.

Whoever drives it asks `begin()` for the next step, waits for the step's duration, and calls `finish()`. All randomness
comes from the seed and the prompt: the same request gives the same answer and, if it is its turn, the same fault.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal

import msgspec

from agent.engines.port import Done, Piece, Progress, Usage
from agent.sizing.gguf import read_header
from agent.sizing.shape import ModelShape, read_shape
from agent.sizing.speed import DEVICES, SpeedModel

MAX_WORDS: Final = 2048
MAX_CACHED_BLOCKS: Final = 65_536
MAX_WAITING: Final = 4096
MAX_SLOTS: Final = 1024
MIN_STEP_S: Final = 1e-6
CACHE_BLOCK_TOKENS: Final = 16
MESSAGE_OVERHEAD_TOKENS: Final = 5
MODEL_NAME: Final = "simulated"

_TOKENS_KEY: Final = "tokenizer.ggml.tokens"
_WORD: Final = re.compile(r"[Ġ▁][a-z]{2,12}")
_PIECE: Final = re.compile(r" ?\w+|[^\w\s]|\s+")
_PLAIN_WORDS: Final = (
    "the of and to in is that it was for on are as with they be at one have this from by hot but some what there we "
    "can out other were all your when up use word how said an each she which do their time if will way about many"
)
_LLAMA_8B: Final = ModelShape(
    weight_bytes=16_060_522_496,
    parameters=8_030_261_248,
    active_parameters=8_030_261_248,
    layers=32,
    hidden=4096,
    feed_forward=14_336,
    vocabulary=128_256,
    kv_elements_per_token=65_536,
    context_train=8192,
)

_encoder: Final = msgspec.json.Encoder()


class FaultKind(StrEnum):
    """What can go wrong on demand."""

    REJECT = "reject"
    """The request is answered 400."""
    ERROR = "error"
    """The request is answered 500."""
    ERROR_EVENT = "error_event"
    """The stream ends with an error event."""
    DROP = "drop"
    """The connection breaks off."""
    STALL = "stall"
    """Nothing comes any more, and the slot stays taken."""
    EMPTY = "empty"
    """The answer ends at once, in order, with no token."""
    BLANK = "blank"
    """The stream ends without a finish reason."""
    NO_USAGE = "no_usage"
    """The engine does not say what it used."""
    OVERCLAIM = "overclaim"
    """The engine claims ten times the tokens that it made."""
    DIE = "die"
    """The process ends."""
    IGNORE_CANCEL = "ignore_cancel"
    """The engine works on although nobody reads."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong with one request, once it has made `after_tokens` tokens."""

    kind: FaultKind
    after_tokens: int = 0


class SimulationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the stand-in behaves. Raises ValueError for what cannot be."""

    slots: int = 4
    context_per_slot: int = 8192
    device: str = "H100 SXM"
    """A name of agent.sizing.speed.DEVICES."""
    model_path: str = ""
    """A GGUF file that lends its shape and vocabulary. Empty: the shape of an 8B model, and a few plain words."""
    seed: int = 0
    speedup: float = 1.0
    """How much faster than the device it runs."""
    decode_tokens_per_s: float = 0.0
    """Fixed pace of every sequence, whatever the batch; 0 means: by the formula."""
    prefill_tokens_per_s: float = 0.0
    """Fixed pace of the prefill; 0 means: by the formula."""
    prefill_chunk_tokens: int = 512
    mean_output_tokens: float = 0.0
    """Answers end by themselves after about so many tokens; 0 means: only at max_tokens."""
    fault_rate: float = 0.0
    """Part of the requests that meet a fault, 0 to 1."""
    fault_kinds: tuple[str, ...] = (FaultKind.ERROR, FaultKind.ERROR_EVENT, FaultKind.DROP)
    """What these faults are, with equal chances."""
    task: Literal["chat", "embed"] = "chat"

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots must be 1 to {MAX_SLOTS}")
        if self.device not in DEVICES:
            raise ValueError(f"unknown device {self.device!r}: one of {', '.join(DEVICES)}")
        if min(self.context_per_slot, self.prefill_chunk_tokens) < 1 or self.speedup <= 0:
            raise ValueError("context, prefill chunk and speedup must be above zero")
        if min(self.decode_tokens_per_s, self.prefill_tokens_per_s, self.mean_output_tokens) < 0:
            raise ValueError("paces and lengths cannot be negative")
        if not 0 <= self.fault_rate <= 1:
            raise ValueError("fault_rate must be 0 to 1")
        for kind in self.fault_kinds:
            FaultKind(kind)


@dataclass(frozen=True, slots=True)
class Word:
    """A token of the stand-in: real text, and its id where the vocabulary is a real one."""

    text: str
    token_id: int | None


SimEvent = Progress | Piece | Done | Fault
Sink = Callable[[SimEvent], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the batch."""

    prompt_tokens: int
    cached_tokens: int
    planned_tokens: int
    finish_reason: str
    fault: Fault | None
    sink: Sink
    rng: random.Random
    prefilled: int
    made: int = 0
    stalled: bool = False

    @property
    def context(self) -> int:
        """Tokens that it holds in the cache."""
        return self.prefilled + self.made


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the batch: a chunk of one prefill, and a token for each sequence that decodes."""

    duration_s: float
    prefill: Sequence | None
    prefill_tokens: int
    decode: tuple[Sequence, ...]


@dataclass(slots=True)
class _PrefixCache:
    """Which beginnings are cached, by scope, in blocks. The oldest are forgotten."""

    blocks: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)

    def hit_tokens(self, scope: str, pieces: list[str]) -> int:
        """Cached tokens at the beginning of this prompt, all but its last; then remembers the whole of it."""
        hit, unbroken = 0, True
        for number, key in enumerate(_chain(scope, pieces), start=1):
            unbroken = unbroken and key in self.blocks
            hit = number * CACHE_BLOCK_TOKENS if unbroken else hit
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > MAX_CACHED_BLOCKS:
            self.blocks.popitem(last=False)
        return hit


def _chain(scope: str, pieces: list[str]) -> Iterator[tuple[str, int]]:
    digest = 0
    for start in range(0, len(pieces) - CACHE_BLOCK_TOKENS, CACHE_BLOCK_TOKENS):
        block = "\0".join(pieces[start : start + CACHE_BLOCK_TOKENS])
        digest = hash((digest, block))
        yield scope, digest


class Refused(Exception):
    """The request is not taken. `status` is the HTTP status that an engine would answer."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message


class Simulation:
    """The batch. See the module's text for how it is driven."""

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        path = Path(config.model_path) if config.model_path else None
        self.words = read_words(path) if path else plain_words()
        shape = read_shape(path) if path else _LLAMA_8B
        self.dimensions = shape.hidden
        """Of an embedding."""
        self._speed = SpeedModel(shape, DEVICES[config.device])
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._armed: deque[Fault] = deque(maxlen=MAX_WAITING)
        self._cache = _PrefixCache()
        self._fault_rng = random.Random(config.seed)  # noqa: S311 - a simulation wants repeatable chance

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    def arm(self, fault: Fault) -> None:
        """The next request that comes meets this fault."""
        self._armed.append(fault)

    def submit(self, body: dict[str, object], max_tokens: int, scope: str, sink: Sink) -> Sequence:
        """Take a request; `sink` hears of its progress during `finish`. Raises Refused."""
        fault = self._next_fault()
        if fault is not None and fault.kind is FaultKind.REJECT:
            raise Refused(400, "invalid_request_error", "simulated rejection")
        if fault is not None and fault.kind is FaultKind.ERROR:
            raise Refused(500, "server_error", "simulated failure")
        text = _encoder.encode(body.get("messages") or body.get("prompt"))
        pieces = prompt_pieces(body)
        if len(pieces) >= self.config.context_per_slot:
            limit = self.config.context_per_slot
            message = f"This model's maximum context length is {limit} tokens, the prompt has {len(pieces)}"
            raise Refused(400, "exceed_context_size_error", message)
        if len(self._waiting) >= MAX_WAITING:
            raise Refused(503, "server_error", "too many requests wait")
        rng = random.Random(zlib.crc32(text, self.config.seed & 0xFFFFFFFF))  # noqa: S311 - as above
        cached = self._cache.hit_tokens(scope, pieces) if scope else 0
        planned, reason = self._plan(rng, min(max_tokens, self.config.context_per_slot - len(pieces)), fault)
        sequence = Sequence(len(pieces), cached, planned, reason, fault, sink, rng, prefilled=cached)
        self._waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Nobody reads any more."""
        if sequence.fault is None or sequence.fault.kind is not FaultKind.IGNORE_CANCEL:
            self._drop(sequence)

    def begin(self) -> Step | None:
        """The next step, or None if there is nothing to do."""
        while self._waiting and len(self._running) < self.config.slots:
            self._running.append(self._waiting.popleft())
        prefill = next((s for s in self._running if s.prefilled < s.prompt_tokens and not s.stalled), None)
        decode = tuple(s for s in self._running if s.prefilled >= s.prompt_tokens and not s.stalled)
        if prefill is None and not decode:
            return None
        chunk = min(self.config.prefill_chunk_tokens, prefill.prompt_tokens - prefill.prefilled) if prefill else 0
        duration = self._decode_s(decode) + (self._prefill_s(chunk, prefill.prefilled) if prefill else 0.0)
        return Step(max(MIN_STEP_S, duration / self.config.speedup), prefill, chunk, decode)

    def finish(self, step: Step) -> None:
        """The step's time has passed: its sequences move on, and their sinks hear of it."""
        for sequence in step.decode:
            if sequence in self._running:
                self._advance(sequence)
        newcomer = step.prefill
        if newcomer is not None and newcomer in self._running:
            newcomer.prefilled += step.prefill_tokens
            newcomer.sink(Progress(newcomer.prefilled, newcomer.prompt_tokens))
            if newcomer.prefilled >= newcomer.prompt_tokens:
                self._advance(newcomer)

    def _advance(self, sequence: Sequence) -> None:
        """One more token of this sequence, or its fault, or its end."""
        fault = sequence.fault
        if fault is not None and sequence.made >= fault.after_tokens and self._strike(sequence, fault):
            return
        if sequence.made < sequence.planned_tokens:
            word = sequence.rng.choice(self.words)
            sequence.made += 1
            sequence.sink(Piece(word.text, () if word.token_id is None else (word.token_id,)))
        if sequence.made >= sequence.planned_tokens:
            self._drop(sequence)
            sequence.sink(Done(sequence.finish_reason, self._usage(sequence)))

    def _strike(self, sequence: Sequence, fault: Fault) -> bool:
        """Let the fault happen. False if it only shows at the end."""
        if fault.kind is FaultKind.STALL:
            sequence.stalled = True
            return True
        if fault.kind is FaultKind.BLANK:
            self._drop(sequence)
            sequence.sink(Done("", self._usage(sequence)))
            return True
        if fault.kind in {FaultKind.DROP, FaultKind.ERROR_EVENT, FaultKind.DIE}:
            self._drop(sequence)
            sequence.sink(fault)
            return True
        return False

    def _usage(self, sequence: Sequence) -> Usage:
        kind = sequence.fault.kind if sequence.fault else None
        if kind is FaultKind.NO_USAGE:
            return Usage()
        made = sequence.made * 10 if kind is FaultKind.OVERCLAIM else sequence.made
        return Usage(sequence.prompt_tokens, sequence.cached_tokens, made)

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _next_fault(self) -> Fault | None:
        if self._armed:
            return self._armed.popleft()
        if self.config.fault_rate and self._fault_rng.random() < self.config.fault_rate:
            return Fault(FaultKind(self._fault_rng.choice(self.config.fault_kinds)), self._fault_rng.randrange(16))
        return None

    def _plan(self, rng: random.Random, limit: int, fault: Fault | None) -> tuple[int, str]:
        if fault is not None and fault.kind is FaultKind.EMPTY:
            return 0, "stop"
        if self.config.mean_output_tokens:
            planned = 1 + int(rng.expovariate(1 / self.config.mean_output_tokens))
            if planned < limit:
                return planned, "stop"
        return limit, "length"

    def _decode_s(self, sequences: tuple[Sequence, ...]) -> float:
        if not sequences:
            return 0.0
        if self.config.decode_tokens_per_s:
            return 1 / self.config.decode_tokens_per_s
        mean_context = sum(s.context for s in sequences) / len(sequences)
        return self._speed.decode_step_s(len(sequences), mean_context)

    def _prefill_s(self, tokens: int, before: int) -> float:
        if self.config.prefill_tokens_per_s:
            return tokens / self.config.prefill_tokens_per_s
        return self._speed.prefill_s(tokens, before)


def prompt_pieces(body: dict[str, object]) -> list[str]:
    """About the tokens of a prompt: one a word, one a mark, some a message. An estimate, and never billed."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return _PIECE.findall(prompt)
    messages = body.get("messages")
    pieces: list[str] = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        text = content if isinstance(content, str) else _encoder.encode(content).decode()
        pieces += ["<message>"] * MESSAGE_OVERHEAD_TOKENS
        pieces += _PIECE.findall(text)
    return pieces


def read_words(path: Path) -> tuple[Word, ...]:
    """Whole words of a model's vocabulary, each a single token of it. Raises ValueError if it has none."""
    tokens = read_header(path, frozenset({_TOKENS_KEY})).metadata.get(_TOKENS_KEY)
    words: list[Word] = []
    for token_id, token in enumerate(tokens if isinstance(tokens, list) else []):
        if isinstance(token, str) and _WORD.fullmatch(token):
            words.append(Word(" " + token[1:], token_id))
            if len(words) == MAX_WORDS:
                break
    if not words:
        raise ValueError(f"{path.name} has no words in its vocabulary")
    return tuple(words)


def plain_words() -> tuple[Word, ...]:
    """Words without ids, for where no vocabulary is given."""
    return tuple(Word(" " + word, None) for word in _PLAIN_WORDS.split())
