"""Organisations and keys: what the command line, the local stack and the console call. The edge commits."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Select, case, delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from marketplace.accounts import keys
from marketplace.accounts.models import ApiKey, KeyBudget, Member, Organisation
from marketplace.core.amounts import usd
from marketplace.core.clock import utcnow
from marketplace.core.errors import BadRequest, NotFound
from marketplace.core.ids import new_id

ROLES: Final = ("renter", "owner", "finance", "operator", "admin")
MAX_NAME_CHARACTERS: Final = 200
DEFAULT_REQUESTS_PER_MINUTE: Final = 600
DEFAULT_PARALLEL_REQUESTS: Final = 32
MAX_REQUESTS_PER_MINUTE: Final = 1_000_000
MAX_PARALLEL_REQUESTS: Final = 10_000
MAX_LISTED: Final = 1_000
MAX_TOKENS_PER_MINUTE: Final = 1_000_000_000
MAX_BUDGET_NANO: Final = 10**16
MAX_LIST: Final = 100
PERIODS: Final = ("total", "day", "week", "month")
_EMAIL: Final = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")


class UnknownOrganisation(NotFound):
    code = "unknown_organisation"


class UnknownKey(NotFound):
    code = "unknown_key"


class UnknownMember(NotFound):
    code = "unknown_member"


class InvalidAccount(BadRequest):
    """A name, a role or a limit that no account may have."""

    code = "invalid_account"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a key may spend: so much nano-USD in each `period`, one of PERIODS."""

    limit_nano: int
    period: str = "month"


@dataclass(frozen=True, slots=True)
class BudgetState:
    """A budget with what became of it in the running period."""

    limit_nano: int
    period: str
    spent_nano: int
    held_nano: int

    @property
    def left_nano(self) -> int:
        """What may still be asked for."""
        return max(self.limit_nano - self.spent_nano - self.held_nano, 0)


def create_organisation(session: Session, name: str) -> Organisation:
    """The organisation of this name, made if there is none. Two callers at once get the same one."""
    name = _checked_name(name)
    session.execute(insert(Organisation).values(id=new_id(), name=name).on_conflict_do_nothing())
    return session.scalars(select(Organisation).where(Organisation.name == name)).one()


def find_organisation(session: Session, name: str) -> Organisation:
    """The organisation of this name. Raises UnknownOrganisation."""
    found = session.scalars(select(Organisation).where(Organisation.name == name)).one_or_none()
    if found is None:
        raise UnknownOrganisation(
            f"There is no organisation named {name[:80]!r}. `fallow org list` shows all, `org create` makes one.",
            param="organisation",
        )
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
    tokens_per_minute: int | None = None,
    models: Collection[str] | None = None,
    networks: Collection[str] | None = None,
    routing: dict[str, Any] | None = None,
    budget: Budget | None = None,
    member: Member | None = None,
) -> tuple[ApiKey, str]:
    """A new key of an organisation, and its secret, which exists nowhere else afterwards.

    `models` and `networks` (CIDR blocks) None: all of them; `routing`: see gateway.choice. A key for a member has none
    but roles that the member has. Raises UnknownOrganisation, UnknownMember if the member was taken out meanwhile, and
    InvalidAccount for what cannot be.
    """
    _check_key(roles, requests_per_minute, parallel_requests, expires_in)
    if tokens_per_minute is not None and not 1 <= tokens_per_minute <= MAX_TOKENS_PER_MINUTE:
        raise InvalidAccount(f"Tokens a minute are 1 to {MAX_TOKENS_PER_MINUTE}.", param="tokens_per_minute")
    if member is not None:
        _check_member(session, member, organisation_id, roles)
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
        tokens_per_minute=tokens_per_minute,
        models=_checked_models(models),
        networks=_checked_networks(networks),
        routing=routing,
        member_id=member.id if member is not None else None,
    )
    session.add(key)
    session.flush()
    if budget is not None:
        set_budget(session, key.id, budget)
    return key, secret


