"""Pure rules of money in and out."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.billing.payouts import TRANSITIONS, week_key
from marketplace.billing.refunds import cumulative_share
from marketplace.billing.runs import due_week
from marketplace.core.settings import Settings


class TestCumulativeShares:
    def test_two_partial_refunds_follow_the_totals(self) -> None:
        # A fee of 7 on 100: 30 and then 20 take 2 and 1, which is the half even 3.5 less the first 2.1.
        assert cumulative_share(7, 100, 0, 30) == 2
        assert cumulative_share(7, 100, 30, 50) == 2
        assert cumulative_share(7, 100, 50, 100) == 3

    @given(
        st.integers(1, 10**15),
        st.integers(0, 10**12),
        st.lists(st.integers(0, 10**6), min_size=1, max_size=20),
    )
    def test_steps_sum_to_the_whole(self, whole: int, part: int, cuts: list[int]) -> None:
        places = sorted({0, whole, *(cut * whole // 10**6 for cut in cuts)})
        steps = [cumulative_share(part, whole, a, b) for a, b in itertools.pairwise(places)]
        assert sum(steps) == part
        assert all(step >= 0 for step in steps)

    @pytest.mark.parametrize("step", [(5, 10, 6, 5), (5, 10, 0, 11), (5, 0, 0, 0)])
    def test_steps_outside_the_whole_are_refused(self, step: tuple[int, int, int, int]) -> None:
        with pytest.raises(ValueError, match="no steps"):
            cumulative_share(*step)


class TestWeeks:
    def test_have_one_key_each_also_around_new_year(self) -> None:
        assert week_key(datetime(2026, 12, 31, tzinfo=UTC)) == week_key(datetime(2027, 1, 3, tzinfo=UTC)) == "2026-W53"
        assert week_key(datetime(2027, 1, 4, tzinfo=UTC)) == "2027-W01"

    def test_are_due_from_their_day_on(self) -> None:
        settings = Settings(_env_file=None, payout_weekday=2)  # type: ignore[call-arg]
        assert due_week(datetime(2026, 11, 24, 23, 59, tzinfo=UTC), settings) is None
        assert due_week(datetime(2026, 11, 25, tzinfo=UTC), settings) == "2026-W48"


class TestStates:
    def test_lead_somewhere_that_exists_and_never_back_to_the_start(self) -> None:
        for targets in TRANSITIONS.values():
            assert targets <= TRANSITIONS.keys()
            assert "awaiting_approval" not in targets
