"""The tasks of webhooks: send what is due, and forget what is long over."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final

from sqlalchemy import func, select

from marketplace.core import process
from marketplace.core.celery import task
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.logs import get_logger
from marketplace.core.settings import get_settings
from marketplace.gateway.webhooks import work
from marketplace.gateway.webhooks.post import Poster
from marketplace.gateway.webhooks.service import warn_of_private
from marketplace.gateway.webhooks.work import Sends

log = get_logger(__name__)
SEND: Final = "webhooks.send"
ERASE: Final = "webhooks.erase"
ERASE_AT_ONCE: Final = 1_000


@task(SEND)
def send_webhooks() -> None:
    """Send what is due."""
    send_all(process.session_factory(), _poster())


@task(ERASE)
def erase_webhooks() -> None:
    """Forget deliveries that ended long ago."""
    with transaction(process.session_factory()) as session:
        erased = work.erase_old(session, limit=ERASE_AT_ONCE)
    if erased:
        log.info("webhook_deliveries_erased", deliveries=erased)


def send_all(factory: SessionFactory, sends: Sends) -> int:
    """One tick, unless another one is at work: receivers may be slow, and must not fill the workers that assignment
    needs too. Returns how many deliveries arrived."""
    with factory() as guard:
        if not guard.scalar(select(func.pg_try_advisory_xact_lock(func.hashtextextended(SEND, 0)))):
            return 0
        arrived = work.send_due(factory, sends, random.Random())  # noqa: S311  # it spreads retries
    if arrived:
        log.info("webhooks_sent", arrived=arrived)
    return arrived


@lru_cache
def _poster() -> Poster:
    settings = get_settings()
    warn_of_private(settings)
    return Poster(allow_private=settings.webhook_allow_private, ca_file=settings.webhook_ca_file)
