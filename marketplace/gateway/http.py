"""Raw ASGI in few lines: read a body within its bound, answer JSON, say errors in OpenAI's shape."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import lru_cache
from typing import Any, Final, Protocol

import msgspec

from marketplace.core.errors import FallowError, TooLarge

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

BODY: Final = "fallow.body"
"""ASGI extension: `extensions[BODY]["body"]` is a Body."""
JSON: Final[Header] = (b"content-type", b"application/json")
_encode = msgspec.json.Encoder().encode


class Body(Protocol):
    """A response's body, where the server can take a part of it without a coroutine."""

    @property
    def writable(self) -> bool:
        """True while the head is out, the body goes on, and the client takes what it is sent."""
        ...

    def write(self, part: bytes) -> None:
        """Send a part that is not empty. Only while `writable`."""
        ...

    def when_gone(self, hear: Callable[[], None] | None) -> None:
        """Call this, on the event loop, if the client leaves before its answer is whole, at once if it has left; None:
        do not call any more. The request's body must have been read."""
        ...


class ClientGoneError(Exception):
    """The client left before its request was whole."""


class MethodNotAllowed(FallowError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"
    type = "invalid_request_error"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"This path takes {allowed} only.", headers={"allow": allowed})


def new_request_id() -> str:
    """`req_` and 128 random bits."""
    return f"req_{secrets.token_hex(16)}"


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


@lru_cache(maxsize=16)
def _networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(network) for network in filter(None, text.split(",")))


def client_address(scope: Scope, trusted_proxies: str) -> str | None:
    """The client's IP address; None where there is none. A hop in `trusted_proxies` (CIDR blocks, comma-separated) is
    believed about the one before it, as X-Forwarded-For names it."""
    client = scope.get("client")
    address: str | None = client[0] if client else None
    proxies = _networks(trusted_proxies)
    said = [value for key, value in scope["headers"] if key == b"x-forwarded-for"] if proxies else []
    hops = [hop.strip() for hop in b",".join(said).decode("latin-1").split(",") if hop.strip()]
    while hops and address is not None and _among(address, proxies):
        address = hops.pop()
    return address


def _among(address: str, networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]) -> bool:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(known in network for network in networks)


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The request's body. Raises TooLarge beyond the limit, as soon as it is known, and ClientGoneError."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        whole: bytes = message.get("body", b"")
        if len(whole) > limit_bytes:
            raise _too_large(limit_bytes)
        return whole
    parts: list[bytes] = []
    size = 0
    while True:
        if message["type"] != "http.request":
            raise ClientGoneError
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


def _too_large(limit_bytes: int) -> TooLarge:
    # What was not read stays on the wire: the connection cannot be used again.
    return TooLarge(f"The body is larger than {limit_bytes} bytes.", headers={"connection": "close"})


async def send_json(send: Send, status: int, body: Any, headers: Iterable[Header] = ()) -> None:
    """Answer with a JSON object."""
    payload = _encode(body)
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [JSON, (b"content-length", b"%d" % len(payload)), *headers],
        }
    )
    await send({"type": "http.response.body", "body": payload, "more_body": False})


async def send_error(send: Send, error: FallowError, headers: Iterable[Header] = ()) -> None:
    """Answer with OpenAI's error object, and tell official clients whether to try again."""
    await send_json(send, error.status, error.body(), [*error_headers(error), *headers])


def error_headers(error: FallowError) -> list[Header]:
    """The headers that go with an error."""
    own = [
        (name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in error.headers.items()
    ]
    return [(b"x-should-retry", b"true" if error.retryable else b"false"), *own]
