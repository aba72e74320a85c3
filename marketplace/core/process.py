"""What a worker or a command shares within its process: one engine, one Valkey client, built on first use.

Celery forks: nothing here may be built before the fork, hence the laziness.
"""

from __future__ import annotations

from functools import lru_cache

import redis

from marketplace.core import valkey
from marketplace.core.database import SessionFactory, make_engine, make_session_factory
from marketplace.core.settings import get_settings


@lru_cache
def session_factory() -> SessionFactory:
    """This process's sessions."""
    return make_session_factory(make_engine(get_settings(), application_name="fallow"))


@lru_cache
def valkey_client() -> redis.Redis:
    """This process's synchronous Valkey client."""
    return valkey.connect(get_settings().valkey_url)
