"""Everything that can be known to be wrong with a book: changed rows, missing rows, rows that somebody slipped in.

The chain finds what was done to journals, lines and accounts; recomputation finds what was done to anything derived
from them; and the guards are counted, since a row can only be changed where one is off. Whoever can rewrite a whole
chain, and every snapshot of a closed period with it, is found by a head that was written down elsewhere: an anchor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from ledger import chain, checkpoints, checks
from ledger.balances import trial_balance
from ledger.chain import Head
from ledger.checks import MAX_PROBLEMS_PER_RULE, Problem
from ledger.models import Book, Period
from ledger.periods import digest

WORK_MEMORY = "64MB"
STATEMENT_TIMEOUT = "30min"
GUARDS = (
    ("ledger_journals", "ledger_journal_admitted"),
    ("ledger_journals", "ledger_journal_balanced"),
    ("ledger_journals", "ledger_journal_recorded"),
    ("ledger_journals", "ledger_journals_append_only"),
    ("ledger_journals", "ledger_journals_no_truncate"),
    ("ledger_journals", "ledger_journals_queued"),
    ("ledger_journals", "ledger_reversal_within"),
    ("ledger_postings", "ledger_posting_dated"),
    ("ledger_postings", "ledger_postings_append_only"),
    ("ledger_postings", "ledger_postings_join"),
    ("ledger_postings", "ledger_postings_match"),
    ("ledger_postings", "ledger_postings_no_truncate"),
    ("ledger_accounts", "ledger_accounts_fixed"),
    ("ledger_accounts", "ledger_accounts_kept"),
    ("ledger_balances", "ledger_balances_kept"),
    ("ledger_holds", "ledger_holds_in_time"),
    ("ledger_holds", "ledger_holds_kept"),
    ("ledger_holds", "ledger_holds_resolve_once"),
    ("ledger_chain", "ledger_chain_append_only"),
    ("ledger_chain", "ledger_chain_no_truncate"),
    ("ledger_periods", "ledger_periods_final"),
    ("ledger_periods", "ledger_periods_kept"),
)
"""(table, trigger): what stands between a program and the history."""

_GUARDS = text(
    """
    select c.relname, t.tgname from pg_trigger t join pg_class c on c.oid = t.tgrelid
    where not t.tgisinternal and t.tgenabled in ('O', 'A') and c.relnamespace = current_schema()::regnamespace
    """
)
_OUTSIDE = text(
    """
    select format('journal %s is neither in the chain nor waiting for it', j.id)
    from ledger_journals j left join ledger_chain c on c.journal_id = j.id
    where c.journal_id is null and not exists (select from ledger_unsealed u where u.journal_id = j.id)
    order by j.id limit :limit
    """
)
_ORPHANS = text(
    """
    select format('line %s belongs to no journal', p.id) from ledger_postings p
    left join ledger_journals j on j.id = p.journal_id where j.id is null order by p.id limit :limit
    """
)
_ESTRANGED = text(
    """
    select format('line %s of journal %s does not have its times, or another account''s currency or book', p.id, j.id)
    from ledger_postings p join ledger_journals j on j.id = p.journal_id
    left join ledger_accounts a on a.id = p.account_id
    where p.effective_at <> j.effective_at or p.recorded_at <> j.recorded_at
       or a.currency is distinct from p.currency or a.book_id is distinct from j.book_id
    order by p.id limit :limit
    """
)
_OVERTAKEN = text(
    """
    select format('journal %s counts in period %s and was written after it was closed', j.id, p.id)
    from ledger_periods p
    join ledger_journals j on j.book_id = p.book_id and j.effective_at >= p.starts_at and j.effective_at < p.ends_at
    left join ledger_chain c on c.journal_id = j.id
    where p.state = 'closed' and (c.sequence is null or c.sequence > p.chain_sequence) order by j.id limit :limit
    """
)
_CHECKPOINTS = text(f"{checkpoints.CHECK} limit :limit")


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found, and the heads that it was found up to."""

    problems: tuple[Problem, ...]
    heads: tuple[Head, ...]
    """One a book. Write them down outside the database: a later verification takes them as anchors."""

    @property
    def links(self) -> int:
        """How many journals the chains hold."""
        return sum(head.sequence for head in self.heads)


