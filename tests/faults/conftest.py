"""One stack for all faults: what a test breaks is mended before the next one, and the rules are checked after each."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from marketplace.core.database import transaction
from marketplace.jobs import standing
from tests.stack import Stack, attach_logs, running_stack
from tests.vocabularies import smollm2_path
from tests.witness import assert_invariants

DEAR: Final = {"ask_input": "1", "ask_cached_input": "0.1", "ask_output": "1000"}
"""300 tokens of output cost 0.30 USD."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (stack := getattr(item, "funcargs", {}).get("stack")) is not None:
        attach_logs(stack, report)
    return report


@pytest.fixture(scope="session")
def whole_stack() -> Iterator[Stack]:
    """Two gateways that reach each other by wires, two workers, a clock, and four nodes.

    `alpha` (at gw-0) and `beta` (at gw-1) serve the common model, each with answers of its own. `solo` alone serves a
    dear one. `brittle` attaches to an engine at which faults can be armed. `scripted` is for agents that a test plays.
    """
    with running_stack("fallow-faults-") as stack:
        forgive(stack)
        for model, sha256 in (("solo", "a" * 64), ("brittle", "b" * 64), ("scripted", "e" * 64)):
            stack.sell(model, sha256)
        stack.add_workers("worker-0", "worker-1")
        stack.add_beat()
        stack.add_gateways("gw-0", "gw-1", through_wire=True)
        stack.add_node("alpha", "gw-0", seed=11)
        stack.add_node("beta", "gw-1", seed=22)
        stack.add_node(
            "solo",
            "gw-0",
            model="solo",
            seed=33,
            slots=32,
            ask=DEAR,
            through_wire=True,
            keys={"weights": None, "sha256": "a" * 64},
            simulation={"model_path": str(smollm2_path())},
        )
        port = stack.add_engine("brittle-engine", slots=16)
        stack.add_node(
            "brittle",
            "gw-1",
            engine="openai",
            engine_url=f"http://127.0.0.1:{port}",
            model="brittle",
            slots=16,
            keys={"weights": None, "sha256": "b" * 64},
        )
        stack.wait_offered()
        yield stack


def forgive(stack: Stack) -> None:
    """Faults made here count against nobody: beat judges meanwhile, and would bar the brittle node for a day."""
    now = datetime.now(UTC)
    with transaction(stack.factory) as session:
        standing.grant_amnesty(session, now - timedelta(hours=1), now + timedelta(days=1), "Faults made by tests.")


@pytest.fixture
def stack(whole_stack: Stack) -> Iterator[Stack]:
    """The stack, whole again."""
    whole_stack.heal()
    yield whole_stack
    whole_stack.heal()
    assert_invariants(whole_stack)
