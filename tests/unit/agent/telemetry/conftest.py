"""Scripted cards behind the real bindings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import nvml


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nvml.Script]:
    """Two healthy cards. Skips where the stand-in library cannot be built."""
    if nvml.compiler() is None:
        pytest.skip("no C compiler: the stand-in libnvidia-ml.so.1 cannot be built")
    nvml.load()
    script = nvml.Script(tmp_path / "nvml.txt", [nvml.card(0), nvml.card(1)])
    monkeypatch.setenv(nvml.SCRIPT_VARIABLE, str(script.path))
    script.write()
    yield script
    script.path.unlink(missing_ok=True)
