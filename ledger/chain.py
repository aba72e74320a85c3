"""The hash chain over a book: each journal in its place, tied to all before it.

A journal's canonical bytes are PostgreSQL's binary form (record_send) of its columns, followed by that of each of its
lines in the order of their ids, with the code and kind of the line's account: every field with its length, so that no
two journals read alike. A link is SHA-256 of the link before it and these bytes; the first follows 32 zero bytes.

Posting knows nothing of the chain: a trigger notes each journal in ledger_unsealed, and `seal` (on a timer, one at a
time a book) takes them from there in the order of their ids. So the order of the chain is that of sealing. Each link
can be judged with nothing but its neighbour: an edited journal is found by its own link, not by all that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from itertools import chain
from typing import Any

import psycopg
from sqlalchemy import Row, text
from sqlalchemy.orm import Session

from ledger import journal as pure
from ledger.checkpoints import fold
from ledger.errors import UnknownBook
from ledger.journal import MAIN_BOOK

SEAL_BATCH = 2_000
"""Journals sealed by one call, at most."""
VERIFY_BATCH = 20_000
"""Links read at once."""
FETCH_ROWS = 2_000
SPARSE = 4
"""Batches that span this many times more ids than they have journals are read id by id."""
SEAL_LOCK_CLASS = 1818584168
"""Advisory lock, with the book's id: one sealer a book."""

_JOURNAL_BYTES = """
    record_send(row(j.book_id, j.id, j.idempotency_key, j.kind, j.source, j.outside_id, j.body_sha256,
                    j.captures_sha256, j.dated, j.effective_at, j.recorded_at, j.reverses_id, j.corrects_period_id,
                    j.closing_entry, j.memo))
"""
_LINE_BYTES = """
    record_send(row(p.id, p.account_id, a.code, a.kind, p.currency, p.amount_nano, p.effective_at, p.recorded_at))
"""
# Journals and their lines are both read in the order of their ids and merged: nothing is sorted, nothing is kept.
_CANONICAL = f"""
    select j.id, {_JOURNAL_BYTES} || coalesce(l.lines, ''::bytea)
    from ledger_journals j
    left join (
      select p.journal_id, string_agg({_LINE_BYTES}, ''::bytea order by p.id) as lines
      from ledger_postings p left join ledger_accounts a on a.id = p.account_id
      where p.journal_id {{wanted}} group by p.journal_id) l on l.journal_id = j.id
    where j.id {{wanted}}
"""  # noqa: S608  # constants of this module
_CANONICAL_RANGE = _CANONICAL.format(wanted="between %(first)s and %(last)s")
_CANONICAL_LISTED = _CANONICAL.format(wanted="= any(%(ids)s)")

_HEAD = text("select sealed_sequence, sealed_sha256, fingerprints_after_id from ledger_books where id = :book")
_PENDING = text(
    """
    select u.journal_id, j.id is not null as written, j.kind, j.source, j.outside_id, j.body_sha256,
           j.captures_sha256, j.dated, j.effective_at, j.reverses_id, j.corrects_period_id, j.closing_entry, j.memo,
           j.book_id, l.accounts, l.currencies, l.amounts
    from ledger_unsealed u
    left join ledger_journals j on j.id = u.journal_id
    left join lateral (
      select array_agg(p.account_id) as accounts, array_agg(p.currency) as currencies,
             array_agg(p.amount_nano) as amounts
      from ledger_postings p where p.journal_id = u.journal_id) l on true
    where u.book_id = :book and (u.refused_at is null or :refused) order by u.journal_id limit :limit
    """
)
_LINK = text(
    """
    insert into ledger_chain (book_id, sequence, journal_id, sha256)
    select :book, * from unnest(cast(:sequences as bigint[]), cast(:journals as bigint[]), cast(:hashes as bytea[]))
    """
)
_TAKE = text("delete from ledger_unsealed where journal_id = any(cast(:ids as bigint[]))")
_REFUSE = text("update ledger_unsealed set refused_at = now() where journal_id = any(cast(:ids as bigint[]))")
_MOVE_HEAD = text("update ledger_books set sealed_sequence = :sequence, sealed_sha256 = :head where id = :book")
_LINKS = """
    select sequence, journal_id, sha256 from ledger_chain
    where book_id = %s and sequence > %s order by sequence limit %s
"""


