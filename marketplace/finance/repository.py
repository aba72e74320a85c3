"""What statements and bills read: sums over receipts, times and energy of a period, made by the database."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Row, Select, func, or_, select, text, true, union_all
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import Session

import ledger
from marketplace.catalog.models import Price, Variant
from marketplace.finance.models import NodeCost
from marketplace.finance.period import Period
from marketplace.fleet.models import Device, Node
from marketplace.jobs.models import Outcome
from marketplace.metering.models import Receipt

LIVE_S = 60
"""An open offered interval seen within this time lasts until now; an older one ended where it was last seen."""

_CLASSES = ("input_uncached", "input_cached", "output_visible", "output_reasoning")

# Multiranges merge what overlaps and intersect exactly, so that no minute counts twice and none outside the offer.
# A lease that still runs lasts until now at most. Work without a reported time is no busy time.
_USAGE = text(
    """
    with period as (
      select tstzmultirange(tstzrange(cast(:start as timestamptz), least(cast(:end as timestamptz), now()))) as span
      where cast(:start as timestamptz) < now()
    ), stretches as (
      select i.node_id, i.device_id, i.offer_id, i.started_at,
             case when i.ended_at is not null then i.ended_at
                  when i.seen_at > now() - make_interval(secs => :live_s) then now() else i.seen_at end as ended_at
      from offered_intervals i join nodes n on n.id = i.node_id
      where n.organisation_id = :owner and i.started_at < :end
    ), offered as (
      select node_id, device_id, array_agg(distinct offer_id) as offers,
             range_agg(tstzrange(started_at, ended_at)) * (select span from period) as span
      from stretches where ended_at > :start and ended_at > started_at
      group by node_id, device_id
    ), leases as (
      select a.node_id, o.device_id, a.leased_at, a.busy_ms,
             coalesce(a.ended_at, least(a.lease_expires_at, now())) as left_at
      from attempts a join offers o on o.id = a.offer_id join nodes n on n.id = a.node_id
      where n.organisation_id = :owner and a.leased_at < :end
        and coalesce(a.ended_at, least(a.lease_expires_at, now())) > greatest(:start, a.leased_at)
    ), work as (
      select node_id, device_id, range_agg(tstzrange(leased_at, left_at)) as rented,
             range_agg(tstzrange(greatest(leased_at, left_at - make_interval(secs => busy_ms / 1000.0)), left_at))
               filter (where busy_ms > 0) as busy
      from leases group by node_id, device_id
    )
    select f.node_id, f.device_id, f.offers,
           (select extract(epoch from sum(upper(s) - lower(s))) from unnest(f.span) s) * 1e6 as offered_us,
           (select extract(epoch from sum(upper(s) - lower(s))) from unnest(f.span * w.rented) s) * 1e6 as rented_us,
           (select extract(epoch from sum(upper(s) - lower(s))) from unnest(f.span * w.busy) s) * 1e6 as busy_us,
           (select sum(o.slots * o.decode_tokens_per_s) from offers o
            where o.id = any(f.offers) and cardinality(f.offers) = 1) as capacity_tokens_per_s
    from offered f left join work w using (node_id, device_id)
    """
)

# A sample that reaches over a bound of the period counts in proportion.
_ENERGY = text(
    """
    with samples as (
      select e.node_id, e.device_id, e.source, e.energy_mj,
             extract(epoch from e.ended_at - e.started_at) as whole_s,
             extract(epoch from least(e.ended_at, cast(:end as timestamptz))
                     - greatest(e.started_at, cast(:start as timestamptz))) as inside_s
      from energy_samples e join nodes n on n.id = e.node_id
      where n.organisation_id = :owner and e.started_at < :end and e.ended_at > :start and e.ended_at > e.started_at
    )
    select node_id, device_id,
           case when source in ('nvml_counter', 'nvml_integrated') then 'measured' else source end as kind,
           round(coalesce(sum(energy_mj * inside_s / whole_s), 0)) as energy_mj,
           sum(inside_s * 1e6) as covered_us
    from samples group by node_id, device_id, kind
    """
)


def device_names(session: Session, owner_id: UUID) -> dict[tuple[UUID, str], tuple[str, str]]:
    """(node_id, device_id) -> (node_name, device_name) of every device that an owner ever brought, by name."""
    rows = session.execute(
        select(Node.id, Node.name, Device.device_id, Device.name)
        .join(Device, Device.node_id == Node.id)
        .where(Node.organisation_id == owner_id)
        .order_by(Node.name, Node.id, Device.device_id)
    )
    return {(node_id, device_id): (node_name, device_name) for node_id, node_name, device_id, device_name in rows}


def owner_sums(session: Session, owner_id: UUID, period: Period) -> Sequence[Row[Any]]:
    """Sums of an owner's receipts, one row for each device and variant."""
    charged = Receipt.loss_nano == 0
    return session.execute(
        select(
            Receipt.node_id,
            Receipt.device_id,
            Receipt.variant_id,
            func.bool_or(Receipt.simulated).label("simulated"),
            func.count().label("jobs"),
            *_token_sums(),
            *_amount_sums(),
            func.sum(Receipt.charge_nano).label("gross_nano"),
            func.coalesce(func.sum(Receipt.fee_nano).filter(charged), 0).label("fee_nano"),
            func.coalesce(func.sum(Receipt.owner_nano).filter(~charged), 0).label("adjustments_nano"),
            func.sum(Receipt.owner_nano).label("net_nano"),
        )
        .where(Receipt.owner_organisation_id == owner_id, *_within(period))
        .group_by(Receipt.node_id, Receipt.device_id, Receipt.variant_id)
    ).all()


