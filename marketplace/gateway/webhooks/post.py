"""One POST to an address that a renter chose. The only call that this platform makes to a place that it was told of.

The name is resolved once, every address of it is checked, and the socket is opened to a checked one and asked again
whom it reached: what the name says a moment later does not matter. No redirect is followed, no proxy of the environment
is used, nothing of the answer is read but its head, and all of it ends within TOTAL_S.
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from marketplace.core.errors import FallowError
from marketplace.gateway.webhooks.addresses import Target, is_public, target_of

RESOLVE_S: Final = 3.0
TOTAL_S: Final = 8.0
"""From the first look at the name to the answer's head."""
MAX_ADDRESSES: Final = 16
"""Of one name; more are not looked at."""
MAX_TRIED: Final = 2
"""Addresses that a connection is tried to."""
ERROR_CHARACTERS: Final = 200

Resolve = Callable[[str, int], Sequence[str]]
"""Host and port to IP addresses, as text. Raises OSError."""


class NotCalled(FallowError):
    """Nothing was sent: the address is none that may be called, or cannot be reached. The message is for the renter."""

    code = "webhook_not_called"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a POST. `status` is None where there was no answer; `error` is empty on success."""

    status: int | None
    error: str = ""

    @property
    def ok(self) -> bool:
        """True if the receiver took it."""
        return self.status is not None and 200 <= self.status < 300


def resolve(host: str, port: int) -> Sequence[str]:
    """All addresses of a name, by the system's resolver, within RESOLVE_S. Raises OSError."""
    found: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=look_up, daemon=True, name="webhook-resolver").start()
    try:
        answer = found.get(timeout=RESOLVE_S)
    except queue.Empty:
        raise TimeoutError("the name was not resolved in time") from None
    if isinstance(answer, OSError):
        raise answer
    return list(dict.fromkeys(str(entry[4][0]) for entry in answer))


def checked_addresses(target: Target, resolver: Resolve, *, allow_private: bool) -> Sequence[str]:
    """The addresses of a target. One that is not public makes all of them suspect. Raises NotCalled."""
    try:
        addresses = resolver(target.host, target.port)[:MAX_ADDRESSES]
    except OSError as error:
        raise NotCalled(f"The name {target.host[:100]} cannot be resolved: {_words(error)}.") from None
    if not addresses:
        raise NotCalled(f"The name {target.host[:100]} has no address.")
    if not allow_private and not all(is_public(address) for address in addresses):
        raise NotCalled(f"The name {target.host[:100]} has an address that is not on the public internet.")
    return addresses


class Poster:
    """Sends POSTs. Any thread.

    `allow_private` (tests and local work) lets it call http and addresses that are not public; `ca_file` names
    certificate authorities to trust beside the system's.
    """

    def __init__(self, *, allow_private: bool = False, ca_file: str = "", resolver: Resolve = resolve) -> None:
        self._allow_private = allow_private
        self._resolver = resolver
        self._tls = ssl.create_default_context()
        if ca_file:
            self._tls.load_verify_locations(ca_file)

    def send(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """POST a body of JSON. Never raises for what is at the other end."""
        ends_at = time.monotonic() + TOTAL_S
        try:
            target = target_of(url, allow_private=self._allow_private)
            addresses = checked_addresses(target, self._resolver, allow_private=self._allow_private)
            with contextlib.closing(self._connect(target, addresses, ends_at)) as raw:
                return self._exchange(raw, target, headers, body, ends_at)
        except FallowError as error:
            return Answer(None, error.message[:ERROR_CHARACTERS])
        except (OSError, http.client.HTTPException) as error:
            late = time.monotonic() >= ends_at
            return Answer(None, f"No answer within {TOTAL_S:g} s." if late else _words(error))

    def _connect(self, target: Target, addresses: Sequence[str], ends_at: float) -> socket.socket:
        """A TCP connection to one of these addresses, verified to be one. Raises OSError and NotCalled."""
        failure: OSError = ConnectionError("nothing answers")
        for address in addresses[:MAX_TRIED]:
            try:
                raw = socket.create_connection((address, target.port), timeout=_left_s(ends_at))
            except OSError as error:
                failure = error
                continue
            if not self._allow_private and not is_public(str(raw.getpeername()[0])):
                raw.close()
                raise NotCalled("The connection reached an address that is not on the public internet.")
            return raw
        raise failure

    def _exchange(
        self, raw: socket.socket, target: Target, headers: Mapping[str, str], body: bytes, ends_at: float
    ) -> Answer:
        # Timeouts of a socket count anew with each byte; this one does not.
        guard = threading.Timer(_left_s(ends_at), _cut, [raw])
        guard.daemon = True
        guard.start()
        try:
            stream = self._tls.wrap_socket(raw, server_hostname=target.host) if target.tls else raw
            with contextlib.closing(_Open(stream, target)) as connection:
                sent = {"content-type": "application/json", "user-agent": "Fallow-Webhooks/1", "connection": "close"}
                connection.request("POST", target.path, body, {**sent, **headers})
                status = connection.getresponse().status
                # A head that was cut reads like one that ended.
                _left_s(ends_at)
        finally:
            guard.cancel()
        answer = Answer(status)
        return answer if answer.ok else Answer(status, f"It answered {status}.")


class _Open(http.client.HTTPConnection):
    """HTTP over a connection that is open; it opens none by itself."""

    auto_open = 0

    def __init__(self, stream: socket.socket, target: Target) -> None:
        super().__init__(target.host, target.port)
        self.default_port = 443 if target.tls else 80
        self.sock = stream


def _cut(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)


def _left_s(ends_at: float) -> float:
    left_s = ends_at - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _words(error: BaseException) -> str:
    """What went wrong, without what only we should know."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"Its certificate is not trusted: {error.verify_message}."[:ERROR_CHARACTERS]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:ERROR_CHARACTERS]
    return type(error).__name__
