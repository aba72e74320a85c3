"""Builds the engine that a configuration names. The daemon knows this function and the port, no adapter."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from agent.engines.port import Engine

EngineKind = Literal["llama.cpp", "llama-server", "vllm", "openai", "simulated", "simulated-inline"]
ENGINE_KINDS: Final[tuple[EngineKind, ...]] = get_args(EngineKind)
EMBEDDING_KINDS: Final = frozenset({"llama.cpp", "openai", "simulated", "simulated-inline"})
LAUNCHED: Final = frozenset({"llama-server", "vllm"})
MAX_SLOTS: Final = 1024
MAX_CONTEXT_TOKENS: Final = 16 * 1024 * 1024
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start. Checked when it is made: raises ValueError with a sentence."""

    kind: EngineKind
    run_dir: Path
    """Folder for the engine's socket; made with mode 0700."""
    slots: int = 4
    context_per_slot: int = 2048
    """Tokens, prompt and output together."""
    model_path: Path | None = None
    """The GGUF file: llama.cpp needs it; a simulated engine borrows its shape and vocabulary where given."""
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
    api_key: str | None = field(default=None, repr=False)
    """openai: the server's key, if it asks for one."""
    served_model: str | None = None
    """openai: the model's name there; None takes the only one that the server lists."""
    dialect: Literal["auto", "vllm", "sglang", "ollama", "llama-server", "generic"] = "auto"
    """openai: which server it is; auto asks it."""
    device_id: str = "cpu"
    """`cpu`, or the UUID of the card that the engine may see."""
    program: str | None = None
    """llama-server, vllm: the program; None: found by its name."""
    arguments: tuple[str, ...] = ()
    """llama-server, vllm: more of them."""
    memory_share: float = 0.85
    """vllm: the share of the card's memory that it claims, whoever else is there."""
    task: Literal["chat", "embed"] = "chat"
    pooling: str = ""
    """Of embeddings: mean, cls or last."""
    isolate: bool = True
    """Keep it from the owner's files and the network, where this system can."""
    simulation: dict[str, float | int | str] = field(default_factory=dict)
    """simulated: further options of agent.engines.simulation.SimulationConfig, by name."""

    def __post_init__(self) -> None:
        if self.kind not in ENGINE_KINDS:
            raise ValueError(f"unknown engine {self.kind!r}: one of {', '.join(ENGINE_KINDS)}")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots must be 1 to {MAX_SLOTS}")
        if not 1 <= self.context_per_slot <= MAX_CONTEXT_TOKENS:
            raise ValueError(f"context_per_slot must be 1 to {MAX_CONTEXT_TOKENS} tokens")
        if self.threads is not None and self.threads < 1:
            raise ValueError("threads must be at least one")
        if min(self.load_timeout_s, self.stall_timeout_s) <= 0 or self.prefix_cache_s < 0:
            raise ValueError("timeouts must be above zero")
        if self.kind in {"llama.cpp", *LAUNCHED} and self.model_path is None:
            raise ValueError(f"{self.kind} needs a model_path")
        if self.kind in LAUNCHED and shutil.which(self.program or self.kind) is None:
            raise ValueError(f"the program {self.program or self.kind} is not installed here: set command to its path")
        if self.task == "embed" and self.kind not in EMBEDDING_KINDS:
            raise ValueError(
                f"{self.kind} is not started for embeddings here: start it yourself, and use openai with url"
            )
        if self.task == "embed" and self.kind == "llama.cpp" and not self.pooling:
            raise ValueError("embeddings need a pooling: mean, cls or last")
        if self.kind == "openai":
            _check_url(self.url)


def _check_url(url: str | None) -> None:
    parts = urlsplit(url or "")
    if parts.scheme not in {"http", "https"} or parts.hostname not in _LOOPBACK:
        raise ValueError("the openai engine needs the url of a server on this machine, such as http://127.0.0.1:8000")


def make_engine(config: EngineConfig) -> Engine:
    """An engine that is not started yet. Raises ValueError if the options of a simulation cannot work."""
    match config.kind:
        case "llama.cpp":
            return _llamacpp(config)
        case "llama-server" | "vllm":
            return _launched(config)
        case "openai":
            return _attached(config)
        case "simulated" | "simulated-inline":
            return _simulated(config)


# The adapters are imported where they are made: an agent pays only for the one that it runs.
def _llamacpp(config: EngineConfig) -> Engine:
    from agent.engines.llamacpp import LlamaCppConfig, LlamaCppEngine  # noqa: PLC0415

    assert config.model_path is not None
    return LlamaCppEngine(
        LlamaCppConfig(
            model_path=config.model_path,
            run_dir=config.run_dir,
            slots=config.slots,
            context_per_slot=config.context_per_slot,
            threads=config.threads,
            gpu_layers=config.gpu_layers,
            prefix_cache_s=config.prefix_cache_s,
            load_timeout_s=config.load_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            isolate=config.isolate,
            device_id=config.device_id,
            task=config.task,
            pooling=config.pooling,
        )
    )


def _launched(config: EngineConfig) -> Engine:
    from agent.engines import launched  # noqa: PLC0415

    assert config.model_path is not None
    program = shutil.which(config.program or config.kind)
    assert program is not None
    make = launched.vllm if config.kind == "vllm" else launched.llama_server
    return make(
        launched.Launch(
            program=program,
            model_path=config.model_path,
            run_dir=config.run_dir,
            slots=config.slots,
            context_per_slot=config.context_per_slot,
            device_id=config.device_id,
            threads=config.threads,
            gpu_layers=config.gpu_layers,
            memory_share=config.memory_share,
            arguments=config.arguments,
            prefix_cache_s=config.prefix_cache_s,
            load_timeout_s=config.load_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            isolate=config.isolate,
        )
    )


def _attached(config: EngineConfig) -> Engine:
    from agent.engines.dialects import DIALECTS  # noqa: PLC0415
    from agent.engines.openai_http import AttachedEngine, Attachment  # noqa: PLC0415

    assert config.url is not None
    return AttachedEngine(
        Attachment(
            base_url=config.url,
            dialect=DIALECTS.get(config.dialect),
            slots=config.slots,
            context_per_slot=config.context_per_slot,
            api_key=config.api_key,
            served_model=config.served_model,
            task=config.task,
            prefix_cache_s=config.prefix_cache_s,
            load_timeout_s=config.load_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
        )
    )


def _simulated(config: EngineConfig) -> Engine:
    from agent.engines.simulated_engine import InlineSimulatedEngine, SimulatedEngine  # noqa: PLC0415
    from agent.engines.simulation import SimulationConfig  # noqa: PLC0415

    options: dict[str, object] = {"slots": config.slots, "context_per_slot": config.context_per_slot}
    if config.model_path is not None:
        options["model_path"] = str(config.model_path)
    if config.task == "embed":
        options["task"] = config.task
    simulation = msgspec.convert(options | config.simulation, SimulationConfig)
    if config.kind == "simulated-inline":
        return InlineSimulatedEngine(
            simulation, stall_timeout_s=config.stall_timeout_s, prefix_cache_s=config.prefix_cache_s
        )
    return SimulatedEngine(
        simulation,
        run_dir=config.run_dir,
        load_timeout_s=config.load_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        prefix_cache_s=config.prefix_cache_s,
    )
