"""What the agent sees of the machine around it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agent.foreign import Known
from agent.surroundings import Desktop, Programs, on_battery, whose


def supply(root: Path, name: str, **facts: str) -> None:
    folder = root / "sys/class/power_supply" / name
    folder.mkdir(parents=True)
    for key, value in facts.items():
        (folder / key).write_text(value + "\n")


def process(root: Path, pid: int, parent: int, comm: str = "python") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "comm").write_text(comm + "\n")
    (folder / "stat").write_text(f"{pid} (odd ) name) S {parent} 1 1 0\n")


class TestTheBattery:
    def test_feeds_the_machine_when_nothing_is_plugged_in(self, tmp_path: Path) -> None:
        supply(tmp_path, "AC", type="Mains", online="0")
        supply(tmp_path, "BAT0", type="Battery", status="Discharging")
        assert on_battery(tmp_path) is True

    def test_does_not_when_something_is(self, tmp_path: Path) -> None:
        supply(tmp_path, "AC", type="Mains", online="1")
        supply(tmp_path, "BAT0", type="Battery", status="Charging")
        assert on_battery(tmp_path) is False

    def test_of_a_mouse_is_no_battery(self, tmp_path: Path) -> None:
        supply(tmp_path, "hidpp_battery_0", type="Battery", scope="Device", status="Discharging")
        assert on_battery(tmp_path) is None

    def test_is_unknown_without_one(self, tmp_path: Path) -> None:
        assert on_battery(tmp_path) is None


class TestTheDesktop:
    def test_is_as_idle_as_its_last_used_terminal(self, tmp_path: Path) -> None:
        (tmp_path / "dev/pts").mkdir(parents=True)
        for name, age_s in (("0", 500), ("1", 40)):
            (tmp_path / "dev/pts" / name).touch()
            os.utime(tmp_path / "dev/pts" / name, (time.time() - age_s, time.time()))
        assert Desktop(tmp_path, x11=False).idle_s() == pytest.approx(40, abs=2)

    def test_is_unknown_where_nothing_tells(self, tmp_path: Path) -> None:
        assert Desktop(tmp_path, x11=False).idle_s() is None


class TestPrograms:
    def test_are_found_by_the_name_that_the_kernel_keeps(self, tmp_path: Path) -> None:
        programs = Programs(["a-very-long-game-name", "blender"], tmp_path)
        process(tmp_path, 10, 1)
        assert programs.running() == ""
        process(tmp_path, 11, 1, "a-very-long-gam")
        assert programs.running() == "a-very-long-game-name"
        (tmp_path / "proc/11/comm").unlink()
        assert programs.running() == "a-very-long-game-name", "a process keeps its name"

    def test_cost_nothing_where_none_are_named(self, tmp_path: Path) -> None:
        assert Programs([], tmp_path / "nowhere").running() == ""


class TestAProcess:
    def test_is_ours_if_an_engine_is_among_its_ancestors(self, tmp_path: Path) -> None:
        process(tmp_path, 50, 1, "llama")
        process(tmp_path, 51, 50, "worker")
        process(tmp_path, 60, 1, "game")
        assert whose([50, 51, 60, 99], [50], tmp_path) == {
            50: Known(True, "llama"),
            51: Known(True, "worker"),
            60: Known(False, "game"),
            99: Known(None),
        }
