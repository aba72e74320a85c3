"""Alembic's environment: both families of tables, one database. See marketplace/core/migrate.py for how it is run."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, MetaData, NullPool, create_engine

import marketplace.accounts.models
import marketplace.billing.models
import marketplace.catalog.models
import marketplace.core.outbox
import marketplace.finance.models
import marketplace.fleet.models
import marketplace.gateway.batches.models
import marketplace.gateway.webhooks.models
import marketplace.jobs.demand
import marketplace.jobs.models
import marketplace.metering.models  # noqa: F401  # each import registers its tables
from ledger.models import LedgerBase
from marketplace.core.database import Base
from marketplace.core.settings import get_settings

METADATA: list[MetaData] = [LedgerBase.metadata, Base.metadata]


def run(connection: Connection) -> None:
    """Run what was asked (upgrade, compare, ...) on this connection, in its transaction if it has one."""
    context.configure(connection=connection, target_metadata=METADATA, compare_type=True, compare_server_default=True)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    raise SystemExit("Migrations run against a database: set DATABASE_URL and leave --sql out.")

handed_over: Connection | None = context.config.attributes.get("connection")
if handed_over is not None:
    run(handed_over)
else:
    engine = create_engine(get_settings().sqlalchemy_url, poolclass=NullPool)
    with engine.connect() as own:
        run(own)
