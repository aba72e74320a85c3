from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest

from ledger import Capture, Head, InvalidAmount, InvalidJournal, JournalDraft, Line, Money, credit, debit
from ledger.journal import body, body_sha256, differing, inverse, portion, validate

HOLD = UUID(int=7)
DRAFT = JournalDraft("key", "charge", "jobs", "batch-1", (debit(1, 100), credit(2, 80), credit(3, 20)))


class TestValidation:
    def test_a_balanced_draft_is_a_journal(self) -> None:
        validate(DRAFT)

    @pytest.mark.parametrize(
        "draft",
        [
            replace(DRAFT, lines=(debit(1, 100), credit(2, 99))),
            replace(DRAFT, lines=(debit(1, 100),)),
            replace(DRAFT, lines=()),
            replace(DRAFT, lines=(Line(1, Money(0)), Line(2, Money(0)))),
            replace(DRAFT, lines=(debit(1, 100), credit(2, 100, "EUR"))),
            replace(DRAFT, idempotency_key=""),
            replace(DRAFT, outside_id=""),
            replace(DRAFT, effective_at=datetime(2026, 1, 1)),  # noqa: DTZ001  # a time without zone is the point
            replace(DRAFT, captures=(Capture(HOLD, 1), Capture(HOLD, 2))),
            replace(DRAFT, captures=(Capture(HOLD, -1),)),
        ],
    )
    def test_anything_else_is_refused(self, draft: JournalDraft) -> None:
        with pytest.raises(InvalidJournal):
            validate(draft)

    def test_currencies_balance_each_by_itself(self) -> None:
        validate(replace(DRAFT, lines=(debit(1, 5), credit(2, 5), debit(3, 9, "EUR"), credit(4, 9, "EUR"))))


class TestFingerprint:
    def test_the_order_of_lines_and_captures_means_nothing(self) -> None:
        captures = (Capture(HOLD, 1), Capture(UUID(int=8), 2))
        first = replace(DRAFT, captures=captures)
        second = replace(DRAFT, captures=captures[::-1], lines=DRAFT.lines[::-1])
        assert body_sha256(first) == body_sha256(second)

    def test_one_instant_in_two_zones_is_one_body(self) -> None:
        utc = datetime(2026, 3, 1, 12, tzinfo=UTC)
        kathmandu = utc.astimezone(timezone(timedelta(hours=5, minutes=45)))
        assert body_sha256(replace(DRAFT, effective_at=utc)) == body_sha256(replace(DRAFT, effective_at=kathmandu))

    @pytest.mark.parametrize(
        ("other", "field"),
        [
            (replace(DRAFT, lines=(debit(1, 100), credit(2, 79), credit(3, 21))), "lines"),
            (replace(DRAFT, outside_id="batch-2"), "outside_id"),
            (replace(DRAFT, memo={"receipts": 2}), "memo"),
            (replace(DRAFT, reverses_id=9), "reverses_id"),
            (replace(DRAFT, kind="refund"), "kind"),
        ],
    )
    def test_what_differs_is_named(self, other: JournalDraft, field: str) -> None:
        assert body_sha256(other) != body_sha256(DRAFT)
        assert differing(body(other), body(DRAFT)) == [field]

    def test_the_key_is_no_part_of_the_body(self) -> None:
        assert body_sha256(replace(DRAFT, idempotency_key="another")) == body_sha256(DRAFT)


def test_the_inverse_takes_each_line_back() -> None:
    assert inverse(DRAFT.lines) == (Line(1, Money(-100)), Line(2, Money(80)), Line(3, Money(20)))


class TestPortions:
    LEFT = (Line(1, Money(100)), Line(2, Money(-73)), Line(3, Money(-27)))

    def test_parts_follow_the_whole_and_sum_to_it(self) -> None:
        left = {line.account_id: line.amount.nano for line in self.LEFT}
        for nano, fee_left in ((30, 19), (20, 14), (50, 0)):
            lines = [Line(account, Money(kept)) for account, kept in left.items()]
            for line in portion(lines, nano):
                left[line.account_id] += line.amount.nano
            assert left[3] == -fee_left
        assert set(left.values()) == {0}

    def test_each_part_balances(self) -> None:
        for nano in range(1, 101):
            assert sum(line.amount.nano for line in portion(self.LEFT, nano)) == 0

    @pytest.mark.parametrize("nano", [0, -1, 1.5])
    def test_what_is_no_amount_is_refused(self, nano: int) -> None:
        with pytest.raises(InvalidAmount):
            portion(self.LEFT, nano)

    def test_more_than_is_left_and_two_currencies_are_refused(self) -> None:
        with pytest.raises(InvalidJournal, match="more than"):
            portion(self.LEFT, 101)
        with pytest.raises(InvalidJournal, match="currency"):
            portion((*self.LEFT, Line(4, Money(1, "EUR")), Line(5, Money(-1, "EUR"))), 1)


class TestHeads:
    def test_a_head_survives_being_written_down(self) -> None:
        head = Head(1, 42, bytes(range(32)))
        assert Head.parse(f" {head}\n") == head

    @pytest.mark.parametrize("text", ["", "1:2", "1:2:zz", "a:2:00"])
    def test_what_is_no_head_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError):
            Head.parse(text)
