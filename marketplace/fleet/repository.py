"""The fleet's rows: nodes, devices, offers, the time that they were offered, and their energy.

Time is the database's, save in energy samples. Statements that touch several nodes do so in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol import DeviceReport
from marketplace.accounts.models import Organisation
from marketplace.core.errors import BadRequest, NotFound
from marketplace.fleet import held
from marketplace.fleet.claims import MAX_REGION_CHARACTERS, Claim
from marketplace.fleet.energy import Stretch
from marketplace.fleet.models import Device, EnergySample, Node, NodeStanding, Offer, OfferedInterval
from marketplace.matching.types import DataTerms, Rates

STALE_INTERVAL_S: Final = 60.0
"""An open interval that nobody moved on for this long belongs to a gateway that died."""

SetPrice = Callable[[Session, UUID, UUID, Rates], int]
"""(session, variant, seller, rates) -> the price's version; the same rates give the same version."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who a node is."""

    node_id: UUID
    organisation_id: UUID
    public_key: bytes
    state: str
    region: str = ""
    standing: str = "proven"
    """See matching.standing; a node without a row of it is older than standings are."""
    attested: bool = False
    """The operator has seen proof of what its owner declares."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A claim that became an offer."""

    claim: Claim
    offer_id: UUID
    price_id: int


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node as people list it."""

    node_id: UUID
    name: str
    organisation: str
    state: str
    last_seen_at: datetime | None
    live_offers: int
    faults: int
    agent_version: str


def list_nodes(session: Session, organisation_id: UUID | None, *, limit: int = 1_000) -> list[NodeRow]:
    """Nodes by name, of one organisation or of all."""
    live = (
        select(func.count())
        .where(OfferedInterval.node_id == Node.id, OfferedInterval.ended_at.is_(None))
        .scalar_subquery()
    )
    query = (
        select(
            Node.id, Node.name, Organisation.name, Node.state, Node.last_seen_at, live, Node.faults, Node.agent_version
        )
        .join(Organisation, Organisation.id == Node.organisation_id)
        .order_by(Organisation.name, Node.name, Node.id)
        .limit(limit)
    )
    if organisation_id is not None:
        query = query.where(Node.organisation_id == organisation_id)
    return [NodeRow(*row) for row in session.execute(query)]


def find_node(session: Session, node_id: UUID) -> NodeIdentity | None:
    """The node, or None."""
    return next(iter(find_nodes(session, [node_id])), None)


def find_nodes(session: Session, node_ids: Sequence[UUID]) -> list[NodeIdentity]:
    """Those of the nodes that exist."""
    rows = session.execute(
        select(
            Node.id,
            Node.organisation_id,
            Node.public_key,
            Node.state,
            Node.region,
            func.coalesce(NodeStanding.standing, "proven"),
            Node.attested_at.is_not(None),
        )
        .outerjoin(NodeStanding, NodeStanding.node_id == Node.id)
        .where(Node.id.in_(node_ids))
    )
    return [NodeIdentity(*row) for row in rows]


def set_region(session: Session, node_id: UUID, region: str) -> None:
    """Say where a node stands. Raises NotFound, and BadRequest for a name that is too long or not printable."""
    if len(region) > MAX_REGION_CHARACTERS or not region.isprintable():
        raise BadRequest(f"A region is at most {MAX_REGION_CHARACTERS} printable characters.", param="region")
    found = session.scalars(update(Node).where(Node.id == node_id).values(region=region).returning(Node.id)).first()
    if found is None:
        raise NotFound(f"There is no node {node_id}.")


def attest(session: Session, node_id: UUID, *, attested: bool) -> None:
    """Say that proof was seen of what a node's owner declares, or that it no longer holds. Raises NotFound."""
    when = func.now() if attested else None
    found = session.scalars(update(Node).where(Node.id == node_id).values(attested_at=when).returning(Node.id)).first()
    if found is None:
        raise NotFound(f"There is no node {node_id}.")


