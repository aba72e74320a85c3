"""The machine itself as a device."""

from __future__ import annotations

from pathlib import Path

import psutil

from agent.telemetry.cpu import CpuSource, DeclaredPower


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class TestThisMachine:
    def test_reports_memory_and_never_invents_power(self) -> None:
        (report,) = CpuSource().sample()
        assert (report.device_id, report.kind, report.state) == ("cpu", "cpu", "ok")
        assert report.memory_total_bytes is not None
        assert report.memory_used_bytes is not None
        assert 0 < report.memory_used_bytes < report.memory_total_bytes
        assert (report.power_mw, report.power_source, report.energy_mj) == (None, "unknown", None)

    def test_labels_declared_power(self) -> None:
        (report,) = CpuSource(DeclaredPower(20.0, 80.0)).sample()
        assert report.power_source == "declared"
        assert report.power_mw is not None
        assert 20_000 <= report.power_mw <= 80_000


class TestDeclaredPower:
    def test_follows_the_load(self) -> None:
        power = DeclaredPower(20.0, 80.0)
        assert [power.milliwatts(share) for share in (0.0, 50.0, 100.0, 250.0)] == [20_000, 50_000, 80_000, 80_000]

    def test_is_unknown_unless_both_figures_and_the_load_are_known(self) -> None:
        assert DeclaredPower(20.0, None).milliwatts(50.0) is None
        assert DeclaredPower(None, 80.0).milliwatts(50.0) is None
        assert DeclaredPower(20.0, 80.0).milliwatts(None) is None


class TestAContainer:
    def test_limits_what_is_total_and_free(self, tmp_path: Path) -> None:
        gib = 1 << 30
        root = tree(
            tmp_path,
            {
                "sys/fs/cgroup/memory.max": f"{gib // 2}\n",
                "sys/fs/cgroup/memory.current": f"{gib // 4}\n",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {gib // 8}\n",
            },
        )
        (report,) = CpuSource(root=root).sample()
        assert report.memory_total_bytes == gib // 2
        free = min(gib // 2 - gib // 8, psutil.virtual_memory().available)
        assert report.memory_used_bytes is not None
        assert abs(gib // 2 - report.memory_used_bytes - free) < 64 * 1024 * 1024

    def test_without_a_limit_changes_nothing(self, tmp_path: Path) -> None:
        root = tree(tmp_path, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"})
        (report,) = CpuSource(root=root).sample()
        assert report.memory_total_bytes == psutil.virtual_memory().total


class TestTheSensor:
    def test_is_read_where_there_is_one(self, tmp_path: Path) -> None:
        root = tree(
            tmp_path,
            {
                "proc/cpuinfo": "processor\t: 0\nmodel name\t: Test CPU 9000\n",
                "sys/class/hwmon/hwmon0/name": "acpitz\n",
                "sys/class/hwmon/hwmon1/name": "k10temp\n",
                "sys/class/hwmon/hwmon1/temp1_input": "61500\n",
            },
        )
        source = CpuSource(root=root)
        (report,) = source.sample()
        assert (report.name, report.temperature_c) == ("Test CPU 9000", 61.5)
        (root / "sys/class/hwmon/hwmon1/temp1_input").unlink()
        assert source.sample()[0].temperature_c is None
