"""/v1/files and /v1/batches, as OpenAI's clients call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, BinaryIO, Final, Literal, TypeVar
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Meta, Struct
from sqlalchemy.orm import Session
from starlette.datastructures import FormData, UploadFile

from marketplace.accounts.auth import Principal
from marketplace.core import ids
from marketplace.core.database import transaction
from marketplace.core.errors import TooLarge
from marketplace.gateway.batches import files, service
from marketplace.gateway.batches.schemas import (
    BatchList,
    BatchObject,
    FileDeleted,
    FileList,
    FileObject,
    batch_list,
    batch_object,
    file_list,
    file_object,
)
from marketplace.gateway.batches.service import Wish
from marketplace.gateway.bodies import ShortText
from marketplace.gateway.deps import GatewayServices, Renter, RequestId
from marketplace.gateway.load import Tier
from marketplace.gateway.services import Services
from marketplace.gateway.strict import InvalidBody, decode_strict
from marketplace.gateway.surface import SURFACES

FILES_PATH: Final = "/v1/files"
MULTIPART_BYTES: Final = 64 * 1024
"""What a form may weigh beside its file."""
MIN_LIFE_S: Final = 3_600
MAX_PAGE: Final = 100
_FORM_FIELDS: Final = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})

T = TypeVar("T")
router = APIRouter(tags=["batches"])


class BatchBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: ShortText
    endpoint: ShortText
    completion_window: ShortText
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None


# --- files --------------------------------------------------------------------------------------------------------


@router.post(FILES_PATH)
async def upload(request: Request, services: GatewayServices, principal: Renter) -> FileObject:
    """Store the input of a batch: JSONL, one request a line."""
    services.require_open()
    async with services.limited(principal), request.form(max_files=1, max_fields=8) as form:
        file, life_s = _read_form(form, services)
        return await asyncio.to_thread(_store, services, principal, file, life_s)


@router.get(FILES_PATH)
async def list_files(
    services: GatewayServices,
    principal: Renter,
    after: Annotated[str | None, Query(max_length=80)] = None,
    purpose: Annotated[Literal["batch", "batch_output"] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
) -> FileList:
    """The organisation's files, newest first. `after` is the id of the last one seen."""
    cursor = ids.parse("file", after) if after is not None else None

    def page(session: Session) -> FileList:
        found = files.page(session, principal.organisation_id, after=cursor, purpose=purpose, limit=limit + 1)
        return file_list(found[:limit], has_more=len(found) > limit)

    return await _in_transaction(services, page)


@router.get(f"{FILES_PATH}/{{file_id}}")
async def show_file(services: GatewayServices, principal: Renter, file_id: str) -> FileObject:
    """One file, without its content. Raises NotFound."""
    id_ = ids.parse("file", file_id)
    return await _in_transaction(services, lambda s: file_object(files.find(s, principal.organisation_id, id_)))


@router.get(f"{FILES_PATH}/{{file_id}}/content")
async def read_file(services: GatewayServices, principal: Renter, file_id: str) -> Response:
    """A file's content. Raises NotFound."""
    id_ = ids.parse("file", file_id)
    file = await _in_transaction(services, lambda s: files.find(s, principal.organisation_id, id_))
    headers = {"content-length": str(file.size_bytes)}
    return StreamingResponse(_content(services, id_), media_type="application/jsonl", headers=headers)


@router.delete(f"{FILES_PATH}/{{file_id}}")
async def delete_file(services: GatewayServices, principal: Renter, file_id: str) -> FileDeleted:
    """Erase a file for good. Raises NotFound and FileInUse."""
    id_ = ids.parse("file", file_id)
    await _in_transaction(services, lambda s: files.erase(s, principal.organisation_id, id_))
    return FileDeleted(id=ids.show("file", id_))


def _read_form(form: FormData, services: Services) -> tuple[UploadFile, int]:
    """The file, and for how many seconds it is kept. Raises InvalidBody and TooLarge."""
    unknown = next((name for name in form if name not in _FORM_FIELDS), None)
    if unknown is not None:
        raise InvalidBody(f"`{unknown[:80]}` is not a field that is taken here.", param=unknown[:80])
    if form.get("purpose") != "batch":
        raise InvalidBody("`purpose` must be batch: files serve batches here.", param="purpose")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidBody("`file` is missing.", param="file")
    if not file.size:
        raise InvalidBody("`file` is empty.", param="file")
    if file.size > services.settings.file_limit_bytes:
        raise TooLarge(f"A file has at most {services.settings.file_limit_bytes} bytes.", param="file")
    if "\0" in (file.filename or ""):
        raise InvalidBody("The file's name holds a NUL.", param="file")
    return file, _life_s(form, services.settings.file_life_s)


