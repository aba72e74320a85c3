"""One request from its bytes to its answer: authentication, version, faults, idempotency, the handler."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import tests.fakes.stripe.resources  # noqa: F401  registers the routes
from tests.fakes.stripe.errors import Json, StripeError, api_error, rate_limited
from tests.fakes.stripe.faults import Fault, FaultKind, Stage
from tests.fakes.stripe.forms import Params, decode
from tests.fakes.stripe.idempotency import Entry, in_use
from tests.fakes.stripe.render import render
from tests.fakes.stripe.routes import Route, match
from tests.fakes.stripe.world import Call, World

VERSION = re.compile(r"\d{4}-\d{2}-\d{2}(\.[a-z]+)?")


@dataclass(frozen=True)
class Request:
    """What arrived; header names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass
class Reply:
    """What to write; `lost` closes the connection without it, `cut` in the middle of it."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    lost: bool = False
    cut: bool = False


def answer(world: World, request: Request) -> Reply:
    """Serve one request of the API; never raises a StripeError."""
    request_id = world.ids.request()
    headers = {"Request-Id": request_id}
    try:
        return _serve(world, request, headers)
    except StripeError as error:
        return Reply(error.status, _encode(error.body), {**headers, **error.headers})


def _serve(world: World, request: Request, headers: dict[str, str]) -> Reply:
    parts = urlsplit(request.target)
    owner = _authenticate(world, request)
    headers["Stripe-Version"] = _version(world, request)
    route, path_ids = match(request.method, parts.path)
    early = world.faults.take(Stage.ARRIVAL, request.method, parts.path)
    if early is not None and early.kind is FaultKind.REFUSED:
        return Reply(lost=True)
    key = request.headers.get("idempotency-key") if request.method == "POST" else None
    if early is not None:
        _fail_early(early, key)
    encoded = parts.query if request.method in {"GET", "DELETE"} else request.body.decode("utf-8", "replace")
    call = Call(
        owner=owner,
        params=Params(decode(encoded)),
        path_ids=path_ids,
        url=parts.path,
        request_id=headers["Request-Id"],
        idempotency_key=key,
    )
    if key is None:
        status, body = _execute(world, route, call, parts.path)
    else:
        headers["Idempotency-Key"] = key
        status, body = _execute_once(world, route, call, parts.path, key, headers)
    if status >= 500:
        headers["Stripe-Should-Retry"] = "false"
    return _respond(world, request.method, parts.path, Reply(status, body, headers))


def _execute_once(
    world: World, route: Route, call: Call, path: str, key: str, headers: dict[str, str]
) -> tuple[int, bytes]:
    with world.lock:
        known = world.keys.claim(call.owner, key, path, _plain(call), headers["Request-Id"])
    if known is not None:
        headers["Idempotent-Replayed"] = "true"
        headers["Original-Request"] = known.request_id
        return _replay(known)
    try:
        status, body = _execute(world, route, call, path, stores=True)
    except StripeError:
        with world.lock:
            world.keys.free(call.owner, key)
        raise
    return status, body


def _plain(call: Call) -> Json:
    """The parameters as plain data, to compare a repetition with its original."""
    return {name: call.params.plain(name) for name in call.params.names()}


def _replay(entry: Entry) -> tuple[int, bytes]:
    assert entry.status is not None
    return entry.status, entry.body


def _execute(world: World, route: Route, call: Call, path: str, *, stores: bool = False) -> tuple[int, bytes]:
    """Run the handler under the lock and store its result under the key, a failure too.

    Raises StripeError only for what a key does not remember.
    """
    fault = world.faults.take(Stage.EXECUTION, route.method, path)
    _wait(fault)
    with world.lock:
        world.run_due()
        try:
            status, answered = 200, _run(world, route, call, fault)
        except StripeError as error:
            if not error.saved:
                raise
            status, answered = error.status, error.body
        body = _encode(answered)
        if stores and call.idempotency_key is not None:
            world.keys.store(call.owner, call.idempotency_key, status, body)
    return status, body


def _run(world: World, route: Route, call: Call, fault: Fault | None) -> Json:
    route.check(call)
    if fault is not None and fault.kind is FaultKind.ERROR_BEFORE:
        raise api_error()
    declined = fault is not None and fault.kind is FaultKind.DECLINED_BALANCE
    call = replace(call, balance_declined=declined)
    with world.serving(call):
        shown = render(world, route.handler(world, call), call)
    if fault is not None and fault.kind is FaultKind.ERROR_AFTER:
        raise api_error()
    return shown


def _wait(fault: Fault | None) -> None:
    if fault is None:
        return
    if fault.kind is FaultKind.SLOW:
        time.sleep(fault.delay_s)
    if fault.kind is FaultKind.PAUSED:
        fault.pause()


def _fail_early(fault: Fault, key: str | None) -> None:
    if fault.kind is FaultKind.RATE_LIMITED:
        raise rate_limited()
    if fault.kind is FaultKind.CONFLICT:
        raise in_use(key or "none")
    raise StripeError(503, "api_error", "The service is temporarily unavailable.", saved=False)


def _respond(world: World, method: str, path: str, reply: Reply) -> Reply:
    fault = world.faults.take(Stage.RESPONSE, method, path)
    if fault is None:
        return reply
    if fault.kind is FaultKind.SLOW_ANSWER:
        time.sleep(fault.delay_s)
    if fault.kind is FaultKind.PAUSED_ANSWER:
        fault.pause()
    reply.lost = fault.kind is FaultKind.LOST
    reply.cut = fault.kind is FaultKind.CUT
    return reply


def _authenticate(world: World, request: Request) -> str:
    """The account whose data the request sees."""
    key = _key(request.headers.get("authorization", ""))
    if not key:
        raise StripeError(
            401,
            "invalid_request_error",
            "You did not provide an API key. You need to provide your API key in the Authorization header, using "
            "Bearer auth (e.g. 'Authorization: Bearer YOUR_SECRET_KEY').",
            saved=False,
        )
    if key != world.secret_key:
        masked = f"{key[:8]}{'*' * max(0, len(key) - 12)}{key[-4:]}"
        raise StripeError(401, "invalid_request_error", f"Invalid API Key provided: {masked}", saved=False)
    account = request.headers.get("stripe-account")
    if account is None or account == world.platform:
        return world.platform
    with world.lock:
        if account not in world.connected():
            raise _not_permitted(account)
    return account


def _not_permitted(account: str) -> StripeError:
    return StripeError(
        403,
        "invalid_request_error",
        f"The provided key does not have access to account '{account}' (or that account does not exist). Application "
        f"access may have been revoked.",
        code="account_invalid",
        saved=False,
    )


def _key(header: str) -> str:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[0]
        except ValueError:
            return ""
    return value.strip() if scheme.lower() == "bearer" else ""


def _version(world: World, request: Request) -> str:
    asked = request.headers.get("stripe-version") or world.terms.api_version
    if not VERSION.fullmatch(asked):
        raise StripeError(400, "invalid_request_error", f"Invalid Stripe API version: {asked}", saved=False)
    return asked


def _encode(data: Json) -> bytes:
    return json.dumps(data).encode()
