"""The agents' one HTTP endpoint: enrolment."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response

from agent.protocol import ENROL_PATH, EnrolAnswer, EnrolRequest
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import BadRequest, TooLarge
from marketplace.fleet import enrolment

MAX_BODY_BYTES: Final = 8 * 1024


def make_router(session_factory: SessionFactory) -> APIRouter:
    """The router, on a database."""
    router = APIRouter(include_in_schema=False)

    def spend(request: EnrolRequest) -> EnrolAnswer:
        with transaction(session_factory) as session:
            return enrolment.enrol(session, request)

    @router.post(ENROL_PATH)
    async def enrol(request: Request) -> Response:
        wanted = _parse(await _body(request))
        answer = await asyncio.to_thread(spend, wanted)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"An enrolment has at most {MAX_BODY_BYTES} bytes.")
    return body


def _parse(body: bytes) -> EnrolRequest:
    try:
        return msgspec.json.decode(body, type=EnrolRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"This is not an enrolment: {error}") from None
