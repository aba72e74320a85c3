"""Sums of sealed postings by account and UTC day or minute, so that no balance reads a whole history.

Both times of a posting are summed: when it counts, and when it was recorded. The sealer adds each journal once, in the
transaction that takes it from ledger_unsealed; so a journal is either in the sums or in that list, for every reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.orm import Session

DAY_S = 86_400
MINUTE_S = 60

_SUMS = """
    select account_id, span_s, starts_at, sum(effective_debit) as effective_debit_nano,
           sum(effective_credit) as effective_credit_nano, sum(recorded_debit) as recorded_debit_nano,
           sum(recorded_credit) as recorded_credit_nano
    from (
      select p.account_id, s.span_s, date_trunc(s.unit, p.effective_at, 'UTC') as starts_at,
             greatest(p.amount_nano, 0) as effective_debit, greatest(-p.amount_nano, 0) as effective_credit,
             0 as recorded_debit, 0 as recorded_credit
      from ledger_postings p cross join (values (86400, 'day'), (60, 'minute')) as s (span_s, unit) where {wanted}
      union all
      select p.account_id, s.span_s, date_trunc(s.unit, p.recorded_at, 'UTC'), 0, 0,
             greatest(p.amount_nano, 0), greatest(-p.amount_nano, 0)
      from ledger_postings p cross join (values (86400, 'day'), (60, 'minute')) as s (span_s, unit) where {wanted}
    ) moved
    group by account_id, span_s, starts_at
"""
_SEALED = "not exists (select from ledger_unsealed u where u.journal_id = p.journal_id)"
_COLUMNS = """account_id, span_s, starts_at, effective_debit_nano, effective_credit_nano, recorded_debit_nano,
              recorded_credit_nano"""
_FOLD = text(
    f"""
    insert into ledger_checkpoints as c ({_COLUMNS})
    {_SUMS.format(wanted="p.journal_id = any(cast(:ids as bigint[]))")} order by account_id, span_s, starts_at
    on conflict (account_id, span_s, starts_at) do update
      set effective_debit_nano = c.effective_debit_nano + excluded.effective_debit_nano,
          effective_credit_nano = c.effective_credit_nano + excluded.effective_credit_nano,
          recorded_debit_nano = c.recorded_debit_nano + excluded.recorded_debit_nano,
          recorded_credit_nano = c.recorded_credit_nano + excluded.recorded_credit_nano
    """  # noqa: S608  # constants of this module
)
_REBUILD = text(f"insert into ledger_checkpoints ({_COLUMNS}) {_SUMS.format(wanted=_SEALED)}")
CHECK = f"""
    select format('account %s has another %s from %s than its postings say', account_id,
                  case span_s when 60 then 'minute' else 'day' end, starts_at)
    from (({_SUMS.format(wanted=_SEALED)}) except all select {_COLUMNS} from ledger_checkpoints
          union all
          (select {_COLUMNS} from ledger_checkpoints except all {_SUMS.format(wanted=_SEALED)})) off
    group by account_id, span_s, starts_at order by account_id, span_s, starts_at
"""  # noqa: S608  # constants of this module
"""Compares every sum with the postings; a row is a difference."""


def fold(session: Session, journal_ids: Sequence[int]) -> None:
    """Add journals that have just been sealed. The caller holds the sealer's lock."""
    session.execute(_FOLD, {"ids": list(journal_ids)})


def rebuild(session: Session) -> None:
    """Compute every sum anew. The caller keeps sealers away."""
    session.execute(text("delete from ledger_checkpoints"))
    session.execute(_REBUILD)
