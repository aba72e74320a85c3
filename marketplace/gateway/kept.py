"""Answers kept with their receipt, for whoever sends the request again: the same bytes as the first time, without the
keep-alives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from agent.protocol import Tokens
from marketplace.core.errors import FallowError
from marketplace.gateway import sse
from marketplace.gateway.outlets import STREAM_HEADERS, chunk_of, end_of
from marketplace.gateway.surface import Writer
from marketplace.jobs.idempotency import StoredAnswer

EVENT_STREAM: Final = STREAM_HEADERS[0][1].decode()
JSON: Final = "application/json"
_encode = msgspec.json.Encoder().encode


class AnswerCut(FallowError):
    """The first request ended before its answer did, and what was delivered was charged."""

    status = 409
    code = "answer_cut"
    type = "invalid_request_error"


def whole(body: dict[str, Any]) -> str:
    """The stored form of an answer that is one JSON object."""
    return _stored(JSON, _encode(body))


def stream(
    writers: Sequence[Writer],
    pieces: Sequence[Tokens],
    reasons: Sequence[str],
    usage: dict[str, Any] | None,
    provider: dict[str, Any],
) -> str:
    """The stored form of a stream. Without finish reasons it ends with an error event, as it was cut."""
    parts = [chunk_of(writers[piece.choice], piece) for piece in pieces]
    if reasons:
        parts.append(end_of(writers, reasons, usage, provider))
    else:
        cut = AnswerCut("The first request with this key ended here. What was delivered is charged.")
        parts.append(sse.error_event(cut.body()))
    return _stored(EVENT_STREAM, b"".join(parts))


def _stored(content_type: str, body: bytes) -> str:
    return _encode(StoredAnswer(200, content_type, body.decode())).decode()
