"""A stand-in libnvidia-ml.so.1, built from C, and the script that drives it."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SONAME = "libnvidia-ml.so.1"
SCRIPT_VARIABLE = "FALLOW_NVML_SCRIPT"
SOURCE = Path(__file__).parent / "standin.c"
GIB = 1 << 30


def compiler() -> str | None:
    """The C compiler of this machine, if it has one."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def functions_of_pynvml() -> set[str]:
    """Every name that the bindings look up in the library."""
    import pynvml

    assert pynvml.__file__ is not None
    return set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(pynvml.__file__).read_text()))


@functools.cache
def build() -> Path:
    """Compile the library, once a process, into a folder of its own: `LD_LIBRARY_PATH` for a child."""
    found = compiler()
    assert found is not None, "ask compiler() first"
    folder = Path(tempfile.mkdtemp(prefix="fallow-nvml-"))
    written = set(re.findall(r"\b(nvml\w+)\(", SOURCE.read_text())) | set(
        re.findall(r"SMALL_FIGURE\((nvml\w+),", SOURCE.read_text())
    )
    unused = sorted(functions_of_pynvml() - written)
    (folder / "unused.h").write_text("".join(f"API int {name}(void) {{ return UNSUPPORTED; }}\n" for name in unused))
    library = folder / SONAME
    subprocess.run(
        [
            *(found, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-fPIC", "-shared"),
            *("-fvisibility=hidden", f"-Wl,-soname,{SONAME}", f"-I{folder}", "-o", str(library), str(SOURCE)),
        ],
        check=True,
        timeout=120,
    )
    return library


def load() -> ctypes.CDLL:
    """The library in this process: pynvml finds it by its name from now on. Without a script it has no driver."""
    return ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)


@dataclass
class Card:
    """One scripted card; `figures` are the stand-in's keys, a key that is left out is not supported."""

    number: int
    figures: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    compute: dict[int, int | None] = field(default_factory=dict)
    graphics: dict[int, int | None] = field(default_factory=dict)
    lost: int = 0

    @property
    def uuid(self) -> str:
        return str(self.figures["uuid"])

    def lines(self) -> list[str]:
        begin = f"card {self.number}"
        rows = [f"{begin} {key} {value}" for key, value in self.figures.items() if value is not None]
        rows += [f"{begin} error {name} {code}" for name, code in self.errors.items()]
        for kind, table in (("compute", self.compute), ("graphics", self.graphics)):
            rows += [f"{begin} {kind} {pid} {'none' if used is None else used}" for pid, used in table.items()]
        return [*rows, f"{begin} lost {self.lost}"] if self.lost else rows


def card(number: int, **changes: Any) -> Card:
    """A healthy RTX 4090, at rest."""
    figures: dict[str, Any] = {
        "uuid": f"GPU-{number:08x}-0000-4000-8000-00000000000{number}",
        "name": "NVIDIA GeForce RTX 4090",
        "memory_total": 24 * GIB,
        "memory_used": 1 * GIB,
        "memory_reserved": 308 << 20,
        "utilisation": 0,
        "power_mw": 30_000,
        "power_limit_mw": 450_000,
        "energy_mj": 1_000_000,
        "temperature": 40,
        "sm_clock": 210,
        "memory_clock": 405,
        "throttle": 1,
        "pcie_generation": 4,
        "pcie_width": 16,
        "pcie_replays": 0,
        "ecc": 0,
        "mig": None,
    }
    return Card(number, figures | changes)


@dataclass
class Script:
    """The file that drives the library. Change the fields, then `write`."""

    path: Path
    cards: list[Card] = field(default_factory=list)
    init: int = 0
    driver: str = "550.54.14"
    order: list[int] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    hangs_ms: dict[str, int] = field(default_factory=dict)
    events: list[tuple[int, int]] = field(default_factory=list)

    def write(self) -> None:
        """Put what the fields say in force, in one step."""
        rows = [f"init {self.init}", f"driver {self.driver}"]
        rows += [f"order {' '.join(map(str, self.order))}"] if self.order else []
        rows += [f"error {name} {code}" for name, code in self.errors.items()]
        rows += [f"hang {name} {ms}" for name, ms in self.hangs_ms.items()]
        rows += [row for entry in self.cards for row in entry.lines()]
        rows += [f"event {number} {xid}" for number, xid in self.events]
        temporary = self.path.with_suffix(".new")
        temporary.write_text("\n".join(rows) + "\n")
        temporary.replace(self.path)
