"""When a delivery is tried again, given up, and an endpoint left alone."""

from __future__ import annotations

from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.gateway.webhooks.retries import DELAYS_S, JITTER, MAX_TRIES, delay_s, why_disable


class TestTheDelay:
    @pytest.mark.parametrize(("tries", "usual_s"), list(enumerate(DELAYS_S, start=1)))
    def test_follows_the_table_with_some_jitter(self, tries: int, usual_s: int) -> None:
        found = [delay_s(tries, Random(seed)) for seed in range(50)]
        assert all(each is not None and abs(each - usual_s) <= usual_s * JITTER for each in found)
        assert len(set(found)) > 1

    def test_ends_after_the_last_try_within_about_a_day(self) -> None:
        assert delay_s(MAX_TRIES, Random(1)) is None
        assert 12 * 3_600 < sum(DELAYS_S) < 30 * 3_600

    @given(st.integers(1, 20), st.integers())
    def test_grows_and_is_never_negative(self, tries: int, seed: int) -> None:
        first, second = delay_s(tries, Random(seed)), delay_s(tries + 1, Random(seed))
        assert first is None or first > 0
        assert first is None or second is None or second > first


class TestDisabling:
    @pytest.mark.parametrize(
        ("status", "hours", "disables"),
        [(410, 0, True), (500, 71, False), (500, 72, True), (None, 72, True), (404, 1, False)],
    )
    def test_comes_with_the_receiver_s_word_or_with_time(self, status: int | None, hours: int, disables: bool) -> None:
        assert (why_disable(status, timedelta(hours=hours)) is not None) is disables
