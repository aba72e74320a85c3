"""What the application answers when something that it stands on gives way."""

from __future__ import annotations

from types import SimpleNamespace

import psycopg
import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient
from sqlalchemy import exc

from marketplace.gateway.api import Bounded, make_api
from marketplace.gateway.metrics import GatewayMetrics


def answer_to(error: Exception) -> TestClient:
    """A client of an application whose one endpoint meets this."""
    router = APIRouter()

    @router.get("/")
    async def meet() -> None:
        raise error

    api = make_api(SimpleNamespace(metrics=GatewayMetrics()), (router,))  # type: ignore[arg-type]
    return TestClient(Bounded(api, 1_000), raise_server_exceptions=False)


class TestADatabaseThatDoesNotAnswer:
    @pytest.mark.parametrize(
        "error",
        [
            exc.OperationalError("select 1", {}, psycopg.OperationalError("connection refused")),
            exc.OperationalError("delete", {}, psycopg.errors.DeadlockDetected("deadlock detected")),
            exc.TimeoutError("QueuePool limit of size 8 overflow 8 reached"),
        ],
        ids=["away", "deadlock", "no free connection"],
    )
    def test_is_told_as_what_passes(self, error: Exception) -> None:
        reply = answer_to(error).get("/")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        assert reply.json()["error"]["code"] == "unavailable"
        assert "x-request-id" in reply.headers

    def test_is_not_mixed_up_with_a_fault_of_ours(self) -> None:
        assert answer_to(ValueError("oops")).get("/").status_code == 500
