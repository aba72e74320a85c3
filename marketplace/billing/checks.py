"""What must always hold between jobs, receipts, holds and the ledger, as queries. Run on a timer, and by fault tests.

Each rule names what it finds. Nothing is tolerated: the amounts are integers.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Session

import ledger

MAX_FINDINGS_PER_RULE = 20

_RULES: dict[str, str] = {
    "a settled job has one settled receipt": """
        select j.id, 'has ' || count(r.id) || ' settled receipts'
        from jobs j left join receipts r on r.job_id = j.id and r.journal_id is not null
        where j.state = 'settled' and {recent} group by j.id having count(r.id) <> 1
    """,
    "a delivered job has one receipt, unsettled": """
        select j.id, case when r.id is null then 'has no receipt' else 'has a settled receipt' end
        from jobs j left join receipts r on r.job_id = j.id
        where j.state = 'delivered' and {recent} and (r.id is null or r.journal_id is not null)
    """,
    "no other job has a receipt": """
        select j.id, 'is ' || j.state || ' and has a receipt'
        from jobs j join receipts r on r.job_id = j.id
        where j.state in ('queued', 'running', 'voided') and {recent}
    """,
    "paid tokens were accepted": """
        select j.id, format('paid %s tokens, accepted %s', r.output_visible_tokens + r.output_reasoning_tokens,
                            a.accepted_tokens)
        from receipts r join attempts a on a.id = r.id join jobs j on j.id = r.job_id
        where {recent} and (r.output_visible_tokens + r.output_reasoning_tokens > a.accepted_tokens
                            or a.job_id <> r.job_id or a.node_id <> r.node_id)
    """,
    "a receipt costs what its tokens cost at the pinned rates": """
        select j.id, format('costs %s nano', r.charge_nano + r.loss_nano)
        from receipts r join attempts a on a.id = r.id join jobs j on j.id = r.job_id
        where {recent}
          and abs((r.charge_nano + r.loss_nano)::numeric * 1000000
                  - r.input_uncached_tokens::numeric * a.input_nano_usd_per_mtok
                  - r.input_cached_tokens::numeric * a.cached_input_nano_usd_per_mtok
                  - (r.output_visible_tokens + r.output_reasoning_tokens)::numeric * a.output_nano_usd_per_mtok
              ) > 500000
    """,
    "an open job holds its worst case": """
        select j.id, format('is %s, its hold is %s over %s nano', j.state, coalesce(h.state, 'missing'), h.amount_nano)
        from jobs j left join ledger_holds h on h.id = j.id
        where j.state in ('queued', 'running') and {recent}
          and (h.state is distinct from 'held' or h.amount_nano <> j.hold_nano) and j.deadline_at > now()
    """,
    "a delivered job holds exactly its charge": """
        select j.id, format('charges %s, its hold is %s over %s nano', r.charge_nano, coalesce(h.state, 'missing'),
                            h.amount_nano)
        from jobs j join receipts r on r.job_id = j.id left join ledger_holds h on h.id = j.id
        where j.state = 'delivered' and {recent}
          and not (h.state is not distinct from 'held' and h.amount_nano = r.charge_nano
                   or r.charge_nano = 0 and coalesce(h.state, '') in ('released', 'expired'))
    """,
    "no hold remains on an ended job": """
        select j.id, format('is %s, its hold is %s over %s nano', j.state, h.state, h.amount_nano)
        from jobs j join ledger_holds h on h.id = j.id left join receipts r on r.job_id = j.id
        where {recent} and (j.state = 'voided' and h.state not in ('released', 'expired')
           or j.state = 'settled' and coalesce(h.captured_nano, 0) <> r.charge_nano
           or j.state = 'settled' and h.state = 'held')
    """,
    "one lease at a time, on the newest attempt": """
        select j.id, format('has %s leased attempts', count(*) filter (where a.state = 'leased'))
        from jobs j join attempts a on a.job_id = j.id
        where {recent} group by j.id, j.state
        having count(*) filter (where a.state = 'leased') > 1
            or count(*) <> max(a.epoch)
            or max(a.epoch) filter (where a.state = 'leased') < max(a.epoch)
            or j.state <> 'running' and bool_or(a.state = 'leased')
    """,
    # Three tries; those that an owner ended by taking the machine back come on top, at most ten.
    "attempts are bounded": """
        select j.id, format('was tried %s times', count(*))
        from jobs j join attempts a on a.job_id = j.id
        where {recent} group by j.id
        having count(*) filter (where a.fault is distinct from 'owner') > 3
            or count(*) filter (where a.fault = 'owner') > 10
    """,
    "never again on a node that failed it": """
        select j.id, format('came back to node %s', b.node_id)
        from attempts b join attempts a on a.job_id = b.job_id and a.node_id = b.node_id and a.epoch < b.epoch
        join jobs j on j.id = b.job_id
        where a.fault = 'node' and {recent}
    """,
    "an ended job has its outcome": """
        select j.id, format('is %s by %s, its outcome row says %s', j.state, j.outcome, coalesce(o.outcome, 'nothing'))
        from jobs j left join outcomes o on o.request_id = j.request_id
        where j.state in ('delivered', 'settled', 'voided') and {recent}
          and (o.outcome is distinct from j.outcome or o.job_id is distinct from j.id)
    """,
    "an open job has no outcome yet": """
        select j.id, format('is %s and has the outcome %s', j.state, o.outcome)
        from jobs j join outcomes o on o.request_id = j.request_id
        where j.state in ('queued', 'running') and {recent}
    """,
}

_JOURNALS = """
    select format('journal %s', s.journal_id), format('moves %s nano, its receipts %s', p.nano, s.nano)
    from (select r.journal_id, sum(r.charge_nano + r.loss_nano) as nano
          from receipts r join jobs j on j.id = r.job_id where r.journal_id > 0 and {recent} group by r.journal_id) s
    left join lateral (select sum(amount_nano) as nano from ledger_postings
                       where journal_id = s.journal_id and amount_nano > 0) p on true
    where p.nano is distinct from s.nano
