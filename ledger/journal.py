"""Journals before they are written: pure values, and the rules that make them journals."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from types import MappingProxyType
from typing import Any
from uuid import UUID

from ledger.errors import InvalidJournal
from ledger.money import Money

MAX_LINES = 200_000
"""Of one journal: a settlement batch stays far below."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Line:
    """One line: debit positive, credit negative."""

    account_id: int
    amount: Money


@dataclass(frozen=True, slots=True)
class Capture:
    """Resolve a hold with this journal: `amount_nano` of it is taken by the lines, the rest is free again."""

    hold_id: UUID
    amount_nano: int


@dataclass(frozen=True, slots=True)
class JournalDraft:
    """A journal as its caller wants it.

    `idempotency_key` is the caller's, for ever unique; `(source, kind, outside_id)` says which outside event it stands
    for, once. The ledger never learns what the outside thing is.
    """

    idempotency_key: str
    kind: str
    source: str
    outside_id: str
    lines: tuple[Line, ...]
    effective_at: datetime | None = None
    """When it counts, timezone-aware. None: when the database writes it (and a repetition need not say when)."""
    captures: tuple[Capture, ...] = ()
    reverses_id: int | None = None
    memo: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """Facts for people, JSON."""


def debit(account_id: int, nano: int, currency: str = "USD") -> Line:
    """A line that debits an account by a positive amount."""
    return Line(account_id, Money(nano, currency))


def credit(account_id: int, nano: int, currency: str = "USD") -> Line:
    """A line that credits an account by a positive amount."""
    return Line(account_id, Money(-nano, currency))


def validate(draft: JournalDraft) -> None:
    """Raise InvalidJournal unless the draft can be a journal: two lines or more, none zero, each currency at zero."""
    if not all((draft.idempotency_key, draft.kind, draft.source, draft.outside_id)):
        raise InvalidJournal("A journal needs an idempotency key, a kind, a source and an outside id.")
    if not 2 <= len(draft.lines) <= MAX_LINES:
        raise InvalidJournal(f"A journal has 2 to {MAX_LINES} lines, this one has {len(draft.lines)}.")
    if draft.effective_at is not None and draft.effective_at.tzinfo is None:
        raise InvalidJournal("effective_at must carry its time zone.")
    totals: dict[str, int] = defaultdict(int)
    for line in draft.lines:
        if line.amount.nano == 0:
            raise InvalidJournal(f"The line on account {line.account_id} is zero.")
        totals[line.amount.currency] += line.amount.nano
    off = [Money(total, currency) for currency, total in totals.items() if total]
    if off:
        raise InvalidJournal(f"The lines do not sum to zero: off by {', '.join(map(str, off))}.")
    if len({capture.hold_id for capture in draft.captures}) != len(draft.captures):
        raise InvalidJournal("A hold is captured twice.")
    if any(capture.amount_nano < 0 for capture in draft.captures):
        raise InvalidJournal("A hold cannot be captured by a negative amount.")


def inverse(lines: Iterable[Line]) -> tuple[Line, ...]:
    """The lines that take these back."""
    return tuple(Line(line.account_id, -line.amount) for line in lines)


def body(draft: JournalDraft) -> dict[str, Any]:
    """What a repetition of the draft must agree with, field by field, in a form that does not depend on order."""
    return {
        "kind": draft.kind,
        "source": draft.source,
        "outside_id": draft.outside_id,
        "lines": sorted([line.account_id, line.amount.currency, line.amount.nano] for line in draft.lines),
        "effective_at": None if draft.effective_at is None else draft.effective_at.astimezone(UTC).isoformat(),
        "captures": sorted([capture.hold_id.hex, capture.amount_nano] for capture in draft.captures),
        "reverses_id": draft.reverses_id,
        "memo": dict(draft.memo),
    }


def body_sha256(draft: JournalDraft) -> bytes:
    """A fingerprint of `body`. Raises TypeError for a memo that is not JSON."""
    text = json.dumps(body(draft), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return sha256(text.encode()).digest()


def differing(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Names of the fields in which a repetition differs from what was written.

    Captures are not kept with the journal, nor whether it named its own time: where all that is kept agrees, it is
    one of those.
    """
    fields = [name for name in stored if name != "effective_at" and wanted[name] != stored[name]]
    if wanted["effective_at"] not in (None, stored["effective_at"]):
        fields.append("effective_at")
    return fields or ["captures or effective_at"]
