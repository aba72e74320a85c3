"""Files and batches as OpenAI's clients read them. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from marketplace.core.amounts import usd
from marketplace.core.ids import show
from marketplace.gateway.batches.models import Batch, File


class FileObject(BaseModel):
    """One file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    """A page of files, newest first."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """The answer to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchErrors(BaseModel):
    """What is wrong with the input, line by line."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class BatchCounts(BaseModel):
    """Requests of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """One batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, Any] | None
    price_share: str
    """What a request costs, as a share of the same one that does not wait."""
    cost: str | None = None
    """What was charged so far, in USD. Lists leave it out."""


class BatchList(BaseModel):
    """A page of batches, newest first."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_object(file: File) -> FileObject:
    """A file for its organisation."""
    return FileObject(
        id=show("file", file.id),
        bytes=file.size_bytes,
        created_at=int(file.created_at.timestamp()),
        expires_at=int(file.expires_at.timestamp()),
        filename=file.filename,
        purpose=file.purpose,
    )


def file_list(files: Sequence[File], *, has_more: bool) -> FileList:
    """A page."""
    data = [file_object(file) for file in files]
    return FileList(
        data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None, has_more=has_more
    )


def batch_object(batch: Batch, cost_nano: int | None = None) -> BatchObject:
    """A batch for its organisation."""
    return BatchObject(
        id=show("batch", batch.id),
        endpoint=batch.endpoint,
        errors=BatchErrors(data=batch.errors) if batch.errors is not None else None,
        input_file_id=show("file", batch.input_file_id),
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=show("file", batch.output_file_id) if batch.output_file_id is not None else None,
        error_file_id=show("file", batch.error_file_id) if batch.error_file_id is not None else None,
        created_at=int(batch.created_at.timestamp()),
        in_progress_at=_unix(batch.in_progress_at),
        expires_at=int(batch.expires_at.timestamp()),
        finalizing_at=_unix(batch.finalizing_at),
        completed_at=_unix(batch.completed_at),
        failed_at=_unix(batch.failed_at),
        expired_at=_unix(batch.expired_at),
        cancelling_at=_unix(batch.cancelling_at),
        cancelled_at=_unix(batch.cancelled_at),
        request_counts=BatchCounts(total=batch.total_lines, completed=batch.completed_lines, failed=batch.failed_lines),
        metadata=batch.tags,
        price_share=f"{batch.price_basis_points / 10_000:g}",
        cost=usd(cost_nano) if cost_nano is not None else None,
    )


def batch_list(batches: Sequence[Batch], *, has_more: bool) -> BatchList:
    """A page."""
    data = [batch_object(batch) for batch in batches]
    return BatchList(
        data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None, has_more=has_more
    )


def _unix(moment: datetime | None) -> int | None:
    return int(moment.timestamp()) if moment is not None else None
