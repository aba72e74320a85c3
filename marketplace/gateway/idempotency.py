"""The Idempotency-Key header, around every endpoint that costs: the first request runs, the others get its answer.

A request without the header passes through untouched. With it, its body is read here, the key is claimed in the
database, and the inner application runs under the claim's request id. What is kept and what frees the key again is
decided by what was charged (see jobs.idempotency).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from marketplace.accounts.auth import Principal
from marketplace.core.errors import BadRequest, Conflict, FallowError, Unavailable
from marketplace.core.ids import show
from marketplace.core.logs import get_logger
from marketplace.gateway.http import (
    ClientGoneError,
    Header,
    Message,
    Receive,
    Scope,
    Send,
    header,
    new_request_id,
    read_body,
    send_error,
)
from marketplace.gateway.services import Services
from marketplace.jobs import idempotency
from marketplace.jobs.idempotency import Claim, Claimed, InProgress, Mismatch, Queued, Replay, StoredAnswer

log = get_logger(__name__)
HEADER: Final = b"idempotency-key"
MAX_KEY_CHARACTERS: Final = 255
MAX_KEPT_BYTES: Final = 4 * 1024 * 1024
"""Of an answer that is not in a job's row; a larger one is not given again."""
RENEW_S: Final = idempotency.LEASE_S / 3
RETRY_S: Final = 1
FINISH_TRIES: Final = 3
FINISH_PAUSE_S: Final = 1.0


class InvalidIdempotencyKey(BadRequest):
    code = "invalid_idempotency_key"


class IdempotencyMismatch(Conflict):
    """The key was used before, for something else."""

    code = "idempotency_mismatch"


class IdempotencyInProgress(Conflict):
    """The first request with this key still runs: official clients ask again by themselves."""

    code = "idempotency_in_progress"
    retryable = True


class Leases:
    """Keeps the claims of this gateway alive while it runs them. One event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._held: set[UUID] = set()
        self._task: asyncio.Task[None] | None = None

    def hold(self, holder: UUID) -> None:
        """Renew this claim from now on."""
        self._held.add(holder)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._renew())

    def let_go(self, holder: UUID) -> None:
        """It ended."""
        self._held.discard(holder)

    async def _renew(self) -> None:
        while self._held:
            await asyncio.sleep(RENEW_S)
            try:
                await asyncio.to_thread(idempotency.renew, self._services.session_factory, list(self._held))
            except SQLAlchemyError as error:
                # A lease bears two such failures; what is lost then is taken over as after a crash.
                log.warning("idempotency_not_renewed", error=type(error).__name__, claims=len(self._held))


class Idempotent:
    """ASGI around ASGI, for POST to `paths`; None: to all that the application serves."""

    def __init__(self, services: Services, leases: Leases, app: Any, paths: Collection[str] | None = None) -> None:
        self._services = services
        self._leases = leases
        self._app = app
        self._paths = frozenset(paths) if paths is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = header(scope, HEADER)
        if key is None or scope["method"] != "POST" or not self._covers(scope["path"]):
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        try:
            principal, body, found = await self._claim(scope, receive, key, request_id)
        except ClientGoneError:
            return
        except FallowError as error:
            self._services.metrics.http_errors.labels(error.code).inc()
            await send_error(send, error, [_request_id_header(request_id)])
            return
        if isinstance(found, Claimed):
            await self._run(found, scope, _Whole(body, receive), send)
        elif isinstance(found, Queued):
            await self._app(_show_job(scope, found), _Whole(b"", receive), send)
        else:
            await self._again(found, principal, request_id, send)

    def _covers(self, path: str) -> bool:
        return self._paths is None or path in self._paths

    async def _claim(
        self, scope: Scope, receive: Receive, key: bytes, request_id: str
    ) -> tuple[Principal, bytes, Claim]:
        services = self._services
        services.require_open()
        principal = await services.authenticate(scope)
        principal.require("renter")
        name = _checked(key)
        body = await read_body(scope, receive, services.settings.body_limit_bytes)
        try:
            found = await asyncio.to_thread(
                idempotency.claim,
                services.session_factory,
                organisation_id=principal.organisation_id,
                key=name,
                fingerprint=_fingerprint(scope, body),
                request_id=request_id,
            )
        except SQLAlchemyError as error:
            log.warning("idempotency_not_claimed", error=type(error).__name__)
            raise Unavailable(
                "The database does not answer. Send the request again.", headers={"retry-after": "2"}
            ) from None
        return principal, body, found

    async def _run(self, claimed: Claimed, scope: Scope, receive: Receive, send: Send) -> None:
        record = _Record(send, lambda answer: self._finish(claimed, answer))
        state = {**scope.get("state", {}), "request_id": claimed.request_id, "idempotent": True}
        # All that is sent goes through the record: no part of the body may leave by another way.
        inner = {**scope, "state": state, "extensions": {}}
        self._leases.hold(claimed.holder)
        try:
            await self._app(inner, receive, record.send)
        finally:
            if not record.ended:
                self._services.in_background(self._finish(claimed, None))

    async def _finish(self, claimed: Claimed, answer: StoredAnswer | None) -> None:
        """Write the end. Should the database be away, the lease ends, and who comes next finds what was charged."""
        try:
            for _ in range(FINISH_TRIES):
                try:
                    await asyncio.to_thread(idempotency.finish, self._services.session_factory, claimed, answer)
                except SQLAlchemyError as error:
                    log.warning("idempotency_not_finished", request_id=claimed.request_id, error=type(error).__name__)
                    await asyncio.sleep(FINISH_PAUSE_S)
                else:
                    return
        finally:
            self._leases.let_go(claimed.holder)

    async def _again(
        self, found: Replay | InProgress | Mismatch, principal: Principal, request_id: str, send: Send
    ) -> None:
        """Not the first: an answer that was given, or why there is none. It counts against the key's limits."""
        own = _request_id_header(request_id)
        try:
            limits = await self._services.limiter.acquire(principal)
            self._services.in_background(self._services.limiter.release(limits))
            if isinstance(found, Mismatch):
                raise IdempotencyMismatch(
                    "This Idempotency-Key was used for another request. Take a new key for each new request."
                )
            if isinstance(found, InProgress):
                raise IdempotencyInProgress(
                    "The first request with this Idempotency-Key still runs.", headers={"retry-after": str(RETRY_S)}
                )
        except FallowError as error:
            self._services.metrics.http_errors.labels(error.code).inc()
            await send_error(send, error, [own])
            return
        headers: list[Header] = [
            (b"content-type", found.content_type.encode("latin-1")),
            (b"content-length", b"%d" % len(found.body)),
            _request_id_header(found.request_id),
            (b"idempotent-replayed", b"true"),
            *((name.encode(), value.encode()) for name, value in limits.headers().items()),
        ]
        await send({"type": "http.response.start", "status": found.status, "headers": headers})
        await send({"type": "http.response.body", "body": found.body, "more_body": False})


