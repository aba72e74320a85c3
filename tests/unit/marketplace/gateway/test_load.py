"""Turning work away: what can wait first, clients that wait last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.gateway.load import BOUNDS, Load, Overloaded, Tier


def refused(load: Load) -> list[Tier]:
    found = []
    for tier in Tier:
        try:
            load.require(tier)
        except Overloaded:
            found.append(tier)
    return found


class TestWhoIsTurnedAway:
    @pytest.mark.parametrize(
        ("late_s", "records", "requests", "tiers"),
        [
            (0.0, 0, 0, []),
            (0.3, 0, 0, [Tier.WAITING]),
            (0.0, 1_001, 0, [Tier.WAITING]),
            (0.0, 0, 6, [Tier.WAITING]),
            (1.1, 0, 0, [Tier.WAITING, Tier.INTERACTIVE]),
            (0.0, 10_001, 0, [Tier.WAITING, Tier.INTERACTIVE]),
        ],
    )
    def test_is_the_lower_tier_first(self, late_s: float, records: int, requests: int, tiers: list[Tier]) -> None:
        load = Load(lambda: records, most_requests=10)
        load.late_s, load.requests = late_s, requests
        assert refused(load) == tiers

    @given(st.floats(0, 5), st.integers(0, 50_000), st.integers(0, 10))
    def test_is_never_a_client_that_waits_while_work_that_can_wait_is_taken(
        self, late_s: float, records: int, requests: int
    ) -> None:
        load = Load(lambda: records, most_requests=10)
        load.late_s, load.requests = late_s, requests
        assert refused(load) in ([], [Tier.WAITING], [Tier.WAITING, Tier.INTERACTIVE])


class TestRequestsInHand:
    def test_are_bounded_and_counted_down_whatever_happens(self) -> None:
        load = Load(lambda: 0, most_requests=1)
        with load.hold():
            with pytest.raises(Overloaded), load.hold():
                pass
            assert load.requests == 1
        with pytest.raises(ValueError, match="broken"), load.hold():
            raise ValueError("broken")
        assert load.requests == 0


class TestLateness:
    def test_is_smoothed_so_that_one_pause_turns_nobody_away(self) -> None:
        load = Load(lambda: 0, most_requests=10)
        load.measured(1.0)
        assert refused(load) == []
        for _ in range(3):
            load.measured(1.0)
        assert refused(load) == [Tier.WAITING]
        for _ in range(20):
            load.measured(-0.001)
        assert load.late_s < BOUNDS[Tier.WAITING].late_s
