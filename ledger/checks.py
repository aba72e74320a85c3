"""What must always hold, recomputed from the postings with no tolerance. Run on a timer, and by tests."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

from ledger import checkpoints

MAX_PROBLEMS_PER_RULE = 100

_RULES: dict[str, str] = {
    "journal_balanced": """
        select format('journal %s is off by %s %s', journal_id, sum(amount_nano), currency)
        from ledger_postings group by journal_id, currency having sum(amount_nano) <> 0 order by journal_id
    """,
    "journal_lines": """
        select format('journal %s has %s lines', j.id, count(p.id))
        from ledger_journals j left join ledger_postings p on p.journal_id = j.id
        group by j.id having count(p.id) < 2 order by j.id
    """,
    "balance_posted": """
        select format('account %s says %s nano, its postings say %s', a.code, b.posted_nano, p.total)
        from ledger_balances b
        join ledger_accounts a on a.id = b.account_id
        cross join lateral (
          select coalesce(sum(amount_nano), 0) * case when a.kind in ('asset', 'expense') then 1 else -1 end as total
          from ledger_postings where account_id = a.id) p
        where b.posted_nano <> p.total order by a.id
    """,
    "balance_held": """
        select format('account %s says that %s nano are held, its open holds say %s', a.code, b.held_nano, h.total)
        from ledger_balances b
        join ledger_accounts a on a.id = b.account_id
        cross join lateral (
          select coalesce(sum(amount_nano), 0) as total
          from ledger_holds where account_id = a.id and state = 'held') h
        where b.held_nano <> h.total order by a.id
    """,
    "balance_floor": """
        select format('account %s has %s nano available, below its floor of %s',
                      a.code, b.posted_nano - b.held_nano, b.floor_nano)
        from ledger_balances b join ledger_accounts a on a.id = b.account_id
        where b.posted_nano - b.held_nano < b.floor_nano order by a.id
    """,
    "balance_limit": """
        select format('account %s has %s nano posted, above its limit of %s', a.code, b.posted_nano, b.limit_nano)
        from ledger_balances b join ledger_accounts a on a.id = b.account_id
        where b.posted_nano > b.limit_nano order by a.id
    """,
    "reversals_within": """
        select format('reversals of journal %s take back %s of account %s, it moved %s',
                      original, -taken, account_id, given)
        from (select j.reverses_id as original, p.account_id, sum(p.amount_nano) as taken,
                     coalesce((select sum(o.amount_nano) from ledger_postings o
                               where o.journal_id = j.reverses_id and o.account_id = p.account_id
                                 and o.currency = p.currency), 0) as given
              from ledger_journals j join ledger_postings p on p.journal_id = j.id
              where j.reverses_id is not null group by j.reverses_id, p.account_id, p.currency) s
        where taken * sign(given) not between -abs(given) and 0 or given = 0 and taken <> 0
        order by original, account_id
    """,
    "balance_kept": """
        select format('account %s is %schecked and has %s balance row',
                      a.code, case when a.checked then '' else 'not ' end,
                      case when b.account_id is null then 'no' else 'a' end)
        from ledger_accounts a left join ledger_balances b on b.account_id = a.id
        where a.checked <> (b.account_id is not null) order by a.id
    """,
    "books_balance": """
        select format('the books are off by %s %s', sum(amount_nano), currency)
        from ledger_postings group by currency having sum(amount_nano) <> 0
    """,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule, in words."""

    rule: str
    story: str


_REBUILD = text(
    """
    update ledger_balances b set posted_nano = s.posted, held_nano = s.held
    from (select a.id,
                 coalesce((select sum(amount_nano) from ledger_postings where account_id = a.id), 0)
                   * case when a.kind in ('asset', 'expense') then 1 else -1 end as posted,
                 coalesce((select sum(amount_nano) from ledger_holds where account_id = a.id and state = 'held'), 0)
                   as held
          from ledger_accounts a where a.checked) s
    where b.account_id = s.id and (b.posted_nano, b.held_nano) <> (s.posted, s.held)
    returning b.account_id
    """
)


def rebuild(session: Session) -> list[int]:
    """Compute every derived balance anew from postings and holds: running rows and checkpoints. Posting, holding and
    sealing wait. Returns the accounts whose running row was wrong.

    Fails with the database's own refusal if the right balance would be outside the account's bounds.
    """
    session.execute(text("lock table ledger_balances, ledger_checkpoints in exclusive mode"))
    checkpoints.rebuild(session)
    return sorted(session.scalars(_REBUILD))


def check(session: Session) -> list[Problem]:
    """Every rule that does not hold, at most MAX_PROBLEMS_PER_RULE each. Empty: the books are in order."""
    problems: list[Problem] = []
    for rule, query in _RULES.items():
        stories = session.scalars(text(f"{query} limit {MAX_PROBLEMS_PER_RULE}"))
        problems.extend(Problem(rule, story) for story in stories)
    return problems
