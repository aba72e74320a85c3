"""llama.cpp as an engine: a child process with one verified model file, a slot of its own for each request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.engines.chat_wire import Dialect
from agent.engines.managed import ManagedEngine
from agent.engines.port import EngineError, EngineFacts, EngineRequest
from agent.engines.scopes import SlotTable, fingerprint_messages
from agent.sizing.gguf import GgufError, read_header, require_complete

NAME: Final = "llama.cpp"
CONTEXT_GRAIN_TOKENS: Final = 256
"""llama.cpp rounds a slot's context up to this."""

_DIALECT: Final = Dialect(
    name=NAME,
    busy_gauges=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    # Without progress events, a closed connection is noticed only after the whole prompt was worked on.
    extra_body={"return_progress": True},
    ids_in_logprobs=True,
    inputs_at_once=1,
)


@dataclass(frozen=True, slots=True)
class LlamaCppConfig:
    """What llama.cpp is told."""

    model_path: Path
    run_dir: Path
    slots: int
    context_per_slot: int
    threads: int | None = None
    gpu_layers: int = 0
    prefix_cache_s: float = 0.0
    load_timeout_s: float = 600.0
    stall_timeout_s: float = 120.0
    isolate: bool = True
    device_id: str = "cpu"
    task: str = "chat"
    pooling: str = ""
    """Of embeddings: mean, cls or last."""


class LlamaCppEngine(ManagedEngine):
    """One llama.cpp with one model. See agent.engines.port.Engine."""

    def __init__(self, config: LlamaCppConfig) -> None:
        super().__init__(
            _DIALECT,
            "agent.engines.llamacpp_child",
            run_dir=config.run_dir,
            load_timeout_s=config.load_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            isolate=config.isolate,
            device_id=config.device_id,
            readable=(config.model_path.resolve(),),
        )
        self._config = config
        self._table = SlotTable(config.slots)

    async def start(self) -> EngineFacts:
        """Verify the file, load it, serve. Raises EngineError with what the file or llama.cpp's log says."""
        config = self._config
        await asyncio.to_thread(verify_model, config.model_path)
        self._table = SlotTable(config.slots)
        context = -(-config.context_per_slot // CONTEXT_GRAIN_TOKENS) * CONTEXT_GRAIN_TOKENS
        version = await self._launch(
            {
                "model_path": str(config.model_path.resolve()),
                "slots": config.slots,
                "context_per_slot": context,
                "threads": config.threads or default_threads(),
                "gpu_layers": gpu_layers(config.gpu_layers, config.device_id),
                "task": config.task,
                "pooling": config.pooling,
            }
        )
        self._facts = EngineFacts(
            name=NAME,
            version=version,
            slots=config.slots,
            context_per_slot=context,
            simulated=False,
            prefix_cache_s=config.prefix_cache_s,
            pid=self.pid,
            task=config.task,
            protection=self.protection,
        )
        return self._facts

    @contextmanager
    def _seated(self, request: EngineRequest) -> Iterator[dict[str, object]]:
        table = self._table
        seat = table.take(request.cache_scope, fingerprint_messages(request.body))
        if seat is None:
            raise EngineError("engine_error", "every slot of the engine is taken")
        try:
            yield {"id_slot": seat.slot, "cache_prompt": seat.reuse}
        finally:
            table.give_back(seat)


def default_threads() -> int:
    """Every core that this process may use but one, and at least one: the agent and the owner need some too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


def verify_model(path: Path) -> None:
    """Raise EngineError unless the file is a whole GGUF file: half a file has a perfect header, and loads."""
    try:
        require_complete(read_header(path))
    except (GgufError, OSError) as error:
        raise EngineError("engine_error", f"{path.name} cannot be loaded: {error}") from None


def gpu_layers(asked: int, device_id: str) -> int:
    """All of them on a card unless the owner says otherwise; none on the processor."""
    return -1 if asked == 0 and device_id.startswith("GPU-") else asked
