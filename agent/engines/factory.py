"""Builds the engine that a configuration names. The daemon knows this function and the port, no adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from agent.engines.port import Engine

EngineKind = Literal["llama.cpp", "openai", "simulated"]
ENGINE_KINDS: Final[tuple[EngineKind, ...]] = ("llama.cpp", "openai", "simulated")
MAX_SLOTS: Final = 1024
MAX_CONTEXT_TOKENS: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start. Checked when it is made: raises ValueError with a sentence."""

    kind: EngineKind
    run_dir: Path
    """Folder (made with mode 0700) for the engine's socket and log."""
    slots: int = 4
    context_per_slot: int = 2048
    """Tokens, prompt and output together."""
    model_path: Path | None = None
    """The GGUF file: llama.cpp needs it; the simulated engine borrows its shape and vocabulary where given."""
    threads: int | None = None
    """llama.cpp on a CPU: threads to use. None: every core but one, at least one."""
    gpu_layers: int = 0
    """llama.cpp: layers kept on the GPU; -1 means all."""
    prefix_cache_s: float = 0.0
    """What is promised to renters about a slot's prefix; 0 promises nothing, and still reuses what it can."""
    load_timeout_s: float = 600.0
    stall_timeout_s: float = 120.0
    """A stream without any event for this long is broken off as `engine_timeout`."""
    url: str | None = None
    """openai: base URL of a running server (vLLM, SGLang, ...), on this machine."""
    api_key: str | None = None
    """openai: the server's key, if it asks for one."""
    served_model: str | None = None
    """openai: the model's name there; None takes the only one that the server lists."""
    simulation: dict[str, float | int | str] = field(default_factory=dict)
    """simulated: options of agent.engines.simulated.SimulationConfig, by name."""


def make_engine(config: EngineConfig) -> Engine:
    """An engine that is not started yet. Raises ValueError if the configuration cannot work."""
    raise ValueError(f"unknown engine kind {config.kind!r}")
