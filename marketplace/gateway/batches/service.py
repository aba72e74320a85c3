"""Batches as their renters handle them: begin one, look, cancel. Functions flush; the endpoint commits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, null, select, tuple_
from sqlalchemy.orm import Session

from marketplace.core.errors import BadRequest, Conflict, NotFound
from marketplace.core.ids import new_id, show
from marketplace.gateway.batches import files
from marketplace.gateway.batches.models import ACTIVE, Batch, BatchLine
from marketplace.metering.models import Receipt

MAX_ACTIVE: Final = 32
"""Batches of one organisation in which something is still to be done."""
MIN_WINDOW_S: Final = 600
MAX_WINDOW_S: Final = 7 * 86_400
_WINDOW: Final = re.compile(r"(\d{1,4})([mhd])", re.ASCII)
_UNITS_S: Final = {"m": 60, "h": 3_600, "d": 86_400}


class InvalidWindow(BadRequest):
    """No time that a batch may take."""

    code = "invalid_completion_window"


class TooManyBatches(BadRequest):
    """The organisation has as many batches at work as it may have."""

    code = "too_many_batches"


class WrongPurpose(BadRequest):
    """The file is no input of a batch."""

    code = "wrong_purpose"


class BatchEnded(Conflict):
    """A batch that has ended cannot be cancelled."""

    code = "batch_ended"


@dataclass(frozen=True, slots=True)
class Wish:
    """A batch as its renter asks for it."""

    input_file_id: UUID
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None
    price_basis_points: int
    routing: Mapping[str, Any] | None = None
    """Where its lines may run, unless they say; None: anywhere."""


def window_s(text: str) -> int:
    """`24h` in seconds. Raises InvalidWindow."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
        raise InvalidWindow(
            "`completion_window` is a number with m, h or d, from 10m to 7d; 24h is usual.", param="completion_window"
        )
    return seconds


def create(session: Session, organisation_id: UUID, key_id: UUID, wish: Wish, *, batch_id: UUID | None = None) -> Batch:
    """Begin a batch; its lines are checked soon after. Raises InvalidWindow, NotFound, WrongPurpose, TooManyBatches.

    With a `batch_id` a second call finds the first one's batch: for requests that may come again.
    """
    before = session.get(Batch, batch_id) if batch_id is not None else None
    if before is not None and before.organisation_id == organisation_id:
        return before
    seconds = window_s(wish.completion_window)
    file = files.find(session, organisation_id, wish.input_file_id)
    if file.purpose != "batch":
        raise WrongPurpose(f"This file's purpose is {file.purpose}, not batch.", param="input_file_id")
    at_work = select(func.count()).select_from(Batch)
    if (
        session.scalar(at_work.where(Batch.organisation_id == organisation_id, Batch.status.in_(ACTIVE))) or 0
    ) >= MAX_ACTIVE:
        raise TooManyBatches(f"At most {MAX_ACTIVE} batches of yours are worked on at a time. Wait for one to end.")
    now = session.scalar(select(func.now()))
    assert now is not None
    batch = Batch(
        id=batch_id or new_id(),
        organisation_id=organisation_id,
        key_id=key_id,
        input_file_id=file.id,
        endpoint=wish.endpoint,
        status="validating",
        completion_window=wish.completion_window,
        price_basis_points=wish.price_basis_points,
        routing=dict(wish.routing) if wish.routing else null(),
        tags=dict(wish.metadata) if wish.metadata is not None else null(),
        errors=null(),
        created_at=now,
        expires_at=now + timedelta(seconds=seconds),
        total_lines=0,
        completed_lines=0,
        failed_lines=0,
    )
    session.add(batch)
    session.flush()
    return batch


def find(session: Session, organisation_id: UUID, batch_id: UUID, *, lock: bool = False) -> Batch:
    """One of the organisation's batches. Raises NotFound."""
    statement = select(Batch).where(Batch.id == batch_id, Batch.organisation_id == organisation_id)
    batch = session.scalars(statement.with_for_update() if lock else statement).one_or_none()
    if batch is None:
        raise NotFound(f"There is no batch with the id {show('batch', batch_id)!r}.")
    return batch


def page(session: Session, organisation_id: UUID, *, after: UUID | None, limit: int) -> Sequence[Batch]:
    """The organisation's batches, newest first, those older than `after`."""
    statement = select(Batch).where(Batch.organisation_id == organisation_id)
    if after is not None:
        cursor = select(Batch.created_at, Batch.id).where(Batch.id == after, Batch.organisation_id == organisation_id)
        statement = statement.where(tuple_(Batch.created_at, Batch.id) < cursor.scalar_subquery())
    return session.scalars(statement.order_by(Batch.created_at.desc(), Batch.id.desc()).limit(limit)).all()


def cost_nano(session: Session, batch_id: UUID) -> int:
    """What its lines were charged so far."""
    statement = (
        select(func.coalesce(func.sum(Receipt.charge_nano), 0))
        .join(BatchLine, BatchLine.job_id == Receipt.job_id)
        .where(BatchLine.batch_id == batch_id)
    )
    return int(session.scalar(statement) or 0)


def cancel(session: Session, organisation_id: UUID, batch_id: UUID) -> Batch:
    """Begin to cancel: what waits ends for free, what runs stops and pays for what was delivered. Cancelling twice is
    cancelling once. Raises NotFound and BatchEnded."""
    batch = find(session, organisation_id, batch_id, lock=True)
    if batch.status in ("cancelling", "cancelled"):
        return batch
    if batch.status not in ("validating", "in_progress"):
        raise BatchEnded(f"Batch {show('batch', batch.id)} is {batch.status} and cannot be cancelled.")
    batch.status, batch.cancelling_at = "cancelling", session.scalar(select(func.now()))
    session.flush()
    return batch
