"""/v1/organisation: an organisation's members and keys, for keys with the role `admin`.

Keys are who acts here, as everywhere: there are no passwords and no sessions. A key gives away no role that it lacks
itself, so that a renter's administrator cannot make somebody finance or operator of the platform.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Annotated, Final, TypeVar
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, Request
from msgspec import Meta, Struct
from pydantic import BaseModel
from sqlalchemy.orm import Session

from marketplace.accounts import service
from marketplace.accounts.auth import Principal
from marketplace.accounts.models import ApiKey, Member
from marketplace.accounts.service import (
    DEFAULT_PARALLEL_REQUESTS,
    DEFAULT_REQUESTS_PER_MINUTE,
    Budget,
    InvalidAccount,
    UnknownKey,
    UnknownMember,
)
from marketplace.core.amounts import nano_of
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import Conflict, Forbidden
from marketplace.core.ids import parse, show
from marketplace.core.logs import get_logger
from marketplace.gateway.bodies import ProviderBody
from marketplace.gateway.choice import choice_of
from marketplace.gateway.deps import Caller, GatewayServices
from marketplace.gateway.key_endpoints import KeyObject, key_object
from marketplace.gateway.strict import decode_strict

log = get_logger(__name__)
PATH: Final = "/v1/organisation"
MAX_DAYS: Final = 3_650
router = APIRouter(prefix=PATH, tags=["organisation"])
T = TypeVar("T")
Roles = Annotated[list[str], Meta(min_length=1, max_length=8)]


async def admin(principal: Caller) -> Principal:
    """A caller that manages its organisation. Raises Forbidden."""
    principal.require("admin")
    return principal


Admin = Annotated[Principal, Depends(admin)]


class RolesBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PUT /v1/organisation/members/{email}."""

    roles: Roles


class BudgetBody(Struct, frozen=True, forbid_unknown_fields=True):
    """In USD, as a decimal string, for each period: `total`, `day`, `week` or `month`."""

    limit: str
    period: str = "month"


class KeyBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/organisation/keys. What is left out is not limited, save the two that have defaults."""

    name: str
    roles: Roles = msgspec.field(default_factory=lambda: ["renter"])
    member: str | None = None
    """The e-mail address of the member that it is for: it ends with their membership."""
    requests_per_minute: int = DEFAULT_REQUESTS_PER_MINUTE
    parallel_requests: int = DEFAULT_PARALLEL_REQUESTS
    tokens_per_minute: int | None = None
    expires_in_days: Annotated[int, Meta(ge=1, le=MAX_DAYS)] | None = None
    models: list[str] | None = None
    networks: list[str] | None = None
    budget: BudgetBody | None = None
    provider: ProviderBody | None = None


class MemberObject(BaseModel):
    """A person, and what keys may be made for them."""

    object: str = "member"
    email: str
    roles: list[str]
    created_at: datetime


class MemberList(BaseModel):
    object: str = "list"
    data: list[MemberObject]


class RemovedMember(BaseModel):
    object: str = "member.removed"
    email: str
    revoked_keys: int


class ManagedKey(KeyObject):
    """A key as its organisation's administrators see it."""

    shown_prefix: str
    """By which a person recognises it."""
    member: str | None
    created_at: datetime
    revoked_at: datetime | None


class NewKey(ManagedKey):
    secret: str
    """Told this once."""


class KeyList(BaseModel):
    object: str = "list"
    data: list[ManagedKey]


class OwnKey(Conflict):
    """A key does not revoke itself: whoever does that by mistake is locked out."""

    code = "own_key"


# --- members ------------------------------------------------------------------------------------------------------


@router.get("/members")
async def list_members(services: GatewayServices, principal: Admin) -> MemberList:
    """Members, by address."""
    found = await _read(services.session_factory, lambda s: service.list_members(s, principal.organisation_id))
    return MemberList(data=[_member_object(member) for member in found])


@router.put("/members/{email}")
async def put_member(email: str, request: Request, services: GatewayServices, principal: Admin) -> MemberObject:
    """Make a person a member, or give a member other roles: keys that need a lost role are revoked."""
    roles = decode_strict(await request.body(), RolesBody).roles

    def work(session: Session) -> Member:
        _require_own(principal, {*roles, *_roles_of(session, principal.organisation_id, email)})
        changed = service.add_member(session, principal.organisation_id, email, roles)
        _require_live(session, principal)
        return changed

    member = await _write(services.session_factory, work)
    log.info("member_changed", by=show("key", principal.key_id), member=member.id.hex, roles=member.roles)
    return _member_object(member)


@router.delete("/members/{email}")
async def remove_member(email: str, services: GatewayServices, principal: Admin) -> RemovedMember:
    """Take a person out: the keys that were made for them are revoked."""

    def work(session: Session) -> int:
        _require_own(principal, _roles_of(session, principal.organisation_id, email))
        lost = service.remove_member(session, principal.organisation_id, email)
        _require_live(session, principal)
        return lost

    revoked = await _write(services.session_factory, work)
    log.info("member_removed", by=show("key", principal.key_id), revoked=revoked)
    return RemovedMember(email=email.strip().lower(), revoked_keys=revoked)


# --- keys ---------------------------------------------------------------------------------------------------------


@router.get("/keys")
async def list_keys(services: GatewayServices, principal: Admin) -> KeyList:
    """Keys, newest first, revoked and expired ones among them."""

    def work(session: Session) -> list[ManagedKey]:
        people = {member.id: member.email for member in service.list_members(session, principal.organisation_id)}
        return [
            _managed(session, key, principal, people) for key in service.list_keys(session, principal.organisation_id)
        ]

    return KeyList(data=await _read(services.session_factory, work))


