"""Standing: how it is earned and lost, and what never counts."""

from __future__ import annotations

import pytest

from marketplace.matching.standing import (
    BAR_S,
    PROMOTE_AFTER_S,
    PROMOTE_COMPLETED,
    Record,
    Standing,
    judge,
    missing,
    outages,
)

LONG_S = 1e6


class TestStanding:
    @pytest.mark.parametrize(
        ("standing", "record", "since_s", "becomes"),
        [
            (Standing.PROBATION, Record(PROMOTE_COMPLETED, 0), PROMOTE_AFTER_S, Standing.PROVEN),
            (Standing.PROBATION, Record(PROMOTE_COMPLETED, 0), PROMOTE_AFTER_S - 1, None),
            (Standing.PROBATION, Record(PROMOTE_COMPLETED - 1, 0), LONG_S, None),
            (Standing.PROBATION, Record(PROMOTE_COMPLETED, 3), LONG_S, None),
            (Standing.PROBATION, Record(5, 12), LONG_S, Standing.BARRED),
            (Standing.PROVEN, Record(1_000, 50), LONG_S, None),
            (Standing.PROVEN, Record(1, 2), LONG_S, None),
            (Standing.PROVEN, Record(10, 3), LONG_S, Standing.PROBATION),
            (Standing.PROVEN, Record(10, 10), LONG_S, Standing.BARRED),
            (Standing.PROVEN, Record(10, 0, forgiven=50), LONG_S, None),
            (Standing.BARRED, Record(0, 50), BAR_S - 1, None),
            (Standing.BARRED, Record(0, 50), BAR_S, Standing.PROBATION),
        ],
    )
    def test_follows_the_record(
        self, standing: Standing, record: Record, since_s: float, becomes: Standing | None
    ) -> None:
        judgement = judge(standing, record, since_s=since_s)
        assert (judgement.standing if judgement else None) is becomes

    def test_changes_with_a_reason_in_figures(self) -> None:
        judgement = judge(Standing.PROVEN, Record(10, 10, 4), since_s=LONG_S)
        assert judgement is not None
        assert judgement.reason == (
            "50% of its work failed: 10 completed and 10 failed by the node's own fault in 7 days (4 more do not count)"
        )

    def test_says_what_is_missing(self) -> None:
        assert missing(Standing.PROVEN, Record(0, 0), since_s=0.0) == ""
        assert missing(Standing.PROBATION, Record(5, 2), since_s=600.0) == (
            "15 more completed attempts, a share of faults of at most 10% (now 29%), 50 more minutes"
        )
        assert "23.0 more hours" in missing(Standing.BARRED, Record(0, 9), since_s=3_600.0)


class TestAnOutageOfOurs:
    def test_is_many_nodes_failing_in_one_minute(self) -> None:
        assert outages({10: (6, 8), 11: (5, 9), 12: (1, 9), 20: (9, 9)}) == [(10, 11), (20, 20)]

    def test_is_not_a_few_nodes_nor_a_small_part(self) -> None:
        assert outages({10: (4, 4), 11: (6, 100)}) == []
