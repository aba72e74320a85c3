"""Files of organisations: stored in pieces, read in pieces, erased as a whole. Functions flush; the edge commits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.orm import Session

from marketplace.core.errors import BadRequest, Conflict, NotFound
from marketplace.core.ids import new_id, show
from marketplace.gateway.batches.models import ACTIVE, Batch, File, FileChunk

CHUNK_BYTES: Final = 256 * 1024
MAX_FILENAME: Final = 256


class StorageFull(BadRequest):
    """The organisation's files are as large as they may be in all."""

    code = "storage_full"


class FileInUse(Conflict):
    """A batch still reads it."""

    code = "file_in_use"


def store(
    session: Session, organisation_id: UUID, purpose: str, filename: str, pieces: Iterable[bytes], *, keep_s: float
) -> File:
    """Write a file, piece by piece; it is erased after `keep_s` seconds."""
    now = session.scalar(select(func.now()))
    assert isinstance(now, datetime)
    file = File(
        id=new_id(),
        organisation_id=organisation_id,
        purpose=purpose,
        filename=filename[:MAX_FILENAME],
        size_bytes=0,
        created_at=now,
        expires_at=now + timedelta(seconds=keep_s),
    )
    session.add(file)
    session.flush()
    for position, data in enumerate(_even(pieces)):
        session.add(FileChunk(file_id=file.id, position=position, data=data))
        file.size_bytes += len(data)
        # Sent, and out of memory.
        session.flush()
    return file


def _even(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of CHUNK_BYTES."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= CHUNK_BYTES:
            yield bytes(buffer[:CHUNK_BYTES])
            del buffer[:CHUNK_BYTES]
    if buffer:
        yield bytes(buffer)


def content(session: Session, file_id: UUID) -> Iterator[bytes]:
    """A file's bytes, one piece after the other."""
    position = 0
    while (data := chunk(session, file_id, position)) is not None:
        yield data
        position += 1


def chunk(session: Session, file_id: UUID, position: int) -> bytes | None:
    """One piece of a file; None behind its end."""
    statement = select(FileChunk.data).where(FileChunk.file_id == file_id, FileChunk.position == position)
    return session.scalars(statement).one_or_none()


def check_room(session: Session, organisation_id: UUID, size_bytes: int, limit_bytes: int) -> None:
    """Raise StorageFull if the organisation's files would be larger than `limit_bytes` in all."""
    used = session.scalar(
        select(func.coalesce(func.sum(File.size_bytes), 0)).where(
            File.organisation_id == organisation_id, File.erased_at.is_(None)
        )
    )
    if int(used or 0) + size_bytes > limit_bytes:
        raise StorageFull(
            f"Your files would be larger than {limit_bytes} bytes in all ({used} now). Delete some that you have read."
        )


def find(session: Session, organisation_id: UUID, file_id: UUID) -> File:
    """One of the organisation's files. Raises NotFound."""
    file = session.scalars(
        select(File).where(File.id == file_id, File.organisation_id == organisation_id, File.erased_at.is_(None))
    ).one_or_none()
    if file is None:
        raise NotFound(f"There is no file with the id {show('file', file_id)!r}.")
    return file


def page(
    session: Session, organisation_id: UUID, *, after: UUID | None, purpose: str | None, limit: int
) -> Sequence[File]:
    """The organisation's files, newest first, those older than `after`."""
    statement = select(File).where(File.organisation_id == organisation_id, File.erased_at.is_(None))
    if purpose is not None:
        statement = statement.where(File.purpose == purpose)
    if after is not None:
        cursor = select(File.created_at, File.id).where(File.id == after, File.organisation_id == organisation_id)
        statement = statement.where(tuple_(File.created_at, File.id) < cursor.scalar_subquery())
    return session.scalars(statement.order_by(File.created_at.desc(), File.id.desc()).limit(limit)).all()


def erase(session: Session, organisation_id: UUID, file_id: UUID) -> None:
    """Erase a file's content for good. Raises NotFound, and FileInUse while a batch has not read it."""
    file = find(session, organisation_id, file_id)
    reading = select(Batch.id).where(Batch.input_file_id == file.id, Batch.status == "validating").limit(1)
    if session.scalar(reading) is not None:
        raise FileInUse("A batch is reading this file just now. Delete it in a moment.")
    _erase(session, [file.id])


def erase_expired(session: Session, *, limit: int) -> int:
    """Erase files whose time is over and that no active batch needs. Returns how many."""
    needed = select(Batch.id).where(
        Batch.status.in_(ACTIVE),
        (Batch.input_file_id == File.id) | (Batch.output_file_id == File.id) | (Batch.error_file_id == File.id),
    )
    due = session.scalars(
        select(File.id)
        .where(File.erased_at.is_(None), File.expires_at <= func.now(), ~needed.exists())
        .order_by(File.expires_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    _erase(session, due)
    return len(due)


def _erase(session: Session, file_ids: Sequence[UUID]) -> None:
    if file_ids:
        session.execute(delete(FileChunk).where(FileChunk.file_id.in_(file_ids)))
        session.execute(update(File).where(File.id.in_(file_ids)).values(erased_at=func.now(), filename=""))