class _Whole:
    """A receive that gives the body that was read before, and then what the client does."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


class _Record:
    """Passes an answer on and remembers it, within MAX_KEPT_BYTES.

    Its end is written before the client sees it, so that whoever has the whole answer can get it again.
    """

    def __init__(self, send: Send, finish: Callable[[StoredAnswer | None], Awaitable[None]]) -> None:
        self._send = send
        self._finish = finish
        self._status = 0
        self._content_type = ""
        self._parts: list[bytes] = []
        self._size = 0
        self.ended = False

    @property
    def transport(self) -> Any:
        """Of the connection: whoever drops it looks for it at `send` (see outlets.abort_connection)."""
        return getattr(getattr(self._send, "__self__", None), "transport", None)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            named = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self._content_type = named[0].decode("latin-1") if named else "application/json"
        elif message["type"] == "http.response.body":
            part = message.get("body", b"")
            self._size += len(part)
            if self._size <= MAX_KEPT_BYTES:
                self._parts.append(part)
            if not message.get("more_body") and not self.ended:
                await self._finish(self._answer())
                self.ended = True
        await self._send(message)

    def _answer(self) -> StoredAnswer | None:
        """The whole answer; None if it is too large."""
        if self._size > MAX_KEPT_BYTES:
            return None
        return StoredAnswer(self._status, self._content_type, b"".join(self._parts).decode(errors="replace"))


def _checked(key: bytes) -> str:
    text = key.decode("latin-1").strip()
    if not 1 <= len(text) <= MAX_KEY_CHARACTERS or not (text.isascii() and text.isprintable()):
        raise InvalidIdempotencyKey(f"An Idempotency-Key has 1 to {MAX_KEY_CHARACTERS} printable ASCII characters.")
    return text


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    parts = (scope["path"].encode(), scope.get("query_string", b""), body)
    return hashlib.sha256(b"\0".join(parts)).digest()


def _request_id_header(request_id: str) -> Header:
    return (b"x-request-id", request_id.encode())


def _show_job(scope: Scope, found: Queued) -> Scope:
    """The same client's question for the job that its first request became."""
    path = f"{scope['path']}/{show('job', found.job_id)}"
    state = {**scope.get("state", {}), "request_id": found.request_id}
    return {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "state": state}
