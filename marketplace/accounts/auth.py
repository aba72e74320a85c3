"""Who is asking: an API key becomes a Principal, from memory where it was seen within the last two seconds.

What queued while a look-up runs goes to the database as one statement, so that a flood of keys, right or wrong, costs
one query at a time. Known and refused keys are kept in two separate bounded stores: garbage cannot push out customers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from marketplace.accounts import keys
from marketplace.accounts.models import ApiKey, Organisation
from marketplace.core.database import SessionFactory
from marketplace.core.errors import Forbidden, Unauthenticated, Unavailable
from marketplace.core.logs import get_logger

log = get_logger(__name__)
TTL_S: Final = 2.0
"""For how long an answer of the database is believed: a revoked key works at most this long."""
MAX_CACHED: Final = 20_000
"""Entries in each of the two stores."""
MAX_BATCH: Final = 256
"""Keys in one look-up."""
MAX_WAITING: Final = 4_096
"""Distinct keys that may wait for a look-up; more are refused at once."""
MAX_HEADER_CHARACTERS: Final = 4_096
_CHALLENGE: Final = {"www-authenticate": "Bearer"}


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ModelNotAllowed(Forbidden):
    code = "model_not_allowed"


class AddressNotAllowed(Forbidden):
    code = "address_not_allowed"


@dataclass(frozen=True, slots=True)
class Principal:
    """A key that may act, and for whom."""

    key_id: UUID
    organisation_id: UUID
    organisation_name: str
    credit_account_id: int | None
    """The ledger account that its requests spend from; None: no credit was ever added."""
    roles: frozenset[str]
    requests_per_minute: int
    parallel_requests: int
    tokens_per_minute: int | None = None
    models: frozenset[str] | None = None
    """Ids of the models that it may use; None: all."""
    networks: tuple[Network, ...] = ()
    """Where it may come from; none: anywhere."""
    routing: Mapping[str, Any] | None = None
    """The `provider` object of its requests that bring none."""

    def require(self, *roles: str) -> None:
        """Raise Forbidden unless the key has one of these roles."""
        if self.roles.isdisjoint(roles):
            raise Forbidden(f"This key may not do that: it takes the role {' or '.join(roles)}.")

    def may_use(self, model_id: str) -> bool:
        """True if the key may use this model."""
        return self.models is None or model_id in self.models

    def require_model(self, model_id: str) -> None:
        """Raise ModelNotAllowed unless the key may use this model."""
        if not self.may_use(model_id):
            raise ModelNotAllowed(f"This key may not use the model {model_id!r}.", param="model")

    def require_network(self, address: str | None) -> None:
        """Raise AddressNotAllowed unless the key may come from this IP address; None: it is not known."""
        if self.networks and not _within(address, self.networks):
            raise AddressNotAllowed("This key may not be used from your network.")


def _within(address: str | None, networks: Sequence[Network]) -> bool:
    try:
        known = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    mapped = getattr(known, "ipv4_mapped", None)
    return any((mapped or known) in network for network in networks)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a key may not act, in words for its holder."""

    message: str


Verdict = Principal | Refused
UNKNOWN: Final = Refused("Incorrect API key provided.")