def connect_node(session: Session, node_id: UUID, agent_version: str) -> int:
    """The node opened a socket: whatever an earlier one left open ends where it was last seen.

    Returns microseconds since 1970 by the database's clock, strictly rising for one node.
    """
    _lock_node(session, node_id)
    session.execute(update(Node).where(Node.id == node_id).values(agent_version=agent_version, last_seen_at=func.now()))
    session.execute(
        update(OfferedInterval)
        .where(OfferedInterval.node_id == node_id, OfferedInterval.ended_at.is_(None))
        .values(ended_at=OfferedInterval.seen_at)
    )
    held.end(session, node_id)
    micros = session.execute(text("select (extract(epoch from clock_timestamp()) * 1000000)::bigint")).scalar_one()
    return int(micros)


def disconnect_node(session: Session, node_id: UUID, gateway_id: str, silent_s: float) -> None:
    """The socket is gone; the node was last heard `silent_s` seconds ago, and was offered until then."""
    _lock_node(session, node_id)
    heard_at = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, max(0.0, silent_s))
    session.execute(
        update(OfferedInterval)
        .where(
            OfferedInterval.node_id == node_id,
            OfferedInterval.gateway_id == gateway_id,
            OfferedInterval.ended_at.is_(None),
        )
        .values(
            ended_at=func.greatest(OfferedInterval.started_at, heard_at),
            seen_at=func.greatest(OfferedInterval.started_at, heard_at),
        )
    )
    held.end(session, node_id)
    session.execute(update(Node).where(Node.id == node_id).values(last_seen_at=heard_at))


def sync_node(
    session: Session,
    node: NodeIdentity,
    gateway_id: str,
    claims: Sequence[Claim],
    devices: Sequence[DeviceReport],
    *,
    available: bool,
    reason: str = "",
    data: DataTerms | None = None,
    declared_idle_mw: int | None,
    declared_load_mw: int | None,
    set_price: SetPrice,
) -> list[Listed]:
    """Write what the node offers now, and open or close the stretches in which it was offered."""
    _lock_node(session, node.node_id)
    session.execute(
        update(Node)
        .where(Node.id == node.node_id)
        .values(
            declared_idle_mw=declared_idle_mw,
            declared_load_mw=declared_load_mw,
            **({} if data is None else {"data_terms": asdict(data)}),
        )
    )
    _upsert_devices(session, node.node_id, devices)
    listed = [_upsert_offer(session, node.node_id, claim, set_price) for claim in claims]
    live = {item.offer_id: item.claim.device_id for item in listed} if available else {}
    _sync_intervals(session, node.node_id, gateway_id, live)
    held.sync(session, node.node_id, None if available else reason)
    return listed


def touch(session: Session, gateway_id: str, node_ids: Collection[UUID]) -> dict[UUID, int]:
    """The nodes are still connected to this gateway: move their open intervals on.

    Returns how many each node has. Nodes that somebody else writes about just now are left out, and left for next time:
    this holds many rows at once and so must wait for none.
    """
    held_ids = list(
        session.execute(
            select(Node.id)
            .where(Node.id.in_(node_ids))
            .order_by(Node.id)
            .with_for_update(key_share=True, skip_locked=True)
        ).scalars()
    )
    if not held_ids:
        return {}
    session.execute(update(Node).where(Node.id.in_(held_ids)).values(last_seen_at=func.now()))
    held.touch(session, held_ids)
    moved = session.execute(
        update(OfferedInterval)
        .where(
            OfferedInterval.node_id.in_(held_ids),
            OfferedInterval.gateway_id == gateway_id,
            OfferedInterval.ended_at.is_(None),
        )
        .values(seen_at=func.now())
        .returning(OfferedInterval.node_id)
    )
    counts = dict.fromkeys(held_ids, 0)
    for node_id in moved.scalars():
        counts[node_id] += 1
    return counts


