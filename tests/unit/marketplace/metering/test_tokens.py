"""Rules that turn claims about tokens into billable counts."""

from __future__ import annotations

import pytest

from marketplace.metering.tokens import TokenCounts, billable_cached, billable_output


class TestClassesAreDisjoint:
    def test_totals_are_derived(self) -> None:
        counts = TokenCounts.of(prompt=100, cached=40, output=30, reasoning=12)
        assert counts == TokenCounts(60, 40, 18, 12)
        assert (counts.input, counts.output) == (100, 30)

    def test_a_part_never_exceeds_its_whole(self) -> None:
        assert TokenCounts.of(prompt=10, cached=99, output=5, reasoning=99) == TokenCounts(0, 10, 0, 5)

    def test_a_negative_part_counts_as_none(self) -> None:
        assert TokenCounts.of(prompt=10, cached=-3, output=5, reasoning=-1) == TokenCounts(10, 0, 5, 0)


class TestBillableOutput:
    @pytest.mark.parametrize(
        ("claimed", "recount", "max_tokens", "billed"),
        [
            (None, 100, 200, 100),  # no ids: our count
            (None, 300, 200, 200),  # never more than was asked
            (100, 100, 200, 100),
            (104, 100, 200, 104),  # 2% and two tokens of slack
            (105, 100, 200, 104),
            (10_000, 100, 20_000, 104),  # an inflated claim
            (90, 100, 200, 90),  # a claim below our count is the node's word against itself
            (1, 0, 16, 1),  # an immediate end mark: one token, no text
            (0, 0, 16, 0),  # zero is an answer
            (150, 150, 128, 128),
        ],
    )
    def test_the_smaller_of_claim_and_recount_with_slack(
        self, claimed: int | None, recount: int, max_tokens: int, billed: int
    ) -> None:
        assert billable_output(claimed, recount, max_tokens) == billed

    def test_a_negative_recount_is_refused(self) -> None:
        with pytest.raises(ValueError, match="negative"):
            billable_output(None, -1, 10)


class TestBillableCached:
    @pytest.mark.parametrize(
        ("reported", "proven", "prompt", "billed"),
        [
            (None, 0, 100, 0),
            (0, 0, 100, 0),
            (64, 0, 100, 64),
            (0, 48, 100, 48),  # the node denies what it promised to keep
            (64, 48, 100, 64),
            (None, 48, 100, 48),
            (500, 0, 100, 100),
            (-5, 0, 100, 0),
        ],
    )
    def test_the_larger_of_report_and_proof_within_the_prompt(
        self, reported: int | None, proven: int, prompt: int, billed: int
    ) -> None:
        assert billable_cached(reported, proven, prompt) == billed