class Authenticator:
    """Checks Authorization headers. One event loop; the look-up runs in a thread."""

    def __init__(self, session_factory: SessionFactory, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lookup: Callable[[Sequence[bytes]], dict[bytes, Verdict]] = KeyLookup(session_factory)
        self._clock = clock
        self._known: dict[bytes, tuple[float, Verdict]] = {}
        self._refused: dict[bytes, tuple[float, Verdict]] = {}
        self._waiting: dict[bytes, asyncio.Future[Verdict]] = {}
        self._task: asyncio.Task[None] | None = None

    async def authenticate(self, authorization_header: str | bytes | None) -> Principal:
        """The principal of `Authorization: Bearer <key>`.

        Raises Unauthenticated for a key that is missing, malformed, unknown, revoked or expired, and Unavailable if the
        database does not answer or too many keys wait for it.
        """
        secret = _bearer(authorization_header)
        if not keys.well_formed(secret):
            raise _unauthenticated(UNKNOWN, secret)
        sha256 = keys.digest(secret)
        verdict = self._cached(sha256)
        if verdict is None:
            # Shielded: a client that leaves must not take the look-up from others who wait for the same key.
            verdict = await asyncio.shield(self._ask(sha256))
        if isinstance(verdict, Refused):
            raise _unauthenticated(verdict, secret)
        return verdict

    def forget(self) -> None:
        """Drop every cached answer."""
        self._known.clear()
        self._refused.clear()

    def _cached(self, sha256: bytes) -> Verdict | None:
        entry = self._known.get(sha256) or self._refused.get(sha256)
        if entry is None or entry[0] <= self._clock():
            return None
        return entry[1]

    def _ask(self, sha256: bytes) -> asyncio.Future[Verdict]:
        waiting = self._waiting.get(sha256)
        if waiting is not None:
            return waiting
        if len(self._waiting) >= MAX_WAITING:
            raise Unavailable("Too many keys are being checked; try again.", headers={"retry-after": "1"})
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[sha256] = future
        if self._task is None:
            self._task = asyncio.create_task(self._flush())
        return future

    async def _flush(self) -> None:
        try:
            while self._waiting:
                await self._answer(list(islice(self._waiting, MAX_BATCH)))
        finally:
            self._task = None
            for sha256 in list(self._waiting):
                self._fail(sha256)

    async def _answer(self, batch: Sequence[bytes]) -> None:
        try:
            verdicts = await asyncio.to_thread(self._lookup, batch)
        except (SQLAlchemyError, OSError) as error:
            log.warning("key_lookup_failed", error=type(error).__name__, keys=len(batch))
            for sha256 in batch:
                self._fail(sha256)
            return
        until = self._clock() + TTL_S
        for sha256 in batch:
            verdict = verdicts.get(sha256, UNKNOWN)
            self._remember(sha256, until, verdict)
            future = self._waiting.pop(sha256)
            if not future.done():
                future.set_result(verdict)

    def _remember(self, sha256: bytes, until: float, verdict: Verdict) -> None:
        self._known.pop(sha256, None)
        self._refused.pop(sha256, None)
        if isinstance(verdict, Principal) and verdict.credit_account_id is None:
            return  # asked again each time: its first top-up must count at once
        store = self._known if isinstance(verdict, Principal) else self._refused
        if len(store) >= MAX_CACHED:
            # Insertion order is age: the first entry is the one nearest its end.
            store.pop(next(iter(store)))
        store[sha256] = (until, verdict)

    def _fail(self, sha256: bytes) -> None:
        future = self._waiting.pop(sha256, None)
        if future is not None and not future.done():
            future.set_exception(Unavailable("Keys cannot be checked right now.", headers={"retry-after": "1"}))
            future.exception()  # nobody may be waiting any more


class KeyLookup:
    """Asks the database about many keys in one statement. Blocking."""

    def __init__(self, session_factory: SessionFactory) -> None:
        self._session_factory = session_factory

    def __call__(self, sha256s: Sequence[bytes]) -> dict[bytes, Verdict]:
        """A verdict for each key that exists. Whether one has expired is decided by the database's clock."""
        query = (
            select(ApiKey, Organisation, (ApiKey.expires_at <= func.now()).label("expired"))
            .join(Organisation, Organisation.id == ApiKey.organisation_id)
            .where(ApiKey.sha256.in_(sha256s))
        )
        with self._session_factory() as session:
            return {
                bytes(key.sha256): _verdict(key, organisation, expired=bool(expired))
                for key, organisation, expired in session.execute(query)
            }


def _verdict(key: ApiKey, organisation: Organisation, *, expired: bool) -> Verdict:
    if key.revoked_at is not None:
        return Refused("This API key was revoked.")
    if expired:
        return Refused("This API key has expired.")
    return Principal(
        key_id=key.id,
        organisation_id=organisation.id,
        organisation_name=organisation.name,
        credit_account_id=organisation.credit_account_id,
        roles=frozenset(key.roles),
        requests_per_minute=key.requests_per_minute,
        parallel_requests=key.parallel_requests,
        tokens_per_minute=key.tokens_per_minute,
        models=frozenset(key.models) if key.models is not None else None,
        networks=tuple(ipaddress.ip_network(network) for network in key.networks or ()),
        routing=key.routing,
    )


def _bearer(header: str | bytes | None) -> str:
    if isinstance(header, bytes):
        header = header.decode("latin-1")
    if not header or not header.strip():
        text = "You didn't provide an API key. Send it in the Authorization header: `Authorization: Bearer YOUR_KEY`."
        raise Unauthenticated(text, headers=dict(_CHALLENGE))
    scheme, _, secret = header[:MAX_HEADER_CHARACTERS].strip().partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise Unauthenticated("The Authorization header must read `Bearer YOUR_KEY`.", headers=dict(_CHALLENGE))
    return secret.strip()


def _unauthenticated(refused: Refused, secret: str) -> Unauthenticated:
    shown = keys.shown(secret).encode("ascii", "replace").decode() if secret.startswith(keys.PREFIX) else secret[:3]
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in shown)
    return Unauthenticated(f"{refused.message} ({shown}…)", headers=dict(_CHALLENGE))