@dataclass(frozen=True, slots=True)
class Head:
    """Where a chain ends. Written down outside the database it proves everything before it."""

    book_id: int
    sequence: int
    sha256: bytes

    def __str__(self) -> str:
        return f"{self.book_id}:{self.sequence}:{self.sha256.hex()}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """The opposite of str(). Raises ValueError."""
        book, sequence, digest = text.strip().split(":")
        return cls(int(book), int(sequence), bytes.fromhex(digest))


@dataclass(frozen=True, slots=True)
class Sealed:
    """What one call of `seal` did."""

    count: int
    head: Head
    refused: tuple[int, ...] = ()
    """Journals whose fingerprint does not fit them: not written by this library. They are never sealed."""


def head(session: Session, book_id: int = MAIN_BOOK) -> Head:
    """The end of a book's chain. Raises UnknownBook."""
    row = _book(session, book_id)
    return Head(book_id, row.sealed_sequence, row.sealed_sha256)


def seal(session: Session, book_id: int = MAIN_BOOK, limit: int = SEAL_BATCH) -> Sealed:
    """Append up to `limit` committed journals to a book's chain, and add them to the checkpoints of balances.

    While another session seals the book, nothing is done. Raises UnknownBook.
    """
    alone = session.scalar(
        text("select pg_try_advisory_xact_lock(:space, :book)"), {"space": SEAL_LOCK_CLASS, "book": book_id}
    )
    book = _book(session, book_id)
    before = Head(book_id, book.sealed_sequence, book.sealed_sha256)
    if not alone:
        return Sealed(0, before)
    rows = session.execute(_PENDING, {"book": book_id, "limit": limit, "refused": False}).all()
    strange = {row.journal_id for row in rows if is_forged(row, book.fingerprints_after_id)}
    ids = [row.journal_id for row in rows if row.journal_id not in strange]
    if strange:
        session.execute(_REFUSE, {"ids": sorted(strange)})
    if not ids:
        return Sealed(0, before, tuple(sorted(strange)))
    canonical = dict(chain.from_iterable(_canonical(session, ids)))
    hashes = []
    link = before.sha256
    for journal_id in ids:
        link = sha256(link + canonical[journal_id]).digest()
        hashes.append(link)
    after = Head(book_id, before.sequence + len(ids), link)
    sequences = list(range(before.sequence + 1, after.sequence + 1))
    session.execute(_LINK, {"book": book_id, "sequences": sequences, "journals": ids, "hashes": hashes})
    session.execute(_TAKE, {"ids": ids})
    session.execute(_MOVE_HEAD, {"book": book_id, "sequence": after.sequence, "head": after.sha256})
    fold(session, ids)
    return Sealed(len(ids), after, tuple(sorted(strange)))


def seal_all(session: Session, book_id: int = MAIN_BOOK) -> Head:
    """Seal whatever can be sealed, in this transaction. Waits for another sealer. Raises UnknownBook."""
    session.execute(text("select pg_advisory_xact_lock(:space, :book)"), {"space": SEAL_LOCK_CLASS, "book": book_id})
    while True:
        sealed = seal(session, book_id)
        if not sealed.count:
            return sealed.head


def pending(session: Session, book_id: int) -> Iterator[Row[Any]]:
    """The journals that wait to be sealed, those that were refused included."""
    yield from session.execute(_PENDING, {"book": book_id, "limit": None, "refused": True})


def is_forged(row: Row[Any], fingerprints_after_id: int) -> bool:
    """True if a waiting journal is gone, or does not have the fingerprint of its own fields and lines."""
    if not row.written or row.accounts is None:
        return True
    if row.journal_id <= fingerprints_after_id:
        return False
    body = pure.make_body(
        kind=row.kind,
        source=row.source,
        outside_id=row.outside_id,
        lines=zip(row.accounts, row.currencies, row.amounts, strict=True),
        effective_at=row.effective_at if row.dated else None,
        captures_sha256=row.captures_sha256,
        reverses_id=row.reverses_id,
        memo=row.memo,
        book_id=row.book_id,
        corrects_period_id=row.corrects_period_id,
        closing_entry=row.closing_entry,
    )
    return bool(pure.fingerprint(body) != row.body_sha256)


