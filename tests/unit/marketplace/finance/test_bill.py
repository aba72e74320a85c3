from __future__ import annotations

from uuid import UUID

from marketplace.core.clock import utcnow
from marketplace.finance.bill import PricedUse, RenterBill
from marketplace.finance.period import Period
from marketplace.finance.statement import Amounts, Tokens
from marketplace.matching.types import Rates


def use(price_id: int, output_rate: int) -> PricedUse:
    rates = Rates(input=50_000_000, cached_input=10_000_000, output=output_rate)
    tokens = Tokens(input_uncached=10, input_cached=20, output_visible=5)
    return PricedUse("tiny", price_id, rates, 1, tokens, Amounts(500, 200, 1_000, 0))


def bill_of(*uses: PricedUse) -> RenterBill:
    now = utcnow()
    return RenterBill(UUID(int=1), "Rita", Period(now, now.replace(year=now.year + 1)), uses, {}, 0, 0, 0, 0, 0, 0)


class TestLines:
    def test_owners_who_ask_the_same_share_a_line_and_another_price_has_its_own(self) -> None:
        bill = bill_of(use(1, 200_000_000), use(2, 200_000_000), use(3, 400_000_000))
        assert [(line.lever, line.rate_usd, line.tokens, line.amount_nano) for line in bill.lines] == [
            ("input", "0.05", 30, 1_500),
            ("input, cached", "0.01", 60, 600),
            ("output", "0.20", 10, 2_000),
            ("output", "0.40", 5, 1_000),
        ]
        assert sum(line.amount_nano for line in bill.lines) == bill.total_nano
