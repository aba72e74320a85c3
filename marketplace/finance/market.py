"""What the market did while an owner's nodes had room, by the minute: from receipts, attempts and noted refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Row, select, text
from sqlalchemy.orm import Session

from agent.sizing.fit import fits, gpu_margin_bytes, llamacpp_need
from agent.sizing.shape import ModelShape
from marketplace.catalog.models import Price, Variant
from marketplace.finance.heldback import Ask, Elsewhere, NodeTime, RefusedDemand, Unserved
from marketplace.finance.period import Period
from marketplace.fleet.models import Device, Node, Offer
from marketplace.jobs.demand import NO_NODE, SEVERAL, RefusedMinute

MAX_UNSERVED: Final = 100

# An offer has room in a minute if its leases take less than all of its slots. Whole minutes: a request that lasted from
# one into the next counts where it ended.
_MARKET: Final = """
    with mine as (
      select o.id, o.node_id, o.variant_id, o.slots from offers o join nodes n on n.id = o.node_id
      where n.organisation_id = :owner
    ), load as materialized (
      select a.offer_id, date_trunc('minute', a.leased_at) as minute,
             sum(extract(epoch from coalesce(a.ended_at, a.lease_expires_at) - a.leased_at)) as leased_s
      from attempts a join mine m on m.id = a.offer_id and m.node_id = a.node_id
      where a.leased_at >= :start and a.leased_at < :end group by 1, 2
    ), offered as materialized (
      select distinct i.offer_id, minute
      from offered_intervals i join mine m on m.id = i.offer_id,
           generate_series(date_trunc('minute', greatest(i.started_at, cast(:start as timestamptz))),
                           least(coalesce(i.ended_at, i.seen_at), cast(:end as timestamptz)) - interval '1 microsecond',
                           interval '1 minute') as minute
      where i.started_at < :end and coalesce(i.ended_at, i.seen_at) > :start
    ), demand as materialized (
      select r.variant_id, date_trunc('minute', r.at) as minute, r.price_id, count(*) as requests,
             sum(r.input_uncached_tokens + r.input_cached_tokens) as input_tokens,
             sum(r.output_visible_tokens + r.output_reasoning_tokens) as output_tokens,
             sum(r.charge_nano) as charge_nano
      from receipts r
      where r.at >= :start and r.at < :end and r.owner_organisation_id <> :owner
        and r.variant_id in (select variant_id from mine)
      group by 1, 2, 3
    ), room as materialized (
      select o.offer_id, o.minute, coalesce(l.leased_s, 0) as leased_s, m.node_id, m.variant_id, m.slots
      from offered o join mine m on m.id = o.offer_id left join load l using (offer_id, minute)
    )
"""
_ELSEWHERE: Final = text(
    _MARKET  # noqa: S608  # both parts are constants
    + """
    select o.node_id, o.variant_id, p.input_nano_usd_per_mtok as input_rate, p.output_nano_usd_per_mtok as output_rate,
           sum(d.requests)::bigint as requests, sum(d.input_tokens)::bigint as input_tokens,
           sum(d.output_tokens)::bigint as output_tokens, sum(d.charge_nano)::bigint as charge_nano
    from room o join demand d using (variant_id, minute) join prices p on p.id = d.price_id
    where o.leased_s < 60 * o.slots
    group by 1, 2, 3, 4 order by 1, 2, 3, 4
    """
)
_NO_DEMAND: Final = text(
    _MARKET  # noqa: S608  # both parts are constants
    + """
    select node_id, count(*) as minutes from (
      select o.node_id, o.minute
      from room o left join (
        select variant_id, minute from demand
        union select variant_id, minute from refused_minutes where minute >= :start and minute < :end
      ) wanted on wanted.variant_id = o.variant_id and wanted.minute = o.minute
      group by o.node_id, o.minute
      having sum(o.leased_s) = 0 and count(wanted.minute) = 0
    ) quiet group by node_id
    """
)
_CONNECTED: Final = text(
    """
    select e.node_id,
           (select sum(extract(epoch from upper(s) - lower(s))) * 1e6
            from unnest(range_agg(tstzrange(e.started_at, e.ended_at))
                        * tstzmultirange(tstzrange(cast(:start as timestamptz), cast(:end as timestamptz)))) s)
             as connected_us
    from energy_samples e join nodes n on n.id = e.node_id
    where n.organisation_id = :owner and e.started_at < :end and e.ended_at > :start group by e.node_id
    """
)


_CAPPED: Final = text(
    """
    select e.node_id, sum(e.capped_ms * extract(epoch from least(e.ended_at, :end) - greatest(e.started_at, :start))
                          / extract(epoch from e.ended_at - e.started_at)) * 1000 as capped_us
    from energy_samples e join nodes n on n.id = e.node_id
    where n.organisation_id = :owner and e.started_at < :end and e.ended_at > :start and e.ended_at > e.started_at
      and e.capped_ms is not null
    group by e.node_id
    """
)


def capped_us(session: Session, owner_id: UUID, period: Period) -> dict[UUID, int]:
    """Node -> microseconds in which power held its cards down; nodes that never said are left out."""
    return {row.node_id: int(row.capped_us) for row in session.execute(_CAPPED, _bounds(owner_id, period))}


def elsewhere(session: Session, owner_id: UUID, period: Period) -> list[Elsewhere]:
    """Requests that others served while one of the owner's offers of the same variant had room."""
    rows = session.execute(_ELSEWHERE, _bounds(owner_id, period))
    return [Elsewhere(**row._mapping) for row in rows]


