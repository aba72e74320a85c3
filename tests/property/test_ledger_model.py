"""Random commands against the ledger and against a few lines of Python that say what it must do: after each step both
agree on every balance at every time, on the trial balance, and on which error a command was refused with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.orm import Session

import ledger
from ledger import Capture, JournalDraft, Kind, Line, Money
from marketplace.core.database import SessionFactory

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
PERIOD = timedelta(days=10)
PERIODS = 4
LATER = datetime(2100, 1, 1, tzinfo=UTC)
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
LIMIT_NANO = 3_000
AMOUNTS = st.integers(min_value=-1, max_value=1_200)
"""Some of them are no amounts."""
PICKS = st.integers(min_value=0, max_value=10**6)
TIMES = st.none() | st.integers(min_value=0, max_value=PERIODS * 10 * 24 * 60).map(
    lambda minutes: EPOCH + timedelta(minutes=minutes)
)


@dataclass
class Account:
    """A checked liability, as the test believes it to be."""

    number: int
    frozen: bool = False
    holds: dict[UUID, tuple[int, bool]] = field(default_factory=dict)
    """Open hold -> (nano, whether it is past its expiry)."""

    @property
    def held_nano(self) -> int:
        return sum(nano for nano, _ in self.holds.values())


@dataclass(frozen=True)
class Entry:
    """A posted journal."""

    draft: JournalDraft
    journal_id: int
    effective_at: datetime | None
    """None: now, which is after every period of the test."""
    lines: tuple[Line, ...]
    reverses: int | None = None


class Refused(Exception):
    """The reference refuses, with this error of the ledger."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__(error.__name__)
        self.error = error


