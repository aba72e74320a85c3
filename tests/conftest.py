"""Fixtures of all tests: real PostgreSQL and real Valkey, started once a run."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from marketplace.core.database import SessionFactory, make_engine, make_session_factory
from marketplace.core.migrate import upgrade
from marketplace.core.settings import Settings
from marketplace.embedded import EmbeddedStores, StoreUrls

TEMPLATE = "template_fallow"
RERUNS = 1
"""Most tests talk to real processes, on machines that may be shared and stand still for seconds. A failed one is run
again and reported as rerun; what fails twice fails."""
_numbers = itertools.count(1)


def pytest_configure() -> None:
    # Workers that run tests side by side claim a terminal of 80 columns; the commands under test write to a pipe.
    os.environ.pop("COLUMNS", None)
    os.environ.pop("LINES", None)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes are told by their place: random ones would give each of two workers tests of other names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("soak") is None:
            item.add_marker(pytest.mark.flaky(reruns=RERUNS, reruns_delay=1))


@pytest.fixture(scope="session")
def stores() -> Iterator[StoreUrls]:
    """Both stores, and a migrated template database from which each test gets a copy in about 30 ms."""
    folder = Path(tempfile.mkdtemp(prefix="fallow-tests-"))
    folder.chmod(0o755)
    embedded = EmbeddedStores(folder)
    try:
        urls = embedded.start()
        with psycopg.connect(_sibling(urls.database_url, "postgres"), autocommit=True) as connection:
            connection.execute("alter system set fsync = off")
            connection.execute("select pg_reload_conf()")
            connection.execute(f"create database {TEMPLATE}")
        upgrade(_sibling(urls.database_url, TEMPLATE))
        yield urls
    finally:
        embedded.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _sibling(url: str, name: str) -> str:
    return url.replace("/fallow?", f"/{name}?", 1)


@pytest.fixture
def database_url(stores: StoreUrls) -> Iterator[str]:
    """A fresh, migrated database."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    admin = _sibling(stores.database_url, "postgres")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"create database {name} template {TEMPLATE}")
    yield _sibling(stores.database_url, name)
    with psycopg.connect(admin, autocommit=True) as connection, contextlib.suppress(psycopg.Error):
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture
def valkey_url(stores: StoreUrls) -> str:
    """An empty Valkey."""
    with redis.Redis.from_url(stores.valkey_url) as client:
        client.flushall()
    return stores.valkey_url


@pytest.fixture
def settings(database_url: str, valkey_url: str) -> Settings:
    """Settings on both stores; simulated engines are allowed."""
    return Settings(
        _env_file=None,  # type: ignore[call-arg]
        database_url=database_url,
        valkey_url=valkey_url,
        allow_simulated=True,
        cluster_secret="a secret of the tests",
    )


@pytest.fixture
def session_factory(settings: Settings) -> Iterator[SessionFactory]:
    """Sessions on the test's database."""
    engine = make_engine(settings, application_name="tests")
    yield make_session_factory(engine)
    engine.dispose()
