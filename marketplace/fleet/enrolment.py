"""How a node joins: an owner makes a one-time token, the agent brings it with its public key."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from datetime import timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from agent.protocol import EnrolAnswer, EnrolRequest
from marketplace.accounts.models import Organisation
from marketplace.core.clock import utcnow
from marketplace.core.errors import BadRequest, Conflict, Unauthenticated
from marketplace.fleet.models import EnrolmentToken, Node, NodeStanding, OfferedInterval, StandingChange

TOKEN_PREFIX: Final = "fallow-enrol-"  # noqa: S105  # a prefix, by which people and scanners know what it is
DEFAULT_LIFE: Final = timedelta(hours=24)
KEY_BYTES: Final = 32
MAX_CHARS: Final = 200


class InvalidEnrolmentToken(Unauthenticated):
    """The token was never made, was used by another node, or is too old."""

    code = "invalid_enrolment_token"


class NodeBelongsElsewhere(Conflict):
    """The node's key is known under another organisation."""

    code = "node_belongs_elsewhere"


def create_token(session: Session, organisation_id: UUID, *, life: timedelta = DEFAULT_LIFE) -> str:
    """A one-time token with which one node joins the organisation. Shown once: only its hash is kept."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    session.add(EnrolmentToken(sha256=_hash(token), organisation_id=organisation_id, expires_at=utcnow() + life))
    session.flush()
    return token


def enrol(session: Session, request: EnrolRequest) -> EnrolAnswer:
    """Spend the token and make the node known. Flushes; the caller commits.

    The same token with the same key again gives the same answer, for the first one may have been lost on its way.
    Raises InvalidEnrolmentToken, NodeBelongsElsewhere, BadRequest.
    """
    public_key = _public_key(request.public_key)
    name = _text(request.name, "name")
    version = _text(request.agent_version, "agent_version")
    token = session.execute(
        select(EnrolmentToken).where(EnrolmentToken.sha256 == _hash(request.token)).with_for_update()
    ).scalar_one_or_none()
    if token is None:
        raise InvalidEnrolmentToken("This enrolment token is unknown. Make a new one with `fallow node enrol-token`.")
    node = session.execute(select(Node).where(Node.public_key == public_key)).scalar_one_or_none()
    if token.used_at is not None:
        if node is None or token.node_id != node.id:
            raise InvalidEnrolmentToken("This enrolment token was used already. Make a new one for each node.")
    elif session.execute(
        select(EnrolmentToken.expires_at < func.now()).where(EnrolmentToken.sha256 == token.sha256)
    ).scalar_one():
        raise InvalidEnrolmentToken("This enrolment token is too old. Make a new one with `fallow node enrol-token`.")
    if node is None:
        node = Node(organisation_id=token.organisation_id, name=name, public_key=public_key, agent_version=version)
        session.add(node)
        session.flush()
        session.add(NodeStanding(node_id=node.id, standing="probation"))
        session.add(StandingChange(node_id=node.id, standing="probation", reason="it has just enrolled"))
        session.flush()
    elif node.organisation_id != token.organisation_id:
        raise NodeBelongsElsewhere("This node's key is enrolled with another organisation. Enrol with a new key.")
    if token.used_at is None:
        token.used_at = utcnow()
        token.node_id = node.id
        session.flush()
    organisation = session.execute(
        select(Organisation.name).where(Organisation.id == node.organisation_id)
    ).scalar_one()
    return EnrolAnswer(node_id=str(node.id), organisation=organisation)


def live_offers(session: Session) -> int:
    """How many offers are live now."""
    return session.execute(
        select(func.count()).select_from(OfferedInterval).where(OfferedInterval.ended_at.is_(None))
    ).scalar_one()


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _public_key(encoded: str) -> bytes:
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("public_key is not base64.", param="public_key") from None
    if len(key) != KEY_BYTES:
        raise BadRequest(f"public_key must be {KEY_BYTES} bytes, the raw Ed25519 key.", param="public_key")
    return key


def _text(value: str, param: str) -> str:
    if not 0 < len(value) <= MAX_CHARS or not value.isprintable():
        raise BadRequest(f"{param} must be 1 to {MAX_CHARS} printable characters.", param=param)
    return value
