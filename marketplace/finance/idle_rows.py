"""The rows behind an explanation of one hour: time, refusals, what others served, telemetry. Only reads."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from marketplace.core.errors import BadRequest, NotFound
from marketplace.finance.idle import HOUR, HOUR_US, MINUTE_US, Minute, Rows, Span
from marketplace.finance.repository import LIVE_S
from marketplace.fleet.models import Node

MAX_UNSERVED: Final = 10

# Merged, so that a busy hour of thousands of leases is a few spans. `ends` closes what is still open.
_SPANS: Final = text(
    """
    with bounds as (select tstzmultirange(tstzrange(:start, :end)) as hour),
    offered as (
      select range_agg(tstzrange(started_at, greatest(started_at, coalesce(ended_at,
               case when seen_at > now() - make_interval(secs => :live_s) then now() else seen_at end)))) as span
      from offered_intervals where node_id = :node and started_at < :end and coalesce(ended_at, now()) > :start
    ), rented as (
      select range_agg(tstzrange(leased_at, greatest(leased_at,
               coalesce(ended_at, least(lease_expires_at, now()))))) as span
      from attempts where node_id = :node and leased_at < :end and coalesce(ended_at, lease_expires_at) > :start
    ), heard as (
      select range_agg(tstzrange(started_at, ended_at)) as span
      from energy_samples where node_id = :node and started_at < :end and ended_at > :start
    )
    select kind, extract(epoch from lower(s) - :start) * 1e6, extract(epoch from upper(s) - :start) * 1e6
    from (select 'offered' as kind, span from offered union all select 'rented', span from rented
          union all select 'heard', span from heard) spans, bounds, unnest(spans.span * bounds.hour) s
    """
)
_HELD: Final = text(
    """
    select extract(epoch from greatest(started_at, :start) - :start) * 1e6,
           extract(epoch from least(ends, :end) - :start) * 1e6, reason
    from (select *, coalesce(ended_at, case when seen_at > now() - make_interval(secs => :live_s) then now()
                                       else seen_at end) as ends
          from held_intervals where node_id = :node and started_at < :end) h
    where ends > :start order by started_at
    """
)
_REFUSED: Final = text(
    """
    select minute, filter, sum(requests),
           max(highest_bid_nano_usd_per_mtok) filter (where filter in ('PRICE', 'BALANCE'))
    from refused_minutes
    where minute >= date_trunc('minute', cast(:start as timestamptz)) and minute < :end and node_id = :node
      and filter <> 'UNAVAILABLE'
    group by 1, 2
    """
)
# The ask in force at the hour's end. Another owner's answer counts where the node's variant was offered in that hour.
_ELSEWHERE: Final = text(
    """
    with mine as (
      select distinct o.variant_id from offered_intervals i join offers o on o.id = i.offer_id
      where i.node_id = :node and i.started_at < :end and coalesce(i.ended_at, now()) > :start
    ), asks as (
      select distinct on (p.variant_id) p.variant_id, p.input_nano_usd_per_mtok as input,
             p.output_nano_usd_per_mtok as output
      from prices p join mine using (variant_id)
      where p.seller_ref = :node and p.created_at < :end order by p.variant_id, p.id desc
    )
    select date_trunc('minute', r.at) as minute,
           count(*) filter (where worth < asked) as cheaper, count(*) filter (where worth >= asked) as dearer
    from (
      select r.at,
        (r.input_uncached_tokens + r.input_cached_tokens) * p.input_nano_usd_per_mtok::numeric
          + (r.output_visible_tokens + r.output_reasoning_tokens) * p.output_nano_usd_per_mtok as worth,
        (r.input_uncached_tokens + r.input_cached_tokens) * a.input::numeric
          + (r.output_visible_tokens + r.output_reasoning_tokens) * a.output as asked
      from receipts r join asks a on a.variant_id = r.variant_id join prices p on p.id = r.price_id
      where r.at >= :start and r.at < :end and r.node_id <> :node
    ) r group by 1
    """
)
_UNSERVED: Final = text(
    """
    select v.model_id, sum(m.requests) from refused_minutes m join variants v on v.id = m.variant_id
    where m.minute >= :start and m.minute < :end and m.node_id = '00000000-0000-0000-0000-000000000000'
    group by 1 order by 2 desc, 1 limit :most
    """
)
_TELEMETRY: Final = text(
    """
    select sum(utilisation_pct * extract(epoch from ended_at - started_at))
             / nullif(sum(extract(epoch from ended_at - started_at)) filter (where utilisation_pct is not null), 0),
           sum(capped_ms * extract(epoch from least(ended_at, :end) - greatest(started_at, :start))
               / extract(epoch from ended_at - started_at)) * 1000
    from energy_samples
    where node_id = :node and started_at < :end and ended_at > :start and ended_at > started_at
    """
)


class UnknownNode(NotFound):
    code = "unknown_node"


def read(session: Session, node_id: UUID, start: datetime, owner_id: UUID | None) -> Rows:
    """The rows of a node's hour. `owner_id`: whoever asks; a node of somebody else is unknown to them.

    Raises UnknownNode, and BadRequest for a time without its zone or an hour that has not begun."""
    node = session.get(Node, node_id)
    if node is None or (owner_id is not None and node.organisation_id != owner_id):
        raise UnknownNode(f"There is no node {node_id}.", param="node")
    if start.tzinfo is None:
        raise BadRequest("A time carries its zone, as in 2026-11-30T13:00Z.", param="hour")
    start = start.replace(minute=0, second=0, microsecond=0)
    now = session.execute(select(text("now()"))).scalar_one()
    if start > now:
        raise BadRequest("This hour has not begun.", param="hour")
    bounds: dict[str, Any] = {"node": node_id, "start": start, "end": start + HOUR, "live_s": LIVE_S}
    spans: dict[str, list[Span]] = {"offered": [], "rented": [], "heard": []}
    for kind, first, last in session.execute(_SPANS, bounds):
        spans[kind].append((int(first), int(last)))
    held = [(int(first), min(HOUR_US, int(last)), reason) for first, last, reason in session.execute(_HELD, bounds)]
    used, capped = session.execute(_TELEMETRY, bounds).one()
    unserved = session.execute(_UNSERVED, {**bounds, "most": MAX_UNSERVED})
    return Rows(
        node_name=node.name,
        start=start,
        now=now,
        joined=node.enrolled_at,
        rented=spans["rented"],
        offered=spans["offered"],
        held=held,
        connected=[*spans["heard"], *((first, last) for first, last, _ in held), *spans["offered"]],
        minutes=_minutes(session, bounds),
        unserved=[(model, int(requests)) for model, requests in unserved],
        utilisation_pct=None if used is None else float(used),
        capped_us=None if capped is None else int(capped),
    )


def _minutes(session: Session, bounds: dict[str, Any]) -> dict[int, Minute]:
    found: dict[int, Minute] = {}

    def at(minute: datetime) -> Minute:
        number = int((minute - bounds["start"]).total_seconds() * 1e6) // MINUTE_US
        return found.setdefault(number, Minute())

    for minute, name, requests, bid in session.execute(_REFUSED, bounds):
        entry = at(minute)
        entry.refused[name] = int(requests)
        entry.highest_bid = bid if entry.highest_bid is None else max(entry.highest_bid, bid or 0)
    for minute, cheaper, dearer in session.execute(_ELSEWHERE, bounds):
        entry = at(minute)
        entry.cheaper, entry.dearer = int(cheaper), int(dearer)
    return found