def end_stale_intervals(session: Session) -> int:
    """End, where they were last seen, intervals that a dead gateway left open. Returns how many."""
    ids = (
        select(OfferedInterval.id)
        .where(
            OfferedInterval.ended_at.is_(None),
            OfferedInterval.seen_at < func.now() - func.make_interval(0, 0, 0, 0, 0, 0, STALE_INTERVAL_S),
        )
        .with_for_update(skip_locked=True)
        .limit(10_000)
    )
    ended = session.execute(
        update(OfferedInterval)
        .where(OfferedInterval.id.in_(ids.scalar_subquery()))
        .values(ended_at=OfferedInterval.seen_at)
        .returning(OfferedInterval.id)
        .execution_options(synchronize_session=False)
    )
    return len(ended.all())


def write_energy(session: Session, node_id: UUID, stretches: Sequence[Stretch]) -> list[int]:
    """Store stretches, new ones and those that grew. Returns their row ids, in order."""
    ids: list[int] = []
    for stretch in stretches:
        if stretch.row_id is None:
            sample = EnergySample(
                node_id=node_id,
                device_id=stretch.device_id,
                started_at=stretch.started_at,
                ended_at=stretch.ended_at,
                energy_mj=stretch.energy_mj,
                source=stretch.source,
                utilisation_pct=stretch.utilisation_pct,
                capped_ms=stretch.capped_ms,
            )
            session.add(sample)
            session.flush()
            ids.append(sample.id)
        else:
            session.execute(
                update(EnergySample)
                .where(EnergySample.id == stretch.row_id)
                .values(
                    ended_at=stretch.ended_at,
                    energy_mj=stretch.energy_mj,
                    utilisation_pct=stretch.utilisation_pct,
                    capped_ms=stretch.capped_ms,
                )
            )
            ids.append(stretch.row_id)
    return ids


def _lock_node(session: Session, node_id: UUID) -> None:
    # key_share: attempts and receipts refer to the node, and their foreign keys must not wait for us.
    session.execute(select(Node.id).where(Node.id == node_id).with_for_update(key_share=True))


def _upsert_devices(session: Session, node_id: UUID, devices: Sequence[DeviceReport]) -> None:
    for device in sorted(devices, key=lambda device: device.device_id):
        facts = {"name": device.name, "kind": device.kind, "memory_total_bytes": device.memory_total_bytes}
        session.execute(
            insert(Device)
            .values(node_id=node_id, device_id=device.device_id, **facts)
            .on_conflict_do_update(
                index_elements=[Device.node_id, Device.device_id], set_={**facts, "updated_at": func.now()}
            )
        )


def _upsert_offer(session: Session, node_id: UUID, claim: Claim, set_price: SetPrice) -> Listed:
    price_id = set_price(session, claim.variant_id, node_id, claim.rates)
    facts = {
        "price_id": price_id,
        "slots": claim.slots,
        "context_per_slot": claim.context_per_slot,
        "engine": claim.engine,
        "engine_version": claim.engine_version,
        "simulated": claim.simulated,
        "decode_tokens_per_s": claim.decode_tokens_per_s,
    }
    offer_id = session.execute(
        insert(Offer)
        .values(node_id=node_id, variant_id=claim.variant_id, device_id=claim.device_id, **facts)
        .on_conflict_do_update(
            index_elements=[Offer.node_id, Offer.variant_id, Offer.device_id],
            set_={**facts, "updated_at": func.now()},
        )
        .returning(Offer.id)
    ).scalar_one()
    return Listed(claim, offer_id, price_id)


def _sync_intervals(session: Session, node_id: UUID, gateway_id: str, live: Mapping[UUID, str]) -> None:
    open_offers = set(
        session.execute(
            select(OfferedInterval.offer_id).where(
                OfferedInterval.node_id == node_id, OfferedInterval.ended_at.is_(None)
            )
        ).scalars()
    )
    ended = open_offers - live.keys()
    if ended:
        session.execute(
            update(OfferedInterval)
            .where(
                OfferedInterval.node_id == node_id,
                OfferedInterval.offer_id.in_(sorted(ended)),
                OfferedInterval.ended_at.is_(None),
            )
            .values(ended_at=func.now(), seen_at=func.now())
        )
    for offer_id in sorted(live.keys() - open_offers):
        session.add(
            OfferedInterval(offer_id=offer_id, node_id=node_id, device_id=live[offer_id], gateway_id=gateway_id)
        )
    session.flush()
