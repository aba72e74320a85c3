"""PostgreSQL: the base of the models, engines and sessions. One colour: synchronous, off the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import BigInteger, DateTime, Engine, MetaData, Uuid, create_engine
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

from marketplace.core.settings import Settings

NAMING: dict[str, str] = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Root of the marketplace's tables. int is BIGINT: money and token counts never meet 32 bits."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger,
        datetime: DateTime(timezone=True),
        UUID: Uuid(),
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
    }


SessionFactory = sessionmaker[Session]


def make_engine(settings: Settings, *, application_name: str) -> Engine:
    """An engine whose statements cannot hang for ever."""
    return create_engine(
        settings.sqlalchemy_url,
        pool_size=settings.database_pool_size,
        max_overflow=settings.database_pool_size,
        pool_pre_ping=True,
        pool_timeout=10,
        # A failed statement is logged; what it was given may be somebody's prompt.
        hide_parameters=True,
        connect_args={
            "application_name": application_name,
            "connect_timeout": 5,
            "options": "-c timezone=UTC -c statement_timeout=60000 -c idle_in_transaction_session_timeout=60000",
        },
    )


def make_session_factory(engine: Engine) -> SessionFactory:
    return sessionmaker(engine, expire_on_commit=False)


@contextmanager
def transaction(factory: SessionFactory) -> Iterator[Session]:
    """One session, one transaction: committed at the end, rolled back on any exception. Only edges call this."""
    with factory() as session, session.begin():
        yield session
