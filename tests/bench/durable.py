"""A database for measuring: real, migrated, and every commit on disk (fsync on), as in production."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import text

import ledger
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.migrate import upgrade
from marketplace.core.settings import Settings
from marketplace.embedded import EmbeddedStores


@contextmanager
def durable_database() -> Iterator[str]:
    """A migrated database of its own: DATABASE_URL if set (it must be empty), else an embedded one."""
    given = os.environ.get("DATABASE_URL")
    if given:
        upgrade(given)
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="fallow-bench-"))
    folder.chmod(0o755)
    stores = EmbeddedStores(folder)
    try:
        url = stores.start().database_url
        upgrade(url)
        yield url
    finally:
        stores.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def sessions(database_url: str, connections: int = 16) -> Iterator[SessionFactory]:
    """Sessions on it, of at most so many connections."""
    settings = Settings(database_url=database_url, database_pool_size=(connections + 1) // 2)
    engine = make_engine(settings, application_name="bench")
    try:
        yield make_session_factory(engine)
    finally:
        engine.dispose()


def timed_s(work: Callable[[], object]) -> float:
    """How long it takes, in seconds."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def seal_all(factory: SessionFactory) -> int:
    """Seal what was posted, as the timer does; returns how many journals."""
    total = 0
    while True:
        with transaction(factory) as session:
            count = ledger.seal(session).count
        if not count:
            return total
        total += count


def vacuum(factory: SessionFactory) -> None:
    """What autovacuum would have done by the time that anybody asks."""
    with factory() as session:
        connection = session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        connection.execute(text("vacuum analyze"))
