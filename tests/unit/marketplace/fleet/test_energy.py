"""Energy from telemetry."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from agent.protocol import DeviceReport
from marketplace.fleet.energy import MAX_GAP_S, STRETCH_S, EnergyMeter, Stretch
from tests.fleet_world import device

START = datetime(2026, 3, 1, tzinfo=UTC)


def measure(*samples: tuple[float, DeviceReport]) -> list[Stretch]:
    meter = EnergyMeter()
    for at_s, report in samples:
        meter.sample([report], START + timedelta(seconds=at_s))
    return meter.due()


class TestAStretch:
    def test_integrates_declared_power_and_says_so(self) -> None:
        (stretch,) = measure((0, device(power_mw=30_000)), (10, device(power_mw=90_000)), (12, device()))
        assert stretch.source == "declared"
        assert stretch.energy_mj == 30_000 * 10 + 90_000 * 2
        assert (stretch.ended_at - stretch.started_at).total_seconds() == 12

    def test_integrates_measured_power_where_there_is_no_counter(self) -> None:
        report = device(power_source="nvml", power_mw=100_000)
        (stretch,) = measure((0, report), (5, report))
        assert (stretch.source, stretch.energy_mj) == ("nvml_integrated", 500_000)

    def test_prefers_the_devices_own_counter(self) -> None:
        first = device(power_source="nvml", power_mw=100_000, energy_mj=1_000)
        second = device(power_source="nvml", power_mw=100_000, energy_mj=301_000)
        (stretch,) = measure((0, first), (5, second))
        assert (stretch.source, stretch.energy_mj) == ("nvml_counter", 300_000)

    @pytest.mark.parametrize("after", [0, 10**15])
    def test_does_not_believe_a_counter_that_fell_or_leapt(self, after: int) -> None:
        first = device(power_source="nvml", power_mw=100_000, energy_mj=1_000)
        second = device(power_source="nvml", power_mw=100_000, energy_mj=after)
        (stretch,) = measure((0, first), (5, second))
        assert (stretch.source, stretch.energy_mj) == ("nvml_integrated", 500_000)

    def test_of_an_unknown_source_has_no_energy_rather_than_none_at_all(self) -> None:
        silent = device(power_mw=None, power_source="unknown")
        (stretch,) = measure((0, silent), (10, silent))
        assert (stretch.source, stretch.energy_mj) == ("unknown", None)

    def test_ends_where_the_source_changes(self) -> None:
        silent = device(power_mw=None, power_source="unknown")
        stretches = measure((0, device()), (10, silent), (20, silent))
        assert [stretch.source for stretch in stretches] == ["declared", "unknown"]
        assert stretches[0].ended_at == stretches[1].started_at

    def test_is_cut_at_its_length(self) -> None:
        stretches = measure(*((10.0 * step, device()) for step in range(int(STRETCH_S / 10) + 3)))
        assert [(s.ended_at - s.started_at).total_seconds() for s in stretches] == [STRETCH_S, 20.0]

    def test_does_not_cover_a_gap_in_the_telemetry(self) -> None:
        stretches = measure((0, device()), (10, device()), (10 + MAX_GAP_S + 1, device()), (60, device()))
        covered = sum((stretch.ended_at - stretch.started_at).total_seconds() for stretch in stretches)
        assert covered == 10 + (60 - 10 - MAX_GAP_S - 1)

    def test_ignores_a_clock_that_stood_still_or_went_back(self) -> None:
        assert measure((10, device()), (10, device()), (5, device())) == []


class TestAMeter:
    def test_hands_out_only_what_changed(self) -> None:
        meter = EnergyMeter()
        meter.sample([device()], START)
        meter.sample([device()], START + timedelta(seconds=1))
        (stretch,) = meter.due()
        stretch.dirty = False
        assert meter.due() == []
        meter.sample([device()], START + timedelta(seconds=2))
        assert meter.due() == [stretch]

    def test_keeps_the_last_stretch_of_a_device_that_vanished(self) -> None:
        meter = EnergyMeter()
        meter.sample([device()], START)
        meter.sample([device()], START + timedelta(seconds=1))
        meter.sample([], START + timedelta(seconds=2))
        assert len(meter.due()) == 1
        assert meter.due() == []
