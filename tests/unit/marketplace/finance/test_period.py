from __future__ import annotations

import itertools
from datetime import UTC, date, datetime, timedelta

import pytest

from marketplace.finance.period import InvalidPeriod, Period, within_hour

ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe", "America/Santiago"]


class TestTiling:
    @pytest.mark.parametrize("zone", ZONES)
    def test_the_days_of_a_year_meet_without_gap_or_overlap_over_both_clock_changes(self, zone: str) -> None:
        first = date(2026, 1, 1)
        days = [Period.of_days(first + timedelta(i), first + timedelta(i + 1), zone) for i in range(365)]
        year = Period.named("2026", zone)
        assert days[0].start == year.start
        assert days[-1].end == year.end
        assert all(before.end == after.start for before, after in itertools.pairwise(days))
        assert sum((day.end - day.start for day in days), timedelta()) == year.end - year.start

    @pytest.mark.parametrize("zone", ZONES)
    def test_the_months_of_a_year_meet_too(self, zone: str) -> None:
        months = [Period.named(f"2026-{month:02d}", zone) for month in range(1, 13)]
        assert all(before.end == after.start for before, after in itertools.pairwise(months))
        assert months[-1].end == Period.named("2027", zone).start

    def test_the_day_of_a_clock_change_has_23_or_25_hours(self) -> None:
        spring, autumn = (Period.named(day, "Europe/Berlin") for day in ("2026-03-29", "2026-10-25"))
        hours = [(day.end - day.start) / timedelta(hours=1) for day in (spring, autumn)]
        assert hours == [23, 25]


class TestNames:
    @pytest.mark.parametrize(
        "text", ["", "2026-13", "2026-02-30", "26-01", "2026-1", "2026-01-01T00", "0001-01-01", "9999", "٢٠٢٦"]
    )
    def test_what_names_no_period_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidPeriod):
            Period.named(text, "UTC")

    @pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "/etc/localtime", "\0"])
    def test_a_zone_that_does_not_exist_is_refused(self, zone: str) -> None:
        with pytest.raises(InvalidPeriod):
            Period.named("2026", zone)

    def test_a_bound_without_its_zone_is_refused(self) -> None:
        naive = datetime(2026, 1, 1)  # noqa: DTZ001  # the point of the test
        with pytest.raises(InvalidPeriod):
            Period(naive, datetime(2026, 2, 1, tzinfo=UTC))

    def test_a_period_is_told_in_its_own_zone(self) -> None:
        told = str(Period.named("2026-03", "Asia/Kathmandu"))
        assert told == "2026-03-01 00:00:00 to 2026-04-01 00:00:00 (Asia/Kathmandu)"


class TestWithinHour:
    @pytest.mark.parametrize(
        ("text", "zone_name", "hour"),
        [
            ("2026-11-30T13", "UTC", 13),
            ("2026-11-30T13:20", "Europe/Berlin", 12),
            ("2026-11-30T13+05:00", "Europe/Berlin", 8),
            ("", "UTC", 6),
        ],
    )
    def test_is_by_the_zone_s_clocks_unless_it_says_otherwise(self, text: str, zone_name: str, hour: int) -> None:
        now = datetime(2026, 11, 30, 7, 30, tzinfo=UTC)
        assert within_hour(text, zone_name, now=now).astimezone(UTC).hour == hour

    @pytest.mark.parametrize(
        ("text", "zone_name"), [("noon", "UTC"), ("2026-11-30T25", "UTC"), ("2026-11-30T13", "Mars")]
    )
    def test_that_is_none_is_refused(self, text: str, zone_name: str) -> None:
        with pytest.raises(InvalidPeriod):
            within_hour(text, zone_name, now=datetime.now(UTC))
