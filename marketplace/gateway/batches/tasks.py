"""The tasks of batches: move every one on, and erase files whose time is over."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Final
from uuid import UUID

from sqlalchemy import func, select

from marketplace.catalog.service import Catalog
from marketplace.core import process
from marketplace.core.celery import task
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.logs import get_logger
from marketplace.core.settings import get_settings
from marketplace.core.valkey import ValkeyDownError
from marketplace.fleet.snapshot import read_fleet
from marketplace.gateway.batches import files, work
from marketplace.gateway.batches.work import Means
from marketplace.matching.types import OfferView

log = get_logger(__name__)
ADVANCE: Final = "batches.advance"
ERASE: Final = "batches.erase"
MAX_BATCHES: Final = 200
"""Looked at in one tick."""
BUDGET_S: Final = 8.0
"""A tick starts no further step after this."""
ERASE_AT_ONCE: Final = 50


@task(ADVANCE)
def advance_batches() -> None:
    """Move batches on, oldest first, each in turn, until nothing is due or the tick is over."""
    advance_all(process.session_factory(), _means())


@task(ERASE)
def erase_files() -> None:
    """Erase files whose time is over."""
    with transaction(process.session_factory()) as session:
        erased = files.erase_expired(session, limit=ERASE_AT_ONCE)
    if erased:
        log.info("files_erased", files=erased)


def advance_all(factory: SessionFactory, means: Means) -> None:
    """One tick, unless another one is at work. A batch that breaks is logged, and the others go on."""
    with factory() as guard:
        # Ticks come each second and may take several: they must not fill the workers that assignment needs too.
        if guard.scalar(select(func.pg_try_advisory_xact_lock(func.hashtextextended(ADVANCE, 0)))):
            _tick(factory, work.active(guard, limit=MAX_BATCHES), means)


def _tick(factory: SessionFactory, due: list[UUID], means: Means) -> None:
    ends_at = time.monotonic() + BUDGET_S
    while due and time.monotonic() < ends_at:
        again = []
        for batch_id in due:
            if time.monotonic() >= ends_at:
                return
            if _step(factory, batch_id, means):
                again.append(batch_id)
        due = again


def _step(factory: SessionFactory, batch_id: UUID, means: Means) -> bool:
    try:
        with transaction(factory) as session:
            return work.advance(session, batch_id, means)
    except Exception:
        # An edge: what one batch breaks must not keep the others from going on.
        log.exception("batch_step_failed", batch=batch_id.hex)
        return False


@lru_cache
def _means() -> Means:
    settings = get_settings()
    client = process.valkey_client()

    def offers() -> list[OfferView]:
        try:
            found = read_fleet(client)
        except ValkeyDownError:
            # Nothing is known to be offered: lines wait.
            return []
        return [offer for offer in found if settings.allow_simulated or not offer.simulated]

    catalog = Catalog(process.session_factory())
    catalog.load()
    return Means(
        catalog=catalog,
        offers=offers,
        hold_margin_s=settings.hold_margin_s,
        keep_files_s=settings.file_life_s,
        most_queued=settings.queued_jobs,
        most_queued_own=settings.queued_jobs_per_organisation,
    )
