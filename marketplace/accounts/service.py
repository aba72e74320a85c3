"""Organisations and keys: what the command line, the local stack and the console call. The edge commits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from marketplace.accounts import keys
from marketplace.accounts.models import ApiKey, Organisation
from marketplace.core.clock import utcnow
from marketplace.core.errors import BadRequest, NotFound
from marketplace.core.ids import new_id

ROLES: Final = ("renter", "owner", "finance", "operator")
MAX_NAME_CHARACTERS: Final = 200
DEFAULT_REQUESTS_PER_MINUTE: Final = 600
DEFAULT_PARALLEL_REQUESTS: Final = 32
MAX_REQUESTS_PER_MINUTE: Final = 1_000_000
MAX_PARALLEL_REQUESTS: Final = 10_000
MAX_LISTED: Final = 1_000


class UnknownOrganisation(NotFound):
    code = "unknown_organisation"


class UnknownKey(NotFound):
    code = "unknown_key"


class InvalidAccount(BadRequest):
    """A name, a role or a limit that no account may have."""

    code = "invalid_account"


def create_organisation(session: Session, name: str) -> Organisation:
    """The organisation of this name, made if there is none. Two callers at once get the same one."""
    name = _checked_name(name)
    session.execute(insert(Organisation).values(id=new_id(), name=name).on_conflict_do_nothing())
    return session.scalars(select(Organisation).where(Organisation.name == name)).one()


def find_organisation(session: Session, name: str) -> Organisation:
    """The organisation of this name. Raises UnknownOrganisation."""
    found = session.scalars(select(Organisation).where(Organisation.name == name)).one_or_none()
    if found is None:
        raise UnknownOrganisation(f"There is no organisation named {name[:80]!r}.", param="organisation")
    return found


def list_organisations(session: Session, *, limit: int = MAX_LISTED) -> Sequence[Organisation]:
    """Organisations by name, at most `limit`."""
    return session.scalars(select(Organisation).order_by(Organisation.name).limit(min(limit, MAX_LISTED))).all()


def create_key(
    session: Session,
    organisation_id: UUID,
    *,
    name: str = "default",
    roles: Collection[str] = ("renter",),
    requests_per_minute: int = DEFAULT_REQUESTS_PER_MINUTE,
    parallel_requests: int = DEFAULT_PARALLEL_REQUESTS,
    expires_in: timedelta | None = None,
) -> tuple[ApiKey, str]:
    """A new key of an organisation, and its secret, which exists nowhere else afterwards.

    Raises UnknownOrganisation, and InvalidAccount for a role, name, limit or expiry that cannot be.
    """
    _check_key(roles, requests_per_minute, parallel_requests, expires_in)
    if session.get(Organisation, organisation_id) is None:
        raise UnknownOrganisation(f"There is no organisation with the id {organisation_id}.", param="organisation")
    secret = keys.new_secret()
    key = ApiKey(
        id=new_id(),
        organisation_id=organisation_id,
        name=_checked_name(name),
        shown_prefix=keys.shown(secret),
        sha256=keys.digest(secret),
        roles=sorted(set(roles)),
        requests_per_minute=requests_per_minute,
        parallel_requests=parallel_requests,
        expires_at=_expiry(expires_in),
        revoked_at=None,
    )
    session.add(key)
    session.flush()
    return key, secret


def list_keys(session: Session, organisation_id: UUID, *, limit: int = MAX_LISTED) -> Sequence[ApiKey]:
    """Keys of an organisation, newest first, revoked and expired ones among them."""
    query = select(ApiKey).where(ApiKey.organisation_id == organisation_id)
    return session.scalars(query.order_by(ApiKey.created_at.desc(), ApiKey.id).limit(min(limit, MAX_LISTED))).all()


def revoke_key(session: Session, key_id: UUID) -> ApiKey:
    """Revoke a key; gateways refuse it within two seconds. Doing it again changes nothing. Raises UnknownKey."""
    key = session.get(ApiKey, key_id, with_for_update={"key_share": True})
    if key is None:
        raise UnknownKey(f"There is no key with the id {key_id}.", param="key")
    if key.revoked_at is None:
        key.revoked_at = session.scalars(select(func.now())).one()
        session.flush()
    return key


def _checked_name(name: str) -> str:
    name = name.strip()
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise InvalidAccount(f"A name has 1 to {MAX_NAME_CHARACTERS} printable characters.", param="name")
    return name


def _check_key(
    roles: Collection[str], requests_per_minute: int, parallel_requests: int, expires_in: timedelta | None
) -> None:
    unknown = sorted(set(roles) - set(ROLES))
    if unknown or not roles:
        raise InvalidAccount(f"Roles are {', '.join(ROLES)}; not {', '.join(unknown) or 'none at all'}.", param="roles")
    if not 1 <= requests_per_minute <= MAX_REQUESTS_PER_MINUTE:
        raise InvalidAccount(f"Requests a minute are 1 to {MAX_REQUESTS_PER_MINUTE}.", param="requests_per_minute")
    if not 1 <= parallel_requests <= MAX_PARALLEL_REQUESTS:
        raise InvalidAccount(f"Parallel requests are 1 to {MAX_PARALLEL_REQUESTS}.", param="parallel_requests")
    if expires_in is not None and expires_in <= timedelta(0):
        raise InvalidAccount("A key must expire in the future.", param="expires_in")


def _expiry(expires_in: timedelta | None) -> datetime | None:
    return None if expires_in is None else utcnow() + expires_in