def broken_links(session: Session, book_id: int, anchors: Iterable[Head] = ()) -> Iterator[str]:
    """Read a whole chain and say what is wrong with it: journals changed or gone, links missing, a head or an anchor
    that the chain does not reach. Raises UnknownBook."""
    expected = head(session, book_id)
    marks = {anchor.sequence: anchor for anchor in (*anchors, expected) if anchor.sequence}
    yield from _contradictions((*anchors, expected))
    sequence, link = 0, bytes(32)
    while links := _links(session, book_id, sequence):
        yield from _gaps(links, sequence)
        yield from _broken(session, links, link)
        sequence, _, link = links[-1]
        for passed in [at for at in marks if at <= sequence]:
            yield from _missed(links, marks.pop(passed))
    yield from (f"the chain of book {book_id} ends at {sequence}, it once reached {missing}" for missing in marks)
    # What was sealed meanwhile is there as well; a book that says less than its chain has been set back.
    if sequence > head(session, book_id).sequence:
        yield f"the chain of book {book_id} has {sequence} links, the book knows of {expected.sequence}"


def _links(session: Session, book_id: int, after: int) -> list[tuple[int, int, bytes]]:
    """(sequence, journal, hash) of the next links."""
    with _connection(session).cursor(binary=True) as cursor:
        return cursor.execute(_LINKS, (book_id, after, VERIFY_BATCH)).fetchall()


def _missed(links: Sequence[tuple[int, int, bytes]], mark: Head) -> Iterator[str]:
    found = next((sha for sequence, _, sha in links if sequence == mark.sequence), b"")
    if found != mark.sha256:
        yield f"link {mark.sequence} is {found.hex()}, it was {mark.sha256.hex()} when it was written down"


def _contradictions(anchors: Sequence[Head]) -> Iterator[str]:
    known: dict[int, bytes] = {0: bytes(32)}
    for anchor in anchors:
        if known.setdefault(anchor.sequence, anchor.sha256) != anchor.sha256:
            yield f"link {anchor.sequence} was written down twice, differently"


def _gaps(links: Sequence[tuple[int, int, bytes]], after: int) -> Iterator[str]:
    if links[-1][0] == after + len(links):
        return
    for sequence, _, _ in links:
        if sequence != after + 1:
            yield f"links {after + 1} to {sequence - 1} are missing"
        after = sequence


def _broken(session: Session, links: Sequence[tuple[int, int, bytes]], before: bytes) -> Iterator[str]:
    """Links that do not follow from the one before and their journal, each judged by itself."""
    sequences, ids, hashes = zip(*links, strict=True)
    expected = dict(zip(ids, zip(sequences, (before, *hashes[:-1]), hashes, strict=True), strict=True))
    for rows in _canonical(session, ids):
        for journal_id, canonical in rows:
            found = expected.pop(journal_id, None)
            if found is not None and sha256(found[1] + canonical).digest() != found[2]:
                who = "the journal, its lines or the chain were changed"
                yield f"link {found[0]} does not fit journal {journal_id}: {who}"
    yield from (f"journal {journal} of link {sequence} is gone" for journal, (sequence, _, _) in expected.items())


def _canonical(session: Session, ids: Sequence[int]) -> Iterator[list[tuple[int, bytes]]]:
    """(journal, canonical bytes), streamed in lists; of neighbours there may be more than were asked for."""
    first, last = min(ids), max(ids)
    with _connection(session).cursor(name="ledger_canonical", binary=True) as cursor:
        if last - first < SPARSE * len(ids):
            cursor.execute(_CANONICAL_RANGE, {"first": first, "last": last})
        else:
            cursor.execute(_CANONICAL_LISTED, {"ids": list(ids)})
        while rows := cursor.fetchmany(FETCH_ROWS):
            yield rows


def _connection(session: Session) -> psycopg.Connection[tuple[Any, ...]]:
    """The driver's own connection: a whole chain is read, and rows that are plain tuples take half the time."""
    raw = session.connection().connection.driver_connection
    assert isinstance(raw, psycopg.Connection)
    return raw


def _book(session: Session, book_id: int) -> Row[Any]:
    row = session.execute(_HEAD, {"book": book_id}).one_or_none()
    if row is None:
        raise UnknownBook(f"There is no book {book_id}.")
    return row


def unsealed_before(session: Session, book_id: int, before: datetime) -> int:
    """How many journals that count before this time are not in the chain yet."""
    query = text(
        """
        select count(*) from ledger_unsealed u left join ledger_journals j on j.id = u.journal_id
        where u.book_id = :book and (j.id is null or j.effective_at < :before)
        """
    )
    return session.scalar(query, {"book": book_id, "before": before}) or 0
