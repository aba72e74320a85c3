from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from marketplace.finance.platform import Age, Earned, by_age

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def earned(days_ago: int, nano: int, owner: str = "a") -> Earned:
    return Earned(owner, NOW - timedelta(days=days_ago), nano)


class TestPayablesByAge:
    def test_each_credit_is_owed_since_its_day(self) -> None:
        ages = by_age([earned(10, 5), earned(45, 7), earned(75, 11), earned(200, 13)], NOW)
        assert ages == (
            Age("up to 30 days", 1, 5),
            Age("31 to 60 days", 1, 7),
            Age("61 to 90 days", 1, 11),
            Age("over 90 days", 1, 13),
        )

    def test_a_payout_takes_the_oldest_first_and_of_its_owner_alone(self) -> None:
        ages = by_age([earned(100, 10), earned(5, 10), earned(1, -12), earned(100, 3, "b")], NOW)
        assert {age.name: (age.accounts, age.nano) for age in ages if age.nano} == {
            "up to 30 days": (1, 8),
            "over 90 days": (1, 3),
        }

    @given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 10**12)), max_size=20), st.integers(0, 100))
    def test_the_ages_add_up_to_what_is_owed(self, credits_: list[tuple[int, int]], percent: int) -> None:
        total = sum(nano for _, nano in credits_)
        paid = total * percent // 100
        ages = by_age([*(earned(*credit) for credit in credits_), earned(0, -paid)], NOW)
        assert sum(age.nano for age in ages) == total - paid
