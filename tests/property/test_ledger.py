"""Random sequences of postings, holds, captures, reversals and repetitions; after each step the books are in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID, uuid4

from hypothesis import HealthCheck, assume, settings
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
from ledger import Capture, JournalDraft, credit, debit
from marketplace.core.database import SessionFactory

LATER = datetime(2100, 1, 1, tzinfo=UTC)
AMOUNTS = st.integers(min_value=1, max_value=1_000)
PICKS = st.integers(min_value=0, max_value=10**6)


@dataclass
class Renter:
    """What the test believes of one renter."""

    account: int
    posted_nano: int = 0
    holds: dict[UUID, int] = field(default_factory=dict)

    @property
    def available_nano(self) -> int:
        return self.posted_nano - sum(self.holds.values())


class LedgerMachine(RuleBasedStateMachine):
    """Each run has renters of its own in one growing, append-only ledger."""

    def __init__(self, factory: SessionFactory) -> None:
        super().__init__()
        self.factory = factory
        self.renters: list[Renter] = []
        self.owner = self.clearing = self.owner_nano = 0
        self.posted: list[tuple[JournalDraft, int]] = []
        self.reversible: list[tuple[int, Renter, int]] = []
        self.resolved: list[UUID] = []

    @initialize()
    def open(self) -> None:
        ref = uuid4().hex
        codes = [ledger.renter_credit(f"{ref}-{i}") for i in range(2)]
        codes += [ledger.owner_pending(ref), ledger.CLEARING]
        with self.factory() as session, session.begin():
            ids = ledger.open_accounts(session, [ledger.charted(code) for code in codes])
        self.renters = [Renter(ids[code]) for code in codes[:2]]
        self.owner, self.clearing = ids[codes[2]], ids[codes[3]]

    @rule(pick=PICKS, nano=AMOUNTS)
    def top_up(self, pick: int, nano: int) -> None:
        renter = self._renter(pick)
        draft = self._draft("top_up", (debit(self.clearing, nano), credit(renter.account, nano)))
        journal = self._post(draft)
        renter.posted_nano += nano
        self.reversible.append((journal, renter, nano))

    @rule(pick=PICKS, nano=AMOUNTS)
    def hold(self, pick: int, nano: int) -> None:
        renter, hold = self._renter(pick), uuid4()
        with self.factory() as session:
            try:
                ledger.reserve(session, hold, renter.account, nano, LATER)
            except ledger.BelowFloor as error:
                refusal = error
            else:
                session.commit()
                refusal = None
        if refusal is not None:
            assert refusal.available_nano == renter.available_nano
            assert renter.available_nano < nano
            return
        assert renter.available_nano >= nano
        renter.holds[hold] = nano

    @precondition(lambda self: self._holding())
    @rule(pick=PICKS, part=st.integers(min_value=0, max_value=100))
    def capture(self, pick: int, part: int) -> None:
        renter, hold = self._some_hold(pick)
        taken = renter.holds[hold] * part // 100
        assume(taken > 0)
        lines = (debit(renter.account, taken), credit(self.owner, taken))
        self._post(self._draft("charge", lines, (Capture(hold, taken),)))
        del renter.holds[hold]
        renter.posted_nano -= taken
        self.owner_nano += taken
        self.resolved.append(hold)

    @precondition(lambda self: self._holding())
    @rule(pick=PICKS, part=st.integers(min_value=0, max_value=100))
    def shrink(self, pick: int, part: int) -> None:
        renter, hold = self._some_hold(pick)
        smaller = renter.holds[hold] * part // 100
        with self.factory() as session, session.begin():
            ledger.shrink(session, hold, smaller)
        renter.holds[hold] = smaller

    @precondition(lambda self: self._holding())
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        renter, hold = self._some_hold(pick)
        with self.factory() as session, session.begin():
            assert ledger.release(session, hold)
        del renter.holds[hold]
        self.resolved.append(hold)

    @precondition(lambda self: self.resolved)
    @rule(pick=PICKS)
    def capture_what_is_gone(self, pick: int) -> None:
        hold = self.resolved[pick % len(self.resolved)]
        renter = self._renter(pick)
        draft = self._draft("charge", (debit(renter.account, 1), credit(self.owner, 1)), (Capture(hold, 1),))
        with self.factory() as session:
            try:
                ledger.post(session, draft)
            except ledger.HoldNotOpen:
                return
        raise AssertionError("a resolved hold was captured")

    @precondition(lambda self: self.posted)
    @rule(pick=PICKS)
    def repeat(self, pick: int) -> None:
        draft, journal = self.posted[pick % len(self.posted)]
        with self.factory() as session, session.begin():
            result = ledger.post(session, draft)
        assert result == ledger.PostResult(journal, replayed=True)

    @precondition(lambda self: self.reversible)
    @rule(pick=PICKS)
    def take_back(self, pick: int) -> None:
        number = pick % len(self.reversible)
        journal, renter, nano = self.reversible[number]
        key = f"undo-{journal}"
        with self.factory() as session:
            try:
                ledger.reverse(session, journal, idempotency_key=key, source="test", outside_id=key)
            except ledger.BelowFloor:
                assert renter.available_nano < nano
                return
            session.commit()
        assert renter.available_nano >= nano
        renter.posted_nano -= nano
        del self.reversible[number]

    @invariant()
    def the_books_are_in_order(self) -> None:
        with self.factory() as session:
            assert ledger.check(session) == []
            assert ledger.trial_balance(session).balanced
            for renter in self.renters:
                self._agrees(session, renter)
            if self.owner:
                assert ledger.balance(session, self.owner).nano == self.owner_nano

    def _agrees(self, session: Session, renter: Renter) -> None:
        kept = ledger.available(session, renter.account)
        assert (kept.posted_nano, kept.available_nano) == (renter.posted_nano, renter.available_nano)
        assert ledger.balance(session, renter.account).nano == renter.posted_nano
        assert kept.available_nano >= 0

    def _renter(self, pick: int) -> Renter:
        return self.renters[pick % len(self.renters)]

    def _holding(self) -> list[tuple[Renter, UUID]]:
        return [(renter, hold) for renter in self.renters for hold in renter.holds]

    def _some_hold(self, pick: int) -> tuple[Renter, UUID]:
        holding = self._holding()
        return holding[pick % len(holding)]

    def _draft(self, kind: str, lines: tuple[ledger.Line, ...], captures: tuple[Capture, ...] = ()) -> JournalDraft:
        key = uuid4().hex
        return JournalDraft(key, kind, "test", key, lines, captures=captures)

    def _post(self, draft: JournalDraft) -> int:
        with self.factory() as session, session.begin():
            result = ledger.post(session, draft)
        assert not result.replayed
        self.posted.append((draft, result.journal_id))
        return result.journal_id


def test_any_sequence_leaves_the_books_in_order(session_factory: SessionFactory) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(session_factory),
        settings=settings(
            max_examples=15,
            stateful_step_count=20,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
