"""What the owner's asks come to."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from agent.earnings import Day, Earnings, gross_nano, read, usd
from agent.protocol import DeviceReport, UsageReport
from agent.telemetry.energy import COUNTER, DECLARED, INTEGRATED, UNKNOWN, EnergyTally
from tests.agent_doubles import served

TODAY = date(2026, 3, 2)


class TestOneAnswer:
    def test_comes_to_its_tokens_by_class(self) -> None:
        assert gross_nano(served(), UsageReport(1_000, 400, 100, 0)) == 600 * 50 + 400 * 10 + 100 * 200

    def test_is_rounded_half_to_even(self) -> None:
        cheap = served(input_nano_usd_per_mtok=500_000, cached_input_nano_usd_per_mtok=0, output_nano_usd_per_mtok=0)
        assert [gross_nano(cheap, UsageReport(n, 0, 0, 0)) for n in (1, 2, 3)] == [0, 1, 2]

    def test_counts_nothing_that_the_engine_did_not_say(self) -> None:
        assert gross_nano(served(), UsageReport()) == 0


class TestTheNote:
    def test_outlives_the_agent(self, tmp_path: Path) -> None:
        earnings = Earnings(tmp_path / "earnings.json")
        earnings.add(served(), UsageReport(1_000, 400, 100, 0), TODAY)
        earnings.save()
        again = Earnings(tmp_path / "earnings.json")
        again.add(served(), UsageReport(1_000, 400, 100, 0), TODAY)
        assert again.today(TODAY) == Day(2, 1_200, 800, 200, 108_000)
        assert (tmp_path / "earnings.json").stat().st_mode & 0o777 == 0o600

    def test_that_is_damaged_begins_anew(self, tmp_path: Path) -> None:
        (tmp_path / "earnings.json").write_text("{")
        assert read(tmp_path / "earnings.json") == {}

    def test_prints_amounts_to_the_nano(self) -> None:
        assert usd(1_234_567_890) == "1.234567890"


def report(**changes: object) -> DeviceReport:
    return DeviceReport("GPU-0", "gpu", "gpu", **changes)  # type: ignore[arg-type]


class TestEnergy:
    @pytest.mark.parametrize(
        ("first", "second", "expected"),
        [
            ({"energy_mj": 1_000, "power_mw": 9}, {"energy_mj": 251_000, "power_mw": 9}, (COUNTER, 250_000)),
            ({"power_mw": 100_000}, {"power_mw": 200_000}, (INTEGRATED, 300_000)),
            ({"power_mw": 50_000}, {"power_mw": 50_000, "power_source": "declared"}, (DECLARED, 100_000)),
            ({}, {}, (UNKNOWN, 0)),
            ({"energy_mj": 500, "power_mw": 1_000}, {"energy_mj": 5, "power_mw": 1_000}, (INTEGRATED, 2_000)),
        ],
    )
    def test_says_where_it_comes_from(
        self, first: dict[str, object], second: dict[str, object], expected: tuple[str, int]
    ) -> None:
        tally = EnergyTally()
        tally.add([report(**first)], 10.0)
        tally.add([report(**second)], 12.0)
        assert tally.totals()["GPU-0"][:2] == expected

    def test_of_a_gap_is_nothing(self) -> None:
        tally = EnergyTally()
        tally.add([report(power_mw=100_000)], 0.0)
        tally.add([report(power_mw=100_000)], 60.0)
        assert tally.totals()["GPU-0"] == (UNKNOWN, 0, 0)
