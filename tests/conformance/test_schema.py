"""schemathesis over our own OpenAPI: no 5xx, no undocumented status, whatever comes in."""

from __future__ import annotations

import asyncio
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.gateway_world import add_renter, answers, world

EXAMPLES = 12
"""A path; each a request to a whole gateway."""
ROLES = ["renter", "owner", "finance", "operator", "admin"]


def run_all(url: str, secret: str) -> int:
    """Every operation; returns how many. Raises what schemathesis finds."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:
        run_one(operation, secret)
    return len(operations)


def run_one(operation: Any, secret: str) -> None:
    @given(case=operation.as_strategy())
    @profile(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        case.call_and_validate(
            headers={"authorization": f"Bearer {secret}"},
            checks=[not_a_server_error, status_code_conformance],
            timeout=30,
        )

    check()


class TestOurOpenApi:
    def test_holds_whatever_comes_in(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory, roles=ROLES, requests_per_minute=100_000, parallel_requests=100)

        async def story() -> None:
            async with world(settings, session_factory, log_level="ERROR") as market:
                await market.connect(answers, slots=16)
                assert await asyncio.to_thread(run_all, market.url, renter.secret) > 40
                await market.settled()
                assert market.books.broken_rules() == []

        asyncio.run(story())