def verify(session: Session, anchors: Iterable[Head] = ()) -> Verification:
    """Read every book whole. At most MAX_PROBLEMS_PER_RULE problems of each rule; none: nothing was tampered with.

    Only reads. It may run beside posting and sealing.
    """
    session.execute(text(f"set local work_mem = '{WORK_MEMORY}'"))
    session.execute(text(f"set local statement_timeout = '{STATEMENT_TIMEOUT}'"))
    known = tuple(anchors)
    problems: list[Problem] = []
    books = list(session.scalars(select(Book).order_by(Book.id)))
    heads = tuple(chain.head(session, book.id) for book in books)
    for book in books:
        sealed = [anchor for anchor in (*known, *_sealed_heads(session, book.id)) if anchor.book_id == book.id]
        problems += _told("chain", chain.broken_links(session, book.id, sealed))
        problems += _told("waiting", _forged(session, book))
        problems += _told("period", _periods(session, book))
    for rule, query in (
        ("chain", _OUTSIDE),
        ("lines", _ORPHANS),
        ("lines", _ESTRANGED),
        ("period", _OVERTAKEN),
        ("checkpoint", _CHECKPOINTS),
    ):
        problems += _told(rule, session.scalars(query, {"limit": MAX_PROBLEMS_PER_RULE}))
    problems += _told("guard", _guards(session))
    return Verification((*problems, *checks.check(session)), heads)


def _told(rule: str, stories: Iterable[str]) -> list[Problem]:
    return [Problem(rule, story) for story in islice(stories, MAX_PROBLEMS_PER_RULE)]


def _sealed_heads(session: Session, book_id: int) -> Iterator[Head]:
    closed = select(Period).where(Period.book_id == book_id, Period.state == "closed").order_by(Period.starts_at)
    for period in session.scalars(closed):
        yield Head(book_id, period.chain_sequence or 0, period.chain_sha256 or b"")


def _forged(session: Session, book: Book) -> Iterator[str]:
    for row in chain.pending(session, book.id):
        if chain.is_forged(row, book.fingerprints_after_id):
            story = "does not have the fingerprint of what it says" if row.written else "is gone"
            yield f"journal {row.journal_id}, which waits to be sealed, {story}"


def _periods(session: Session, book: Book) -> Iterator[str]:
    """Snapshots against what the postings say today, and the order of the periods."""
    closed_through = None
    before: Period | None = None
    for period in session.scalars(select(Period).where(Period.book_id == book.id).order_by(Period.starts_at)):
        if before is not None and (before.ends_at != period.starts_at or (before.state, period.state) in _DISORDER):
            yield f"period {period.id} does not follow period {before.id}"
        before = period
        if period.state != "closed":
            continue
        closed_through = period.ends_at
        if digest(period) != period.snapshot_sha256:
            yield f"the snapshot of period {period.id} was changed"
        now = trial_balance(session, period.ends_at, book_id=book.id)
        rows = [[row.code, row.kind.value, row.currency, row.debit_nano, row.credit_nano] for row in now.rows]
        if rows != period.snapshot:
            yield f"the trial balance at the end of period {period.id} is not the one that it was closed with"
    if closed_through != book.closed_through:
        yield f"book {book.code} says that it is closed through {book.closed_through}, its periods {closed_through}"


_DISORDER = {(first, second) for first in ("open", "closing") for second in ("closing", "closed")}
"""States of a period and the next that cannot be: periods close in their order."""


def _guards(session: Session) -> Iterator[str]:
    found = {tuple(row) for row in session.execute(_GUARDS)}
    for table, trigger in GUARDS:
        if (table, trigger) not in found:
            yield f"the guard {trigger} on {table} is missing or switched off"
