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
from ledger.money import Money, positive_nano, split_nano, whole_nano

MAX_LINES = 200_000
"""Of one journal: a settlement batch stays far below."""
MAX_TEXT_CHARACTERS = 200
"""Of a key, a kind, a source and an outside id: they are indexed."""
MAX_MEMO_CHARACTERS = 100_000
MAX_MEMO_DEPTH = 20
MAIN_BOOK = 1
"""Id of the book that every database has."""
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
    """Facts for people: JSON without floats (an amount is a string or a whole number)."""
    book_id: int = MAIN_BOOK
    corrects_period_id: int | None = None
    """The closed period that it sets right. A reversal's is found by the database, and not given here."""
    closing_entry: bool = False
    """It may enter while its period is closing."""


def debit(account_id: int, nano: int, currency: str = "USD") -> Line:
    """A line that debits an account by a positive amount. Raises InvalidAmount."""
    return Line(account_id, Money(positive_nano(nano), currency))


def credit(account_id: int, nano: int, currency: str = "USD") -> Line:
    """A line that credits an account by a positive amount. Raises InvalidAmount."""
    return Line(account_id, Money(-positive_nano(nano), currency))


def validate(draft: JournalDraft) -> None:
    """Raise InvalidJournal unless the draft can be a journal: two lines or more, none zero, each currency at zero."""
    for name in ("idempotency_key", "kind", "source", "outside_id"):
        _check_name(name, getattr(draft, name))
    _check_memo(draft.memo)
    if draft.reverses_id is not None and draft.corrects_period_id is not None:
        raise InvalidJournal("A reversal corrects the period of the journal that it takes back, and names none.")
    _check_lines(draft)
    if len({capture.hold_id for capture in draft.captures}) != len(draft.captures):
        raise InvalidJournal("A hold is captured twice.")
    if any(whole_nano(capture.amount_nano) < 0 for capture in draft.captures):
        raise InvalidJournal("A hold cannot be captured by a negative amount.")


def _check_lines(draft: JournalDraft) -> None:
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


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT_CHARACTERS or not _storable(value):
        raise InvalidJournal(f"A journal's {name} is a text of 1 to {MAX_TEXT_CHARACTERS} characters, not {value!r}.")


def _check_memo(memo: Mapping[str, Any]) -> None:
    if not memo:
        return
    _check_json(dict(memo), MAX_MEMO_DEPTH)
    if len(json.dumps(dict(memo))) > MAX_MEMO_CHARACTERS:
        raise InvalidJournal(f"A memo has at most {MAX_MEMO_CHARACTERS} characters.")


def _check_json(value: object, depth_left: int) -> None:
    if depth_left == 0:
        raise InvalidJournal(f"A memo is nested {MAX_MEMO_DEPTH} deep at most.")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InvalidJournal(f"A memo's keys are texts, not {key!r}.")
            _check_json(key, depth_left)
            _check_json(inner, depth_left - 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_json(inner, depth_left - 1)
    elif isinstance(value, str):
        if not _storable(value):
            raise InvalidJournal("A memo holds a text that cannot be stored: a NUL or half a surrogate pair.")
    elif value is not None and not isinstance(value, int):
        raise InvalidJournal(
            f"A memo holds {value!r}: only texts, whole numbers, booleans, lists and objects are kept."
        )


def _storable(value: str) -> bool:
    if "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def inverse(lines: Iterable[Line]) -> tuple[Line, ...]:
    """The lines that take these back."""
    return tuple(Line(line.account_id, -line.amount) for line in lines)


def portion(left: Iterable[Line], amount_nano: int) -> tuple[Line, ...]:
    """Of what is left of a journal in one currency, the lines that take back `amount_nano` of its debits.

    Each line gives in proportion to what is left of it, by largest remainder: over several steps every line (a fee, a
    tax) follows the total to the nano, and the last step takes exactly the rest. Raises InvalidAmount for an amount
    that is not positive, InvalidJournal for two currencies or more than is left.
    """
    positive_nano(amount_nano)
    lines = list(left)
    if len({line.amount.currency for line in lines}) != 1:
        raise InvalidJournal("A part of a journal is taken back in one currency: name the lines for several.")
    taken: list[Line] = []
    for side in (1, -1):
        lines_of_side = [line for line in lines if line.amount.nano * side > 0]
        weights = [abs(line.amount.nano) for line in lines_of_side]
        if amount_nano > sum(weights):
            raise InvalidJournal(f"{amount_nano} nano are more than the {sum(weights)} that are left of the journal.")
        for line, part_nano in zip(lines_of_side, split_nano(amount_nano, weights), strict=True):
            if part_nano:
                taken.append(Line(line.account_id, Money(-side * part_nano, line.amount.currency)))
    return tuple(taken)


def body(draft: JournalDraft) -> dict[str, Any]:
    """What a repetition of the draft must agree with, field by field, in a form that does not depend on order."""
    captures_sha = captures_sha256(draft.captures)
    return make_body(
        kind=draft.kind,
        source=draft.source,
        outside_id=draft.outside_id,
        lines=[(line.account_id, line.amount.currency, line.amount.nano) for line in draft.lines],
        effective_at=draft.effective_at,
        captures_sha256=captures_sha,
        reverses_id=draft.reverses_id,
        memo=draft.memo,
        book_id=draft.book_id,
        corrects_period_id=draft.corrects_period_id,
        closing_entry=draft.closing_entry,
    )


def make_body(
    *,
    kind: str,
    source: str,
    outside_id: str,
    lines: Iterable[tuple[int, str, int]],
    effective_at: datetime | None,
    captures_sha256: bytes | None,
    reverses_id: int | None,
    memo: Mapping[str, Any],
    book_id: int,
    corrects_period_id: int | None,
    closing_entry: bool,
) -> dict[str, Any]:
    """The body out of its fields, from a draft or from what was stored. `effective_at`: only if the caller named it."""
    return {
        "kind": kind,
        "source": source,
        "outside_id": outside_id,
        "lines": sorted(list(line) for line in lines),
        "effective_at": None if effective_at is None else effective_at.astimezone(UTC).isoformat(),
        "captures": None if captures_sha256 is None else captures_sha256.hex(),
        "reverses_id": reverses_id,
        "memo": dict(memo),
        "book_id": book_id,
        # Of a reversal the database finds it.
        "corrects_period_id": None if reverses_id is not None else corrects_period_id,
        "closing_entry": closing_entry,
    }


def captures_sha256(captures: Iterable[Capture]) -> bytes | None:
    """A fingerprint of captures in any order; None of none."""
    parts = sorted([capture.hold_id.hex, capture.amount_nano] for capture in captures)
    return _fingerprint(parts) if parts else None


def body_sha256(draft: JournalDraft) -> bytes:
    """A fingerprint of `body`."""
    return fingerprint(body(draft))


def fingerprint(body: Mapping[str, Any]) -> bytes:
    """SHA-256 of a body's JSON: keys sorted, no spaces, UTF-8."""
    return _fingerprint(dict(body))


def _fingerprint(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return sha256(text.encode()).digest()


def differing(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Names of the fields in which a repetition differs from what was written."""
    return [name for name in stored if wanted[name] != stored[name]]
