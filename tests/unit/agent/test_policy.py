"""When idle is idle."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from agent.config import ConfigError, OwnerTable
from agent.policy import Policy, Sight, Verdict, hottest_c, parse_window

MONDAY_NOON = datetime(2026, 3, 2, 12, 0)  # noqa: DTZ001 - a wall clock has no zone
GIB = 1 << 30


def sight(now: float = 0.0, **changes: Any) -> Sight:
    values: dict[str, Any] = {
        "now": now,
        "local": MONDAY_NOON,
        "paused": False,
        "memory_free_bytes": 4 * GIB,
        "temperature_c": 50.0,
        **changes,
    }
    return Sight(**values)


class TestWindows:
    @pytest.mark.parametrize(
        ("window", "weekday", "clock", "inside"),
        [
            ("mon-fri 18:00-08:00", 0, "18:00", True),
            ("mon-fri 18:00-08:00", 0, "17:59", False),
            ("mon-fri 18:00-08:00", 1, "07:59", True),
            ("mon-fri 18:00-08:00", 1, "08:00", False),
            ("mon-fri 18:00-08:00", 5, "07:00", True),  # Friday's window runs into Saturday
            ("mon-fri 18:00-08:00", 0, "07:00", False),  # Sunday has none
            ("sat-sun 00:00-24:00", 6, "23:59", True),
            ("sat-sun 00:00-24:00", 0, "00:00", False),
            ("fri-mon 10:00-11:00", 6, "10:30", True),
            ("wed 10:00-11:00", 2, "10:30", True),
            ("wed 10:00-11:00", 3, "10:30", False),
        ],
    )
    def test_hold_what_they_say(self, window: str, weekday: int, clock: str, inside: bool) -> None:
        local = datetime(2026, 3, 2 + weekday, int(clock[:2]), int(clock[3:]))  # noqa: DTZ001 - a wall clock has no zone
        assert parse_window(window).holds(local) == inside

    @pytest.mark.parametrize(
        "text", ["", "mon", "foo 10:00-11:00", "mon 10:00-10:00", "mon 25:00-26:00", "mon 10:60-11:00"]
    )
    def test_that_mean_nothing_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="hours"):
            Policy(OwnerTable(hours=[text]))


class TestThePolicy:
    def test_works_when_nothing_speaks_against_it(self) -> None:
        assert Policy(OwnerTable()).decide(sight()) == Verdict(True)

    def test_obeys_a_pause_at_once_and_its_end_too(self) -> None:
        policy = Policy(OwnerTable())
        assert policy.decide(sight(0, paused=True)) == Verdict(False, "paused by the owner")
        assert policy.decide(sight(1)).available

    def test_keeps_the_owners_hours(self) -> None:
        policy = Policy(OwnerTable(hours=["mon-fri 18:00-08:00"]))
        assert policy.decide(sight()) == Verdict(False, "outside the owner's hours")
        assert policy.decide(sight(1, local=MONDAY_NOON.replace(hour=19))).available

    def test_yields_memory_after_two_samples_and_returns_after_quiet(self) -> None:
        policy = Policy(OwnerTable(reserve_memory_mib=1024, return_s=60))
        assert policy.decide(sight(0, memory_free_bytes=GIB // 2)).available, "one sample may be a spike"
        assert policy.decide(sight(1, memory_free_bytes=GIB // 2)).reason == "the owner needs the memory"
        assert not policy.decide(sight(2)).available
        assert not policy.decide(sight(60)).available
        assert policy.decide(sight(61)).available

    def test_waits_longer_each_time_it_has_to_yield_again(self) -> None:
        policy = Policy(OwnerTable(reserve_memory_mib=1024, return_s=10))
        now, waits = 0.0, []
        for _ in range(4):
            for _ in range(2):
                now += 1
                policy.decide(sight(now, memory_free_bytes=0))
            since = now
            while not policy.decide(sight(now)).available:
                now += 1
            waits.append(now - since)
        assert waits == [10, 20, 40, 80]

    def test_yields_to_heat(self) -> None:
        policy = Policy(OwnerTable(max_temperature_c=85))
        policy.decide(sight(0, temperature_c=86))
        assert policy.decide(sight(1, temperature_c=86)).reason == "the machine is too hot"

    def test_decides_nothing_from_what_is_unknown(self) -> None:
        policy = Policy(OwnerTable())
        for now in range(5):
            assert policy.decide(sight(now, memory_free_bytes=None, temperature_c=None)).available


class TestTheHottest:
    def test_is_unknown_only_if_all_are(self) -> None:
        assert hottest_c([None, 40.0, 61.5]) == 61.5
        assert hottest_c([None]) is None
        assert hottest_c([]) is None
