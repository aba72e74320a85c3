"""What a worker or a command shares within its process: one engine, one Valkey client, built on first use.

Celery forks: nothing here may be built before the fork, hence the laziness.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import redis
from sqlalchemy.orm import Session

from marketplace.core import valkey
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.errors import FallowError
from marketplace.core.settings import get_settings
from marketplace.core.tracing import Tracing, make_tracing


@lru_cache
def session_factory() -> SessionFactory:
    """This process's sessions."""
    return make_session_factory(make_engine(get_settings(), application_name="fallow"))


@lru_cache
def valkey_client() -> redis.Redis:
    """This process's synchronous Valkey client."""
    return valkey.connect(get_settings().valkey_url)


@lru_cache
def tracing() -> Tracing | None:
    """This process's traces; None where there is no collector."""
    return make_tracing(get_settings(), "fallow-worker")


@contextmanager
def command_session() -> Iterator[Session]:
    """One transaction of a command line; an error that has words for people is printed, and ends the command with 1."""
    try:
        with transaction(session_factory()) as session:
            yield session
    except FallowError as error:
        print(error.message, file=sys.stderr)
        raise SystemExit(1) from None
