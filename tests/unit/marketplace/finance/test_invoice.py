from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marketplace.finance.bill import PricedUse
from marketplace.finance.invoice import Resent, growth, hints
from marketplace.finance.statement import Amounts, Tokens
from marketplace.metering.pricing import Rates

RATES = Rates(100_000_000, 25_000_000, 400_000_000)


def use(model: str, uncached: int, cached: int, output: int, rates: Rates = RATES) -> PricedUse:
    """At whole prices: a million tokens cost their rate."""
    amounts = Amounts(
        uncached * rates.input // 10**6, cached * rates.cached_input // 10**6, output * rates.output // 10**6
    )
    return PricedUse(model, 1, rates, 1, Tokens(uncached, cached, output), amounts)


class TestGrowth:
    def test_twice_the_input_is_growth_of_input_alone(self) -> None:
        parts = growth([use("a", 2_000_000, 0, 10**6)], [use("a", 10**6, 0, 10**6)], "before")
        assert (parts.input_nano, parts.output_nano, parts.price_nano, parts.mix_nano) == (100_000_000, 0, 0, 0)

    def test_a_dearer_price_is_growth_of_price_alone(self) -> None:
        dearer = Rates(150_000_000, 25_000_000, 400_000_000)
        parts = growth([use("a", 10**6, 0, 10**6, dearer)], [use("a", 10**6, 0, 10**6)], "before")
        assert (parts.input_nano, parts.output_nano, parts.price_nano, parts.mix_nano) == (0, 0, 50_000_000, 0)

    def test_a_cache_that_hits_lowers_the_price_paid_for_input(self) -> None:
        parts = growth([use("a", 0, 10**6, 0)], [use("a", 10**6, 0, 0)], "before")
        assert (parts.input_nano, parts.price_nano) == (0, -75_000_000)

    def test_the_same_tokens_from_a_dearer_model_are_mix(self) -> None:
        other = Rates(300_000_000, 25_000_000, 400_000_000)
        parts = growth([use("b", 10**6, 0, 0, other)], [use("a", 10**6, 0, 0)], "before")
        assert (parts.input_nano, parts.output_nano, parts.price_nano, parts.mix_nano) == (0, 0, 0, 200_000_000)

    def test_a_first_bill_grew_by_its_tokens(self) -> None:
        parts = growth([use("a", 10**6, 0, 10**6)], [], "before")
        assert (parts.input_nano, parts.output_nano, parts.mix_nano) == (100_000_000, 400_000_000, 0)

    @given(
        st.lists(st.tuples(st.sampled_from("abc"), *[st.integers(0, 10**9)] * 3), max_size=4),
        st.lists(st.tuples(st.sampled_from("abc"), *[st.integers(0, 10**9)] * 3), max_size=4),
    )
    def test_the_parts_add_up_to_the_change_to_the_nano(
        self, now: list[tuple[str, int, int, int]], before: list[tuple[str, int, int, int]]
    ) -> None:
        parts = growth([use(*facts) for facts in now], [use(*facts) for facts in before], "before")
        total = parts.input_nano + parts.output_nano + parts.price_nano + parts.mix_nano
        assert total == parts.now_nano - parts.before_nano


class TestHints:
    def test_trimming_and_caching_are_priced_by_what_was_sent_again(self) -> None:
        uses = [use("a", 10**6, 0, 0)]
        trim, cache = hints(uses, Resent(600_000, 400_000, resent_uncached_tokens=400_000), {})
        assert (trim.name, trim.saves_nano) == ("trimming", 20_000_000)
        assert (cache.name, cache.saves_nano) == ("caching", 30_000_000)

    def test_without_conversations_they_are_unknown_and_not_zero(self) -> None:
        found = hints([use("a", 10**6, 0, 0)], Resent(unknown_tokens=10**6), {})
        assert [hint.saves_nano for hint in found] == [None, None]

    def test_a_smaller_model_is_named_only_where_it_saves(self) -> None:
        cheap, dear = Rates(10_000_000, 10_000_000, 40_000_000), Rates(10**9, 10**9, 10**9)
        uses = [use("a", 10**6, 0, 10**6)]
        assert hints(uses, Resent(), {"a": ("small", cheap)})[-1].saves_nano == 450_000_000
        assert len(hints(uses, Resent(), {"a": ("small", dear)})) == 2
