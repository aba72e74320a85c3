"""The lines of a batch's input, checked one by one. Pure: what a file says, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from marketplace.core.errors import FallowError
from marketplace.gateway.bodies import FLEX
from marketplace.gateway.parse import Inference
from marketplace.gateway.strict import InvalidBody, decode_strict
from marketplace.gateway.surface import SURFACES

MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 2 * 1024 * 1024
MAX_ERRORS: Final = 100
"""Of a file that is not accepted, so many are told."""


class _LineBody(Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: Raw


@dataclass(frozen=True, slots=True)
class Line:
    """A line that passed every check but those that need the world as it is when it runs."""

    number: int
    """From 1."""
    custom_id: str
    body: str
    """JSON of the request, as it was sent."""


@dataclass(slots=True)
class Checked:
    """What a file holds."""

    lines: list[Line] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's error objects: code, message, param, line."""

    def refuse(self, code: str, message: str, *, line: int | None, param: str | None = None) -> None:
        """Note an error, up to MAX_ERRORS."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"code": code, "message": message, "param": param, "line": line})


def split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a file, without their ends. One that is longer than MAX_LINE_BYTES comes cut, just longer than that."""
    buffer = bytearray()
    cut = False
    for piece in pieces:
        *whole, rest = piece.split(b"\n")
        for part in whole:
            if not cut:
                buffer += part
            yield bytes(buffer[: MAX_LINE_BYTES + 1])
            buffer.clear()
            cut = False
        if not cut:
            buffer += rest
            if len(buffer) > MAX_LINE_BYTES:
                del buffer[MAX_LINE_BYTES + 1 :]
                cut = True
    if buffer:
        yield bytes(buffer)


def check(pieces: Iterable[bytes], endpoint: str, resolve: Callable[[Inference], object]) -> Checked:
    """Check every line of a file for one endpoint. `resolve` raises for a model that is not sold as it is asked for,
    and for a choice of providers that cannot be."""
    checked = Checked()
    seen: set[str] = set()
    for number, raw in enumerate(split_lines(pieces), start=1):
        if not raw.strip():
            continue
        if len(checked.lines) >= MAX_LINES:
            checked.refuse("too_many_lines", f"A batch has at most {MAX_LINES} requests.", line=number)
            break
        try:
            line = _check_line(raw, number, endpoint, resolve)
            if line.custom_id in seen:
                raise InvalidBody(f"The custom_id {line.custom_id[:80]!r} appeared before.", param="custom_id")
            seen.add(line.custom_id)
            checked.lines.append(line)
        except FallowError as error:
            checked.refuse(error.code, error.message, line=number, param=error.param)
    if not checked.lines and not checked.errors:
        checked.refuse("empty_file", "The file has no requests.", line=None)
    return checked


def _check_line(raw: bytes, number: int, endpoint: str, resolve: Callable[[Inference], object]) -> Line:
    """One line. Raises FallowError saying what is wrong."""
    if len(raw) > MAX_LINE_BYTES:
        raise InvalidBody(f"The line is longer than {MAX_LINE_BYTES} bytes.")
    line = decode_strict(raw, _LineBody)
    if line.url != endpoint:
        raise InvalidBody(f"`url` must be the batch's endpoint, {endpoint}.", param="url")
    body = bytes(line.body)
    try:
        resolve(parse_request(body, endpoint))
    except FallowError as error:
        error.param = f"body.{error.param}" if error.param else "body"
        raise
    return Line(number, line.custom_id, body.decode())


def parse_request(body: bytes, endpoint: str) -> Inference:
    """The request of a line. Raises InvalidBody (400)."""
    request = SURFACES[endpoint].parse(body)
    if request.stream:
        raise InvalidBody("The answers of a batch are fetched, not streamed: leave `stream` out.", param="stream")
    if request.service_tier == FLEX:
        raise InvalidBody("A batch has its own price: leave `service_tier` out.", param="service_tier")
    return request


def result_line(
    batch_request_id: str,
    custom_id: str,
    *,
    answer: str | None,
    status_code: int | None,
    request_id: str | None,
    error: tuple[str, str] | None,
) -> bytes:
    """One line of an output or error file, with its end. `answer` is JSON; `error` a code and a message."""
    response = None
    if answer is not None:
        response = {"status_code": status_code, "request_id": request_id, "body": Raw(answer.encode())}
    shown = {"code": error[0], "message": error[1]} if error is not None else None
    line = {"id": batch_request_id, "custom_id": custom_id, "response": response, "error": shown}
    return msgspec.json.encode(line) + b"\n"