def _life_s(form: FormData, default_s: int) -> int:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise InvalidBody("`expires_after[anchor]` must be created_at.", param="expires_after[anchor]")
    text = seconds if isinstance(seconds, str) else ""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and MIN_LIFE_S <= int(text) <= default_s):
        raise InvalidBody(f"`expires_after[seconds]` is {MIN_LIFE_S} to {default_s}.", param="expires_after[seconds]")
    return int(text)


def _store(services: Services, principal: Principal, upload_: UploadFile, life_s: int) -> FileObject:
    with transaction(services.session_factory) as session:
        limit_bytes = services.settings.files_limit_bytes
        files.check_room(session, principal.organisation_id, upload_.size or 0, limit_bytes)
        name = upload_.filename or "upload.jsonl"
        pieces = _pieces(upload_.file)
        return file_object(files.store(session, principal.organisation_id, "batch", name, pieces, keep_s=life_s))


def _pieces(source: BinaryIO) -> Iterator[bytes]:
    while piece := source.read(files.CHUNK_BYTES):
        yield piece


async def _content(services: Services, file_id: UUID) -> AsyncIterator[bytes]:
    position = 0
    while True:
        data = await _in_transaction(services, lambda s, at=position: files.chunk(s, file_id, at))  # type: ignore[misc]
        if data is None:
            return
        yield data
        position += 1


# --- batches ------------------------------------------------------------------------------------------------------


@router.post("/v1/batches")
async def create_batch(
    request: Request, services: GatewayServices, principal: Renter, request_id: RequestId
) -> BatchObject:
    """Begin a batch. Its lines are checked first; then they run as there is room, until its window ends."""
    services.require_open()
    services.load.require(Tier.WAITING)
    body = decode_strict(await request.body(), BatchBody)
    if body.endpoint not in SURFACES:
        raise InvalidBody(f"`endpoint` is one of {', '.join(SURFACES)}.", param="endpoint")
    wish = Wish(
        input_file_id=ids.parse("file", body.input_file_id),
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=body.metadata,
        price_basis_points=services.settings.batch_price_basis_points,
        routing=principal.routing,
    )
    # A claim that outlived its gateway keeps its request id, and so finds the batch that it made.
    batch_id = UUID(hex=request_id.removeprefix("req_")) if getattr(request.state, "idempotent", False) else None

    def create(session: Session) -> BatchObject:
        made = service.create(session, principal.organisation_id, principal.key_id, wish, batch_id=batch_id)
        return batch_object(made, 0)

    async with services.limited(principal):
        return await _in_transaction(services, create)


@router.get("/v1/batches")
async def list_batches(
    services: GatewayServices,
    principal: Renter,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
) -> BatchList:
    """The organisation's batches, newest first. `after` is the id of the last one seen."""
    cursor = ids.parse("batch", after) if after is not None else None

    def page(session: Session) -> BatchList:
        found = service.page(session, principal.organisation_id, after=cursor, limit=limit + 1)
        return batch_list(found[:limit], has_more=len(found) > limit)

    return await _in_transaction(services, page)


@router.get("/v1/batches/{batch_id}")
async def show_batch(services: GatewayServices, principal: Renter, batch_id: str) -> BatchObject:
    """One batch, with what it cost so far. Raises NotFound."""
    id_ = ids.parse("batch", batch_id)

    def show(session: Session) -> BatchObject:
        batch = service.find(session, principal.organisation_id, id_)
        return batch_object(batch, service.cost_nano(session, id_))

    return await _in_transaction(services, show)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(services: GatewayServices, principal: Renter, batch_id: str) -> BatchObject:
    """Cancel: what waits ends for free, what runs stops and pays for what was delivered."""
    id_ = ids.parse("batch", batch_id)
    return await _in_transaction(
        services, lambda s: batch_object(service.cancel(s, principal.organisation_id, id_), service.cost_nano(s, id_))
    )


async def _in_transaction(services: Services, action: Callable[[Session], T]) -> T:
    def run() -> T:
        with transaction(services.session_factory) as session:
            return action(session)

    return await asyncio.to_thread(run)
