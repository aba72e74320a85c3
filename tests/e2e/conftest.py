"""The main job with the real engine: two gateways, two workers, and one node that is connected to the first gateway."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.stack import Stack, attach_logs, running_stack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (stack := getattr(item, "funcargs", {}).get("stack")) is not None:
        attach_logs(stack, report)
    return report


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Real weights, real llama.cpp; simulated engines are not for sale here."""
    with running_stack("fallow-e2e-", FALLOW_ALLOW_SIMULATED="false", FALLOW_BODY_LIMIT_BYTES="65536") as stack:
        stack.sell()
        stack.add_workers("worker-0", "worker-1")
        stack.add_beat()
        stack.add_gateways("gw-0", "gw-1")
        stack.add_node("llama", "gw-0", engine="llama.cpp", slots=2, context_per_slot=1024, keys={"threads": 1})
        stack.wait_offered()
        yield stack