"""
_FLOORS = """
    select o.id, format('may be held down to %s nano, has %s promotional', b.floor_nano, coalesce(p.posted_nano, 0))
    from organisations o join ledger_balances b on b.account_id = o.credit_account_id
    left join ledger_accounts a on a.code = 'renter\\:' || replace(o.id::text, '-', '') || '\\:promotional'
    left join ledger_balances p on p.account_id = a.id
    where b.floor_nano is distinct from -coalesce(p.posted_nano, 0)
"""
_TRANSIT = """
    select a.reference, format('has %s nano in transit, open payouts over %s', b.posted_nano, p.nano)
    from ledger_accounts a join ledger_balances b on b.account_id = a.id
    cross join lateral (
      select coalesce(sum(amount_minor), 0)::bigint * 10000000 as nano from payouts
      where replace(organisation_id::text, '-', '') = a.reference
        and state in ('awaiting_approval', 'scheduled', 'paying', 'returning')) p
    where a.code like 'owner:%' and a.code like '%transit' and b.posted_nano <> p.nano
"""
_OVERDUE = """
    select j.id, format('is %s, %s past its deadline', j.state, now() - j.deadline_at)
    from jobs j where j.state in ('queued', 'running') and j.deadline_at < now() - make_interval(secs => :grace_s)
"""


def invariants(session: Session, *, since: datetime | None = None, grace_s: float | None = None) -> list[str]:
    """Every broken rule, as sentences; empty when all is in order.

    `since`: only jobs admitted from then on, for a timer over a large history (settlement journals, which mix jobs,
    are then left out). `grace_s`: also report jobs that are open this long after their deadline.
    """
    recent = "true" if since is None else "j.created_at >= :since"
    parameters = {} if since is None else {"since": since}
    findings = [f"{problem.rule}: {problem.story}" for problem in ledger.check(session)] if since is None else []
    rules = dict(_RULES)
    if since is None:
        rules["a settlement moves what its receipts say"] = _JOURNALS
        rules["what may be held is paid and promotional credit"] = _FLOORS
        rules["what is in transit is in open payouts"] = _TRANSIT
    for rule, query in rules.items():
        rows = session.execute(text(f"{query.format(recent=recent)} limit {MAX_FINDINGS_PER_RULE}"), parameters)
        findings += [f"{rule}: {subject} {story}" for subject, story in rows]
    if grace_s is not None:
        rows = session.execute(text(f"{_OVERDUE} limit {MAX_FINDINGS_PER_RULE}"), {"grace_s": grace_s})
        findings += [f"every job ends in time: {subject} {story}" for subject, story in rows]
    return findings