def find_key(session: Session, key_id: UUID) -> ApiKey:
    """The key with this id. Raises UnknownKey."""
    key = session.get(ApiKey, key_id)
    if key is None:
        raise UnknownKey(f"There is no key with the id {key_id}.", param="key")
    return key


def set_budget(session: Session, key_id: UUID, budget: Budget | None) -> None:
    """Give a key a budget, change it, or take it away. What was spent in a running period of the same kind stays spent;
    what the key runs now counts. Raises UnknownKey and InvalidAccount."""
    find_key(session, key_id)
    if budget is None:
        session.execute(delete(KeyBudget).where(KeyBudget.key_id == key_id))
        return
    if budget.period not in PERIODS or not 0 <= budget.limit_nano <= MAX_BUDGET_NANO:
        raise InvalidAccount(f"A budget is 0 to {usd(MAX_BUDGET_NANO)} USD per {', '.join(PERIODS)}.", param="budget")
    start = func.key_period_start(budget.period, func.now())
    spent = case((KeyBudget.period == budget.period, KeyBudget.spent_nano), else_=0)
    session.execute(
        insert(KeyBudget)
        .values(key_id=key_id, limit_nano=budget.limit_nano, period=budget.period, period_started_at=start)
        .on_conflict_do_update(
            index_elements=[KeyBudget.key_id],
            set_={
                "limit_nano": budget.limit_nano,
                "spent_nano": spent,
                "period": budget.period,
                "period_started_at": case(
                    (KeyBudget.period == budget.period, KeyBudget.period_started_at), else_=start
                ),
            },
        )
    )
    # Accounts sits below jobs and imports none of it: what was admitted before there was a budget is found by its row.
    session.execute(
        text(
            "update key_budgets k set held_nano = coalesce((select sum(j.hold_nano) from jobs j"
            " where j.key_id = k.key_id and j.state in ('queued','running')), 0) where k.key_id = :key_id"
        ),
        {"key_id": key_id},
    )


def set_routing(session: Session, key_id: UUID, routing: dict[str, Any] | None) -> None:
    """Give a key a default for its requests' `provider` (see gateway.choice), or take it away. Raises UnknownKey."""
    find_key(session, key_id).routing = routing
    session.flush()


def budget_of(session: Session, key_id: UUID) -> BudgetState | None:
    """A key's budget now; None: it has none."""
    start = func.key_period_start(KeyBudget.period, func.now())
    spent = case((KeyBudget.period_started_at < start, 0), else_=KeyBudget.spent_nano)
    row = session.execute(
        select(KeyBudget.limit_nano, KeyBudget.period, spent, KeyBudget.held_nano).where(KeyBudget.key_id == key_id)
    ).one_or_none()
    return BudgetState(*row) if row is not None else None


def add_member(session: Session, organisation_id: UUID, email: str, roles: Collection[str]) -> Member:
    """Make a person a member, or give a member other roles. Keys that a lost role was needed for are revoked. Raises
    InvalidAccount."""
    _check_roles(roles)
    email = email.strip().lower()
    if not _EMAIL.fullmatch(email) or len(email) > MAX_NAME_CHARACTERS:
        raise InvalidAccount("A member is known by an e-mail address.", param="email")
    session.execute(
        insert(Member)
        .values(id=new_id(), organisation_id=organisation_id, email=email, roles=sorted(set(roles)))
        .on_conflict_do_update(
            index_elements=[Member.organisation_id, Member.email], set_={"roles": sorted(set(roles))}
        )
    )
    member = _locked_member(session, organisation_id, email)
    for key in _keys_of(session, member):
        if not set(key.roles) <= set(roles):
            revoke_key(session, key.id)
    return member


def find_member(session: Session, organisation_id: UUID, email: str) -> Member:
    """The member with this address. Raises UnknownMember."""
    return _one_member(session, _by_address(organisation_id, email), email)


