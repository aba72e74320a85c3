"""Structured logs: fixed event names, facts as keywords, ids bound once. Prompts and answers are never logged."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure(format_: str = "console", level: str = "INFO") -> None:
    """Set up structlog and the standard library's logging for this process, on stderr."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
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
    logging.basicConfig(level=threshold, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")


def get_logger(name: str) -> Any:
    """A bound logger. Events are snake_case facts, such as `lease_expired`."""
    return structlog.get_logger(name)
