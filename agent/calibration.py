"""A short measured run of an engine, remembered by device, variant and engine version."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final, cast

import msgspec

from agent.engines.port import Done, Embedded, Engine, EngineError, EngineEvent, EngineFacts, EngineRequest, Piece
from agent.identity import write_private
from agent.sizing.variants import EMBED

log = logging.getLogger("fallow.agent.engine")

PROMPT_WORDS: Final = 120
ANSWER_TOKENS: Final = 24
LIMIT_S: Final = 30.0
"""A run that takes longer is given up: real answers will tell."""
MAX_REMEMBERED: Final = 256


class Speeds(msgspec.Struct, frozen=True):
    """What one request alone gets. None: not measured."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    measured_at_s: float = 0.0
    """Unix time."""


class SpeedBook:
    """speeds.json: may be deleted at any time, and is then measured again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known = msgspec.json.decode(path.read_bytes(), type=dict[str, Speeds])
        except (OSError, msgspec.DecodeError):
            self._known = {}

    def find(self, device: str, variant: str, engine: str) -> Speeds | None:
        """What was measured; `engine` is its name and version."""
        return self._known.get(_key(device, variant, engine))

    def of_variant(self, device: str, variant: str) -> Speeds | None:
        """The newest of any engine."""
        begin = _key(device, variant, "")
        found = [speeds for key, speeds in self._known.items() if key.startswith(begin)]
        return max(found, key=lambda speeds: speeds.measured_at_s, default=None)

    def note(self, device: str, variant: str, engine: str, speeds: Speeds) -> None:
        """Remember. Raises OSError."""
        self._known[_key(device, variant, engine)] = speeds
        while len(self._known) > MAX_REMEMBERED:
            self._known.pop(min(self._known, key=lambda key: self._known[key].measured_at_s))
        write_private(self._path, msgspec.json.encode(self._known), durable=False)


def _key(device: str, variant: str, engine: str) -> str:
    return f"{device}|{variant}|{engine}"


class Calibrator:
    """Knows the speeds of engines on one machine, measuring those that it does not know."""

    def __init__(self, book: SpeedBook) -> None:
        self._book = book

    async def speeds(self, engine: Engine, facts: EngineFacts, device: str, variant: str) -> Speeds:
        """Remembered or measured now, before the engine is offered. Never raises for an engine that cannot."""
        name = f"{facts.name} {facts.version}"
        known = self._book.find(device, variant, name)
        if known is not None or facts.simulated:
            return known or Speeds()
        try:
            async with asyncio.timeout(LIMIT_S):
                measured = await measure(engine)
            self._book.note(device, variant, name, measured)
        except (TimeoutError, EngineError, OSError) as error:
            log.info("not_calibrated engine=%s reason=%r", name, type(error).__name__)
            return Speeds()
        log.info(
            "calibrated engine=%s prefill_tokens_per_s=%.0f decode_tokens_per_s=%.1f",
            *(name, measured.prefill_tokens_per_s or 0, measured.decode_tokens_per_s or 0),
        )
        return measured


async def measure(engine: Engine) -> Speeds:
    """One request of a known length, alone. Raises EngineError."""
    # Nobody else's beginning: nothing of it may lie in a cache.
    prompt = f"{time.time_ns()} " + "one two three four five six " * (PROMPT_WORDS // 6)
    embeds = engine.facts.task == EMBED
    body: dict[str, object] = (
        {"input": [prompt]} if embeds else {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
    )
    request = EngineRequest(body, ANSWER_TOKENS, "", LIMIT_S)
    began = time.monotonic()
    times: list[float] = []
    done = Done("")
    async with aclosing(cast("AsyncGenerator[EngineEvent, None]", engine.generate(request))) as events:
        async for event in events:
            if isinstance(event, Piece | Embedded):
                times.append(time.monotonic())
            elif isinstance(event, Done):
                done = event
    if not times:
        return Speeds(measured_at_s=time.time())
    uncached = (done.usage.prompt_tokens or 0) - (done.usage.cached_tokens or 0)
    decoded = (done.usage.completion_tokens or len(times)) - 1
    return Speeds(
        prefill_tokens_per_s=_rate(uncached, times[0] - began),
        decode_tokens_per_s=_rate(decoded, times[-1] - times[0]) if len(times) > 1 else None,
        measured_at_s=time.time(),
    )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