def variant_names(session: Session) -> dict[UUID, tuple[str, str]]:
    """variant_id -> (model_id, quantisation)."""
    rows = session.execute(select(Variant.id, Variant.model_id, Variant.quantisation))
    return {variant_id: (model_id, quantisation) for variant_id, model_id, quantisation in rows}


def nodes_of(session: Session, owner_id: UUID) -> Sequence[Node]:
    """An owner's nodes by name."""
    return session.scalars(select(Node).where(Node.organisation_id == owner_id).order_by(Node.name, Node.id)).all()


def node_costs(
    session: Session, owner_id: UUID, before: datetime, declared_until: datetime | None
) -> dict[UUID, NodeCost]:
    """Node -> the newest of its declarations that is valid before a time, of those made until `declared_until`."""
    known = NodeCost.declared_at <= declared_until if declared_until is not None else true()
    rows = session.scalars(
        select(NodeCost)
        .join(Node, Node.id == NodeCost.node_id)
        .where(Node.organisation_id == owner_id, NodeCost.valid_from < before, known)
        .order_by(NodeCost.node_id, NodeCost.valid_from.desc(), NodeCost.id.desc())
        .ext(distinct_on(NodeCost.node_id))
    )
    return {cost.node_id: cost for cost in rows}


def usage_of(session: Session, owner_id: UUID, period: Period) -> Sequence[Row[Any]]:
    """Offered, rented and busy time of an owner's devices, one row for each device that was offered."""
    return session.execute(
        _USAGE, {"owner": owner_id, "start": period.start, "end": period.end, "live_s": LIVE_S}
    ).all()


def energy_of(session: Session, owner_id: UUID, period: Period) -> Sequence[Row[Any]]:
    """Energy of an owner's devices, one row for each device and kind (`measured`, `declared`, `unknown`)."""
    return session.execute(_ENERGY, {"owner": owner_id, "start": period.start, "end": period.end}).all()


def carried(session: Session, owner_id: UUID, start: datetime, end: datetime) -> tuple[int, int, int]:
    """(settled within, delivered before `start` and not settled by then, the same at `end`) of an owner's receipts.

    All three are unsettled, or settled by journals effective since `start`: nothing older is read.
    """
    amount = Receipt.owner_nano
    columns = (Receipt.at, Receipt.journal_id, amount)
    mine = Receipt.owner_organisation_id == owner_id
    since = ledger.journals_between(start).cte("since").prefix_with("materialized")
    after = select(ledger.journals_between(end).cte("after").prefix_with("materialized").c.id)
    recent = union_all(
        select(*columns).where(mine, Receipt.journal_id.is_(None)),
        select(*columns).where(mine, Receipt.journal_id.in_(select(since.c.id))),
    ).subquery()
    open_at_end = or_(recent.c.journal_id.is_(None), recent.c.journal_id.in_(after))
    row = session.execute(
        select(
            func.sum(recent.c.owner_nano).filter(~open_at_end),
            func.sum(recent.c.owner_nano).filter(recent.c.at < start),
            func.sum(recent.c.owner_nano).filter(recent.c.at < end, open_at_end),
        )
    ).one()
    return int(row[0] or 0), int(row[1] or 0), int(row[2] or 0)