class Reference(RuleBasedStateMachine):
    """Each run has a book of its own."""

    def __init__(self, factory: SessionFactory) -> None:
        super().__init__()
        self.factory = factory
        self.book = self.clearing = self.income = 0
        self.accounts: list[Account] = []
        self.entries: list[Entry] = []
        self.resolved: list[UUID] = []
        self.periods: list[int] = []
        self.closed = 0

    @initialize()
    def open(self) -> None:
        ref = uuid4().hex
        with self._transaction() as session:
            self.book = ledger.open_book(session, ref)
            opened = [
                ledger.open_account(
                    session,
                    f"{ref}:{number}",
                    Kind.LIABILITY,
                    checked=True,
                    floor_nano=0,
                    limit_nano=LIMIT_NANO,
                    book_id=self.book,
                )
                for number in range(2)
            ]
            self.clearing = ledger.open_account(session, f"{ref}:clearing", Kind.ASSET, book_id=self.book)
            self.income = ledger.open_account(session, f"{ref}:income", Kind.INCOME, book_id=self.book)
            for number in range(PERIODS):
                start = EPOCH + number * PERIOD
                view = ledger.open_period(session, start, start + PERIOD, self.book)
                self.periods.append(view.period_id)
        self.accounts = [Account(number) for number in opened]

    # --- commands ---------------------------------------------------------------------------------------------------

    @rule(pick=PICKS, nano=AMOUNTS, at=TIMES)
    def pay_in(self, pick: int, nano: int, at: datetime | None) -> None:
        account = self._pick(pick)

        def reference() -> None:
            self._positive(nano)
            self._open_at(at)
            if self._posted(account.number) + nano > LIMIT_NANO:
                raise Refused(ledger.AboveLimit)

        self._post(reference, lambda: (ledger.debit(self.clearing, nano), ledger.credit(account.number, nano)), at)

    @rule(pick=PICKS, nano=AMOUNTS, at=TIMES)
    def spend(self, pick: int, nano: int, at: datetime | None) -> None:
        account = self._pick(pick)

        def reference() -> None:
            self._positive(nano)
            self._open_at(at)
            if account.frozen:
                raise Refused(ledger.AccountNotOpen)
            if self._available(account) < nano:
                raise Refused(ledger.BelowFloor)

        self._post(reference, lambda: (ledger.debit(account.number, nano), ledger.credit(self.income, nano)), at)

    @rule(pick=PICKS, nano=AMOUNTS, late=st.booleans())
    def hold(self, pick: int, nano: int, late: bool) -> None:
        account, hold = self._pick(pick), uuid4()

        def reference() -> None:
            self._positive(nano)
            if account.frozen:
                raise Refused(ledger.AccountNotOpen)
            if self._available(account) < nano:
                raise Refused(ledger.BelowFloor)

        def command(session: Session) -> None:
            view = ledger.reserve(session, hold, account.number, nano, LONG_AGO if late else LATER)
            assert (view.state, view.amount_nano) == ("held", nano)

        if self._agree(reference, command):
            account.holds[hold] = (nano, late)

    @precondition(lambda self: self._holding())
    @rule(pick=PICKS, part=st.integers(min_value=1, max_value=120))
    def capture(self, pick: int, part: int) -> None:
        account, hold = self._some_hold(pick)
        nano, late = account.holds[hold]
        taken = max(1, nano * part // 100)

        def reference() -> None:
            if account.frozen and taken > nano:
                raise Refused(ledger.HoldNotOpen)
            if late or taken > nano:
                raise Refused(ledger.HoldNotOpen)

        lines = (ledger.debit(account.number, taken), ledger.credit(self.income, taken))
        if self._post(reference, lambda: lines, None, (Capture(hold, taken),)):
            del account.holds[hold]
            self.resolved.append(hold)

    @precondition(lambda self: self.resolved)
    @rule(pick=PICKS)
    def capture_again(self, pick: int) -> None:
        hold = self.resolved[pick % len(self.resolved)]
        lines = (ledger.debit(self.income, 1), ledger.credit(self.clearing, 1))

        def reference() -> None:
            raise Refused(ledger.HoldNotOpen)

        self._post(reference, lambda: lines, None, (Capture(hold, 1),))

    @precondition(lambda self: self._holding())
    @rule(pick=PICKS, expire=st.booleans())
    def let_go(self, pick: int, expire: bool) -> None:
        account, hold = self._some_hold(pick)
        with self._transaction() as session:
            if expire:
                freed = ledger.expire(session, [hold]) == 1
                assert freed == account.holds[hold][1]
            else:
                freed = ledger.release(session, hold)
                assert freed
        if freed:
            del account.holds[hold]
            self.resolved.append(hold)

    @rule(pick=PICKS)
    def freeze_or_thaw(self, pick: int) -> None:
        account = self._pick(pick)
        with self._transaction() as session:
            (ledger.unfreeze if account.frozen else ledger.freeze)(session, account.number)
        account.frozen = not account.frozen

    @precondition(lambda self: self.entries)
    @rule(pick=PICKS, nano=st.none() | AMOUNTS, at=TIMES)
    def take_back(self, pick: int, nano: int | None, at: datetime | None) -> None:
        entry = self.entries[pick % len(self.entries)]
        left = self._left(entry)
        key = uuid4().hex
        taken: list[Line] = []

        def reference() -> None:
            if entry.reverses is not None:
                raise Refused(ledger.InvalidJournal)
            total = sum(max(part, 0) for part in left.values())
            if (nano is not None and nano > total) or (nano is None and not total):
                raise Refused(ledger.AlreadyReversed)
            if nano is not None:
                self._positive(nano)
            part = total if nano is None else nano
            for number, kept in left.items():
                if kept:
                    taken.append(Line(number, Money(-part if kept > 0 else part)))
            self._open_at(at)
            self._bounded(taken)

        def command(session: Session) -> int:
            return ledger.reverse(
                session,
                entry.journal_id,
                idempotency_key=key,
                source="test",
                outside_id=key,
                amount_nano=nano,
                effective_at=at,
            ).journal_id

        result = self._agree(reference, command)
        if result:
            draft = JournalDraft(key, "reversal", "test", key, tuple(taken), at, reverses_id=entry.journal_id)
            self.entries.append(Entry(draft, result, at, tuple(taken), entry.journal_id))

    @precondition(lambda self: self.entries)
    @rule(pick=PICKS, other=st.booleans())
    def repeat(self, pick: int, other: bool) -> None:
        entry = self.entries[pick % len(self.entries)]
        if entry.reverses is not None:
            return
        draft = entry.draft
        if other:
            changed = JournalDraft(draft.idempotency_key, "another kind", "test", draft.outside_id, draft.lines)

            def refuse() -> None:
                raise Refused(ledger.IdempotencyMismatch)

            self._agree(refuse, lambda session: ledger.post(session, changed).journal_id)
            return
        with self._transaction() as session:
            # A hold that a repetition names was captured the first time: nothing is captured again.
            assert ledger.post(session, draft) == ledger.PostResult(entry.journal_id, replayed=True)

    @rule()
    def seal(self) -> None:
        with self._transaction() as session:
            assert ledger.seal(session, self.book).refused == ()

    @precondition(lambda self: self.closed < PERIODS)
    @rule()
    def close_a_period(self) -> None:
        with self._transaction() as session:
            ledger.begin_close(session, self.periods[self.closed])
        with self._transaction() as session:
            view = ledger.close(session, self.periods[self.closed])
        self.closed += 1
        assert view.snapshot is not None
        self._same_trial_balance(view.snapshot.trial_balance, self._closed_through())

    # --- what must agree after each of them -------------------------------------------------------------------------

    @invariant()
    def every_balance_agrees(self) -> None:
        if not self.book:
            return
        with self.factory() as session:
            for account in self.accounts:
                kept = ledger.available(session, account.number)
                assert kept.posted_nano == self._posted(account.number)
                assert kept.pending_nano == account.held_nano
                assert kept.available_nano == self._available(account) >= 0
            for number in (*(account.number for account in self.accounts), self.clearing, self.income):
                sign = 1 if number == self.clearing else -1
                assert ledger.balance(session, number).nano == sign * self._sum(number)

    @rule(minutes=st.integers(min_value=0, max_value=PERIODS * 10 * 24 * 60), seconds=st.integers(0, 59))
    def ask_for_a_moment(self, minutes: int, seconds: int) -> None:
        at = EPOCH + timedelta(minutes=minutes, seconds=seconds)
        with self.factory() as session:
            now = ledger.trial_balance(session, book_id=self.book)
            for number in (*(account.number for account in self.accounts), self.clearing, self.income):
                sign = 1 if number == self.clearing else -1
                assert ledger.balance(session, number, as_of=at).nano == sign * self._sum(number, at)
                assert ledger.balance(session, number, recorded_before=EPOCH).nano == 0
                assert ledger.balance(session, number, recorded_before=LATER).nano == sign * self._sum(number)
                assert ledger.balance(session, number, at, recorded_before=LATER).nano == sign * self._sum(number, at)
            self._same_trial_balance(ledger.trial_balance(session, at, book_id=self.book), at)
            self._same_trial_balance(now, None)

    def teardown(self) -> None:
        with self.factory() as session:
            assert ledger.verify(session).problems == ()

    # --- the reference ----------------------------------------------------------------------------------------------

    def _sum(self, number: int, before: datetime | None = None) -> int:
        return sum(
            line.amount.nano
            for entry in self.entries
            if before is None or (entry.effective_at is not None and entry.effective_at < before)
            for line in entry.lines
            if line.account_id == number
        )

    def _posted(self, number: int) -> int:
        return -self._sum(number)

    def _available(self, account: Account) -> int:
        return self._posted(account.number) - account.held_nano

    def _closed_through(self) -> datetime:
        return EPOCH + self.closed * PERIOD

    def _positive(self, nano: int) -> None:
        if nano <= 0:
            raise Refused(ledger.InvalidAmount)

    def _open_at(self, at: datetime | None) -> None:
        if at is not None and self.closed and at < self._closed_through():
            raise Refused(ledger.PeriodClosed)

    def _bounded(self, lines: list[Line]) -> None:
        for account in self.accounts:
            moved = -sum(line.amount.nano for line in lines if line.account_id == account.number)
            if moved < 0 and self._available(account) + moved < 0:
                raise Refused(ledger.BelowFloor)
            if moved > 0 and self._posted(account.number) + moved > LIMIT_NANO:
                raise Refused(ledger.AboveLimit)

    def _left(self, entry: Entry) -> dict[int, int]:
        left: dict[int, int] = defaultdict(int)
        for other in self.entries:
            if other is entry or other.reverses == entry.journal_id:
                for line in other.lines:
                    left[line.account_id] += line.amount.nano
        return left

    def _same_trial_balance(self, trial: ledger.TrialBalance, before: datetime | None) -> None:
        assert trial.balanced
        by_code = {row.code.rsplit(":", 1)[1]: row.debit_nano - row.credit_nano for row in trial.rows}
        names = {"clearing": self.clearing, "income": self.income}
        names |= {str(number): account.number for number, account in enumerate(self.accounts)}
        for name, number in names.items():
            assert by_code.get(name, 0) == self._sum(number, before)

    # --- running both -----------------------------------------------------------------------------------------------

    def _post(
        self,
        reference: Callable[[], None],
        lines: Callable[[], tuple[Line, ...]],
        at: datetime | None,
        captures: tuple[Capture, ...] = (),
    ) -> bool:
        key = uuid4().hex
        drafts: list[JournalDraft] = []

        def command(session: Session) -> int:
            draft = JournalDraft(key, "test", "test", key, lines(), at, captures, book_id=self.book)
            drafts.append(draft)
            return ledger.post(session, draft).journal_id

        journal_id = self._agree(reference, command)
        if journal_id:
            self.entries.append(Entry(drafts[0], journal_id, at, drafts[0].lines))
        return bool(journal_id)

    def _agree(self, reference: Callable[[], None], command: Callable[[Session], int | None]) -> int:
        """Run both; 0 if both refuse, with the same error."""
        try:
            reference()
        except Refused as refused:
            expected: type[Exception] | None = refused.error
        else:
            expected = None
        raised: ledger.LedgerError | None = None
        result = None
        with self.factory() as session:
            try:
                result = command(session)
                session.commit()
            except ledger.LedgerError as error:
                raised = error
        assert type(raised) is (expected or type(None)), f"{raised!r}, expected {expected}"
        return 0 if raised else result or 1

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        with self.factory() as session, session.begin():
            yield session

    def _pick(self, pick: int) -> Account:
        return self.accounts[pick % len(self.accounts)]

    def _holding(self) -> list[tuple[Account, UUID]]:
        return [(account, hold) for account in self.accounts for hold in account.holds]

    def _some_hold(self, pick: int) -> tuple[Account, UUID]:
        holding = self._holding()
        return holding[pick % len(holding)]


def test_the_ledger_does_what_a_few_lines_of_python_say(session_factory: SessionFactory) -> None:
    run_state_machine_as_test(
        lambda: Reference(session_factory),
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
