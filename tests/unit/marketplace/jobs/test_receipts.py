"""Who pays a receipt."""

from __future__ import annotations

from uuid import uuid4

import pytest

from marketplace.jobs.hot import ReceiptFacts
from marketplace.jobs.receipts import receipt_facts
from marketplace.metering.pricing import Rates, price
from marketplace.metering.tokens import TokenCounts


def receipt(*, paid_by_platform: bool) -> ReceiptFacts:
    counts = TokenCounts.of(prompt=1_001, cached=333, output=77, reasoning=11)
    return receipt_facts(
        counts,
        price(counts, Rates(123_456, 23_456, 987_654), 1_750),
        owner_organisation_id=uuid4(),
        device_id="cpu",
        simulated=False,
        node_signature=None,
        paid_by_platform=paid_by_platform,
    )


@pytest.mark.parametrize("paid_by_platform", [False, True])
def test_what_is_paid_equals_its_classes_and_its_shares(paid_by_platform: bool) -> None:
    facts = receipt(paid_by_platform=paid_by_platform)
    classes = (
        facts.input_uncached_nano + facts.input_cached_nano + facts.output_visible_nano + facts.output_reasoning_nano
    )
    assert facts.charge_nano + facts.loss_nano == classes == facts.owner_nano + facts.fee_nano


def test_our_own_failure_costs_the_renter_nothing_and_the_owner_nothing() -> None:
    ours, theirs = receipt(paid_by_platform=True), receipt(paid_by_platform=False)
    assert (ours.charge_nano, ours.loss_nano) == (0, theirs.charge_nano)
    assert ours.owner_nano == theirs.owner_nano