def remove_member(session: Session, organisation_id: UUID, email: str) -> int:
    """Take a person out and revoke the keys that were made for them. Returns how many. Raises UnknownMember."""
    member = _locked_member(session, organisation_id, email)
    keys_of = _keys_of(session, member)
    for key in keys_of:
        revoke_key(session, key.id)
    session.delete(member)
    session.flush()
    return len(keys_of)


def list_members(session: Session, organisation_id: UUID, *, limit: int = MAX_LISTED) -> Sequence[Member]:
    """Members of an organisation by address."""
    query = select(Member).where(Member.organisation_id == organisation_id).order_by(Member.email)
    return session.scalars(query.limit(min(limit, MAX_LISTED))).all()


def _by_address(organisation_id: UUID, email: str) -> Select[Member]:
    return select(Member).where(Member.organisation_id == organisation_id, Member.email == email.strip().lower())


def _one_member(session: Session, query: Select[Member], email: str) -> Member:
    found = session.scalars(query.execution_options(populate_existing=True)).one_or_none()
    if found is None:
        raise UnknownMember(f"There is no member {email[:80]!r}.", param="email")
    return found


def _locked_member(session: Session, organisation_id: UUID, email: str) -> Member:
    """A member whose keys are about to be looked at: whoever makes one just now ends first."""
    return _one_member(session, _by_address(organisation_id, email).with_for_update(), email)


def _check_member(session: Session, member: Member, organisation_id: UUID, roles: Collection[str]) -> None:
    # As they are now, and stay until the key is written: it must not outlive a membership that ends meanwhile.
    query = select(Member).where(Member.id == member.id).with_for_update(read=True)
    known = _one_member(session, query, member.email)
    if known.organisation_id != organisation_id or not set(roles) <= set(known.roles):
        raise InvalidAccount(f"{known.email} has the roles {', '.join(known.roles)} only.", param="roles")


def _keys_of(session: Session, member: Member) -> Sequence[ApiKey]:
    return session.scalars(select(ApiKey).where(ApiKey.member_id == member.id, ApiKey.revoked_at.is_(None))).all()


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


def _check_roles(roles: Collection[str]) -> None:
    unknown = sorted(set(roles) - set(ROLES))
    if unknown or not roles:
        raise InvalidAccount(f"Roles are {', '.join(ROLES)}; not {', '.join(unknown) or 'none at all'}.", param="roles")


def _checked_models(models: Collection[str] | None) -> list[str] | None:
    if models is None:
        return None
    if not 1 <= len(models) <= MAX_LIST or not all(1 <= len(model) <= MAX_NAME_CHARACTERS for model in models):
        raise InvalidAccount(f"A key's list of models has 1 to {MAX_LIST} ids.", param="models")
    return sorted(set(models))


def _checked_networks(networks: Collection[str] | None) -> list[str] | None:
    if networks is None:
        return None
    if not 1 <= len(networks) <= MAX_LIST:
        raise InvalidAccount(f"A key's list of networks has 1 to {MAX_LIST} blocks.", param="networks")
    try:
        return sorted({str(ipaddress.ip_network(network.strip())) for network in networks})
    except ValueError as error:
        raise InvalidAccount(f"A network is written as 192.0.2.0/24: {error}.", param="networks") from None


def _check_key(
    roles: Collection[str], requests_per_minute: int, parallel_requests: int, expires_in: timedelta | None
) -> None:
    _check_roles(roles)
    if not 1 <= requests_per_minute <= MAX_REQUESTS_PER_MINUTE:
        raise InvalidAccount(f"Requests a minute are 1 to {MAX_REQUESTS_PER_MINUTE}.", param="requests_per_minute")
    if not 1 <= parallel_requests <= MAX_PARALLEL_REQUESTS:
        raise InvalidAccount(f"Parallel requests are 1 to {MAX_PARALLEL_REQUESTS}.", param="parallel_requests")
    if expires_in is not None and expires_in <= timedelta(0):
        raise InvalidAccount("A key must expire in the future.", param="expires_in")


def _expiry(expires_in: timedelta | None) -> datetime | None:
    return None if expires_in is None else utcnow() + expires_in
