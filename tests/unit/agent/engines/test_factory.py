"""The factory: every kind is made, and a wrong configuration says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.engines.factory import EngineConfig, make_engine
from agent.engines.llamacpp import LlamaCppEngine, default_threads
from agent.engines.openai_http import AttachedEngine
from agent.engines.simulated_engine import InlineSimulatedEngine, SimulatedEngine

HERE = Path("run")


class TestMaking:
    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            ({"kind": "llama.cpp", "model_path": Path("m.gguf")}, LlamaCppEngine),
            ({"kind": "openai", "url": "http://127.0.0.1:8000", "dialect": "vllm"}, AttachedEngine),
            ({"kind": "simulated", "simulation": {"seed": 1, "speedup": 2.0}}, SimulatedEngine),
            ({"kind": "simulated-inline"}, InlineSimulatedEngine),
        ],
    )
    def test_each_kind_has_its_adapter(self, options: dict[str, Any], kind: type) -> None:
        assert isinstance(make_engine(EngineConfig(run_dir=HERE, **options)), kind)

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({"kind": "abacus"}, "unknown engine"),
            ({"kind": "llama.cpp"}, "model_path"),
            ({"kind": "simulated", "slots": 0}, "slots"),
            ({"kind": "simulated", "context_per_slot": 0}, "context_per_slot"),
            ({"kind": "simulated", "threads": 0}, "threads"),
            ({"kind": "simulated", "stall_timeout_s": 0.0}, "timeouts"),
            ({"kind": "openai"}, "url"),
            ({"kind": "openai", "url": "ftp://127.0.0.1"}, "url"),
            ({"kind": "openai", "url": "http://engine.example:8000"}, "this machine"),
        ],
    )
    def test_a_wrong_configuration_is_refused_with_its_reason(self, options: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            EngineConfig(run_dir=HERE, **options)

    @pytest.mark.parametrize("simulation", [{"speed": 3}, {"speedup": "fast"}, {"device": "abacus"}])
    def test_a_wrong_simulation_is_refused(self, simulation: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            make_engine(EngineConfig(kind="simulated", run_dir=HERE, simulation=simulation))

    def test_a_key_is_not_shown(self) -> None:
        config = EngineConfig(kind="openai", run_dir=HERE, url="http://localhost:1", api_key="secret-key")
        assert "secret-key" not in repr(config)

    def test_some_core_is_left_for_others(self) -> None:
        assert default_threads() >= 1
