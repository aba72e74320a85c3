"""What an organisation should know about its money."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from marketplace.billing.models import Notice
from marketplace.core.logs import get_logger

log = get_logger(__name__)
MAX_LISTED: Final = 200


def tell(session: Session, organisation_id: UUID, kind: str, message: str, *, key: str, now: datetime) -> None:
    """Leave a notice. The same key of the same organisation says nothing more."""
    values = {
        "organisation_id": organisation_id,
        "kind": kind,
        "key": key,
        "message": message,
        "created_at": now,
    }
    told = session.scalar(insert(Notice).values(values).on_conflict_do_nothing().returning(Notice.id))
    if told is not None:
        log.info("notice", organisation=organisation_id.hex, kind=kind)


def read(session: Session, organisation_id: UUID) -> Sequence[Notice]:
    """Notices of an organisation, newest first."""
    query = select(Notice).where(Notice.organisation_id == organisation_id)
    return session.scalars(query.order_by(Notice.created_at.desc(), Notice.id.desc()).limit(MAX_LISTED)).all()