def bill_sums(session: Session, organisation_id: UUID, period: Period) -> Sequence[Row[Any]]:
    """Sums of what a renter was charged, one row for each model and price."""
    columns: list[ColumnElement[Any]] = [
        Variant.model_id.label("model_id"),
        Price.id.label("price_id"),
        Price.input_nano_usd_per_mtok.label("input_rate"),
        Price.cached_input_nano_usd_per_mtok.label("cached_input_rate"),
        Price.output_nano_usd_per_mtok.label("output_rate"),
        func.count().label("jobs"),
        *_token_sums(),
        *_amount_sums(),
    ]
    return session.execute(
        select(*columns)
        .join(Variant, Variant.id == Receipt.variant_id)
        .join(Price, Price.id == Receipt.price_id)
        .where(Receipt.renter_organisation_id == organisation_id, Receipt.loss_nano == 0, *_within(period))
        .group_by(Variant.model_id, Price.id)
        .order_by(Variant.model_id, Price.id)
    ).all()


def waived(session: Session, organisation_id: UUID, period: Period) -> tuple[int, int]:
    """(jobs, nanos) that the platform paid instead of this renter."""
    row = session.execute(
        select(func.count(), func.coalesce(func.sum(Receipt.loss_nano), 0)).where(
            Receipt.renter_organisation_id == organisation_id, Receipt.loss_nano > 0, *_within(period)
        )
    ).one()
    return int(row[0]), int(row[1])


def charged_in(session: Session, organisation_id: UUID, journals: Select[int]) -> int:
    """What a renter's receipts settled by these journals come to."""
    total = select(func.coalesce(func.sum(Receipt.charge_nano), 0)).where(
        Receipt.renter_organisation_id == organisation_id, Receipt.journal_id.in_(journals)
    )
    return int(session.scalar(total) or 0)


def last_receipt(session: Session, organisation_id: UUID, outcome: str | None) -> Receipt | None:
    """The newest receipt of a renter, of this outcome if given."""
    query = select(Receipt).where(Receipt.renter_organisation_id == organisation_id)
    if outcome is not None:
        query = query.where(Receipt.outcome == outcome)
    return session.scalars(query.order_by(Receipt.at.desc(), Receipt.id.desc()).limit(1)).one_or_none()


def unsettled_receipts(session: Session) -> int:
    """Receipts that wait for settlement."""
    return session.scalar(select(func.count()).where(Receipt.journal_id.is_(None))) or 0


def outcome_counts(session: Session, organisation_id: UUID, period: Period) -> dict[str, int]:
    """How a renter's requests ended: outcome -> count."""
    rows = session.execute(
        select(Outcome.outcome, func.count())
        .where(Outcome.organisation_id == organisation_id, Outcome.at >= period.start, Outcome.at < period.end)
        .group_by(Outcome.outcome)
        .order_by(Outcome.outcome)
    )
    return {outcome: int(count) for outcome, count in rows}


def receipts_of(owner_id: UUID, period: Period) -> Select[Receipt, str]:
    """A query for an owner's receipts in order of time, each with its model: to be streamed."""
    return (
        select(Receipt, Variant.model_id)
        .join(Variant, Variant.id == Receipt.variant_id)
        .where(Receipt.owner_organisation_id == owner_id, *_within(period))
        .order_by(Receipt.at, Receipt.id)
    )


def _within(period: Period) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Receipt.at >= period.start, Receipt.at < period.end


def _amount_sums() -> list[ColumnElement[int]]:
    return [func.sum(getattr(Receipt, f"{name}_nano")).label(f"{name}_nano") for name in _CLASSES]


def _token_sums() -> list[ColumnElement[int]]:
    return [func.sum(getattr(Receipt, f"{name}_tokens")).label(f"{name}_tokens") for name in _CLASSES]