@router.post("/keys", status_code=201)
async def make_key(request: Request, services: GatewayServices, principal: Admin) -> NewKey:
    """A new key. Its secret is in this answer and nowhere else."""
    body = decode_strict(await request.body(), KeyBody)
    choice_of(body.provider, None)
    _require_own(principal, body.roles)

    def work(session: Session) -> NewKey:
        organisation_id = principal.organisation_id
        member = service.find_member(session, organisation_id, body.member) if body.member is not None else None
        key, secret = service.create_key(
            session,
            organisation_id,
            name=body.name,
            roles=body.roles,
            requests_per_minute=body.requests_per_minute,
            parallel_requests=body.parallel_requests,
            expires_in=timedelta(days=body.expires_in_days) if body.expires_in_days is not None else None,
            tokens_per_minute=body.tokens_per_minute,
            models=body.models,
            networks=body.networks,
            routing=(msgspec.to_builtins(body.provider) or None) if body.provider is not None else None,
            budget=_budget_of(body.budget),
            member=member,
        )
        session.refresh(key)
        people = {member.id: member.email} if member is not None else {}
        return NewKey(**_managed(session, key, principal, people).model_dump(), secret=secret)

    made = await _write(services.session_factory, work)
    log.info("key_made", by=show("key", principal.key_id), key=made.id, roles=made.roles)
    return made


@router.put("/keys/{key_id}/budget")
async def set_budget(key_id: str, request: Request, services: GatewayServices, principal: Admin) -> ManagedKey:
    """Give a key a budget or change it; the body `null` takes it away."""
    budget = _budget_of(decode_strict(await request.body(), BudgetBody | None))  # type: ignore[arg-type]

    def work(session: Session) -> ManagedKey:
        key = _own(session, principal, key_id)
        service.set_budget(session, key.id, budget)
        return _managed(session, key, principal, _people(session, key))

    changed = await _write(services.session_factory, work)
    log.info("key_budget_set", by=show("key", principal.key_id), key=changed.id)
    return changed


@router.delete("/keys/{key_id}")
async def revoke_key(key_id: str, services: GatewayServices, principal: Admin) -> ManagedKey:
    """Revoke a key: gateways refuse it within two seconds. Doing it again changes nothing."""

    def work(session: Session) -> ManagedKey:
        key = _own(session, principal, key_id)
        _require_own(principal, key.roles)
        if key.id == principal.key_id:
            raise OwnKey("This is the key that you use. Revoke it with another one.")
        return _managed(session, service.revoke_key(session, key.id), principal, _people(session, key))

    revoked = await _write(services.session_factory, work)
    log.info("key_revoked", by=show("key", principal.key_id), key=revoked.id)
    return revoked


# --- inside -------------------------------------------------------------------------------------------------------


def _require_own(principal: Principal, roles: Collection[str]) -> None:
    lacking = sorted(set(roles) - principal.roles)
    if lacking:
        raise Forbidden(
            f"This key lacks the role {', '.join(lacking)}: it can neither give nor take it.", param="roles"
        )


def _require_live(session: Session, principal: Principal) -> None:
    """Raises OwnKey if what was done to a member took the caller's own key with it; the edge rolls it back."""
    if service.find_key(session, principal.key_id).revoked_at is not None:
        raise OwnKey("The key that you use is this member's and would end with it. Do it with another one.")


def _roles_of(session: Session, organisation_id: UUID, email: str) -> list[str]:
    """What a member has now; nothing where there is no such member."""
    try:
        return service.find_member(session, organisation_id, email).roles
    except UnknownMember:
        return []


def _own(session: Session, principal: Principal, key_id: str) -> ApiKey:
    """A key of the caller's organisation. Raises UnknownKey for every other."""
    key = service.find_key(session, parse("key", key_id))
    if key.organisation_id != principal.organisation_id:
        raise UnknownKey(f"There is no key with the id {key_id[:80]}.", param="key")
    return key


def _people(session: Session, key: ApiKey) -> dict[UUID, str]:
    member = session.get(Member, key.member_id) if key.member_id is not None else None
    return {member.id: member.email} if member is not None else {}


def _budget_of(body: BudgetBody | None) -> Budget | None:
    if body is None:
        return None
    try:
        return Budget(nano_of(body.limit), body.period)
    except ValueError as error:
        raise InvalidAccount(f"`budget.limit`: {error}.", param="budget.limit") from None


def _member_object(member: Member) -> MemberObject:
    return MemberObject(email=member.email, roles=member.roles, created_at=member.created_at)


def _managed(session: Session, key: ApiKey, principal: Principal, people: dict[UUID, str]) -> ManagedKey:
    shown = key_object(key, service.budget_of(session, key.id), principal.organisation_name)
    return ManagedKey(
        **shown.model_dump(),
        shown_prefix=key.shown_prefix,
        member=people.get(key.member_id) if key.member_id is not None else None,
        created_at=key.created_at,
        revoked_at=key.revoked_at,
    )


async def _read(factory: SessionFactory, work: Callable[[Session], T]) -> T:
    def run() -> T:
        with factory() as session:
            return work(session)

    return await asyncio.to_thread(run)


async def _write(factory: SessionFactory, work: Callable[[Session], T]) -> T:
    def run() -> T:
        with transaction(factory) as session:
            return work(session)

    return await asyncio.to_thread(run)
