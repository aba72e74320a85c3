"""The schema: bring a database to the newest migration, and compare it with the models, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, NullPool, create_engine, text

from marketplace.core.errors import Conflict

LOCK_KEY = 0x66616C6C6F77
"""Advisory lock: processes that start together migrate one after the other."""
LOCK_WAIT_MS = 60_000
EXPECTED_SCHEMA = "fallow_expected"

Facts = dict[str, str]
"""What a schema holds: `table.column` or `table constraint name` -> its definition in PostgreSQL's own words."""

_FACTS = text(
    """
    select format('%s.%s', c.relname, a.attname) as name,
           format_type(a.atttypid, a.atttypmod)
           || case when a.attnotnull then ' not null' else '' end
           || case a.attidentity when 'a' then ' identity always' when 'd' then ' identity by default' else '' end
           || coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), '') as definition
    from pg_attribute a
    join pg_class c on c.oid = a.attrelid and c.relkind in ('r', 'p')
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where c.relnamespace = current_schema()::regnamespace and a.attnum > 0 and not a.attisdropped
    union all
    select format('%s constraint %s', c.relname, n.conname), pg_get_constraintdef(n.oid)
    from pg_constraint n join pg_class c on c.oid = n.conrelid
    where n.connamespace = current_schema()::regnamespace and n.contype in ('p', 'u', 'c', 'f', 'x')
    union all
    select format('%s index %s', c.relname, i.relname),
           replace(pg_get_indexdef(i.oid), format(' ON %s.', current_schema()), ' ON ')
    from pg_index x join pg_class i on i.oid = x.indexrelid join pg_class c on c.oid = x.indrelid
    where i.relnamespace = current_schema()::regnamespace
    """
)


class WrongVersion(Conflict):
    """Program and database do not fit together; the message says which of them is older, and what to do."""

    code = "wrong_version"


def upgrade(database_url: str) -> None:
    """Apply every migration that is missing, in one transaction. Safe to call from many processes at once.

    Raises WrongVersion if a newer version of this program has migrated the database already.
    """
    with _locked(database_url) as (connection, config):
        applied, known = _versions(connection, config)
        if not applied <= known:
            raise WrongVersion(
                f"A newer Fallow has used this database (its version: {_named(applied)}); this one knows up to "
                f"{_named(set(ScriptDirectory.from_config(config).get_heads()))}. Install the newer one again."
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def require_upgraded(database_url: str) -> None:
    """Raises WrongVersion if migrations are missing. A newer database is fine: during an update, versions overlap."""
    with _locked(database_url) as (connection, config):
        applied, known = _versions(connection, config)
        newest = set(ScriptDirectory.from_config(config).get_heads())
        if applied <= known and applied != newest:
            raise WrongVersion(
                f"The database is older than this program ({_named(applied)}, not {_named(newest)}): "
                "run `fallow migrate`."
            )


def check(database_url: str) -> list[str]:
    """Differences between the migrated schema and the models: one sentence each, none when they agree.

    The models are created in a schema of their own inside a transaction that is rolled back, and both schemas are
    compared column by column, constraint by constraint, index by index. Triggers and functions belong to migrations
    alone and are not compared.
    """
    found: list[str] = []

    def compare(_: Any, context: MigrationContext) -> list[Any]:
        assert context.connection is not None
        found.extend(_differences(context.connection, context.opts["target_metadata"]))
        return []

    with _locked(database_url) as (connection, config):
        config.attributes["connection"] = connection
        script = ScriptDirectory.from_config(config)
        applied = MigrationContext.configure(connection).get_current_heads()
        if set(applied) != set(script.get_heads()):
            found.append(f"The database is at {applied or 'no migration'}, the newest is {script.get_heads()}.")
        with EnvironmentContext(config, script, fn=compare):
            script.run_env()
        connection.rollback()
    return found


def migrations_folder() -> Path:
    """Where the migrations lie: inside the wheel, or beside the packages in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_migrations"
    return installed if installed.is_dir() else package.parent / "migrations"


@contextmanager
def _locked(database_url: str) -> Iterator[tuple[Connection, Config]]:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    url = database_url.replace("postgresql://", "postgresql+psycopg://", 1)
    engine = create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": 10})
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text(f"set local lock_timeout = {LOCK_WAIT_MS}"))
        connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
        yield connection, config
        if transaction.is_active:
            transaction.commit()


def _versions(connection: Connection, config: Config) -> tuple[set[str], set[str]]:
    """The migrations at which the database stands, and all that this program knows."""
    applied = set(MigrationContext.configure(connection).get_current_heads())
    return applied, {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


def _named(versions: set[str]) -> str:
    return ", ".join(sorted(versions)) or "empty"


def _differences(connection: Connection, metadatas: list[MetaData]) -> list[str]:
    actual = _facts(connection)
    connection.execute(text(f"create schema {EXPECTED_SCHEMA}"))
    connection.execute(text(f"set local search_path = {EXPECTED_SCHEMA}"))
    for metadata in metadatas:
        metadata.create_all(connection, checkfirst=False)
    expected = _facts(connection)
    sentences = []
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            sentences.append(f"{name}: models say {expected.get(name)!r}, migrations made {actual.get(name)!r}.")
    return sentences


def _facts(connection: Connection) -> Facts:
    rows = connection.execute(_FACTS)
    return {row.name: row.definition for row in rows if not row.name.startswith("alembic_version")}
