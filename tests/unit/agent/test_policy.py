"""When idle is idle."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest

from agent.errors import ConfigError
from agent.foreign import Known
from agent.hours import parse_window
from agent.policy import DRAIN_S, MACHINE, Policy, Sight, Sold, Verdict, energy_nano_per_mtok, hottest_c
from agent.protocol import DeviceReport
from agent.telemetry.port import GpuProcess
from agent.terms import Action, CircuitTable, DoesTable, OwnerTable, PowerTable, TariffTable, Terms

MONDAY_NOON = datetime(2026, 3, 2, 12, 0)  # noqa: DTZ001 - a wall clock has no zone
GIB = 1 << 30


VARIANT = "a" * 64


def cpu(free_bytes: int | None = 4 * GIB, temperature_c: float | None = 50.0) -> DeviceReport:
    used = None if free_bytes is None else 8 * GIB - free_bytes
    return DeviceReport(
        "cpu", "cpu", "cpu", memory_total_bytes=8 * GIB, memory_used_bytes=used, temperature_c=temperature_c
    )


def gpu(number: int = 0, **changes: Any) -> DeviceReport:
    values: dict[str, Any] = {
        "device_id": f"GPU-{number}",
        "name": "RTX 4090",
        "kind": "gpu",
        "memory_total_bytes": 24 * GIB,
        "memory_used_bytes": 8 * GIB,
        "power_mw": 300_000,
        "power_source": "nvml",
        "temperature_c": 60.0,
        **changes,
    }
    return DeviceReport(**values)


def sight(now: float = 0.0, **changes: Any) -> Sight:
    values: dict[str, Any] = {"now": now, "local": MONDAY_NOON, "devices": [cpu()], **changes}
    return Sight(**values)


def policy(does: DoesTable | None = None, **owner: Any) -> Policy:
    return Policy(Terms(owner=OwnerTable(does=does or DoesTable(), **owner)))


def sold(device_id: str = "GPU-0", **changes: Any) -> Sold:
    values: dict[str, Any] = {
        "variant": VARIANT,
        "device_id": device_id,
        "ask_output_nano": 200_000_000,
        "slots": 4,
        "decode_tokens_per_s": 25.0,
        **changes,
    }
    return Sold(**values)


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
            policy(hours=[text])


class TestThePolicy:
    def test_works_when_nothing_speaks_against_it(self) -> None:
        assert policy().decide(sight(devices=[cpu(), gpu()])) == {}

    def test_obeys_a_pause_at_once_and_its_end_too(self) -> None:
        rules = policy()
        assert rules.decide(sight(0, asked="pause")) == {MACHINE: Verdict(Action.DRAIN, "paused by the owner", 2.0)}
        assert rules.decide(sight(1, asked="evict"))[MACHINE].action is Action.EVICT
        assert rules.decide(sight(1, asked="drain"))[MACHINE].grace_s == DRAIN_S
        assert rules.decide(sight(1)) == {}

    def test_keeps_the_owners_hours(self) -> None:
        rules = policy(hours=["mon-fri 18:00-08:00"], quiet_hours=["mon 20:00-21:00"])
        assert rules.decide(sight())[MACHINE].reason == "outside the owner's hours"
        assert rules.decide(sight(1, local=MONDAY_NOON.replace(hour=19))) == {}
        assert rules.decide(sight(2, local=MONDAY_NOON.replace(hour=20)))[MACHINE].reason == (
            "inside the owner's quiet hours"
        )

    def test_yields_memory_after_two_samples_and_returns_after_quiet(self) -> None:
        rules = policy(reserve_memory_mib=1024, return_s=60)
        low = [cpu(GIB // 2)]
        assert rules.decide(sight(0, devices=low)) == {}, "one sample may be a spike"
        assert rules.suspicious, "so look again at once"
        assert rules.decide(sight(1, devices=low))[MACHINE] == Verdict(Action.EVICT, "the owner needs the memory")
        assert rules.decide(sight(2, devices=low))
        assert rules.decide(sight(61))
        assert rules.decide(sight(62)) == {}

    def test_waits_longer_each_time_it_has_to_yield_again(self) -> None:
        rules = policy(reserve_memory_mib=1024, return_s=10)
        now, waits = 0.0, []
        for _ in range(4):
            for _ in range(2):
                now += 1
                rules.decide(sight(now, devices=[cpu(0)]))
            since = now
            while rules.decide(sight(now)):
                now += 1
            waits.append(now - since)
        assert waits == [10, 20, 40, 80]

    def test_yields_to_heat_of_the_machine_and_of_one_card(self) -> None:
        rules = policy(max_temperature_c=85)
        for now in (0, 1):
            held = rules.decide(sight(now, devices=[cpu(temperature_c=86), gpu(0), gpu(1, temperature_c=90)]))
        assert {scope: verdict.reason for scope, verdict in held.items()} == {
            MACHINE: "the machine is too hot",
            "GPU-1": "RTX 4090 is too hot",
        }

    def test_decides_nothing_from_what_is_unknown(self) -> None:
        rules = policy(reserve_gpu_share=0.5)
        blank = gpu(memory_used_bytes=None, power_mw=None, temperature_c=None)
        for now in range(5):
            assert rules.decide(sight(now, devices=[cpu(None, None), blank])) == {}

    @pytest.mark.parametrize("action", list(Action))
    def test_does_what_the_owner_wrote(self, action: Action) -> None:
        held = policy(DoesTable(battery=action), grace_s=7.0).decide(sight(on_battery=True))
        expected = {
            Action.IGNORE: {},
            Action.PAUSE: {MACHINE: Verdict(Action.PAUSE, "the machine runs on its battery", 7.0)},
            Action.DRAIN: {MACHINE: Verdict(Action.DRAIN, "the machine runs on its battery", 7.0)},
            Action.EVICT: {MACHINE: Verdict(Action.EVICT, "the machine runs on its battery", 0.0)},
        }
        assert held == expected[action]

    def test_lets_the_strongest_rule_count(self) -> None:
        rules = policy(DoesTable(program=Action.EVICT, battery=Action.PAUSE))
        held = rules.decide(sight(on_battery=True, program="cs2"))
        assert held == {MACHINE: Verdict(Action.EVICT, "cs2 runs")}

    def test_stays_away_for_a_while_after_a_game(self) -> None:
        rules = policy(return_s=60)
        assert rules.decide(sight(0, program="cs2"))
        assert rules.decide(sight(59))
        assert rules.decide(sight(60)) == {}

    def test_rests_while_somebody_types_if_asked(self) -> None:
        assert policy().decide(sight(input_idle_s=0.0)) == {}
        rules = policy(input_idle_s=300)
        assert rules.decide(sight(input_idle_s=12.0))[MACHINE].action is Action.PAUSE
        assert rules.decide(sight(input_idle_s=301.0)) == {}

    def test_keeps_a_share_of_a_card_free(self) -> None:
        rules = policy(reserve_gpu_share=0.25)
        full = gpu(1, memory_used_bytes=20 * GIB)
        rules.decide(sight(0, devices=[gpu(0), full]))
        assert set(rules.decide(sight(1, devices=[gpu(0), full]))) == {"GPU-1"}


class TestADevice:
    def test_that_is_lost_fails_its_work_over(self) -> None:
        held = policy().decide(sight(devices=[gpu(0, state="lost", reason="gone"), gpu(1)]))
        assert held == {"GPU-0": Verdict(Action.EVICT, "gone", fault=True)}

    @pytest.mark.parametrize("state", ["refused", "unavailable"])
    def test_that_cannot_be_read_keeps_what_runs_and_gets_nothing_new(self, state: str) -> None:
        held = policy().decide(sight(devices=[gpu(0, state=state, reason="why")]))
        assert (held["GPU-0"].action, held["GPU-0"].fault) == (Action.PAUSE, True)

    def test_that_failed_by_an_event_is_lost_as_well(self) -> None:
        held = policy().decide(sight(devices=[gpu(0, state="unavailable", xid=48)]))
        assert held["GPU-0"].action is Action.EVICT

    def test_that_is_not_there_gets_no_engine(self) -> None:
        assert policy().decide(sight(devices=[cpu()], sold=(sold("GPU-9"),)))["GPU-9"].reason == (
            "the device is not there"
        )


def used(
    rules: Policy, now: float, processes: tuple[GpuProcess, ...] | None, known: dict[int, Known], **changes: Any
) -> dict[str, Verdict]:
    card = gpu(0, **changes)
    return rules.decide(
        sight(now, devices=[card], processes={"GPU-0": processes}, known=known, sold=(sold(stamp="ready"),))
    )


class TestSomebodyElseOnTheCard:
    OURS, THEIRS = GpuProcess(10, "compute", 8 * GIB), GpuProcess(20, "compute", GIB)

    def test_evicts_at_the_second_sample(self) -> None:
        rules = policy()
        known = {10: Known(True, "llama"), 20: Known(False, "python")}
        assert used(rules, 0, (self.OURS,), known) == {}
        assert used(rules, 1, (self.OURS, self.THEIRS), known) == {}
        assert rules.suspicious
        assert used(rules, 1.2, (self.OURS, self.THEIRS), known) == {
            "GPU-0": Verdict(Action.EVICT, "python computes on RTX 4090")
        }

    def test_that_the_owner_lists_is_in_nobodys_way(self) -> None:
        rules = policy(ignore_programs=["Xorg"])
        for now in range(4):
            assert used(rules, now, (self.OURS, self.THEIRS), {10: Known(True), 20: Known(False, "Xorg")}) == {}

    def test_by_drawing_more_than_usual(self) -> None:
        rules = policy(graphics_growth_mib=768)
        desktop = GpuProcess(30, "graphics", GIB // 2)
        known = {30: Known(False, "game")}
        assert used(rules, 0, (desktop,), known) == {}
        game = GpuProcess(30, "graphics", 4 * GIB)
        used(rules, 1, (game,), known)
        assert used(rules, 2, (game,), known)["GPU-0"].reason == "something draws on RTX 4090"

    @pytest.mark.parametrize("processes", [None, (GpuProcess(5_000_00, "compute"),)])
    def test_is_seen_by_memory_where_processes_cannot_be_told(self, processes: tuple[GpuProcess, ...] | None) -> None:
        rules = policy(graphics_growth_mib=1024)
        known = {5_000_00: Known(None)}
        for now in range(7):
            assert used(rules, now, processes, known, memory_used_bytes=(2 + now) * GIB) == {}, "our engine loads"
        used(rules, 8, processes, known, memory_used_bytes=8 * GIB)
        used(rules, 9, processes, known, memory_used_bytes=11 * GIB)
        held = used(rules, 10, processes, known, memory_used_bytes=11 * GIB)
        assert held["GPU-0"].reason == "somebody else uses the memory of RTX 4090"

    def test_is_not_the_owners_own_server_that_we_sell(self) -> None:
        rules = policy()
        for now in range(8):
            held = rules.decide(
                sight(
                    now,
                    devices=[gpu(0)],
                    processes={"GPU-0": (self.THEIRS,)},
                    known={20: Known(False, "vllm")},
                    sold=(sold(stamp="ready", attached=True),),
                )
            )
            assert held == {}


class TestACircuit:
    def rules(self) -> Policy:
        return Policy(Terms(owner=OwnerTable(return_s=30), circuits=[CircuitTable(watts=700, base_watts=100)]))

    def test_over_its_watts_rests_one_card_after_the_other(self) -> None:
        rules = self.rules()
        cards = [gpu(0), gpu(1), gpu(2)]
        assert rules.decide(sight(0, devices=cards)) == {}
        assert set(rules.decide(sight(1, devices=cards))) == {"GPU-2"}
        assert set(rules.decide(sight(2, devices=cards))) == {"GPU-2"}, "power lags: wait before the next"
        assert set(rules.decide(sight(7, devices=cards))) == {"GPU-2", "GPU-1"}
        calm = [gpu(0), gpu(1, power_mw=30_000), gpu(2, power_mw=30_000)]
        assert set(rules.decide(sight(8, devices=calm))) == {"GPU-2", "GPU-1"}
        assert set(rules.decide(sight(38, devices=calm))) == {"GPU-2"}
        assert set(rules.decide(sight(69, devices=calm))) == set()

    def test_counts_only_the_cards_that_hang_on_it(self) -> None:
        rules = Policy(Terms(circuits=[CircuitTable(watts=400, devices=["GPU-0"])]))
        for now in range(4):
            assert rules.decide(sight(now, devices=[gpu(0), gpu(1)])) == {}

    def test_rests_first_what_it_cannot_measure(self) -> None:
        rules = self.rules()
        cards = [gpu(0, power_mw=None), gpu(1, power_mw=400_000), gpu(2)]
        rules.decide(sight(0, devices=cards))
        assert set(rules.decide(sight(1, devices=cards))) == {"GPU-0"}


class TestMoney:
    TERMS = Terms(
        power=PowerTable(idle_watts=30, load_watts=430, usd_per_kwh="0.20"),
        tariff=[TariffTable("mon-fri 17:00-21:00", "0.60")],
    )

    def test_of_power_for_a_million_tokens_is_exact_and_rounded_up(self) -> None:
        # 10^6 tokens at 4 x 25 a second are 2.777... h; 0.4 kW of them are 1.111... kWh.
        assert energy_nano_per_mtok(self.TERMS, Decimal("0.20"), sold()) == 222_222_223

    def test_pauses_an_ask_under_the_cost_of_its_power(self) -> None:
        rules = Policy(self.TERMS)
        held = rules.decide(sight(sold=(sold("cpu"), sold("cpu", variant="b" * 64, ask_output_nano=300_000_000))))
        assert set(held) == {VARIANT}
        assert "power" in held[VARIANT].reason
        evening = rules.decide(
            sight(1, local=MONDAY_NOON.replace(hour=18), sold=(sold("cpu", ask_output_nano=300_000_000),))
        )
        assert set(evening) == {VARIANT}, "dearer by the tariff"

    def test_knows_no_cost_without_a_measured_speed(self) -> None:
        assert Policy(self.TERMS).decide(sight(sold=(sold("cpu", decode_tokens_per_s=None),))) == {}

    def test_keeps_the_owners_floor(self) -> None:
        rules = policy(price_floor_usd_per_mtok="0.25")
        assert set(rules.decide(sight(sold=(sold("cpu"),)))) == {VARIANT}
        assert rules.decide(sight(sold=(sold("cpu", ask_output_nano=250_000_000),))) == {}

    def test_stops_when_power_is_too_dear(self) -> None:
        rules = Policy(Terms(OwnerTable(max_usd_per_kwh="0.50"), self.TERMS.power, self.TERMS.tariff))
        assert rules.decide(sight()) == {}
        assert rules.decide(sight(local=MONDAY_NOON.replace(hour=18)))[MACHINE].reason == "power costs 0.60 USD/kWh now"


class TestTheHottest:
    def test_is_unknown_only_if_all_are(self) -> None:
        assert hottest_c([None, 40.0, 61.5]) == 61.5
        assert hottest_c([None]) is None
        assert hottest_c([]) is None
