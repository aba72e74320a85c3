"""Server-sent events: the bytes of one stream, written from a prefix that is made once a request.

A node supplies text, never bytes of the stream: ids, names, usage and the shape of each chunk are written here. Only
what official clients accept is used: `data:` lines, comments, and one `[DONE]`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

KEEPALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def json_text(text: str) -> bytes:
    """Text as a JSON string, on one line."""
    return one_line(_encode(text))


def one_line(encoded: bytes) -> bytes:
    """JSON with U+2028, U+2029 and U+0085 escaped: some clients split lines on them."""
    if b"\xe2\x80" in encoded:
        encoded = encoded.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    if b"\xc2\x85" in encoded:
        encoded = encoded.replace(b"\xc2\x85", b"\\u0085")
    return encoded


def stream_head(completion_id: str, kind: str, created: int, model: str, service_tier: str | None = None) -> bytes:
    """The beginning that all chunks of one answer share."""
    return (
        b'data: {"id":'
        + _encode(completion_id)
        + b',"object":"'
        + kind.encode()
        + b'","created":'
        + str(created).encode()
        + b',"model":'
        + json_text(model)
        + (b',"service_tier":' + _encode(service_tier) if service_tier is not None else b"")
    )


def with_provider(event: bytes, provider: dict[str, Any]) -> bytes:
    """A chunk with a `provider` member, which official clients do not know and ignore."""
    return event[: -len(b"}\n\n")] + b',"provider":' + one_line(_encode(provider)) + b"}\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """The event that ends a broken stream: official clients raise on a `data` object with `error`."""
    return b"data: " + one_line(_encode(body)) + b"\n\n"


class ChunkWriter:
    """Writes the chunks of one choice of a chat completion. Not shared between requests."""

    __slots__ = ("_check", "_role", "_start", "_tail", "_usage_head")

    def __init__(
        self,
        *,
        completion_id: str,
        created: int,
        model: str,
        include_usage: bool,
        index: int = 0,
        service_tier: str | None = None,
    ) -> None:
        head = stream_head(completion_id, "chat.completion.chunk", created, model, service_tier)
        self._start = head + b',"choices":[{"index":%d,"delta":{' % index
        self._usage_head = head + b',"choices":[],"usage":'
        # With usage asked, every other chunk says null, as OpenAI's do.
        self._tail = (b"]," + b'"usage":null}\n\n') if include_usage else b"]}\n\n"
        self._role = b'"role":"assistant",'
        self._check = b""

    def text(self, text: str) -> bytes:
        """One chunk of the visible answer."""
        return self._delta(b'"content":' + json_text(text))

    def reasoning(self, text: str) -> bytes:
        """One chunk of the model's reasoning."""
        return self._delta(b'"reasoning_content":' + json_text(text))

    def delta(self, members: dict[str, Any], logprobs: Any = None) -> bytes:
        """One chunk with any delta members (tool calls) and the choice's log probabilities."""
        inside = one_line(_encode(members))[1:-1]
        return self._delta(inside, one_line(_encode(logprobs)) if logprobs is not None else b"null")

    def note_check(self, check: dict[str, Any]) -> None:
        """What was found of the schema that the answer is to follow; the finish chunk tells it."""
        self._check = b',"schema_check":' + one_line(_encode(check))

    def finish(self, reason: str) -> bytes:
        """The chunk that ends the choice."""
        role, self._role = self._role, b""
        inside = b'"role":"assistant","content":""' if role else b""
        end = _encode(reason) + self._check + b"}" + self._tail
        return self._start + inside + b'},"logprobs":null,"finish_reason":' + end

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk before [DONE], for clients that asked for usage."""
        return self._usage_head + _encode(usage) + b"}\n\n"

    def _delta(self, inside: bytes, logprobs: bytes = b"null") -> bytes:
        role = self._role
        if role:
            # The first chunk says who speaks.
            self._role = b""
            inside = role + inside
        return b'%b%b},"logprobs":%b,"finish_reason":null}%b' % (self._start, inside, logprobs, self._tail)
