"""Log lines: ids bound once, and of an exception only what nobody else may have said."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import psycopg
import pytest
import structlog
from sqlalchemy.exc import IntegrityError

from marketplace import worker
from marketplace.core import logs
from marketplace.core.errors import NotFound

SECRET = "what a renter said"


class Refused(psycopg.errors.CheckViolation):
    """A database's refusal, with the row that it quotes."""

    sqlstate = "23514"

    def __init__(self) -> None:
        super().__init__(f'violates check constraint "c"\nDETAIL:  Failing row contains ({SECRET}).')

    @property
    def diag(self) -> Any:
        return type("Diag", (), {"message_primary": 'violates check constraint "c"'})()


def caught(error: BaseException) -> Any:
    try:
        raise error
    except type(error):
        return sys.exc_info()


class TestAReason:
    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (Refused(), 'Refused 23514: violates check constraint "c"'),
            (IntegrityError(f"insert {SECRET}", {"body": SECRET}, Refused()), "IntegrityError: Refused 23514"),
            (NotFound(SECRET), "NotFound: not_found"),
            (KeyError(SECRET), "KeyError"),
            (ValueError(SECRET), "ValueError"),
            (ConnectionRefusedError(111, "Connection refused"), "ConnectionRefusedError: [Errno 111]"),
            (psycopg.OperationalError("the server is away\nmore"), "OperationalError : the server is away"),
        ],
    )
    def test_says_what_happened_and_not_to_what(self, error: Exception, told: str) -> None:
        assert logs.reason(error).startswith(told)
        assert SECRET not in logs.reason(error)


class TestATraceback:
    def test_has_its_places_and_its_causes_without_their_words(self) -> None:
        try:
            try:
                raise KeyError(SECRET)
            except KeyError as cause:
                raise ValueError(SECRET) from cause
        except ValueError:
            told = logs.told(sys.exc_info())
        assert "in test_has_its_places" in told
        assert told.index("ValueError") < told.index("caused by") < told.index("KeyError")
        assert SECRET not in told

    def test_is_told_so_whoever_logs_it(self) -> None:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "broke", (), caught(ValueError(SECRET)))
        assert SECRET not in logs.Formatter("%(message)s").format(record)
        context = {"exc": repr(ValueError(SECRET)), "traceback": SECRET, "name": "jobs.sweep"}
        record = logging.LogRecord(
            "x", logging.ERROR, "f", 1, "%(name)s %(exc)s %(traceback)s", (context,), caught(ValueError(SECRET))
        )
        assert worker._plain(record)
        assert logs.Formatter("%(message)s").format(record).startswith("jobs.sweep ValueError")
        assert SECRET not in logs.Formatter("%(message)s").format(record)


class TestIds:
    def test_are_bound_once_for_a_task_and_what_it_starts(self) -> None:
        async def inner() -> dict[str, Any]:
            return dict(structlog.contextvars.get_contextvars())

        async def request(name: str) -> dict[str, Any]:
            logs.bind(request_id=name)
            await asyncio.sleep(0)
            logs.bind(job="7")
            return await asyncio.create_task(inner())

        async def story() -> list[dict[str, Any]]:
            return await asyncio.gather(*(asyncio.create_task(request(name)) for name in ("a", "b")))

        found = asyncio.run(story())
        assert found == [{"request_id": "a", "job": "7"}, {"request_id": "b", "job": "7"}]
        assert json.dumps(found)
