"""The SQL of the queue: whose turn it is among the jobs that given offers could run, and which fit none of them."""

from __future__ import annotations

from collections.abc import Sequence
from string import Template
from typing import Any, Final

from sqlalchemy import TextClause, text

from marketplace.matching.types import OfferView

_OFFERS = """
    offers as materialized (
        select input, cached, output, context, choices, cast(node as uuid) as node_id, array[node, owner] as names,
               array[region, country] as places, private, proven
        from unnest(cast(:inputs as bigint[]), cast(:cached as bigint[]), cast(:outputs as bigint[]),
                    cast(:contexts as bigint[]), cast(:choices as boolean[]), cast(:nodes as text[]),
                    cast(:owners as text[]), cast(:regions as text[]), cast(:countries as text[]),
                    cast(:private as boolean[]), cast(:proven as boolean[]))
             as o(input, cached, output, context, choices, node, owner, region, country, private, proven)
    )
"""
"""The offers, given as arrays, laid out once a statement."""

_CHOSEN = """
    cross join lateral (select j.choice -> 'only' as only_these, j.choice -> 'ignored' as ignored,
                               j.choice -> 'order' as named, j.choice -> 'regions' as regions,
                               j.choice -> 'private_only' as private_only, j.choice -> 'proven_only' as proven_only,
                               j.choice -> 'fallbacks' as alone offset 0) c
"""
"""The choice of job `j`, taken apart once a job and not once an offer: with a hundred names it is long."""

_WITHIN = """
    select from offers o
    where (c.only_these is null or c.only_these ?| o.names) and (c.ignored is null or not c.ignored ?| o.names)
      and (c.regions is null or c.regions ?| o.places)
      and (c.private_only is null or o.private) and (c.proven_only is null or o.proven)
      and case when c.alone is null then true when c.named is not null then c.named ?| o.names
               else not exists (select from attempts a where a.job_id = j.id and a.node_id <> o.node_id) end
"""
"""The offers that the choice `c` of job `j` allows: what Choice.allows says, and what is left of it after an
attempt."""

_RUNNABLE = f"""{_WITHIN}
      and o.input * j.price_basis_points / 10000 <= j.max_input_nano_usd_per_mtok
      and o.cached * j.price_basis_points / 10000 <= j.max_cached_input_nano_usd_per_mtok
      and o.output * j.price_basis_points / 10000 <= j.max_output_nano_usd_per_mtok
      and o.context >= coalesce((j.body ->> 'longest_input_tokens')::bigint, j.prompt_tokens + j.max_output_tokens)
      and (o.choices or not coalesce(j.body ? 'n', false))
"""
"""Those of them that are within the price and the context of job `j` too, and give as many answers."""

_HEAD = """
    (select j.id, least(j.deadline_at, j.created_at + make_interval(secs => :patience_s)) as due_at
     from jobs j $chosen
     where j.state = 'queued' and j.variant_id = :variant_id and j.organisation_id = r.organisation_id
       and j.cancel_requested_at is null and j.deadline_at > now()
       and (j.client_until is null or j.client_until > now()) and exists ($runnable)
     order by $order limit :heads)
"""
"""The first of one renter's line by one order. The first n by deadline and the first n by arrival contain together the
first n by the sooner of the two, and each is read from its index."""

_NEXT = """
    with recursive $offers, renters(organisation_id) as (
        (select organisation_id from jobs
         where state = 'queued' and variant_id = :variant_id order by organisation_id limit 1)
        union all
        select (select j.organisation_id from jobs j
                where j.state = 'queued' and j.variant_id = :variant_id and j.organisation_id > r.organisation_id
                order by j.organisation_id limit 1)
        from renters r where r.organisation_id is not null
    ), working as (
        select j.organisation_id, count(*) as jobs
        from attempts a join jobs j on j.id = a.job_id
        where a.state = 'leased' and j.kind <> 'interactive' group by j.organisation_id
    ), line as (
        select head.id, head.due_at,
               row_number() over (partition by r.organisation_id order by head.due_at, head.id)
               + coalesce(w.jobs, 0) as turn
        from (select organisation_id from renters where organisation_id is not null limit :max_renters) r
        left join working w using (organisation_id)
        cross join lateral ($by_deadline union $by_arrival) head
    )
    select id from line order by turn, due_at, id limit :limit
"""

_MISFITS = """
    with $offers
    select j.id from jobs j $chosen
    where j.state = 'queued' and j.variant_id = :variant_id
      and (j.cancel_requested_at is not null
           or (j.created_at < now() - make_interval(secs => :older_than_s)
               and exists ($within) and not exists ($runnable)))
    order by j.created_at limit :limit
"""


def _filled(statement: str, **parts: str) -> TextClause:
    return text(Template(statement).substitute(parts))


NEXT_IN_LINE: Final = _filled(
    _NEXT,
    offers=_OFFERS,
    by_deadline=Template(_HEAD).substitute(chosen=_CHOSEN, runnable=_RUNNABLE, order="j.deadline_at"),
    by_arrival=Template(_HEAD).substitute(chosen=_CHOSEN, runnable=_RUNNABLE, order="j.created_at"),
)
FIT_NOWHERE: Final = _filled(_MISFITS, offers=_OFFERS, chosen=_CHOSEN, within=_WITHIN, runnable=_RUNNABLE)


def as_arrays(offers: Sequence[OfferView]) -> dict[str, list[Any]]:
    """The offers as the parameters of both."""
    return {
        "inputs": [offer.rates.input for offer in offers],
        "cached": [offer.rates.cached_input for offer in offers],
        "outputs": [offer.rates.output for offer in offers],
        "contexts": [offer.context_per_slot for offer in offers],
        "choices": [offer.gives_choices for offer in offers],
        "nodes": [str(offer.node_id) for offer in offers],
        "owners": [str(offer.owner_organisation_id) for offer in offers],
        "regions": [offer.region for offer in offers],
        "countries": [offer.data.country for offer in offers],
        "private": [offer.data.private for offer in offers],
        "proven": [not offer.probation for offer in offers],
    }
