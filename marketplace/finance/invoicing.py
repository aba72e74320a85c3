"""Makes invoices. Only reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from marketplace.finance import service
from marketplace.finance.bill import PricedUse
from marketplace.finance.invoice import Invoice, InvoiceLine, Resent, growth, hints
from marketplace.finance.period import Period
from marketplace.finance.statement import Amounts, Tokens
from marketplace.metering.pricing import Rates

LOOK_BACK: Final = timedelta(days=1)
"""A conversation that paused for longer before the period counts as new."""
LIVE_S: Final = 60

_LINES: Final = text(
    """
    select s.*, k.name as key_name from (
      select (r.at at time zone :zone)::date as day, r.key_id, v.model_id, count(*) as jobs,
             sum(r.input_uncached_tokens) as input_uncached_tokens, sum(r.input_cached_tokens) as input_cached_tokens,
             sum(r.output_visible_tokens) as output_visible_tokens,
             sum(r.output_reasoning_tokens) as output_reasoning_tokens,
             sum(r.input_uncached_nano) as input_uncached_nano, sum(r.input_cached_nano) as input_cached_nano,
             sum(r.output_visible_nano) as output_visible_nano, sum(r.output_reasoning_nano) as output_reasoning_nano
      from receipts r join variants v on v.id = r.variant_id
      where r.renter_organisation_id = :renter and r.loss_nano = 0 and r.at >= :start and r.at < :end
      group by 1, 2, 3) s
    join api_keys k on k.id = s.key_id
    order by s.day, k.name, s.key_id, s.model_id
    """
)
# What a call re-sends is what the call before it in its conversation sent and received, as far as it is that long.
_RESENT: Final = text(
    """
    with calls as (
      select r.at, c.conversation, r.input_cached_tokens as cached,
             r.input_uncached_tokens + r.input_cached_tokens as input,
             case when c.conversation is not null then
               coalesce(lag(r.input_uncached_tokens + r.input_cached_tokens
                            + r.output_visible_tokens + r.output_reasoning_tokens)
                        over (partition by c.conversation order by r.at, r.id), 0) end as known
      from receipts r left join job_conversations c on c.job_id = r.job_id
      where r.renter_organisation_id = :renter and r.loss_nano = 0 and r.at >= :from and r.at < :end
    )
    select coalesce(sum(input - least(input, known)) filter (where known is not null), 0) as fresh,
           coalesce(sum(least(input, known)) filter (where known is not null), 0) as resent,
           coalesce(sum(input) filter (where conversation is null), 0) as unknown,
           coalesce(sum(greatest(0, least(input, known) - cached)) filter (where known is not null), 0)
             as resent_uncached
    from calls where at >= :start
    """
)
_OFFERED: Final = text(
    """
    select v.model_id, v.size_bytes, p.input_nano_usd_per_mtok as input,
           p.cached_input_nano_usd_per_mtok as cached_input, p.output_nano_usd_per_mtok as output
    from offers o join variants v on v.id = o.variant_id join prices p on p.id = o.price_id
    where not o.simulated and exists (
      select from offered_intervals i
      where i.offer_id = o.id and i.node_id = o.node_id and i.ended_at is null
        and i.seen_at > now() - make_interval(secs => :live_s))
    order by p.output_nano_usd_per_mtok, p.input_nano_usd_per_mtok, v.model_id
    """
)
_SIZES: Final = text("select model_id, min(size_bytes) as size_bytes from variants group by model_id")


def make_invoice(session: Session, renter_id: UUID, period: Period) -> Invoice:
    """A renter's invoice for a period, beside the period before it. Raises UnknownOrganisation."""
    bill = service.renter_bill(session, renter_id, period.start, period.end, period.zone_name)
    before = period.before()
    uses_before = service.priced_uses(session, renter_id, before)
    resent = _resent(session, renter_id, period, before)
    return Invoice(
        bill=bill,
        lines=_lines(session, renter_id, period),
        growth=growth(bill.uses, uses_before, str(before)),
        resent=resent,
        hints=hints(bill.uses, resent, _smaller(session, bill.uses)),
    )


def _lines(session: Session, renter_id: UUID, period: Period) -> tuple[InvoiceLine, ...]:
    rows = session.execute(_LINES, {**_bounds(renter_id, period), "zone": period.zone_name})
    return tuple(
        InvoiceLine(
            day=row.day,
            key_id=row.key_id,
            key_name=row.key_name,
            model_id=row.model_id,
            jobs=row.jobs,
            tokens=Tokens(
                int(row.input_uncached_tokens),
                int(row.input_cached_tokens),
                int(row.output_visible_tokens),
                int(row.output_reasoning_tokens),
            ),
            amounts=Amounts(
                int(row.input_uncached_nano),
                int(row.input_cached_nano),
                int(row.output_visible_nano),
                int(row.output_reasoning_nano),
            ),
        )
        for row in rows
    )


def _resent(session: Session, renter_id: UUID, period: Period, before: Period) -> Resent:
    now, then = (_resent_row(session, renter_id, each) for each in (period, before))
    return Resent(
        new_tokens=int(now.fresh),
        resent_tokens=int(now.resent),
        unknown_tokens=int(now.unknown),
        resent_uncached_tokens=int(now.resent_uncached),
        new_before_tokens=int(then.fresh),
        resent_before_tokens=int(then.resent),
        unknown_before_tokens=int(then.unknown),
    )


def _resent_row(session: Session, renter_id: UUID, period: Period) -> Any:
    return session.execute(_RESENT, {**_bounds(renter_id, period), "from": period.start - LOOK_BACK}).one()


def _smaller(session: Session, uses: Sequence[PricedUse]) -> dict[str, tuple[str, Rates]]:
    """Model -> the cheapest smaller model that is offered now."""
    sizes = {row.model_id: row.size_bytes for row in session.execute(_SIZES)}
    offered: dict[str, list[tuple[int, Rates]]] = defaultdict(list)
    for row in session.execute(_OFFERED, {"live_s": LIVE_S}):
        offered[row.model_id].append((row.size_bytes, Rates(row.input, row.cached_input, row.output)))
    found: dict[str, tuple[str, Rates]] = {}
    for model_id in {use.model_id for use in uses}:
        candidates = [
            (rates.output, rates.input, name, rates)
            for name, asks in offered.items()
            for size_bytes, rates in asks
            if name != model_id and size_bytes < sizes.get(model_id, 0)
        ]
        if candidates:
            _, _, name, rates = min(candidates, key=lambda candidate: candidate[:3])
            found[model_id] = (name, rates)
    return found


def _bounds(renter_id: UUID, period: Period) -> dict[str, Any]:
    return {"renter": renter_id, "start": period.start, "end": period.end}
