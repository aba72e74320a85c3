"""A stranger on the card: a real agent over the stand-in driver gives it back within three seconds."""

from __future__ import annotations

import asyncio

import pytest

from tests.bench.agent import evict_s
from tests.fakes import nvml


def test_a_foreign_process_has_the_card_within_three_seconds() -> None:
    if nvml.compiler() is None:
        pytest.skip("no C compiler: the stand-in libnvidia-ml.so.1 cannot be built")
    gone, told = asyncio.run(evict_s())
    assert gone < 3.0
    assert told < 4.0