def quiet_minutes(session: Session, owner_id: UUID, period: Period) -> dict[UUID, int]:
    """Node -> minutes in which it was offered, ran nothing, and nobody asked anybody for what it serves."""
    return {row.node_id: row.minutes for row in session.execute(_NO_DEMAND, _bounds(owner_id, period))}


def connected_us(session: Session, owner_id: UUID, period: Period) -> dict[UUID, int]:
    """Node -> microseconds in which its agent reported."""
    rows = session.execute(_CONNECTED, _bounds(owner_id, period))
    return {row.node_id: int(row.connected_us or 0) for row in rows}


def refused(session: Session, owner_id: UUID, period: Period) -> list[RefusedDemand]:
    """Refused requests that one of the owner's nodes would have served but for one filter."""
    rows = session.scalars(
        select(RefusedMinute)
        .join(Node, Node.id == RefusedMinute.node_id)
        .where(Node.organisation_id == owner_id, RefusedMinute.filter != SEVERAL, *_minutes(period))
    )
    totals: dict[tuple[UUID, UUID, str], tuple[int, int, int]] = {}
    for row in rows:
        key = (row.node_id, row.variant_id, row.filter)
        requests, prompt, output = totals.get(key, (0, 0, 0))
        totals[key] = (requests + row.requests, prompt + row.prompt_tokens, output + row.max_output_tokens)
    return [RefusedDemand(*key, *total) for key, total in sorted(totals.items())]


def unserved(session: Session, period: Period) -> list[Unserved]:
    """Variants that were asked for while nobody offered them, the most wanted first."""
    rows = session.execute(
        select(Variant.model_id, Variant.size_bytes, RefusedMinute.requests)
        .join(Variant, Variant.id == RefusedMinute.variant_id)
        .where(RefusedMinute.node_id == NO_NODE, *_minutes(period))
    )
    totals: dict[tuple[str, int], int] = {}
    for model_id, size_bytes, requests in rows:
        totals[model_id, size_bytes] = totals.get((model_id, size_bytes), 0) + requests
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))[:MAX_UNSERVED]
    return [Unserved(model_id, size_bytes, requests) for (model_id, size_bytes), requests in ranked]


def asks(session: Session, owner_id: UUID) -> list[Ask]:
    """What the owner's offers ask for now."""
    rows = session.execute(
        select(Offer, Price, Variant.model_id, Variant.shape, Device.memory_total_bytes, Device.kind)
        .join(Node, Node.id == Offer.node_id)
        .join(Price, Price.id == Offer.price_id)
        .join(Variant, Variant.id == Offer.variant_id)
        .join(Device, (Device.node_id == Offer.node_id) & (Device.device_id == Offer.device_id), isouter=True)
        .where(Node.organisation_id == owner_id)
        .order_by(Offer.node_id, Offer.id)
    )
    return [_ask(row) for row in rows]


def _ask(row: Row[Any]) -> Ask:
    return Ask(
        node_id=row.Offer.node_id,
        variant_id=row.Offer.variant_id,
        model_id=row.model_id,
        input_rate=row.Price.input_nano_usd_per_mtok,
        output_rate=row.Price.output_nano_usd_per_mtok,
        more_slots_fit=_more_slots_fit(row),
    )


def _more_slots_fit(row: Row[Any]) -> bool | None:
    """Fit again, with one slot more and everything else as it is."""
    names = ModelShape.__dataclass_fields__
    facts = {name: value for name, value in row.shape.items() if name in names}
    if row.memory_total_bytes is None or not names.keys() - {"kv_type"} <= facts.keys():
        return None
    on_gpu = row.kind == "gpu"
    need = llamacpp_need(
        ModelShape(**facts),
        slots=row.Offer.slots + 1,
        context_per_slot=row.Offer.context_per_slot,
        on_gpu=on_gpu,
    )
    return fits(need, row.memory_total_bytes, gpu_margin_bytes(row.memory_total_bytes) if on_gpu else 0)


def node_times(
    session: Session, owner_id: UUID, period: Period, offered: dict[UUID, tuple[int, int]]
) -> list[NodeTime]:
    """The time of each node that was offered or connected. `offered`: node -> (offered, rented) microseconds."""
    connected, quiet = connected_us(session, owner_id, period), quiet_minutes(session, owner_id, period)
    capped = capped_us(session, owner_id, period)
    rows = session.execute(
        select(Node.id, Node.name, Device.memory_total_bytes)
        .join(Device, Device.node_id == Node.id, isouter=True)
        .where(Node.organisation_id == owner_id)
        .order_by(Node.name, Node.id)
    )
    memory: dict[tuple[UUID, str], int | None] = {}
    for node_id, name, bytes_ in rows:
        known = memory.get((node_id, name))
        memory[node_id, name] = bytes_ if known is None else max(known, bytes_ or 0)
    return [
        NodeTime(
            node_id=node_id,
            node_name=name,
            connected_us=connected.get(node_id, 0),
            offered_us=offered.get(node_id, (0, 0))[0],
            rented_us=offered.get(node_id, (0, 0))[1],
            no_demand_us=quiet.get(node_id, 0) * 60_000_000,
            memory_bytes=bytes_,
            capped_us=capped.get(node_id),
        )
        for (node_id, name), bytes_ in memory.items()
        if node_id in connected or node_id in offered
    ]


def _bounds(owner_id: UUID, period: Period) -> dict[str, Any]:
    return {"owner": owner_id, "start": period.start, "end": period.end}


def _minutes(period: Period) -> Sequence[Any]:
    # The primary key begins with the minute: a period reads its own rows alone.
    return RefusedMinute.minute >= period.start, RefusedMinute.minute < period.end
