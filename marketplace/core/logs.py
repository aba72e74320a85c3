"""Structured logs: fixed event names, facts as keywords, ids bound once. Prompts and answers are never logged.

An exception is the one way in which they could slip in: a database quotes the row that it refuses, and a library the
bytes that it cannot read. So of an exception its class, its place in the code, and what `reason` lets through is told.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, Final

import psycopg
import structlog
from sqlalchemy.exc import StatementError

from marketplace.core.errors import FallowError

CHATTY: Final = ("asyncio", "httpcore", "httpx", "kombu", "opentelemetry", "python_multipart", "uvicorn", "websockets")
"""At the level DEBUG some of these write what they read and send: they stay at INFO."""
_PLAIN: Final = (OSError, TimeoutError, psycopg.Error, FallowError)
"""Whose words are the system's, the database's own or ours."""


def configure(format_: str = "console", level: str = "INFO") -> None:
    """Set up structlog and the standard library's logging for this process, on stderr."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.ExceptionRenderer(told),
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if format_ == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    threshold = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=threshold, handlers=[handler])
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(threshold, logging.INFO))


def get_logger(name: str) -> Any:
    """A bound logger. Events are snake_case facts, such as `lease_expired`."""
    return structlog.get_logger(name)


def bind(**ids: str) -> None:
    """Put these ids into every line that this task, and whatever it starts, logs from now on."""
    structlog.contextvars.bind_contextvars(**ids)


def reason(error: BaseException) -> str:
    """What went wrong, in one line and without anything that a client, a node or a row may have said."""
    if isinstance(error, StatementError) and error.orig is not None:
        return f"{type(error).__name__}: {reason(error.orig)}"
    if isinstance(error, psycopg.Error):
        # Its text ends with DETAIL and CONTEXT, which quote the row.
        words = error.diag.message_primary if error.sqlstate else str(error).partition("\n")[0]
        return f"{type(error).__name__} {error.sqlstate or ''}: {words}"
    if isinstance(error, FallowError):
        return f"{type(error).__name__}: {error.code}"
    return f"{type(error).__name__}: {error}" if isinstance(error, _PLAIN) else type(error).__name__


class Formatter(logging.Formatter):
    """The standard library's, for exceptions that other people's code logs."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the library's name
        """Called by logging."""
        return told(ei)


def told(exc_info: Any) -> str:
    """A traceback whose exceptions are told by `reason`; their places in the code, and no line of it."""
    chain: list[str] = []
    error: BaseException | None = exc_info[1]
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        places = traceback.extract_tb(error.__traceback__)
        frames = "".join(f"  {place.filename}:{place.lineno} in {place.name}\n" for place in places)
        chain.append(f"{frames}{reason(error)}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\ncaused by:\n".join(chain)
